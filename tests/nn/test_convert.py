"""`convert` keeps what a model computes, its keys, its parameters and its paths; `revert` gives it back.

`MODELS` are whole models, each with what becomes of some of its norms; `check_twins` is what holds for all of them.
"""

from __future__ import annotations

import copy
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from takeback import zoo
from takeback.errors import ConvertError
from takeback.nn import ABN, InPlaceABN, InPlaceABNSync
from takeback.nn.convert import Changed, Conversion, Fused, Kept, conversion, convert, revert
from takeback.zoo import resnet


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are tiny: on a busy machine two threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- models --------------------------------------------------------------------------------------------------------


def conv(channels_in: int, channels_out: int, kernel: int = 3, **kwargs: Any) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, padding=kernel // 2, bias=False, **kwargs)


class BasicBlock(nn.Module):
    """As torchvision writes it: one ReLU for two places, `+=`."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(channels_in, channels, stride=stride), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = conv(channels, channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(conv(channels_in, channels, 1, stride=stride), nn.BatchNorm2d(channels))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(channels, channels // 4, 1), nn.BatchNorm2d(channels // 4)
        self.conv2, self.bn2 = conv(channels // 4, channels // 4), nn.BatchNorm2d(channels // 4)
        self.conv3, self.bn3 = conv(channels // 4, channels, 1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(
            self.bn2(self.conv2(out)),
            inplace=True,
        )
        out = self.bn3(self.conv3(out))
        return torch.relu_(out + x)


class TorchvisionLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, 2))
        self.layer2 = nn.Sequential(Bottleneck(16))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.act1, self.conv1 = nn.BatchNorm2d(channels), nn.LeakyReLU(0.2), conv(channels, 8, 1)
        self.norm2, self.act2, self.conv2 = nn.BatchNorm2d(8), nn.ELU(), conv(8, growth)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(self.act1(self.norm1(x)))
        new = self.conv2(self.act2(self.norm2(new)))
        new = F.dropout(new, 0.0, training=self.training)
        return torch.cat([x, new], 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 6)
        self.layers = nn.ModuleList([DenseLayer(6, 4), DenseLayer(10, 4)])
        self.norm, self.act = nn.BatchNorm2d(14), nn.SiLU()
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.act(self.norm(x)).flatten(2).sum(2))


class InvertedResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Sequential(conv(channels, 12, 1), nn.BatchNorm2d(12), nn.SiLU(inplace=True)),
            nn.Sequential(conv(12, 12, groups=12), nn.BatchNorm2d(12), nn.SiLU(inplace=True)),
            nn.Sequential(conv(12, channels, 1), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def mobile() -> nn.Module:
    return nn.Sequential(
        conv(3, 6), nn.BatchNorm2d(6), nn.Hardswish(), InvertedResidual(6), InvertedResidual(6), nn.BatchNorm2d(6)
    )


class UNet(nn.Module):
    """Each level's convolution is read twice: by its norm and by the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.norm1, self.act1 = conv(3, 4), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)
        self.down2, self.norm2, self.act2 = conv(4, 8), nn.BatchNorm2d(8), nn.LeakyReLU(0.1)
        self.up, self.norm3 = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.BatchNorm2d(4)
        self.act3 = nn.ELU()
        self.out = conv(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        y = F.max_pool2d(self.act1(self.norm1(skip)), 2)
        y = self.act2(self.norm2(self.down2(y)))
        y = self.act3(self.norm3(self.up(y)))
        return self.out(torch.cat([skip, y], 1))


class Wandering(nn.Module):
    """Cannot be traced; its blocks can."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = conv(3, 8), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList([BasicBlock(8, 8), BasicBlock(8, 8)])
        self.narrow, self.norm_act = conv(8, 4), NormAct()
        self.tail = nn.Sequential(conv(4, 4), nn.BatchNorm2d(4), nn.LeakyReLU(), conv(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            if x.abs().mean() > 0:
                x = block(x)
        x = self.narrow(x)
        return self.tail(self.norm_act(x) * x)


class ConvNorm(nn.Module):
    """Its activation stands in whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(4, 4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class NormAct(nn.Module):
    """Its input is made by whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(4), nn.LeakyReLU(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class Borders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = conv(3, 4), ConvNorm(), NormAct()
        self.act, self.middle, self.third = nn.SiLU(), conv(4, 4), NormAct()

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        x = self.act(self.first(self.stem(x)))
        x = self.second(self.middle(x))
        y = self.third(x)
        if extra is not None:
            y = y + extra
        return y * x


class Loop(nn.Module):
    """One line of source, many calls; the last norm is called twice, both times before a SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([conv(3, 4), conv(4, 4), conv(4, 4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.convs, [*self.norms, self.norms[-1]], strict=True):
            x = self.act(norm(layer(x)))
        return x


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv(3, 4), nn.BatchNorm2d(4), nn.ELU(0.7), conv(4, 4), nn.BatchNorm2d(4), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        early = self.features[:3](x)
        return self.features[3:](early) + early


def one_relu_in_many_slots() -> nn.Module:
    act = nn.SiLU()
    return nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), act, conv(4, 4), act, conv(4, 4), nn.BatchNorm2d(4), act)


def sequential() -> nn.Module:
    return nn.Sequential(
        *(conv(3, 4), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)),
        *(conv(4, 4), nn.BatchNorm2d(4, momentum=None, eps=1e-3), nn.ELU()),
        *(conv(4, 4), nn.BatchNorm2d(4, affine=False), nn.SiLU()),
        *(conv(4, 4), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 6), nn.BatchNorm1d(6), nn.LeakyReLU(0.01, inplace=True)),
    )


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4), nn.ELU(inplace=True), nn.Conv3d(4, 2, 1))


