"""Makes the tables of the speed page, of the READMEs' speed section, and the picture, all from speed.json.

    python benchmarks/speed_page.py            says which page or picture is not what speed.json gives; exit code 1
    python benchmarks/speed_page.py --fix      writes them anew: after cp runs/speed/speed.json benchmarks/speed.json

In a page, what stands between <!-- speed: NAME --> and <!-- end --> is written here.
"""

import hashlib
import json
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA, PICTURE = HERE / "speed.json", HERE / "speed.png"
PAGES = {HERE / "README.md": 0, HERE / "README_CN.md": 1, HERE.parent / "README.md": 0, HERE.parent / "README_CN.md": 1}
BLOCK = re.compile(r"(<!-- speed: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# ResNet-50 on cards, on paper. One Ascend 910 at batch 32, mixed precision: MindSpore's own benchmark page (see there
# also 8 and 16 cards). Each card has a 100 Gb/s port; 5 microseconds a message is an assumption.
PARAMETERS, BATCH, ONE_CARD, MEASURED = 25_557_032, 32, 1787, {8: 13_689, 16: 27_090}
BANDWIDTH, LATENCY = 100e9 / 8, 5e-6


class Report:
    """The figures of speed.json: medians over the repeated runs, with the smallest and largest beside them."""

    def __init__(self, text):
        self.report = json.loads(text)
        self.rows = {(part, row["name"], row["ranks"], row["size"]): row["runs"]
                     for part, rows in self.report["parts"].items() for row in rows}

    def values(self, part, name, ranks, size=32, key="step"):
        return [run[key] for run in self.rows[part, name, ranks, size]]

    def median(self, *row, **key):
        return statistics.median(self.values(*row, **key))

    def shown(self, *row, scale=1.0, digits=1, **key):
        """'median (smallest-largest)'."""
        values = sorted(scale * value for value in self.values(*row, **key))
        return f"{statistics.median(values):.{digits}f} ({values[0]:.{digits}f}-{values[-1]:.{digits}f})"

    def names(self, part):
        """The (name, ranks, size) of a part, ordered by size, ranks and name."""
        found = [row[1:] for row in self.rows if row[0] == part]
        return sorted(found, key=lambda row: (row[2], row[1], row[0]))


def table(head, rows):
    """A Markdown table; head: its columns, separated by |."""
    columns = [column.strip() for column in head.split("|")]
    lines = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def machine(report, language):
    its = report.report["machine"]
    versions = ", ".join(f"{name} {its[name]}" for name in ("python", "mindspore", "torch", "numpy", "openmpi")
                         if name in its)
    cores = (f"{its['cores']} cores", f"{its['cores']} 核")[language]
    return (f"Measured on: {its['cpu']}, {cores}; {versions}; {report.report['repeats']} runs of each row.\n",
            f"测量环境：{its['cpu']}，{cores}；{versions}；每行运行 {report.report['repeats']} 次。\n")[language]


NAMES = ({}, {"lesson": "本课", "tutorial's step": "教程的写法", "lesson without exchange": "本课，不交换梯度",
              "lesson, by MCCL": "本课，用 MCCL",
              "lesson, plain convolutions and MCCL": "本课，普通布局的卷积和 MCCL",
              "MindSpore's defaults": "MindSpore 默认设置", "plain msrun": "直接用 msrun"})


def named(name, language):
    return NAMES[language].get(name, name)


def training(report, part, language):
    """Step times and images a second."""
    rows = []
    for name, ranks, size in report.names(part):
        step = report.median(part, name, ranks, size)
        alone = (part, name, 1, size) in report.rows
        gain = f"{ranks * report.median(part, name, 1, size) / step:.2f}" if alone and ranks > 1 else ""
        rows.append((named(name, language), ranks, size, report.shown(part, name, ranks, size, scale=1e3),
                     f"{ranks * size / step:,.0f}", gain))
    return table(("| ranks | images a rank and step | ms a step | images/s | images/s, times those of 1 rank",
                  "| 进程数 | 每进程每步图片数 | 每步毫秒 | 图片/秒 | 是单进程的几倍")[language], rows)


def profile(report, language):
    """Where a step's time goes."""
    parts = ("step", "data", "compute", "exchange", "waiting", "rest")
    rows = [(ranks, *(f"{1e3 * report.median('profile', name, ranks, key=part):.1f}" for part in parts))
            for name, ranks, _ in report.names("profile")]
    return table(("ranks | ms a step | data | compute | exchange | waiting for the last rank | rest",
                  "进程数 | 每步毫秒 | 数据 | 计算 | 交换 | 等最后一个进程 | 其余")[language], rows)


def first_loss(report, language):
    rows = [(named(name, language), report.shown("first_loss", name, 2, key="first"))
            for name in ("run.sh", "mpirun", "run_msrun.sh", "plain msrun", "torchrun")]
    head = ("2 ranks, started by | seconds to the first loss", "2 个进程，启动方式 | 到第一个 loss 的秒数")
    return table(head[language], rows)


def all_reduce(report, language):
    measured = report.names("allreduce")
    libraries = [name for name in ("MPI", "MCCL", "gloo") if name in {row[0] for row in measured}]
    rows = [(f"{size:,}", *(report.shown("allreduce", library, 2, size, scale=1e3, digits=2)
                            for library in libraries)) for size in sorted({size for _, _, size in measured})]
    head = ({"MPI": "MPI (the lessons), ms", "MCCL": "MCCL (MindSpore), ms", "gloo": "gloo (PyTorch), ms"},
            {"MPI": "MPI（本课），毫秒", "MCCL": "MCCL（MindSpore），毫秒", "gloo": "gloo（PyTorch），毫秒"})[language]
    return table(" | ".join((("bytes", "字节")[language], *map(head.get, libraries))), rows)


def growth(report, language):
    rows = [(ranks, report.shown("mnist", "lesson", ranks, key="first"),
             report.shown("mnist", "lesson", ranks, scale=1e3), report.shown("mnist", "lesson", ranks, key="megabytes",
                                                                            digits=0)) for ranks in (1, 2, 4, 8)]
    return table(("ranks | seconds to the first loss | ms a step | MB a rank",
                  "进程数 | 到第一个 loss 的秒数 | 每步毫秒 | 每进程 MB")[language], rows)


def on_paper(_, language):
    """Images a second of N cards, if the all-reduce hides behind no computation, and if it hides as far as it can."""
    rows = []
    for cards in (1, 8, 16, 64, 1024):
        alone = BATCH / ONE_CARD
        exchange = 2 * (cards - 1) / cards * 4 * PARAMETERS / BANDWIDTH + 2 * (cards - 1) * LATENCY
        bounds = [f"{cards * BATCH / seconds:,.0f}" for seconds in (alone + exchange, max(alone, exchange))]
        rows.append((cards, f"{1e3 * exchange:.1f}", *bounds, f"{MEASURED[cards]:,}" if cards in MEASURED else ""))
    return table(("cards | all-reduce, ms | images/s, nothing hidden | images/s, hidden as far as possible | "
                  "images/s, published", "卡数 | all-reduce，毫秒 | 图片/秒，完全不重叠 | 图片/秒，尽量重叠 | "
                  "图片/秒，官方数据")[language], rows)


def summary(report, language):
    """The four sentences of the READMEs."""
    step = {name: report.median("mnist", name, 2) for name in
            ("lesson", "tutorial's step", "PyTorch DDP", "lesson without exchange")}
    gain = {size: 2 * report.median(part, "lesson", 1, size) / report.median(part, "lesson", 2, size)
            for part, size in (("mnist", 32), ("batches", 1024))}
    resnet = {name: report.median("resnet", name, 1) for name in ("lesson", "MindSpore's defaults", "PyTorch DDP")}
    first = {name: report.median("first_loss", name, 2, key="first") for name in ("run.sh", "plain msrun", "torchrun")}
    exchange = report.median("profile", "lesson", 2, key="exchange")
    cells = [
        (("MNIST, 2 ranks, ms a step", "MNIST，2 个进程，每步毫秒"), 1e3 * step["lesson"],
         1e3 * step["tutorial's step"], 1e3 * step["PyTorch DDP"]),
        (("of that the gradients' exchange", "其中梯度交换"), 1e3 * exchange, "", ""),
        (("MNIST, images/s of 2 ranks over 1, batch 32", "MNIST，2 进程对 1 进程的图片/秒之比，batch 32"), gain[32],
         "", ""),
        (("the same, batch 1024", "同上，batch 1024"), gain[1024], "", ""),
        (("ResNet-50, 1 rank, ms a step", "ResNet-50，1 个进程，每步毫秒"), 1e3 * resnet["lesson"],
         1e3 * resnet["MindSpore's defaults"], 1e3 * resnet["PyTorch DDP"]),
        (("2 ranks, seconds to the first loss", "2 个进程，到第一个 loss 的秒数"),
         first["run.sh"], first["plain msrun"], first["torchrun"])]
    rows = [(labels[language], *(value if value == "" else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
                                 for value in values)) for labels, *values in cells]
    return table(("| lesson | tutorial or MindSpore's defaults | PyTorch DDP",
                  "| 本课 | 教程或 MindSpore 默认 | PyTorch DDP")[language], rows)


BLOCKS = {"machine": machine, "mnist": lambda report, language: training(report, "mnist", language),
          "batches": lambda report, language: training(report, "batches", language),
          "resnet": lambda report, language: training(report, "resnet", language), "profile": profile,
          "first_loss": first_loss, "allreduce": all_reduce, "growth": growth, "paper": on_paper, "summary": summary}


def tables(report_text, language=0):
    """All tables, for the terminal."""
    report = Report(report_text)
    parts = set(report.report["parts"])
    needs = {"machine": parts, "growth": {"mnist"}, "summary": {"mnist", "batches", "resnet", "profile", "first_loss"}}
    return "\n".join(f"{name}\n{make(report, language)}" for name, make in BLOCKS.items()
                     if name != "paper" and needs.get(name, {name}) <= parts)


def expected(page, language, report):
    """A page with its blocks as speed.json gives them."""
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match[2]](report, language) + match[3],
                     page.read_text(encoding="utf-8"))


