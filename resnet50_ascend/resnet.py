"""ResNet-50, the network of the lessons: resnet50(num_classes).

Source: He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385,
table 1, 50 layers: 25,557,032 parameters for 1,000 classes. As in torchvision ("v1.5"), the 3x3
convolution of a block halves the picture; the paper's 1x1 would skip three quarters of its input.
"""

from mindspore import nn, ops
from mindspore.common.initializer import HeNormal


def convolution(in_channels, out_channels, kernel_size, stride=1):
    """A convolution without bias (batch norm adds one); only the stride changes the size."""
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, pad_mode="pad",
                     padding=kernel_size // 2,
                     weight_init=HeNormal(mode="fan_out", nonlinearity="relu"))


class Bottleneck(nn.Cell):
    """Three convolutions, 1x1, 3x3 and 1x1, and a short cut around them.

    From float32 (batch, in_channels, h, w) to (batch, 4 * channels, h / stride, w / stride).
    """

    def __init__(self, in_channels, channels, stride):
        super().__init__()
        self.conv1 = convolution(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = convolution(channels, 4 * channels, 1)
        # A block begins as its short cut alone (https://arxiv.org/abs/1706.02677, section 5.1):
        # else the sums grow from block to block, and small batches train badly at first.
        self.bn3 = nn.BatchNorm2d(4 * channels, gamma_init="zeros")
        self.relu = nn.ReLU()
        self.downsample = nn.Identity()
        if stride != 1 or in_channels != 4 * channels:  # the sum needs equal shapes
            self.downsample = nn.SequentialCell(convolution(in_channels, 4 * channels, 1, stride),
                                                nn.BatchNorm2d(4 * channels))

    def construct(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + self.downsample(x))


def stage(blocks, in_channels, channels, stride):
    """Several blocks in a row, of which the first changes the shape; 0: a convolution does it."""
    if blocks == 0:
        return nn.SequentialCell(convolution(in_channels, 4 * channels, 1, stride))
    rest = [Bottleneck(4 * channels, channels, stride=1) for _ in range(blocks - 1)]
    return nn.SequentialCell(Bottleneck(in_channels, channels, stride), *rest)


class ResNet50(nn.Cell):
    """The layers of resnet50()."""

    def __init__(self, num_classes, blocks):
        super().__init__()
        self.conv1 = convolution(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        # "same" pads below and right only; what pads all around is unknown to automatic parallel.
        self.max_pool = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="same")
        self.layer1 = stage(blocks[0], 64, 64, stride=1)
        self.layer2 = stage(blocks[1], 256, 128, stride=2)
        self.layer3 = stage(blocks[2], 512, 256, stride=2)
        self.layer4 = stage(blocks[3], 1024, 512, stride=2)
        self.mean = ops.ReduceMean()
        self.fc = nn.Dense(2048, num_classes)

    def construct(self, x):
        x = self.max_pool(self.relu(self.bn1(self.conv1(x))))  # 224x224 to 56x56
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # 56x56, 28x28, 14x14, 7x7
        return self.fc(self.mean(x, (2, 3)))


def resnet50(num_classes=10, blocks=(3, 4, 6, 3)):
    """Make a ResNet-50 with random weights; blocks: of each stage, fewer compile faster.

    Returns a Cell from images, float32 (batch, 3, height, width), of multiples of 32, to logits,
    float32 (batch, num_classes). The weights begin as in https://arxiv.org/abs/1502.01852.
    """
    return ResNet50(num_classes, blocks)
