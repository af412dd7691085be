"""MindSpore's LossMonitor, with losses of 5 digits; rank 0 also says how long a long training will take.

in_rank.py and gpu_libraries.py run this file where tools/ lies beside the lesson.
"""

import os
import re
import sys
import time
from pathlib import Path

monitor = sys.modules.get("mindspore.train.callback._loss_monitor")
FIRST = os.getenv("OMPI_COMM_WORLD_RANK") or os.getenv("RANK_ID", "0")


def say(line, **how):
    """Print a line of LossMonitor's."""
    print(re.sub(r"(?<=loss is )\d\S*", lambda loss: f"{float(loss[0]):.5g}", line), **how)


def step_end(self, run_context, as_ever=monitor and monitor.LossMonitor.step_end):
    """What LossMonitor does, and after its second line on rank 0, if more than 10 minutes are left, that."""
    about, each = run_context.original_args(), self._per_print_times
    if self._last_print_time == 0 and each and not about.get("dataset_sink_mode"):
        # After --resume it would print at other steps, as within a batch that is added up.
        self._last_print_time = (about.cur_step_num - 1) // each * each
    if not hasattr(self, "earlier"):  # steps, before --resume
        self.earlier = (about.cur_epoch_num - 1) * about.batch_num * (about.cur_step_num > about.batch_num)
    before = self._last_print_time
    as_ever(self, run_context)
    if self._last_print_time == before or FIRST != "0":
        return
    times = self.__dict__.setdefault("times", [])
    times.append((about.cur_step_num, time.monotonic()))
    if len(times) == 2:  # the first step compiles
        (first, began), (step, now) = times
        pace = (now - began) / (step - first)
        left = pace * (about.epoch_num * about.batch_num + self.earlier - step)
        if left > 600:
            small = "; options of a small run (with a launcher, after --): --epochs 1 --steps 4 --image-size 32"
            script = Path(sys.argv[0])
            print(f"about {left / 3600:.1f} h to go, at {pace:.{1 if pace >= 0.1 else 4}f} s a step"
                  f"{small if script.is_file() and b'--image-size' in script.read_bytes() else ''}", flush=True)


if monitor and monitor.LossMonitor.step_end.__name__ == "step_end" and not hasattr(monitor, "print"):
    monitor.print, monitor.LossMonitor.step_end = say, step_end
