"""Looks at how gradients will be averaged, where MindSpore takes settings without a word that make the mean wrong; and
after the training, where mpirun has started the ranks on CPU, whether all hold the same weights.
"""

import contextlib
import os
import sys
import weakref
import zlib

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, get_group_size
from mindspore.experimental.optim import Optimizer as NewOptimizer
from mindspore.parallel._auto_parallel_context import auto_parallel_context

TRAINED = weakref.WeakValueDictionary()  # the parameters that optimizers were given, by their ids
SAME = 1e-4  # of the weights' norm; rounding is far below


def refuse(parameters):
    """End with a sentence if the gradients of these parameters would not become their mean over all ranks."""
    size, settings = get_group_size(), auto_parallel_context()
    stages, number = settings.get_pipeline_stages(), settings.get_device_num()
    alone = [parameter.name for parameter in parameters if parameter.param_info.is_in_pynative_shard]
    if alone:
        sys.exit(f"shard() of a cell switches off the exchange of gradients, here those of {len(alone)} parameters "
                 f"({alone[0]}, ...): each rank would train alone. Leave it out in {settings.get_parallel_mode()}")
    if stages > 1 and settings.get_parallel_mode() in ("data_parallel", "hybrid_parallel"):
        sys.exit(f"pipeline_stages={stages} makes gradients wrong in {settings.get_parallel_mode()}; leave it out "
                 "(a pipeline is trained in semi_auto_parallel or auto_parallel)")
    if settings.get_gradients_mean() and settings.get_device_num_is_set() and number != size:
        sys.exit(f"device_num={number} of set_auto_parallel_context is not the number of ranks, {size}, by which "
                 "gradients are to be divided; leave it out")


def take_over():
    """Have nn.DistributedGradReducer, which Model.train makes, too, look first."""
    def make(self, parameters, mean=None, degree=None, *more, made=nn.DistributedGradReducer.__init__, **named):
        refuse(parameters)
        made(self, parameters, mean, degree, *more, **named)
        size = get_group_size()
        if self.mean and degree not in (None, size) and not more and not named and \
                (os.getenv("OMPI_COMM_WORLD_RANK") or os.getenv("RANK_ID", "0")) == "0":
            print(f"warning: gradients are summed over {size} ranks and divided by {degree}, the degree given to "
                  f"DistributedGradReducer; their mean wants {size}", flush=True)

    nn.DistributedGradReducer.__init__ = make


def take_note_of_optimizers():
    """Note what they train, less what is each rank's own."""
    def noting(made):
        def make(self, *given, **named):
            made(self, *given, **named)
            TRAINED.update({id(one): one for one in self.parameters if not one.layerwise_parallel})

        return make

    for kind in (nn.Optimizer, NewOptimizer):
        kind.__init__ = noting(kind.__init__)


def compare():
    """Say it if this rank's weights are not rank 0's, where all ranks train one network; all ranks must call it."""
    norm, seen, network = 0.0, 0.0, 0
    for parameter in list(TRAINED.values()):
        network += zlib.crc32(f"{parameter.name} {parameter.shape}".encode()) >> 16
        with contextlib.suppress(TypeError):  # numpy may have no such numbers
            values = parameter.asnumpy().astype(np.float64).ravel()
            norm += values @ values
            seen += values @ np.cos(np.arange(values.size))  # of a difference it sees 0.7 of the norm, on the average
    norms, seen, networks = ops.AllGather()(
        Tensor(np.array([norm ** 0.5, seen, network], np.float32))).asnumpy().reshape(-1, 3).T
    others = np.flatnonzero(np.abs(seen - seen[0]) > SAME * norms[0])
    if others.size and np.all(networks == networks[0]) and os.getenv("OMPI_COMM_WORLD_RANK") == "0":
        print(f"warning: rank {' '.join(map(str, others))} ended with other weights than rank 0; in data parallel all "
              "have the same. Their initial weights, learning rates or numbers of steps differ, or gradients were not "
              "averaged (parallel_mode)", flush=True)


def compare_in_the_end(ranks):
    """Have ranks.leave() compare, where the ranks wait for each other; in a computed plan, compute.py does so."""
    if "ASCEND_PLAN" in os.environ:
        return
    take_note_of_optimizers()

    def meet(meet=ranks._meet):
        if GlobalComm.INITED and get_group_size() > 1:
            compare()
        meet()

    ranks._meet = meet