@dataclass(frozen=True)
class Whole:
    """A model, an input shape, and for some norms the form they take or why they are kept."""

    make: Callable[[], nn.Module]
    becomes: dict[str, str] = field(default_factory=dict)
    shape: tuple[int, ...] = (4, 3, 8, 8)


RELU, SILU = r"InPlaceABN\(relu\): leaves its input", r"InPlaceABN\(silu\): leaves its input"
NOT_SAVED = "kept: .*add.* follows it, .*nothing to save"
FUNCTION = r"kept: relu\(\) at test_convert.py:\d+ follows it, but it is a function of the forward"
MODELS = {
    "sequential": Whole(
        sequential,
        {
            "1": r"InPlaceABN\(leaky_relu\[0.1\]\): overwrites its input",
            "4": r"InPlaceABN\(elu\[1\]\): overwrites",
            "7": SILU,
            "10": RELU,
            "14": r"InPlaceABN\(leaky_relu\[0.01\]\): overwrites",
        },
    ),
    "volumes": Whole(volumes, {"1": r"InPlaceABN\(elu\[1\]\): overwrites"}, (2, 3, 4, 4, 4)),
    "torchvision-like": Whole(
        TorchvisionLike,
        {
            "bn1": RELU,
            "layer1.0.bn1": r"kept: layer1.0.relu .*, but it is also called elsewhere \(layer1.0.relu at .*\)",
            "layer1.0.bn2": NOT_SAVED,
            "layer1.1.downsample.1": NOT_SAVED,
            "layer2.0.bn1": FUNCTION,
            "layer2.0.bn2": FUNCTION,
            "layer2.0.bn3": NOT_SAVED,
        },
    ),
    "dense": Whole(
        DenseNet,
        {
            "layers.0.norm1": r"ABN\(leaky_relu\[0.2\]\): .*input is read again by cat\(\) at test_convert.py:\d+",
            "layers.1.norm2": r"InPlaceABN\(elu\[1\]\): overwrites its input",
            "norm": SILU,
        },
    ),
    "mobile": Whole(
        mobile,
        {
            "1": r"InPlaceABN\(identity\): overwrites its input",
            "3.block.0.1": SILU,
            "3.block.2.1": NOT_SAVED,
            "5": "kept: its output goes to the caller of the model",
        },
    ),
    "unet": Whole(
        UNet,
        {
            "norm1": r"ABN\(leaky_relu\[0.1\]\): .*input is read again by cat\(\)",
            "norm2": r"InPlaceABN\(leaky_relu\[0.1\]\): overwrites",
            "norm3": r"InPlaceABN\(elu\[1\]\): overwrites",
        },
    ),
    "wandering": Whole(
        Wandering,
        {
            "stem_norm": "kept: the model calls it, whose forward cannot be traced .*control flow",
            "blocks.1.bn1": "kept: blocks.1.relu .*, but it is also called elsewhere",
            "norm_act.norm": r"ABN\(leaky_relu\[0.3\]\): .*comes from the model, whose forward cannot be traced",
            "tail.1": r"InPlaceABN\(leaky_relu\[0.01\]\): overwrites",
        },
    ),
    "borders": Whole(
        Borders,
        {
            "first.norm": SILU,
            "second.norm": r"InPlaceABN\(leaky_relu\[0.3\]\): overwrites",
            "third.norm": r"ABN\(leaky_relu\[0.3\]\): .*input is read again by mul\(\)",
        },
    ),
    "loop": Whole(Loop, {"norms.0": SILU, "norms.1": SILU}),
    "sliced": Whole(Sliced, {"features.1": r"InPlaceABN\(elu\[0.7\]\): overwrites", "features.4": SILU}),
    "slots": Whole(one_relu_in_many_slots, {"1": SILU, "6": SILU}),
    "zoo resnet": Whole(
        lambda: zoo.ResNet(resnet.SMALL), {"stem.1": RELU, "stages.0.0.branch.7": NOT_SAVED}, (4, 3, 16, 16)
    ),
    "zoo resnet, in place": Whole(
        lambda: zoo.ResNet(zoo.ResNetConfig("basic", (1, 1), width=4, classes=3, stem=(3, 1), inplace=True)),
        {"stem.1": RELU, "stages.1.0.shortcut.1": NOT_SAVED},
        (4, 3, 16, 16),
    ),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(len(name))
    model = MODELS[name].make().double()
    for module in model.modules():  # not the start, where weights are 1, biases 0 and much is symmetric
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.normal_(module.bias)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.weight.data[::2] *= -1
    return model, torch.randn(MODELS[name].shape, dtype=torch.float64)


# -- what holds for all of them --------------------------------------------------------------------------------------


def train_(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[Tensor]:
    """Outputs, input gradients and parameter gradients of some steps."""
    seen: list[Tensor] = []
    for _ in range(steps):
        read = x.clone().requires_grad_()
        optimizer.zero_grad()
        y = model(read)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        (y * weights + y**2).sum().backward()
        seen += [y.detach(), read.grad, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
    return seen


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def paths_and_flags(model: nn.Module) -> list[tuple[str, bool]]:
    return [(path, module.training) for path, module in model.named_modules(remove_duplicate=False)]


def check_twins(original: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    """Convert a copy, and check everything a user relies on; the converted model."""
    model = copy.deepcopy(original)
    parameters = dict(model.named_parameters())
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3, momentum=0.9) for each in (original, model)]
    assert convert(model, **options) is model
    assert list(model.state_dict()) == list(original.state_dict())
    assert paths_and_flags(model) == paths_and_flags(original)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())

    expected = train_(original, x, optimizers[0])
    assert_close(train_(model, x, optimizers[1]), expected)
    assert_close(list(model.state_dict().values()), list(original.state_dict().values()))

    original.eval()
    model.eval()
    with torch.no_grad():
        y = original(x.clone())
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_close([each(x.clone())], [y])
    assert str(conversion(pickle.loads(pickle.dumps(model)))) == str(conversion(model))
    model.load_state_dict(original.state_dict())
    original.load_state_dict(model.state_dict())

    back = revert(pickle.loads(pickle.dumps(model)))
    assert str(back) == str(original)
    assert [type(each) for each in back.modules()] == [type(each) for each in original.modules()]
    assert list(back.state_dict()) == list(original.state_dict())
    assert paths_and_flags(back) == paths_and_flags(original)
    with torch.no_grad():
        assert torch.equal(back(x.clone()), y)
    return model


def fates(report: Conversion) -> dict[str, str]:
    """By path, `InPlaceABN(relu): why` or `kept: why`."""
    return {each.path: f"{each.became}: {each.reason}" for each in report.changed} | {
        each.path: f"kept: {each.reason}" for each in report.kept
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_the_same_model(name: str) -> None:
    original, x = made(name)
    found = fates(conversion(check_twins(original, x)))
    assert found.keys() == {
        path for path, module in original.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    for path, becomes in MODELS[name].becomes.items():
        assert re.match(becomes, found[path]), f"{path} {found[path]}"


@pytest.mark.parametrize("name", MODELS)
def test_relu_as_leaky_relu_is_another_function_that_reverts_exactly(name: str) -> None:
    model, x = made(name)
    keys = list(model.state_dict())
    relus = {each.path for each in conversion(convert(copy.deepcopy(model))).changed if "(relu)" in each.became}
    convert(model, relu="leaky_relu")
    changed = conversion(model).changed
    assert {each.path for each in changed if "another function" in each.reason} == relus
    assert all("ABN(leaky_relu[0.01])" in each.became for each in changed if each.path in relus)
    train_(model, x, torch.optim.SGD(model.parameters(), lr=1e-3))
    model.eval()
    with torch.no_grad():
        y = model(x.clone())
        back = revert(revert(model))
        assert_close([back(x.clone())], [y])
    assert not any(isinstance(each, (InPlaceABN, Fused)) for each in back.modules())
    assert list(back.state_dict()) == keys


def test_transformers_resnet() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    torch.manual_seed(0)
    original = transformers.ResNetForImageClassification(config).double()
    model = copy.deepcopy(original)
    convert(model)
    report = conversion(model)
    assert sum(each.became == "InPlaceABN(relu)" for each in report.changed) >= 3, str(report)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0])
    for each in (original, model):
        each(pixel_values=x.clone(), labels=labels).loss.backward()
    assert_close([each.grad for each in model.parameters()], [each.grad for each in original.parameters()])
    assert list(model.state_dict()) == list(original.state_dict())
    assert str(revert(model)) == str(original)


# -- the report ------------------------------------------------------------------------------------------------------


def test_report_names_norm_activation_form_and_reason() -> None:
    model, _ = made("unet")
    report = conversion(convert(model))
    line = UNet.forward.__code__.co_firstlineno
    assert report.changed[1].path == "norm2"
    assert report.changed[1].activation == f"act2 at test_convert.py:{line + 3}"
    text = str(report)
    assert text.startswith("3 batch norms converted, 0 kept\n")
    assert "norm1 <- act1" in text
    assert max(map(len, text.splitlines())) <= 80


def test_report_groups_what_has_one_reason() -> None:
    kept = tuple(Kept(path, "it has hooks") for path in ("a", "b"))
    text = str(Conversion((Changed("c", "", "InPlaceABN(identity)", "overwrites"),), kept))
    assert text.splitlines()[1:] == [
        "",
        "InPlaceABN(identity): overwrites",
        "    c",
        "",
        "kept: it has hooks",
        "    a",
        "    b",
    ]


def test_a_model_that_was_not_converted_has_no_report() -> None:
    with pytest.raises(ValueError, match="was not converted"):
        conversion(nn.Sequential())
    with pytest.raises(ValueError, match="relu is"):
        convert(nn.Sequential(), relu="elu")  # type: ignore[arg-type]


# -- what is overwritten, and what must not be -----------------------------------------------------------------------


def test_a_norm_that_overwrites_its_input_really_does() -> None:
    model = convert(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.LeakyReLU(), conv(4, 2)))
    made_by: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: made_by.append(output))
    y = model[:3](torch.randn(2, 3, 4, 4))
    assert y.data_ptr() == made_by[0].data_ptr()


