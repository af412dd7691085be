"""Where the time of a step of the MNIST lesson goes on CPU, by MindSpore's own profiler; the script is unmodified.

    mpirun -n 2 python benchmarks/where_time_goes.py FOLDER mnist_ddp/train_ddp.py --data-path DIR --epochs 1 --steps 60
    python benchmarks/where_time_goes.py FOLDER

The first command leaves in FOLDER what each rank did, the second prints what it adds up to, as JSON, in seconds a step,
the median over the steps, the mean over the ranks. All ranks run on one machine, so their clocks agree. A step:
    data      waiting for the next batch: next() of the data set's iterator
    compute   all kernels but all-reduce
    waiting   all-reduce, until the last rank has come to it
    exchange  all-reduce, from then on
    rest      between the kernels: MindSpore's runtime, Python
"""

import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path

PARTS = ("data", "compute", "waiting", "exchange", "rest")
SKIPPED = 10  # the first steps, in which the graph is compiled and caches are cold


def profile(folder, script, options):
    """Run a script as this rank of its job; leave its kernels and its waits for data in FOLDER/rank_<rank>.json."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    import ranks
    from mindspore import profiler
    from mindspore.dataset.engine.iterators import Iterator

    mine = folder / f"rank_{os.getenv('OMPI_COMM_WORLD_RANK', '0')}"
    waits, get_next, leave = [], Iterator.__next__, ranks.leave
    running = profiler.profile(activities=[profiler.ProfilerActivity.CPU],
                               on_trace_ready=profiler.tensorboard_trace_handler(str(mine)))

    def timed_next(self):
        begin = time.time_ns()
        try:
            return get_next(self)
        finally:
            waits.append((begin, time.time_ns() - begin))

    def write_and_leave(code=0):
        running.stop()
        kernels = next(mine.rglob("cpu_op_execute_timestamp_*.txt")).read_text()
        mine.with_suffix(".json").write_text(json.dumps({"kernels": kernels, "waits": waits}))
        leave(code)

    Iterator.__next__, ranks.leave = timed_next, write_and_leave
    sys.argv = [script, *options]
    running.start()
    runpy.run_path(script, run_name="__main__")


def kernels_of(text):
    """The profiler's lines "name;kind;start in ns,milliseconds,thread ..." as a list of (start, end, name), in ns."""
    found = []
    for line in text.splitlines():
        name, _, calls = line.split(";", 2)
        for call in calls.split():
            start, milliseconds = call.split(",")[:2]
            found.append((int(start), int(start) + round(float(milliseconds) * 1e6), name))
    return sorted(found)


def report(folder):
    """Split the steps of all ranks: {"step": seconds, "data": seconds, ...}."""
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank_*.json"))]
    kernels = [kernels_of(rank["kernels"]) for rank in ranks]
    exchanges = [[kernel for kernel in one if "AllReduce" in kernel[2]] for one in kernels]
    last_to_come = [max(start for start, _, _ in calls) for calls in zip(*exchanges)]
    sums = {part: [] for part in ("step", *PARTS)}
    for rank, mine, calls in zip(ranks, kernels, exchanges):
        mark = next(name for _, _, name in mine if "SGD" in name)  # comes once a step, in training only
        starts = [start for start, _, name in mine if name == mark]
        spans = list(zip(starts, starts[1:]))[SKIPPED:]
        found = {part: [] for part in sums}
        for begin, end in spans:
            step = {"step": end - begin}
            step["data"] = sum(length for start, length in rank["waits"] if begin <= start < end)
            step["compute"] = sum(stop - start for start, stop, name in mine
                                  if begin <= start < end and "AllReduce" not in name)
            inside = [(start, stop, last) for (start, stop, _), last in zip(calls, last_to_come)
                      if begin <= start < end]
            step["waiting"] = sum(min(max(last, start), stop) - start for start, stop, last in inside)
            step["exchange"] = sum(stop - start for start, stop, _ in inside) - step["waiting"]
            step["rest"] = step["step"] - sum(step[part] for part in PARTS[:-1])
            for part, length in step.items():
                found[part].append(length)
        for part, lengths in found.items():
            sums[part].append(statistics.median(lengths) / 1e9)
    return {part: statistics.mean(seconds) for part, seconds in sums.items()}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        profile(Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:])
    else:
        print(json.dumps(report(Path(sys.argv[1]))))
