"""Runs a script's own check (SCRIPT OPTIONS --check) without MindSpore, whose import alone takes seconds.

    python tools/quick_check.py SCRIPT OPTIONS --check            prints and exits as python SCRIPT OPTIONS --check does

A check looks at options and files. So `import mindspore` gets stand-ins here, which can be named, taken as a base class
and nothing else; if a script makes more use of them, or fails in any way, it runs again, with the real MindSpore.
"""

import contextlib
import errno
import importlib.abc
import importlib.machinery
import io
import os
import runpy
import sys
import types


class Used(BaseException):
    """The check makes use of MindSpore."""


def use(*_, **__):
    raise Used


class Name(type):
    """The class of what stand-ins hold: classes that cannot be called, compared as numbers, counted or asked."""

    def __getattr__(cls, name):
        return stand_in(name)

    __call__ = __bool__ = __iter__ = __len__ = __getitem__ = __instancecheck__ = use


def stand_in(name):
    """What `mindspore.<name>` is; private names are not there."""
    if name.startswith("_"):
        raise AttributeError(name)
    return type.__call__(Name, name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds mindspore and all its modules."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "mindspore":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = stand_in
        return module

    def exec_module(self, module):
        pass


def main(argv):
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    sys.argv = list(argv)
    sys.meta_path.insert(0, Finder())
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(argv[0], run_name="__main__")
                end = 0
            except SystemExit as how:
                end = how.code
            except OSError as error:  # data of somebody else, of a broken disk, of a name that cannot be
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG):
                    raise
                mend = "have its owner make it readable (chmod -R a+rX), or " * isinstance(error, PermissionError)
                print(f"{os.path.basename(argv[0])}: error: {str(error.filename)[:200]}: {error.strerror}; {mend}name "
                      "other data", file=sys.stderr)
                end = 2
    except BaseException:  # noqa: BLE001  # the real run will say it
        os.execv(sys.executable, [sys.executable, *argv])
    sys.stdout.write(out.getvalue())
    sys.stderr.write(err.getvalue())
    sys.exit(end)


if __name__ == "__main__":
    main(sys.argv[1:])