class Reader(nn.Module):
    """`between` is what happens to the convolution's output x, and to the activation's y."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv(3, 4), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)
        self.inner = nn.Sequential(nn.Identity(), conv(4, 4))
        self.inplace = nn.Sequential(nn.Identity(), nn.Hardtanh(inplace=True))
        self.hooked = conv(3, 4)
        self.hooked.register_forward_hook(lambda module, args, output: None)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)


def after(x: Tensor, y: Tensor) -> Tensor:
    return y.flatten(1).mul_(2)


READERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "the model's own input": (
        lambda m, x: m.act(m.norm(torch.cat([x, x[:, :1]], 1))),
        "InPlaceABN.*overwrites its input",
    ),
    "relu before": (lambda m, x: m.act(m.norm(F.relu(m.conv(x)))), "ABN.*made by relu.*may keep it"),
    "a view before": (
        lambda m, x: m.act(m.norm(m.conv(x).view(-1, 4, 8, 8))),
        "ABN.*made by view.*may .*share its bytes",
    ),
    "its shape is read": (
        lambda m, x: (lambda c: m.act(m.norm(c)) * c.shape[1])(m.conv(x)),
        "InPlaceABN.*overwrites its",
    ),
    "read later": (lambda m, x: (lambda c: m.act(m.norm(c)) * c)(m.conv(x)), r"ABN.*read again by mul\(\)"),
    "read in another module": (
        lambda m, x: (lambda c: m.act(m.norm(c)) + m.inner(c))(m.conv(x)),
        "ABN.*read again by inner",
    ),
    "returned too": (
        lambda m, x: (lambda c: m.act(m.norm(c)) + m.inplace[0](c))(m.conv(x)),
        "ABN.*read again by inplace.0",
    ),
    "a hook sees it": (lambda m, x: m.act(m.norm(m.hooked(x))), "ABN.*made by hooked.*has hooks"),
    "from a module that is entered": (
        lambda m, x: m.act(m.norm(m.inner(F.pad(x, (0, 0, 0, 0, 0, 1))))),
        "InPlaceABN.*overwrites",
    ),
    "output written": (lambda m, x: m.act(m.norm(m.conv(x))).add_(1), r"kept: add_\(\) .*overwrites the output"),
    "output written by a function": (lambda m, x: after(x, m.act(m.norm(m.conv(x)))), r"kept: mul_\(\) .*overwrites"),
    "output written by a module": (lambda m, x: m.inplace(m.act(m.norm(m.conv(x)))), "kept: inplace.1.*overwrites"),
}


def iadd(m: Any, x: Tensor) -> Tensor:
    y = m.act(m.norm(m.conv(x)))
    y += 1
    return y


READERS["output written by +="] = (iadd, r"kept: iadd\(\) .*overwrites")


@pytest.mark.parametrize("name", READERS)
def test_what_is_overwritten_depends_on_who_reads(name: str) -> None:
    between, becomes = READERS[name]
    torch.manual_seed(0)
    original = Reader(between).double()
    model = convert(copy.deepcopy(original))
    found = fates(conversion(model))["norm"]
    assert re.match(becomes, found), found
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    grads = []
    for each in (original, model):
        (each(x.clone()) ** 2).sum().backward()
        grads.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
    assert_close(grads[1], grads[0])


class Twisted(nn.Module):
    """A forward that tracing could misread. What is kept, is kept with this reason."""

    reason = ""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv(3, 4), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)
        self.register_buffer("steps", torch.zeros(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class AsksType(Twisted):
    reason = "asks for the type"

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x))) if isinstance(x, Tensor) else x


class KeepsValue(Twisted):
    reason = r"sets self.last"

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x)
        return self.act(self.norm(self.last))


class CollectsValues(Twisted):
    reason = r"sets self.seen"

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.conv(x))
        return self.act(self.norm(self.seen[-1]))


class Checkpoints(Twisted):
    reason = "torch.utils.checkpoint"

    def forward(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.norm, self.conv(x), use_reentrant=False)
        return self.act(x)


class DrawsLots(Twisted):
    reason = "does not depend on its inputs"

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x))) + torch.rand(1)


class TakesAnything(Twisted):
    reason = r"takes \*args"

    def forward(self, *args: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(args[0])))


class OnlyInTraining(Twisted):
    reason = "different things follow it at its 2 calls"

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return self.act(x) if self.training else F.silu(x)


class OnlyWithout(Twisted):
    reason = "different things follow"

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = self.norm(self.conv(x))
        return self.act(x) if other is None else x + other


class OwnNorm(nn.BatchNorm2d):
    pass


class SubclassOfNorm(Twisted):
    reason = "is a OwnNorm, not a plain BatchNorm"

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnNorm(4)


class HookedNorm(Twisted):
    reason = "has hooks"

    def __init__(self) -> None:
        super().__init__()
        self.norm.register_forward_hook(lambda module, args, output: None)


class Parametrized(Twisted):
    reason = "is a ParametrizedBatchNorm2d"

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.norm, "weight", nn.Softplus())


class Lazy(Twisted):
    reason = "is a LazyBatchNorm2d, not a plain"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LazyBatchNorm2d()


class HookedActivation(Twisted):
    reason = "act .*follows it, which is not an activation"

    def __init__(self) -> None:
        super().__init__()
        self.act.register_forward_hook(lambda module, args, output: None)


class HeldElsewhere(Twisted):
    reason = "the model.order holds it"

    def __init__(self) -> None:
        super().__init__()
        self.order = [self.conv, self.norm]

    def forward(self, x: Tensor) -> Tensor:
        for each in self.order:
            x = each(x)
        return self.act(x)


class NeverCalled(Twisted):
    reason = "no forward calls it"

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def relu_of(x: Tensor) -> Tensor:
    return F.relu(x)


class InAHelper(Twisted):
    reason = "a function of the forward"

    def forward(self, x: Tensor) -> Tensor:
        return relu_of(self.norm(self.conv(x)))


class BothTimes(Twisted):
    reason = "a function of the forward"

    def forward(self, x: Tensor) -> Tensor:
        for each in (self.norm, nn.functional.hardtanh):
            x = F.relu(each(self.conv(x) if each is self.norm else x))
        return x


class AlsoCalled(Twisted):
    reason = r"2 follows it, but it is also called elsewhere \(features.2 at test_convert.py:\d+\)"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.features = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.features[2](self.features(x) - 1)


class Reaches(Twisted):
    """Untraceable, and it calls a norm two levels down."""

    reason = "the model reads .deep_norm, and its forward cannot be traced"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.inner = nn.Sequential()
        self.inner.add_module("conv", conv(3, 4))
        self.inner.add_module("deep_norm", nn.BatchNorm2d(4))
        self.inner.add_module("act", nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return self.inner(x)
        return self.inner.deep_norm(self.inner.conv(x))


TWISTED = [
    *(AsksType, KeepsValue, CollectsValues, Checkpoints, DrawsLots, TakesAnything, OnlyInTraining, OnlyWithout),
    *(SubclassOfNorm, HookedNorm, Parametrized, Lazy, HookedActivation, HeldElsewhere, NeverCalled, InAHelper),
    *(BothTimes, AlsoCalled, Reaches),
]


@pytest.mark.parametrize("twisted", TWISTED, ids=lambda each: each.__name__)
def test_what_tracing_could_misread_is_kept_with_its_reason(twisted: type[Twisted]) -> None:
    model = twisted()
    before = {path: type(module) for path, module in model.named_modules()}
    attributes = copy.copy(vars(model))
    state = torch.get_rng_state()
    report = conversion(convert(model))
    assert report.changed == ()
    assert re.search(twisted.reason, report.kept[0].reason), report.kept[0].reason
    assert {path: type(module) for path, module in model.named_modules()} == before
    assert {name: value for name, value in vars(model).items() if name in attributes} == attributes
    assert vars(model).keys() - attributes.keys() == {"takeback_conversion"}
    assert model.seen == []
    assert float(model.steps) == 0
    assert torch.equal(torch.get_rng_state(), state)


class CountsSteps(Twisted):
    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.act(self.norm(self.conv(x)))


def test_tracing_runs_nothing_on_the_users_buffers() -> None:
    model = convert(CountsSteps())
    assert float(model.steps) == 0
    assert len(conversion(model).changed) == 1
    model(torch.randn(2, 3, 4, 4))
    assert float(model.steps) == 1


# -- what is converted twice, or was traced before -------------------------------------------------------------------


def test_a_graph_module_converts() -> None:
    original = fx.symbolic_trace(MODELS["unet"].make().double())
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    model = convert(copy.deepcopy(original))
    assert len(conversion(model).changed) == 3
    assert_close([model(x.clone())], [original(x.clone())])


def test_converting_twice_changes_what_is_new() -> None:
    original, x = made("torchvision-like")
    model = copy.deepcopy(original)
    convert(model)
    convert(model)
    assert conversion(model).changed == ()
    assert_close([model(x.clone())], [original(x.clone())])
    assert str(revert(model)) == str(original)


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_flags_and_attributes_are_carried() -> None:
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4, eps=1e-2, momentum=0.3), nn.LeakyReLU(0.2))
    norm = model[1]
    norm.eval()
    norm.weight.requires_grad_(False)
    norm.note = "mine"
    convert(model)
    assert (model[1].eps, model[1].momentum, model[1].training, model[1].note) == (1e-2, 0.3, False, "mine")
    assert model[1].weight is norm.weight
    assert model[1].running_var is norm.running_var
    assert not model[1].weight.requires_grad
    back = revert(model)[1]
    assert (back.eps, back.momentum, back.training, back.note) == (1e-2, 0.3, False, "mine")
    assert back.weight is norm.weight


def test_a_norm_alone_is_returned_as_it_is() -> None:
    norm = nn.BatchNorm2d(3)
    assert convert(norm) is norm
    assert "model itself" in conversion(norm).kept[0].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_convert(dtype: torch.dtype) -> None:
    model, x = made("sequential")
    model, x = model.to(dtype), x.to(dtype)
    original = copy.deepcopy(model)
    convert(model)
    assert model[1].weight.dtype == dtype
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(model(x.clone()), original(x.clone()), rtol=tolerance, atol=tolerance)


def test_example_accepts_a_right_conversion_and_undoes_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made("dense")
    state = copy.deepcopy(model.state_dict())
    convert(model, example=x)
    assert_close(list(model.state_dict().values()), list(state.values()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert convert(made("dense")[0], example=(x,), relu="leaky_relu") is not None

    model, x = made("dense")
    text = str(model)
    monkeypatch.setattr("takeback.nn.find_norms._shared", lambda *args: None)  # everything may be overwritten
    with pytest.raises(ConvertError, match=r"on the example"):
        convert(model, example=x)
    assert str(model) == text


# -- synchronised norms ----------------------------------------------------------------------------------------------


def test_sync_norms_become_synchronised_in_place_norms() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(sequential())
    text = str(model)
    convert(model)
    assert {type(model[i]) for i in (1, 4, 7, 10, 14)} == {InPlaceABNSync}
    assert str(revert(model)) == text


def test_a_group_synchronises_every_norm() -> None:
    original, _ = made("dense")
    model = convert(copy.deepcopy(original), group="world")
    found = fates(conversion(model))
    assert found["layers.1.norm2"].startswith("InPlaceABNSync(elu[1])")
    assert re.match("SyncBatchNorm: .*InPlaceABNSync would overwrite", found["layers.0.norm1"])
    assert isinstance(model.layers[0].norm1, nn.SyncBatchNorm)
    assert isinstance(model.norm, InPlaceABNSync)
    assert not any(isinstance(each, nn.BatchNorm2d) for each in model.modules())
    assert str(revert(model)) == str(original)
    with pytest.warns(UserWarning, match="norm stays without synchronisation: it has hooks"):
        convert(HookedNorm(), group="world")


# -- inplace_abn's modules, and models written with ours -------------------------------------------------------------


@pytest.fixture
def inplace_abn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the package: its names, attributes and scale."""
    package = types.ModuleType("inplace_abn")

    class Theirs(ABN):
        def __init__(self, num_features: int) -> None:
            super().__init__(num_features)
            del self.num_batches_tracked

        def forward(self, x: Tensor) -> Tensor:
            weight, training = self.weight.abs() + self.eps, self.training
            z = F.batch_norm(x, self.running_mean, self.running_var, weight, self.bias, training, 0.1, self.eps)
            return F.leaky_relu(z, self.activation_param)

    package.InPlaceABN = type("InPlaceABN", (Theirs,), {"__module__": "inplace_abn.abn"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "inplace_abn", package)
    return package


def test_modules_of_inplace_abn_become_ours_and_export_exactly(inplace_abn: types.ModuleType) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(conv(3, 4), inplace_abn.InPlaceABN(4), conv(4, 2)).double()
    nn.init.normal_(original[1].weight)
    model = convert(copy.deepcopy(original))
    assert fates(conversion(model)) == {"1": "InPlaceABN(leaky_relu[0.01]): was inplace_abn's InPlaceABN"}
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (original, model)]
    assert_close(train_(model, x, optimizers[1]), train_(original, x, optimizers[0]))
    original.eval()
    revert(model.eval())
    assert type(model[1]) is ABN
    assert bool((model[1].weight > 0).all())
    assert_close([model(x.clone())], [original(x.clone())])


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm1, self.norm2 = conv(3, 4), InPlaceABN(4), InPlaceABN(4, activation="identity")
        self.line, self.norm3 = nn.Linear(4, 4), InPlaceABN(4, activation="identity", scale="absolute")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(self.conv(x))
        x = self.norm1(self.conv(x[:, :3])).mean((2, 3))
        return self.norm3(self.line(x))


