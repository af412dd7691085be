"""MindSpore's msrun, started sooner: for tools/launch.py.

    python tools/msrun.py --worker_num=2 ... SCRIPT ...        what msrun would do

It does the same, but where no Ascend card is, and no --bind, imports only msrun's own modules, not all of MindSpore,
before it starts the first rank; it sees sooner that the ranks have ended, ends without MindSpore's clean-up, at Ctrl-C
at once, and has this Python run the ranks, not the first one on the PATH that is called python.
"""

import os
import sys

# As in launch.py.
sys.path.sort(key=lambda folder: not folder.startswith((os.path.dirname(__file__), os.path.dirname(os.__file__))))

import importlib.util
import signal
import subprocess
import time
import types
from pathlib import Path

import linux
import quick_import

# It kills its ranks at Ctrl-C, which then looks like a lack of memory; launch.py sees what has ended it.
if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as behind & in a script
    signal.signal(signal.SIGINT, signal.SIG_DFL)
for number in linux.SCRIPTS_OWN:
    signal.signal(number, lambda *_: None)
signal.signal = lambda *_: None


WHOLE = "with all of MindSpore"


class NoTaskManager:
    """MindX, which may tell an msrun on Ascend what to do."""

    def check_enable(self):
        return False


def only_msrun():
    """Have its modules find the packages around them empty, but for names that they use with an Ascend card only."""
    where = Path(importlib.util.find_spec("mindspore").origin).parents[1]
    for name, has in (("mindspore", {}), ("mindspore.parallel", {}), ("mindspore.runtime", {}),
                      ("mindspore.context", {}), ("mindspore.communication", {"get_local_rank_size": None}),
                      ("mindspore.utils", {"RSCPluginHandle": NoTaskManager})):
        package = sys.modules[name] = types.ModuleType(name)
        vars(package).update(has, __path__=[str(where / name.replace(".", "/"))])


again = sys.argv[1:2] == [WHOLE]
if again:
    del sys.argv[1]
if again or os.path.exists("/dev/davinci_manager") or any(word.startswith("--bind") for word in sys.argv):
    quick_import.import_mindspore(nothing_of=quick_import.ASCEND_ONLY)
else:
    only_msrun()
try:
    from mindspore.parallel.cluster.process_entity import _api as waiting
    from mindspore.parallel.cluster.run import main
except (ImportError, AttributeError):  # a version that needs more of MindSpore
    if again:
        raise
    os.execv(sys.executable, [sys.executable, __file__, WHOLE, *sys.argv[1:]])


class Process(subprocess.Popen):
    def __init__(self, command, **options):
        """What gets no session of its own, as tail, which follows a log, ends with this process."""
        super().__init__(command, **{"preexec_fn": linux.die_with_parent, **options})

    def poll(self):
        """Has it ended? Some versions ask again at once, others in a second."""
        if super().poll() is None:
            time.sleep(0.05)
        return self.returncode


def changed(module, **names):
    """A copy of a module, in which these names are others."""
    copy = types.ModuleType(module.__name__)
    vars(copy).update(vars(module), **names)
    return copy


waiting.subprocess = changed(subprocess, Popen=Process)
waiting.time = changed(time, sleep=lambda seconds: time.sleep(min(seconds, 0.05)))


def use_this_python():
    """msrun takes one of two names for a Python, and no path."""
    here = Path(sys.executable).parent
    for name in ("python", "python3"):
        if (here / name).exists() and (here / name).samefile(sys.executable):
            os.environ["PATH"] = f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
            script = next((place for place, word in enumerate(sys.argv) if place and word[:2] != "--"), len(sys.argv))
            sys.argv.insert(script, name)
            return


if __name__ == "__main__":
    use_this_python()
    try:
        code = main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            code = print(code, file=sys.stderr) or 1
    sys.stdout.flush()
    os._exit(code or 0)
