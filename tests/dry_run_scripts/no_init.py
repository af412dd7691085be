"""Forgets init(): compiles, but as a job of one process."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

ms.set_context(mode=ms.GRAPH_MODE)
nn.Dense(4, 2)(Tensor(np.ones((2, 4)), ms.float32))
