"""Chooses the CPU itself."""
import mindspore as ms
from mindspore.communication import init

ms.set_device("CPU")
init()
