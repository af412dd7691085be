"""The loss of the lesson: softmax cross entropy in small operators, as the tutorial writes it; and
what prints it while a network is trained.
"""

import math
import time

import mindspore as ms
from mindspore import nn, ops
from mindspore.train import Callback


class SoftmaxCrossEntropyExpand(nn.Cell):
    """The mean loss, a float32 scalar, of logits, float32 (batch, classes), and labels.

    Labels are class numbers, int32 (batch,), if sparse, else one-hot, float32 (batch, classes).
    Automatic parallel decides for each small operator how to cut it over the cards; a fused loss
    would leave it no choice. A probability below 1e-24 counts as 1e-24.
    """

    def __init__(self, sparse=False):
        super().__init__()
        self.sparse = sparse
        self.one_hot = ops.OneHot()
        self.one, self.zero = ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32)
        self.max_of_row = ops.ReduceMax(keep_dims=True)
        self.sum_of_row = ops.ReduceSum(keep_dims=True)
        self.sum = ops.ReduceSum()
        self.mean = ops.ReduceMean()
        self.sub, self.exp, self.div, self.log = ops.Sub(), ops.Exp(), ops.RealDiv(), ops.Log()
        self.add, self.mul, self.neg = ops.Add(), ops.Mul(), ops.Neg()
        self.least = ms.Tensor(1e-24, ms.float32)  # the logarithm of 0 would be -inf

    def construct(self, logits, labels):
        if self.sparse:
            labels = self.one_hot(labels, logits.shape[1], self.one, self.zero)
        powers = self.exp(self.sub(logits, self.max_of_row(logits, -1)))  # at most 1: no overflow
        probabilities = self.div(powers, self.sum_of_row(powers, -1))
        log_probabilities = self.log(self.add(probabilities, self.least))
        return self.mean(self.neg(self.sum(self.mul(log_probabilities, labels), -1)))


class PrintLoss(Callback):
    """Prints the loss as MindSpore's LossMonitor does, every so many steps, but with 5 digits.

    After the second time rank 0 says how long the rest will take, if that is over 10 minutes.
    """

    def __init__(self, every=1, rank=0):
        super().__init__()
        self.every, self.rank, self.last, self.times, self.at = every, rank, 0, 0, 0.0

    def on_train_step_end(self, run_context):
        about = run_context.original_args()
        step, loss = about.cur_step_num, about.net_outputs
        steps, now, before = step - self.last, time.monotonic(), self.at
        if steps < self.every:
            return
        self.last, self.times, self.at = step, self.times + 1, now
        loss = float((loss[0] if isinstance(loss, tuple) else loss).asnumpy().mean())
        place = f"epoch: {about.cur_epoch_num} step: {(step - 1) % about.batch_num + 1}"
        if not math.isfinite(loss):
            raise ValueError(f"In {place}, loss is NAN or INF: training cannot continue")
        print(f"{place}, loss is {loss:.5g}", flush=True)
        pace = (now - before) / steps  # the first step compiles
        left = pace * (about.epoch_num * about.batch_num - step)
        if self.times == 2 and self.rank == 0 and left > 600:
            print(f"about {left / 3600:.1f} h to go, at {pace:.1f} s a step; options of a small run"
                  " (with a launcher, after --): --epochs 1 --steps 4 --image-size 32", flush=True)
