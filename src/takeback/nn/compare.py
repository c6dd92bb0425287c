"""Whether a converted model computes what it did: outputs and gradients on an example, before and after."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from takeback.errors import ConvertError
from takeback.nn.lazy_logits import LazyLogits


@dataclass(frozen=True)
class Arguments:
    """Of one call of a model."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]


def compare(before: nn.Module, model: nn.Module, example: Arguments, *, values: bool) -> None:
    """Raise if the two models' outputs or gradients differ by more than their dtype's rounding explains."""
    expected = _step(before, example)
    try:
        actual = _step(copy.deepcopy(model), example)
    except RuntimeError as error:
        raise ConvertError(f"the converted model fails on the example: {error}") from error
    assert expected.keys() == actual.keys()
    for name, wanted in expected.items() if values else ():
        size = float(wanted.double().norm())
        difference = float((actual[name].double() - wanted.double()).norm())
        if not difference <= torch.finfo(wanted.dtype).eps ** 0.5 * max(size, 1e-3):
            raise ConvertError(
                f"on the example, {name} of the converted model differs by {difference:.1e}, of {size:.1e}. "
                "A forward does what its traces do not show; convert the submodules around it one by one."
            )


def _step(model: nn.Module, example: Arguments) -> dict[str, Tensor]:
    """Outputs, and the gradients of their sum in which each element has another weight."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.enable_grad():
        torch.manual_seed(0)
        given = copy.deepcopy(example)
        result = dict(_tensors(model(*given.positional, **given.keywords), "the output"))
        reached = [each.flatten().double() for each in result.values() if each.requires_grad]
        if reached:
            everything = torch.cat(reached)
            (everything @ torch.linspace(0.5, 1.5, everything.numel()).to(everything)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            result[f"the gradient of {name}"] = parameter.grad
    return {name: value.detach() for name, value in result.items()}


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, LazyLogits):
        value = value.made()
    if isinstance(value, Tensor) and value.is_floating_point():
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]")
