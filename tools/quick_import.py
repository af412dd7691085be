"""Imports MindSpore, quicker: for in_rank.py, msrun.py and dry_run/."""

import functools
import gc
import importlib.machinery
import sys
import types

# From these MindSpore's own modules import a name or two for a metric, a data set, a profiler, a kind of file: a fifth
# of the import.
LATER = {"scipy", "scipy.io", "scipy.linalg", "scipy.ndimage", "scipy.sparse", "unittest", "unittest.mock",
         "mindspore.train.checkpoint_pb2", "mindspore.train.lineage_pb2", "mindspore.train.mind_ir_pb2",
         "mindspore.train.node_strategy_pb2", "mindspore.train.print_pb2", "mindspore.train.summary_pb2"}
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

    def __instancecheck__(self, instance):
        return isinstance(instance, self.here())


class Finder:
    """Finds modules, each with a Later for whatever is imported from it."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in self.names else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = functools.partial(Later, spec.name)
        return module

    def exec_module(self, module):
        """There is nothing in it."""


def import_mindspore(nothing_of=()):
    """Import it, without what LATER has and nobody has imported yet; nothing_of: modules that nobody will need."""
    sys.modules.update({name: types.ModuleType(name) for name in nothing_of})
    finder = Finder({name for name in LATER if name.partition(".")[0] not in sys.modules})
    sys.meta_path.insert(0, finder)
    gc.disable()  # to look for garbage among all that the import makes would take a sixth of its time
    try:
        import mindspore  # noqa: F401
    finally:
        gc.freeze()  # nor is there any in what it has made: MindSpore looks after each graph
        gc.enable()
        sys.meta_path.remove(finder)
        for name in finder.names & sys.modules.keys():
            del sys.modules[name]
