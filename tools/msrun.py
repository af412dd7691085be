"""MindSpore's msrun, started sooner: for tools/launch.py.

    python tools/msrun.py --worker_num=2 ...        what msrun would do

It does the same, but imports MindSpore as the ranks do (quick_import.py), and ends without MindSpore's clean-up.
"""

import os
import sys

import quick_import

quick_import.import_mindspore(nothing_of=quick_import.ASCEND_ONLY)
from mindspore.parallel.cluster.run import main  # noqa: E402

if __name__ == "__main__":
    try:
        code = main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            code = print(code, file=sys.stderr) or 1
    sys.stdout.flush()
    os._exit(code or 0)
