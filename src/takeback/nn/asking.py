"""How a module is asked what it computes: on the CPU, with numbers of its own, and nothing is left behind."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def asking(module: nn.Module) -> Iterator[None]:
    """Tensors made inside are on the CPU and always the same; modes, warnings and the random state are put back."""
    flags = [(each, each.training) for each in module.modules()]
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        for each, flag in flags:
            each.training = flag


def in_both_modes(module: nn.Module) -> Iterator[bool]:
    """Puts the module, and all inside it, into training and into eval, in turn."""
    for training in (True, False):
        for each in module.modules():
            each.training = training
        yield training


def refusal(error: Exception) -> str:
    """Why a module could not be asked."""
    said = (str(error).strip().splitlines() or [""])[0][:80]
    return f"its forward cannot be asked ({type(error).__name__}: {said})"


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether the forward has one argument, and no way to get others."""
    taken = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(taken) == 1 and taken[0].kind in (taken[0].POSITIONAL_ONLY, taken[0].POSITIONAL_OR_KEYWORD)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Plain values that its forward may read, its classes' too: what was found by asking holds for these."""
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    names = dict.fromkeys(name for each in (module, *classes) for name in vars(each))
    values = {name: getattr(module, name, None) for name in names if name != "training" and not name.startswith("_")}
    return {name: value for name, value in values.items() if _is_plain(value)}


def has_settings(module: nn.Module, settings: dict[str, Any]) -> bool:
    """Whether they are what they were. Reads them as a forward does: a compiled step sees what it depends on."""
    return all(getattr(module, name, None) == value for name, value in settings.items())


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
