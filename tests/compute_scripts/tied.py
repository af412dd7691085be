"""A weight that both stages of a pipeline use; prints the loss of each step and saves it.

    python tied.py alone OUT
    python dry_run/compute.py -n 4 tied.py pipeline OUT
    ... OUT clip           gradients are clipped by the norm of all
    ... OUT sharded        the optimizer's work is cut, which cannot be
"""
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_rank, init

pipeline, folder, rank = sys.argv[1] == "pipeline", sys.argv[2], 0
ms.set_context(mode=ms.GRAPH_MODE)
if pipeline:
    init()
    rank = get_rank()
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=2, dataset_strategy="full_batch")
    ms.set_auto_parallel_context(enable_parallel_optimizer="sharded" in sys.argv,
                                 parallel_optimizer_config={"parallel_optimizer_threshold": 0})
random = np.random.default_rng(1)
TABLE, MIDDLE = (0.3 * random.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 8)))
X, Y = (random.standard_normal((4, 16, 16)).astype(np.float32) for _ in "xy")


class Encoder(nn.Cell):
    """(batch, 16) to (batch, 8)."""

    def __init__(self, table):
        super().__init__()
        self.table, self.matmul = table, ops.MatMul()

    def construct(self, x):
        return ops.relu(self.matmul(x, self.table))


class Decoder(nn.Cell):
    """(batch, 8) to (batch, 16)."""

    def __init__(self, table):
        super().__init__()
        self.table, self.matmul = table, ops.MatMul(transpose_b=True)
        self.middle = nn.Dense(8, 8, weight_init=Tensor(MIDDLE), bias_init="zeros")

    def construct(self, x):
        return self.matmul(self.middle(x), self.table)


class Net(nn.Cell):
    """(batch, 16) to (batch, 16)."""

    def __init__(self):
        super().__init__()
        table = Parameter(Tensor(TABLE), name="table")
        self.encoder, self.decoder = Encoder(table), Decoder(table)
        self.encoder.pipeline_stage, self.decoder.pipeline_stage = 0, 1

    def construct(self, x):
        return self.decoder(self.encoder(x))


net = Net()
loss_net = nn.WithLossCell(net, nn.MSELoss())
if pipeline:
    loss_net = nn.PipelineCell(loss_net, 2)
optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
data = ms.dataset.NumpySlicesDataset((X.reshape(-1, 16), Y.reshape(-1, 16)), ["x", "y"], shuffle=False).batch(16)


class Clipped(nn.Cell):
    """A step: (x, y) to the loss."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.loss_and_gradients = ops.value_and_grad(loss_net, None, optimizer.parameters)
        self.optimizer, self.reduce = optimizer, nn.PipelineGradReducer(optimizer.parameters)

    def construct(self, x, y):
        loss, gradients = self.loss_and_gradients(x, y)
        return ops.depend(loss, self.optimizer(ops.clip_by_global_norm(self.reduce(gradients), 0.1)))


class Losses(ms.train.Callback):
    """Prints the loss of each step: the sum of the micro batches' where the stage has one."""

    def step_end(self, run_context):
        step = run_context.original_args()
        print(f"rank {rank} step: {step.cur_step_num}, loss is {float(step.net_outputs.asnumpy()):.6f}", flush=True)


model = ms.Model(Clipped()) if "clip" in sys.argv else ms.Model(loss_net, optimizer=optimizer)
model.train(1, data, callbacks=Losses(), dataset_sink_mode=False)
np.savez(f"{folder}/held_{rank}.npz", **{value.name: value.asnumpy() for value in net.get_parameters()})