@pytest.mark.parametrize("with_example", [False, True])
def test_a_model_written_by_hand_reverts_under_the_same_keys(with_example: bool) -> None:
    model = ByHand().double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    model(x.clone()).sum().backward()
    nn.init.normal_(model.norm3.weight)
    keys = list(model.state_dict())
    y = model.eval()(x.clone())
    model.train()
    training = copy.deepcopy(model)(x.clone())
    assert revert(model, example=x if with_example else None) is model
    assert model.training
    assert list(model.state_dict()) == keys
    expected = (ABN, nn.BatchNorm2d, nn.BatchNorm1d) if with_example else (ABN, ABN, ABN)
    assert (type(model.norm1), type(model.norm2), type(model.norm3)) == expected
    assert_close([copy.deepcopy(model)(x.clone()), model.eval()(x.clone())], [training, y], 1e-8)


# -- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning"
)  # ABN's shape check
@pytest.mark.parametrize("name", ["torchvision-like", "unet", "by hand"])
@pytest.mark.parametrize("relu", ["relu", "leaky_relu"])
def test_a_reverted_model_exports_with_torchs_ops_only(name: str, relu: Any) -> None:
    model, x = made(name) if name != "by hand" else (ByHand().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64))
    convert(model, relu=relu)
    model(x.clone())
    y = model.eval()(x.clone())
    revert(model)
    with torch.no_grad():
        exported = torch.export.export(model, (x.clone(),))
        assert "takeback" not in str(exported.graph)
        assert_close([exported.module()(x.clone())], [y])
        traced = torch.jit.trace(model, x.clone())
        assert not any("takeback" in node.kind() for node in traced.inlined_graph.nodes())
        assert_close([traced(x.clone())], [y])


