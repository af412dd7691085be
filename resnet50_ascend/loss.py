"""The loss of the lesson: softmax cross entropy in small operators, as the tutorial writes it.
"""

import mindspore as ms
from mindspore import nn, ops


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
