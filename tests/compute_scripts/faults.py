"""What cannot be computed: python dry_run/compute.py -n 2 faults.py control_flow."""
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init
from mindspore.parallel.auto_parallel import AutoParallel

fault = sys.argv[1]
ms.set_context(mode=ms.PYNATIVE_MODE if fault.startswith("pynative") else ms.GRAPH_MODE)
init()
STRATEGIES = {"other_batch_as_ones": ((1, 1),), "other_slices": ((2, 1),), "neighbours_alike": ((2, 1),)}
if fault != "other_batch_in_a_class":
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel",
                                 dataset_strategy=STRATEGIES.get(fault, "full_batch"))


class Net(nn.Cell):
    """One of the faults."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.matmul = ops.MatMul().shard(((1, 2), (2, 1)))
        self.thirds = ops.ReLU().shard(((1, 3),))
        self.weight = ms.Parameter(Tensor(np.ones((8, 8)), ms.float32))
        if fault == "sparse":
            self.table = nn.EmbeddingLookup(8, 8, slice_mode="table_row_slice")

    def construct(self, x):
        if self.fault == "unplannable":
            x = self.thirds(x)
        if self.fault == "control_flow":
            while x.sum() < 100:
                x = x * 2
        if self.fault == "no_kernel":
            x = x + ops.NPUAllocFloatStatus()()
        if self.fault == "masked":
            x = x * ops.grad(lambda y: ops.masked_select(y, y > 0).sum())(x)
        if self.fault == "sparse":
            x = x + self.table(x.astype(ms.int32)).sum(-1)
        z = self.matmul(x, self.weight)
        if self.fault == "uncut_loss":
            return ops.smooth_l1_loss(z, x)
        return ops.addcmul(z, z, z, 0.5) if self.fault == "uncut" else z


net = Net(fault)
if fault == "one_never_comes" and get_rank() == 1:
    time.sleep(99)
x = Tensor(np.full((8, 8), 1 + get_rank() * fault.startswith("other_") + get_rank() // 2), ms.float32)
if fault == "other_batch_in_a_class":
    net = AutoParallel(net, parallel_mode="semi_auto")
    net.dataset_strategy("full_batch")
if fault == "pynative_trains":
    net = nn.TrainOneStepCell(net, nn.Momentum(net.trainable_params(), 0.1, 0.9))
if fault in ("Lamb", "ASGD", "sparse"):
    net = nn.TrainOneStepCell(net, getattr(nn, fault.replace("sparse", "SGD"))(net.trainable_params(), 0.1))
if fault == "loss_scale":
    net = nn.TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params(), 0.1), Tensor(1024, ms.float32))
if fault == "pipeline_by_hand":
    net = nn.TrainOneStepCell(nn.PipelineCell(net, 2), nn.SGD(net.trainable_params(), 0.1))
if fault == "interleaved":
    ms.set_auto_parallel_context(pipeline_stages=2,
                                 pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "1f1b"})

    class Whole(nn.Cell):
        @ms.lazy_inline
        def __init__(self, net):
            super().__init__()
            self.net = net

        def construct(self, x):
            return self.net(x)

    net = Whole(net)
if fault == "no_such_stage":
    ms.set_auto_parallel_context(pipeline_stages=2)
    net.pipeline_stage = 2
if fault == "another_rank":
    ms.set_auto_parallel_context(global_rank=1 - get_rank())
if fault == "early_stopping":
    ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1), metrics={"mse"}).fit(
        1, ms.dataset.NumpySlicesDataset(([0.0], [0.0])), callbacks=[ms.train.EarlyStopping("mse")])
if fault == "copied":
    net = nn.Dense(8, 8)
    copies = [parameter.clone() for parameter in net.trainable_params()]
    net = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1))
for step in range(2):
    if fault == "one_leaves" and step == 1 and get_rank() == 1:
        break
    if fault == "one_sleeps" and step == 1 and get_rank() == 1:
        time.sleep(60)
    if fault == "used_early" and step == 0:
        ops.zeros_like(net.weight)
    if fault == "cut_twice" and step == 1:
        held, net = net.weight, Net(fault)
        net.weight, net.matmul = held, ops.MatMul().shard(((2, 1), (1, 1)))
    net(x)
    print(f"rank {get_rank()} step {step} done", flush=True)
if fault == "none":
    ms.export(net, x, file_name=f"of_rank_{get_rank()}", file_format="MINDIR")
if fault == "one_more_graph" and get_rank() == 0:
    Net(fault)(x)
if fault == "crossed":
    other = Net(fault)
    other(x)
    (net if get_rank() == 0 else other)(x)
