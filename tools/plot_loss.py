"""Draws the losses of every rank of one or several runs, and the accuracies where logged, into one PNG.

    python tools/plot_loss.py device                        a run: the folder in which the launcher wrote its logs
    python tools/plot_loss.py one/device two/device four/device --output loss.png
    python tools/plot_loss.py device/train.log --smooth 20  a log; mean over 20 printed losses

A folder's logs are those of its ranks: log_output/1/rank.N/stdout (mpirun), log_msrun/worker_N.log (msrun),
deviceN/train.logN, device_N/trainN.log; where there are none, train.log, which holds all ranks. The folder log_output
itself will do, too, also under the name to which a later run has moved it. One colour a run.
"""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

from progress import NUMBER
from speech import say_in_the_end

os.environ["MPLBACKEND"] = "Agg"  # a file, no window; that of a notebook is not there for its commands
import matplotlib  # noqa: E402
from matplotlib import font_manager, pyplot  # noqa: E402

# Names of folders may be Chinese; Matplotlib's own font has no such characters.
CHINESE = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Microsoft YaHei",
           "SimHei", "PingFang SC")
INSTALLED = {font.name for font in font_manager.fontManager.ttflist}
matplotlib.rcParams["font.family"] = ["DejaVu Sans", *(font for font in CHINESE if font in INSTALLED)]

RANK_LOGS = ("log_output/1/rank.*/stdout", "log_output/worker_*.log", "log_msrun/worker_*.log",
             "log_msrun_[0-9]*/worker_*.log",
             "device[0-9]*/train.log[0-9]*", "device_[0-9]*/train[0-9]*.log",
             "device/log_output/1/rank.*/stdout", "device/log_msrun/worker_*.log",
             "1/rank.*/stdout", "worker_*.log", "train.log[0-9]*", "train[0-9]*.log")  # a folder of logs itself
JOINT_LOGS = ("train.log", "device/train.log")
# "[rank 1] epoch: 1 step: 20, loss is 0.5" (LossMonitor) and "epoch: 0, step: 20, loss is 0.5" (hand-written loops);
# without epochs, "step: 20, loss is 0.5", all is epoch 0.
RANK = r"(?:\[(?:rank |\d+,)(\d{1,9})\](?:<\w+>:| ))?"  # as our launchers write it, or mpirun --tag-output
LOSS = re.compile(RANK + r"(?:epoch: (\d{1,99}),? )?step: (\d{1,99}), loss is " + NUMBER, re.IGNORECASE)
ACCURACY = re.compile(r"accuracy'?: " + NUMBER)


class PlotError(Exception):
    """Something the user can mend: printed as one sentence, exit code 2."""


def find_logs(path):
    """The logs of a run: [path] for a file; for a folder its ranks' logs in the order of the ranks, or a joint log. Of
    several runs, by several launchers, the last.
    """
    if not path.exists():
        raise PlotError(f"{path} does not exist (looked from {Path.cwd()})")
    if not path.is_dir():  # it may be a pipe
        return [path]
    found = [logs for logs in (list(path.glob(pattern)) for pattern in RANK_LOGS) if logs]
    if found:
        last = max(found, key=lambda logs: max(log.stat().st_mtime for log in logs))
        return sorted(last, key=lambda log: [int(part) for part in re.findall(r"\d+", str(log.relative_to(path)))])
    for name in JOINT_LOGS:
        if (path / name).is_file():
            return [path / name]
    raise PlotError(f"{path} holds no logs of a run; give the folder in which the launcher was started, its "
                    "log_output, log_msrun or deviceN, or a log file")


def read_log(file):
    """Read a log.

    Returns:
        (losses, accuracies): losses is a dict from rank to a list of (epoch, step, loss) in printed order. The key is
        None for lines that do not name their rank.
        accuracies is a list of (epoch, accuracy), epoch that of the loss before.
    """
    losses, accuracies, epoch = {}, [], 0
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        for rank, epoch_text, step, loss in LOSS.findall(line):
            epoch = int(epoch_text or 0)
            losses.setdefault(int(rank) if rank else None, []).append((epoch, int(step), float(loss)))
        accuracy = ACCURACY.search(line)
        if accuracy and "rank" not in line[accuracy.end():]:
            accuracies.append((epoch, float(accuracy[1])))
    if len(accuracies) > 1 and accuracies[-1] == accuracies[-2]:
        accuracies.pop()  # a launcher repeats the last one
    return losses, accuracies


def read_run(path):
    """Read all logs of a run: ({name of a rank: [(epoch, step, loss)]}, [(epoch, accuracy)])."""
    try:
        logs = find_logs(path)
        read = [read_log(log) for log in logs]
    except OSError as error:
        raise PlotError(f"{error.filename or path} cannot be read ({error.strerror})") from error
    ranks, accuracies = {}, []
    for number, (losses, found) in enumerate(read):
        accuracies = accuracies or found  # one rank prints them for all
        for rank, points in losses.items():
            if rank is None and len(logs) == 1:
                ranks["all ranks"] = points
            else:
                ranks[f"rank {number if rank is None else rank}"] = points
    if not ranks:
        raise PlotError(f"{logs[0]} holds no line such as 'epoch: 1 step: 1, loss is 2.3'")
    return ranks, accuracies