def draw(report, digest):
    """Images a second over ranks, of the MNIST lesson at batch 32."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for name, ranks in (("PyTorch DDP", (1, 2, 4)), ("lesson", (1, 2, 4, 8)), ("tutorial's step", (1, 2))):
        rates = [[n * 32 / value for value in report.values("mnist", name, n)] for n in ranks]
        middle = [statistics.median(one) for one in rates]
        quarters = [statistics.quantiles(one, method="inclusive") for one in rates]
        spread = [[middle - low for low, middle, _ in quarters], [high - middle for _, middle, high in quarters]]
        axes.errorbar(ranks, middle, spread, marker="o", capsize=3, label=name)
    cores = report.report["machine"]["cores"]
    axes.set(xscale="log", xlabel="ranks", ylabel="images/s", ylim=(0, None),
             title=f"MNIST, batch 32 a rank, {cores} cores; bars: middle half of the runs")
    axes.title.set_fontsize(10)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(PICTURE, dpi=120, metadata={"Description": digest})


def main():
    fix, text = "--fix" in sys.argv[1:], DATA.read_text(encoding="utf-8")
    report, digest, stale = Report(text), hashlib.sha256(text.encode()).hexdigest(), []
    for page, language in PAGES.items():
        wanted = expected(page, language, report)
        if page.read_text(encoding="utf-8") != wanted:
            stale.append(page)
            if fix:
                page.write_text(wanted, encoding="utf-8")
    if not PICTURE.is_file() or digest.encode() not in PICTURE.read_bytes():
        stale.append(PICTURE)
        if fix:
            draw(report, digest)
    for file in stale:
        print(f"{file.relative_to(HERE.parent)} {'written' if fix else 'is not what speed.json gives; run --fix'}")
    sys.exit(1 if stale and not fix else 0)


if __name__ == "__main__":
    main()
