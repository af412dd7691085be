"""Imports MindSpore, quicker: for in_rank.py, msrun.py and dry_run/."""

import functools
import gc
import importlib
import sys
import types

# From these MindSpore's own modules import a name or two for a metric, a data set, a profiler: a tenth of the import.
LATER = ("scipy", "scipy.io", "scipy.linalg", "scipy.ndimage", "scipy.sparse", "unittest.mock")
# 400 modules, a tenth of the import, which list what runs on Ascend only.
ASCEND_ONLY = ("mindspore.ops._op_impl.aicpu",)


class Later:
    """What a module has under a name: a module or something to call. It is imported when it is used."""

    def __init__(self, module, name):
        self.here = lambda: getattr(importlib.import_module(module), name)

    def __getattr__(self, name):
        return getattr(self.here(), name)

    def __call__(self, *args, **options):
        return self.here()(*args, **options)


def import_mindspore(nothing_of=()):
    """Import it, without what LATER has and nobody has imported yet; nothing_of: modules that nobody will need."""
    sys.modules.update({name: types.ModuleType(name) for name in nothing_of})
    later = [name for name in LATER if name.partition(".")[0] not in sys.modules]
    for name in later:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = functools.partial(Later, name)
    gc.disable()  # to look for garbage among all that the import makes would take a sixth of its time
    try:
        import mindspore  # noqa: F401
    finally:
        gc.freeze()  # nor is there any in what it has made: MindSpore looks after each graph
        gc.enable()
        for name in later:
            del sys.modules[name]
