"""The moving line under the ranks' lines on a terminal: epoch, step, losses, samples a second, time left.

All is read from what the ranks print ("epoch: 0, step: 20, loss is 2.3", the lines of MindSpore's LossMonitor, too) and
from the script's options; what cannot be known is left out. In a file or a pipe nothing of it is written.
"""

import collections
import contextlib
import os
import re
import shutil
import sys
import time
from pathlib import Path

import speech

NUMBER = r"([-+]?(?:\d+(?:\.\d+|\.(?=e))?(?:e[-+]?\d+)?|nan\b|inf\b))"  # also where a full stop follows
LINE = re.compile(rf"(?:epoch: (\d{{1,18}})(,?) )?step: (\d{{1,18}}), loss is {NUMBER}", re.IGNORECASE)


def option(name, options, text):
    """The number that an option of a script has, given, shortened as argparse takes it, or by default; None where that
    is not to be seen. text: the script's.
    """
    value = re.search(rf'"{name}",(?:(?!add_argument).)*?\bdefault=(\d+)', text)
    value, own = value and value[1], {*re.findall(r"""["'](--[\w-]+)["']""", text)}
    for word, then in zip(options, [*options[1:], ""]):
        flag, same, its = word.partition("=")
        if flag == name or (len(flag) > 2 and name in own and name.startswith(flag) and flag not in own):
            value = its if same else then
    return int(value) if re.fullmatch(r"\d{1,18}", value or "") else None


def spoken(seconds):
    """A time, roughly: 40 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else \
        f"{minutes // 60} h {minutes % 60} min"


class Progress:
    """What the moving line needs to know; show() draws it, clear() takes it away before other lines are printed."""

    def __init__(self, out=None):
        self.out, self.drawn, self.began, self.active = out or sys.stdout, "", time.monotonic(), False
        self.losses, self.ranks, self.epoch, self.step, self.first_epoch = {}, 0, None, None, 0
        self.epochs = self.steps = self.batch = self.limit = None
        self.interval, self.history = 1, collections.deque(maxlen=50)

    def start(self, args):
        """Begin to draw, if this is a terminal."""
        self.active = self.out.isatty() and os.getenv("TERM", "dumb") != "dumb"
        if self.active:
            self.__init__(self.out)
            self.active, self.ranks = True, args.n
            text = ""
            with contextlib.suppress(OSError):
                text = Path(args.script).read_text(errors="replace")
            self.epochs, self.steps, self.batch = (
                option(name, args.options, text) for name in ("--epochs", "--steps", "--batch-size"))
            parts = re.search(r"[Aa]ccumulat\w*\(", text)
            if parts or re.search(r"(full_batch|dataset_strategy|pipeline_stages)[\"']? ?[=:(]|\.pipeline\(", text):
                self.batch = None  # ranks may share a batch, or a step be a part of one
            if parts:
                self.steps = None

    def read(self, rank, line, now=None):
        """Take in a line of a rank, which may have carriage returns; the first rank is the one whose steps count."""
        for found in LINE.finditer(line):
            self.losses[rank] = found[4]
            if rank == min(self.losses):
                self.move(found, now)

    def move(self, found, now):
        """Go on to what LINE has found."""
        counts_from_1 = found[1] is not None and not found[2]  # "epoch: 1 step: 1", as LossMonitor writes
        epoch, step = int(found[1] or 0) - counts_from_1, int(found[3]) - counts_from_1 + 1
        if self.epoch is None:
            self.first_epoch = epoch
        elif epoch == self.epoch:
            self.interval = max(1, step - self.step)
        elif not self.limit:
            self.limit = self.step + self.interval // 2  # the last line of an epoch may come before its last step
        self.epoch, self.step = epoch, step
        self.history.append((now or time.monotonic(), self.done()))

    def an_epoch(self):
        """The steps of an epoch, as far as that is known: as given, or as many as the first one had, about."""
        as_given = self.steps and (not self.limit or abs(self.limit - self.steps) < self.interval)
        return self.steps if as_given else self.limit

    def done(self):
        """Steps so far; None while it is not known how many an epoch has."""
        before = self.epoch - self.first_epoch
        return self.step + before * (self.an_epoch() or 0) if self.an_epoch() or not before else None

    def text(self, now):
        """The line."""
        if self.epoch is None:
            return f"{self.ranks} ranks: no loss yet, {spoken(now - self.began)}"
        each, total = self.an_epoch(), self.epochs if self.epochs and self.epochs > self.epoch else None
        parts = [f"epoch {self.epoch + 1}" + (f" of {total}" if total else "")] if self.epochs else []
        parts.append(f"step {self.step}" + (
            f" of {'about ' * (self.interval > 1 and each != self.steps)}{each}" if each and each >= self.step else ""))
        losses = [f"{float(loss):.4g}" if re.fullmatch(r"[-+\d.e]+", loss) else loss
                  for _, loss in sorted(self.losses.items())]
        parts.append("loss " + (" ".join(losses) if len(losses) <= 4 else f"{losses[0]} ... {losses[-1]}"))
        known = [(when, done) for when, done in self.history if done is not None]
        if len(known) > 1 and known[-1][1] > known[0][1]:
            pace = (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0] or 1e-9)  # steps a second
            parts.append(f"{pace * self.batch * self.ranks:.3g} samples/s" if self.batch else f"{pace:.3g} steps/s")
            if each and (total or not self.epochs):
                left = (total or 1) * each - self.epoch * each - self.step
                parts.append(f"{spoken(max(0, left / pace - (now - known[-1][0])))} left")
        return ", ".join(parts)

    def show(self):
        """Draw the line anew, if it has changed."""
        if not self.active:
            return
        text = self.text(time.monotonic())[:max(10, shutil.get_terminal_size().columns - 1)]
        if text != self.drawn:
            self.write(f"\r\x1b[2K{text}")
            self.drawn = text

    def clear(self):
        """Take the line away."""
        if self.drawn:
            self.write("\r\x1b[2K")
            self.drawn = ""

    def stop(self):
        self.clear()
        self.active = False

    def write(self, text):
        try:
            with contextlib.suppress(BlockingIOError):
                if speech.takes_more(self.out, 0):  # not after Ctrl-S
                    speech.write(self.out, text.encode(errors="replace"))
        except (OSError, ValueError):  # the terminal is gone; the job goes on
            self.active, self.drawn = False, ""