def steps_from_the_start(points):
    """Count steps over all epochs. An epoch is as long as its largest step, and 1 longer where steps start at 0.

    Returns:
        ([global step, from 1], [loss], {epoch: global step of its end}).
    """
    zero_based = any(step == 0 for _, step, _ in points)
    length, ends, before = {}, {}, 0
    for epoch, step, _ in points:
        length[epoch] = max(length.get(epoch, 0), step + zero_based)
    starts = {}
    for epoch in sorted(length):
        starts[epoch] = before
        before = ends[epoch] = before + length[epoch]
    return [starts[epoch] + step + zero_based for epoch, step, _ in points], [point[2] for point in points], ends


def smooth(values, width):
    """Mean over up to width values before and at each place."""
    return [sum(values[max(0, end - width):end]) / len(values[max(0, end - width):end])
            for end in range(1, len(values) + 1)]


def draw(runs, output, width):
    """Draw {label: (ranks, accuracies)} into a PNG of 1200 x 500 pixels."""
    with_accuracy = any(accuracies for _, accuracies in runs.values())
    at_the_end = all(len({epoch for epoch, _ in accuracies}) <= 1 for _, accuracies in runs.values())
    figure, axes = pyplot.subplots(1, 1 + with_accuracy, figsize=(10, 4.2), squeeze=False,
                                   gridspec_kw={"width_ratios": [3, 2] if with_accuracy else [1]})
    for index, (name, (ranks, accuracies)) in enumerate(runs.items()):
        label = re.sub("^_", " _", name).replace("$", r"\$")  # Matplotlib hides the first, sets the other as a formula
        colour, ends = f"C{index % 10}", {}
        for points in ranks.values():
            steps, values, ends = steps_from_the_start(points)
            if len(set(steps)) < len(steps):  # lines of several ranks, which do not say whose they are
                axes[0, 0].plot(steps, values, ".", color=colour, alpha=0.6)
            else:
                axes[0, 0].plot(steps, smooth(values, width), "-" if len(steps) > 1 else ".", color=colour, linewidth=1)
        axes[0, 0].plot([], [], color=colour, label=f"{label} ({len(ranks)} ranks)" if len(ranks) > 1 else label)
        if accuracies and at_the_end:
            axes[0, 1].plot([label] * len(accuracies), [value for _, value in accuracies], "o", color=colour)
        elif accuracies:
            axes[0, 1].plot([ends.get(epoch, 0) for epoch, _ in accuracies], [value for _, value in accuracies], "o-",
                            color=colour)
    axes[0, 0].set(xlabel="step", ylabel="loss" + (f", mean over {width} printed" if width > 1 else ""))
    if with_accuracy:
        axes[0, 1].set(xlabel="" if at_the_end else "step", ylabel="accuracy")
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=min(3, len(runs)), fontsize=9, frameon=False)
    with warnings.catch_warnings(record=True) as caught:
        figure.tight_layout()
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            kind = output.suffix[1:].lower()  # else savefig would add one to the name
            figure.savefig(output, dpi=120, format=kind if kind in figure.canvas.get_supported_filetypes() else "png")
        except (OSError, RuntimeError) as error:  # the latter: no TeX, for .pgf
            why = error.strerror if isinstance(error, OSError) else error
            raise PlotError(f"cannot write {output} ({why}); choose another --output") from error
    if any("missing from font" in str(warning.message) for warning in caught):
        print("plot_loss.py: no font here has all characters of the labels, so there are boxes in the picture; name "
              "the runs with --labels, or install a font such as Noto Sans CJK SC", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description="Draw the losses of runs into one PNG.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="LOG_OR_FOLDER")
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    parser.add_argument("--labels", help="names of the runs, with commas between them; else their paths")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="mean over N printed losses")
    args = parser.parse_args()
    labels = args.labels.split(",") if args.labels else [str(path) for path in args.runs]
    if args.smooth < 1 or len(set(labels)) != len(args.runs):
        parser.error("--smooth must be at least 1, and there must be as many --labels, all different, as runs")
    if not os.path.exists(os.readlink("/proc/self/cwd")):
        parser.error("this folder has been removed; change to another one")
    try:
        runs = {label: read_run(path) for label, path in zip(labels, args.runs)}
        if args.output.exists() and any(args.output.samefile(log) for path in args.runs for log in find_logs(path)):
            raise PlotError(f"--output {args.output} is one of the logs; choose another one")
        draw(runs, args.output, args.smooth)
    except PlotError as error:
        print(f"plot_loss.py: {error}", file=sys.stderr)
        sys.exit(2)
    drawn = [f"{label}: {len(ranks)} lines of {sum(map(len, ranks.values()))} losses, {len(accuracies)} accuracies"
             for label, (ranks, accuracies) in runs.items()]
    say_in_the_end("\n".join([*drawn, str(args.output)]))


if __name__ == "__main__":
    main()