# -- random models ---------------------------------------------------------------------------------------------------


class Random(nn.Module):
    """A program over a few values: each op reads earlier ones, norms and activations among them."""

    def __init__(self, ops: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.ops = ops
        self.layers = nn.ModuleDict()
        for index, (op, _, _) in enumerate(ops):
            if op in LAYERS:
                self.layers[str(index)] = LAYERS[op]()

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for index, (op, first, second) in enumerate(self.ops):
            value, other = values[-1 - first % len(values)], values[-1 - second % len(values)]
            if op in LAYERS:
                value = self.layers[str(index)](value)
            elif op == "add":
                value = value + other
            elif op == "mul":
                value = value * other.sigmoid()
            elif op == "view":
                value = value.view(value.shape[0], 3, 2, 2)
            elif op == "silu":
                value = F.silu(value)
            elif op == "iadd":
                value += other.detach().tanh()
            values.append(value)
        return torch.cat(values[-2:], 1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(3, 3, 1),
    "norm": lambda: nn.BatchNorm2d(3),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "elu": lambda: nn.ELU(),
    "relu": lambda: nn.ReLU(),
    "leaky_": lambda: nn.LeakyReLU(0.1, inplace=True),
    "block": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.LeakyReLU(0.2)),
    "start": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.ELU()),
    "end": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
}
OPS = st.tuples(
    st.sampled_from([*LAYERS, "conv", "norm", "norm", "leaky", "add", "mul", "view", "silu", "iadd"]),
    st.sampled_from([0, 0, 0, 0, 1, 2]),
    st.integers(0, 3),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ops=st.lists(OPS, min_size=2, max_size=9), seed=st.integers(0, 3))
def test_random_models_keep_their_gradients(ops: list[tuple[str, int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    original = Random(ops).double()
    model = convert(copy.deepcopy(original))
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    results = []
    for each in (original, model):
        read = x.clone().requires_grad_()
        try:
            y = each(read * 1)
            (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        except RuntimeError as error:  # a program that torch refuses too
            assume(each is not original or "modified by an inplace operation" not in str(error))
            raise
        grads = [parameter.grad for parameter in each.parameters() if parameter.grad is not None]
        results.append([y.detach(), read.grad, *grads, *each.buffers()])
    assert_close(results[1], results[0], 1e-6)
    assert str(revert(model)) == str(original)
