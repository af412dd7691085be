"""MindSpore's msrun, started sooner: for tools/launch.py.

    python tools/msrun.py --worker_num=2 ... SCRIPT ...        what msrun would do

It does the same, but imports MindSpore as the ranks do (quick_import.py), ends without MindSpore's clean-up, at Ctrl-C
at once, and has this Python run the ranks, not the first one on the PATH that is called python.
"""

import os
import signal
import sys
from pathlib import Path

import quick_import

# It kills its ranks at Ctrl-C, which then looks like a lack of memory; launch.py sees what has ended it.
if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as behind & in a script
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal = lambda *_: None
quick_import.import_mindspore(nothing_of=quick_import.ASCEND_ONLY)
from mindspore.parallel.cluster.run import main  # noqa: E402


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
