"""A small network in every parallel mode; prints the loss of each step and saves the parameters of this rank.

    python small.py stand_alone OUT
    python dry_run/compute.py -n 2 small.py semi_auto_parallel OUT
    python dry_run/compute.py -n 2 small.py semi_auto_parallel OUT --jit then auto_parallel OTHER
"""
import argparse
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

MODES = ("stand_alone", "semi_auto_parallel", "auto_parallel", "optimizer_shard", "pipeline")
parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=MODES)
parser.add_argument("out", type=Path, help="folder for what this rank holds")
parser.add_argument("--slices", type=int, nargs=2, default=(1, 2), help="of the rows and columns of the first weight")
parser.add_argument("--search-mode", default="recursive_programming")
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--optimizer", choices=("Momentum", "Adam"), default="Momentum")
parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
                    help="of the second MatMul")
parser.add_argument("--jit", action="store_true", help="the step as a function under jit instead of a Cell")
parser.add_argument("--lazy", action="store_true", help="the network is a graph of its own")
parser.add_argument("--predict", action="store_true", help="run the network alone after training")

ms.set_context(mode=ms.GRAPH_MODE)

random = np.random.default_rng(1)
X = random.standard_normal((8, 16, 32)).astype(np.float32)
Y = random.standard_normal((8, 16)).astype(np.float32)
W1 = (0.2 * random.standard_normal((32, 64))).astype(np.float32)
W2 = (0.2 * random.standard_normal((64, 16))).astype(np.float32)



class Layer(nn.Cell):
    """relu(x @ weight)."""

    def __init__(self, weight, dtype=ms.float32):
        super().__init__()
        self.weight = Parameter(Tensor(weight), name="weight")
        self.matmul, self.relu, self.cast, self.dtype = ops.MatMul(), ops.ReLU(), ops.Cast(), dtype

    def construct(self, x):
        if self.dtype != ms.float32:
            return self.cast(self.relu(self.matmul(self.cast(x, self.dtype), self.cast(self.weight, self.dtype))),
                             ms.float32)
        return self.relu(self.matmul(x, self.weight))


class Net(nn.Cell):
    """(batch, 32) to (batch,)."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = Layer(W1), Layer(W2, dtype)
        self.bias = Parameter(Tensor(np.zeros(1, np.float32)), name="bias")
        self.sum = ops.ReduceSum()

    def construct(self, x):
        return self.sum(self.second(self.first(x)), -1) + self.bias


class Loss(nn.Cell):
    """The mean square error, a scalar."""

    def __init__(self, net, parts):
        super().__init__(auto_prefix=False)
        self.net, self.parts = net, parts

    def construct(self, x, y):
        return ((self.net(x) - y) ** 2).mean() / self.parts  # a PipelineCell adds up the losses of its micro batches


class Step(nn.Cell):
    """One step of training."""

    def __init__(self, net, optimizer, reduce):
        super().__init__(auto_prefix=False)
        self.net, self.optimizer, self.reduce = net, optimizer, reduce
        self.gradients = ms.value_and_grad(self.forward, None, optimizer.parameters)

    def forward(self, x, y):
        return self.net(x, y)

    def construct(self, x, y):
        loss, gradients = self.gradients(x, y)
        return ops.depend(loss, self.optimizer(self.reduce(gradients)))


def set_mode(args):
    """Tell MindSpore the parallel mode."""
    ms.reset_auto_parallel_context()
    mode = args.mode if args.mode == "auto_parallel" else "semi_auto_parallel"
    ms.set_auto_parallel_context(parallel_mode=mode, dataset_strategy="full_batch", gradients_mean=False)
    if mode == "auto_parallel":
        ms.set_auto_parallel_context(search_mode=args.search_mode)
    if args.mode == "optimizer_shard":
        ms.set_auto_parallel_context(dataset_strategy="data_parallel", enable_parallel_optimizer=True,
                                     parallel_optimizer_config={"parallel_optimizer_threshold": 0})
    if args.mode == "pipeline":
        ms.set_auto_parallel_context(pipeline_stages=args.stages)


def make_step(args):
    """The network, and a step of its training."""
    micro_batches = 2 if args.mode == "pipeline" else 1
    if args.lazy:
        Net.__init__ = ms.lazy_inline(Net.__init__)
    net = Net(getattr(ms, args.dtype))
    if args.mode == "semi_auto_parallel":
        rows, columns = args.slices
        net.first.matmul.shard(((rows, 1), (1, columns)))
        net.first.relu.shard(((rows, columns),))
        net.second.matmul.shard(((rows, columns), (columns, 1)))
    loss_net = Loss(net, micro_batches)
    if args.mode == "pipeline":
        net.first.pipeline_stage, net.second.pipeline_stage = 0, args.stages - 1
        loss_net = nn.PipelineCell(loss_net, micro_batches)
    optimizer = getattr(nn, args.optimizer)(net.trainable_params(), 0.01, **(
        {"momentum": 0.9} if args.optimizer == "Momentum" else {}))
    reduce = nn.PipelineGradReducer(optimizer.parameters) if args.mode == "pipeline" else nn.Identity()
    return net, Step(loss_net, optimizer, reduce).set_train()


def train(args, rank=0, ranks=1):
    """Train in one mode, and save."""
    if args.mode != "stand_alone":
        set_mode(args)
    net, step = make_step(args)

    @ms.jit
    def run_under_jit(x, y):
        """The same step, as a function."""
        return step(x, y)

    run = run_under_jit if args.jit else step
    share = slice(None)
    if args.mode == "optimizer_shard":
        share = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
    for number in range(args.steps):
        loss = run(Tensor(X[number][share]), Tensor(Y[number][share]))
        line = f"rank {rank} step: {number}, loss is {float(loss.asnumpy()):.7f} in {args.out.name}\n"
        print(line, end="", flush=True)  # at once, or mpirun may put another rank's line into it

    args.out.mkdir(parents=True, exist_ok=True)
    if args.predict:
        net.set_train(False)
        answer = net(Tensor(X[0][share])).asnumpy()
        np.save(args.out / f"answer_{rank}.npy", answer)
    np.savez(args.out / f"held_{rank}.npz", **{value.name: value.asnumpy() for _, value in step.parameters_and_names()})
    if args.mode != "pipeline":
        ms.save_checkpoint(step, str(args.out / f"whole_{rank}.ckpt"), integrated_save=True)


runs = [[]]
for word in sys.argv[1:]:
    if word == "then":
        runs.append([])
    else:
        runs[-1].append(word)
who = ()
if "stand_alone" not in runs[0]:
    init()
    who = get_rank(), get_group_size()
for options in runs:
    train(parser.parse_args(options), *who)
