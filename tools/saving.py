"""Nothing is lost at TERM: all ranks end one and the same step, save, and are ended. tools/launch.py uses it.

Rank 0 is asked when ("when"). At the end of a step it says which step will be the last, the next one, and waits. The
other ranks cannot end that one without rank 0, so they all learn of it in time; rank 0 goes on when they know. A rank
that has saved says so and waits for its end: no rank fails because another one has ended. A rank says "steps" when it
has ended its first step and so takes part, and "kept ..." when it has saved an epoch. Class Launcher is the ranks'
side, which checkpoints.py uses.
"""

import os
import re
import select
import sys
import time


def kept_by_all(job):
    """What all ranks have saved last, in words; "" if they have saved different things, or nothing."""
    words = {rank.get("word", "") for rank in job.ranks.values()}
    return words.pop()[5:] if len(words) == 1 and all(word.startswith("kept") for word in words) else ""


class Saving:
    """Of one job, from TERM on.

    Args:
        job: has ranks, {rank: its record}, with "word" what it said last and "told" what it was told last, and ask().
        seconds: the most that it may take.

    Attributes:
        kept: what all ranks had saved before, as of kept_by_all().
        failed: the rank that has failed before all had saved, or None.
    """

    def __init__(self, job, seconds):
        self.job, self.seconds, self.deadline, self.last = job, seconds, time.monotonic() + seconds, None
        self.kept, self.failed = kept_by_all(job), None
        job.ask(job.ranks[0], word="when")

    @staticmethod
    def possible(job):
        """Has a rank ended a step, and do they save? Then all will soon say so: what they say may be on its way. Not
        where other launchers have some of the ranks.
        """
        ranks = job.ranks.values()
        return (len(ranks) == job.args.n and any(re.match("steps|kept", rank.get("word", "")) for rank in ranks)
                and all(rank["code"] is None for rank in ranks))

    def go_on(self):
        """Pass on what the ranks have said. Returns what came of it, at the end, else ""."""
        first, *others = [rank for _, rank in sorted(self.job.ranks.items())]
        if self.last is None and first.get("word", "").isdigit():
            self.last = first["word"]
            for rank in others:
                self.job.ask(rank, word=self.last)
        if self.last and first["told"] == "when" and all(rank.get("told") == self.last for rank in others):
            self.job.ask(first, word=self.last)
            first["told"] = self.last
        saved = [number for number, rank in self.job.ranks.items() if rank.get("word", "").startswith("saved")]
        missing = sorted(set(self.job.ranks) - set(saved))
        if not missing:
            self.kept = ""  # is told here
            return f"all ranks have {first['word']}; --resume goes on there"
        self.failed = next((rank for rank in missing if self.job.ranks[rank]["code"]), None)
        if self.failed is not None:
            return f"rank {self.failed} has failed before all had saved"
        if time.monotonic() > self.deadline:
            halted = self.job.halted()
            stopped = f"; {self.job.stop_of(halted)}" if any(
                halted is self.job.ranks[rank] for rank in missing) else ""
            if kept_by_all(self.job) and not stopped:
                return f"no step has ended within {self.seconds:g} s, as none does while ranks test"
            return f"not saved within {self.seconds:g} s: rank {', '.join(map(str, missing))}{stopped}"
        return ""


class Launcher:
    """What a rank has of the launcher: a socket (variable RANKS_WORDS)."""

    def __init__(self):
        self.link, self.steps, self.last = int(os.environ["RANKS_WORDS"]), 0, float("inf")

    def ends_after(self, result):
        """To be asked after each step, with what it has computed: is it the last? Ends a rank that diverges."""
        value = repr(result)  # it is there when the step is done, on a card, too
        if diverged := re.search(r"\b(nan|inf)\b", value):
            sys.exit(f"the loss is {diverged[0]}: training has diverged, and nothing more is saved; take a smaller "
                     "--lr")
        self.steps += 1
        if self.steps == 1:
            os.write(self.link, b"steps")
        while select.select([self.link], [], [], 0)[0]:
            word = os.read(self.link, 99)
            if word == b"when":  # asks rank 0, without which no rank can end the next step
                os.write(self.link, b"%d" % (self.steps + 1))
                word = os.read(self.link, 99)  # comes when all others have it
            self.last = int(word)
        return self.steps >= self.last

    def saved(self, where):
        """Say what was saved; does not return after the last step."""
        ends = self.steps >= self.last
        os.write(self.link, f"{'saved' if ends else 'kept'} {where}".encode())
        if ends:
            os.read(self.link, 1)  # it ends this process when all ranks have saved
