"""Looks at how gradients will be averaged, where MindSpore takes settings without a word that make the mean wrong."""

import os
import sys

from mindspore import nn
from mindspore.communication import get_group_size
from mindspore.parallel._auto_parallel_context import auto_parallel_context


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
