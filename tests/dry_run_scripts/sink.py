"""A step with its data set in the sink; says how many samples were read, and whether a thread works in vain."""
import time

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import init
from mindspore.dataset import GeneratorDataset

ms.set_context(mode=ms.GRAPH_MODE)
init()
ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
read = []


class Samples:
    """256 of 16 numbers."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        read.append(index)
        return np.ones(16, np.float32), np.int32(0)


class Busy(ms.train.Callback):
    """Before the first step: does this process work while it sleeps?"""

    def on_train_step_begin(self, run_context):
        begin = time.process_time()
        time.sleep(1)
        print(f"read {len(read)} samples, worked {time.process_time() - begin:.2f} s of 1", flush=True)


class Sizes(ms.train.Callback):
    """What callbacks ask of a data set in the sink."""

    def on_train_step_end(self, run_context):
        helper = run_context.original_args().dataset_helper
        helper.get_send_info(run_context)
        print("queue", helper.get_mbuf_queue_size(), flush=True)


net = nn.Dense(16, 10)
model = ms.Model(net, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
                 nn.Momentum(net.trainable_params(), 0.1, 0.9))
data = GeneratorDataset(Samples(), ["x", "y"], num_parallel_workers=1).batch(4)
model.train(2, data, callbacks=[Busy(), Sizes(), ms.train.LossMonitor(1)], dataset_sink_mode=True)
