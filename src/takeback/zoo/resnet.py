"""Residual networks after He et al. (v1, stride on the 3x3 convolution): images in, class logits out.

`RESNET18` and `RESNET50` have torchvision's architecture and parameter counts; `SMALL` is a tiny one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ResNetConfig:
    """`depths` counts the blocks of each stage; stage i is `width * 2**i` wide and halves the image if i > 0.

    `stem` is the first convolution's kernel and stride. `inplace` overwrites in ReLU and in the residual sum,
    as torchvision does. `zero_init` starts every residual branch at zero, by the gamma of its last BatchNorm.
    """

    block: Literal["basic", "bottleneck"]
    depths: tuple[int, ...]
    width: int = 64
    classes: int = 1000
    stem: tuple[int, int] = (7, 2)
    inplace: bool = False
    zero_init: bool = False


SMALL = ResNetConfig("bottleneck", (2, 1, 1), width=8, classes=10, stem=(3, 1))
RESNET18 = ResNetConfig("basic", (2, 2, 2, 2))
RESNET50 = ResNetConfig("bottleneck", (3, 4, 6, 3))


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size at stride 1; BatchNorm follows it, so it has no bias."""
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)


class _Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); the shortcut is a 1x1 convolution where the shape changes."""

    expansion: int

    def __init__(self, branch: nn.Sequential, channels_in: int, channels_out: int, stride: int, inplace: bool) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(_conv(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out))
        self.relu = nn.ReLU(inplace)
        self.inplace = inplace

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.branch[-1]

    def forward(self, images: Tensor) -> Tensor:
        branch, shortcut = self.branch(images), self.shortcut(images)
        return self.relu(branch.add_(shortcut) if self.inplace else branch + shortcut)


class BasicBlock(_Residual):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int, inplace: bool) -> None:
        branch = nn.Sequential(
            _conv(channels_in, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace),
            _conv(width, width, 3),
            nn.BatchNorm2d(width),
        )
        super().__init__(branch, channels_in, width, stride, inplace)


class Bottleneck(_Residual):
    """1x1 down to `width`, 3x3, 1x1 up to four times `width`."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int, inplace: bool) -> None:
        channels_out = width * self.expansion
        branch = nn.Sequential(
            _conv(channels_in, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace),
            _conv(width, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace),
            _conv(width, channels_out, 1),
            nn.BatchNorm2d(channels_out),
        )
        super().__init__(branch, channels_in, channels_out, stride, inplace)


class ResNet(nn.Module):
    """Stem, max pool, the stages of residual blocks, global average pool, linear classifier."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        block = BasicBlock if config.block == "basic" else Bottleneck
        kernel, stride = config.stem
        self.stem = nn.Sequential(
            _conv(3, config.width, kernel, stride),
            nn.BatchNorm2d(config.width),
            nn.ReLU(config.inplace),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        channels = config.width
        stages: list[nn.Module] = []
        for index, depth in enumerate(config.depths):
            width = config.width * 2**index
            blocks: list[nn.Module] = []
            for position in range(depth):
                block_stride = 2 if index > 0 and position == 0 else 1
                blocks.append(block(channels, width, block_stride, config.inplace))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, config.classes)
        self._initialise_()

    def _initialise_(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if self.config.zero_init and isinstance(module, _Residual):
                nn.init.zeros_(module.last_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(self.stages(self.stem(images)))
        return self.classifier(torch.flatten(features, 1))


def loss_fn(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the model's logits against class labels."""
    return F.cross_entropy(model(images), labels)
