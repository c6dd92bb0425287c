"""Bytes that are read through something other than a tensor of their storage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import overwriters as sab
import pytest
import torch
from overwriters import Double, errors_of, leaf
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

ALIASES: dict[str, Callable[[torch.Tensor], object]] = {
    "storage": lambda h: h.untyped_storage(),
    "numpy": lambda h: h.detach().numpy(),
    "a row of numpy": lambda h: h.detach().numpy()[1],
    "numpy backwards": lambda h: h.detach().numpy()[::-1, ::-2],
    "numpy in a list": lambda h: [{"a": h.detach().numpy()}],
    "numpy in a closure": lambda h: (lambda array: lambda: array)(h.detach().numpy()),
    "DLPack": lambda h: torch.from_dlpack(h.detach()),
    "a part by DLPack": lambda h: torch.from_dlpack(h.detach()[1:]),
    "numpy by DLPack": lambda h: np.from_dlpack(h.detach()),
}


@pytest.mark.parametrize("how", ALIASES)
def test_what_the_user_holds_of_an_overwritten_tensor(how: str) -> None:
    def step() -> None:
        h = leaf() * 3
        y = Double.apply(h, sab.nothing, sab.by_pointer)
        held = ALIASES[how](h)
        del h
        y.square().mean().backward()
        del held

    [error] = errors_of(step)
    assert error.tensor.startswith("its saved_tensors[0]")
    closure = how == "numpy in a closure"
    assert ("a closure" if closure else "the variable held of step()") in error.readers[0]


@pytest.mark.parametrize("how", ALIASES)
def test_what_the_user_no_longer_holds(how: str) -> None:
    def step() -> None:
        h = leaf() * 3
        y = Double.apply(h, sab.nothing, sab.by_pointer)
        held = ALIASES[how](h)
        del h, held
        y.square().mean().backward()

    assert errors_of(step) == []


def test_a_tensor_that_lies_in_an_array() -> None:
    array = np.zeros((3, 4), np.float32)

    def step() -> None:
        h = torch.from_numpy(array).copy_(leaf())
        y = Double.apply(h, sab.nothing, sab.by_pointer)
        del h
        y.square().mean().backward()

    [error] = errors_of(step)
    assert "a closure" in error.readers[0] or "the variable array" in error.readers[0]


@pytest.mark.parametrize(("others", "errors"), [(slice(4, 8), 0), (slice(3, 8), 1)])
def test_the_other_columns_of_the_same_array(others: slice, errors: int) -> None:
    def step() -> None:
        array = np.zeros((3, 8), np.float32)
        held = array[:, others]
        h = torch.from_numpy(array[:, :4]).copy_(leaf())
        y = Double.apply(h, sab.nothing, lambda t: t.data.mul_(3))
        del h, array
        y.square().mean().backward()
        del held

    assert len(errors_of(step)) == errors


def test_an_array_that_only_the_graph_keeps() -> None:
    """A pack hook made it, and what it was made of is gone."""

    def step() -> None:
        with saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy):
            y = Double.apply(leaf() * 3, sab.nothing, sab.by_pointer)
        y.square().mean().backward()

    assert errors_of(step) == []


def test_statistics_that_a_checkpoint_moves_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mean = model[1].running_mean
    assert isinstance(mean, torch.Tensor)
    array, other, storage = mean.numpy(), torch.from_dlpack(mean), mean.untyped_storage()

    def step() -> None:
        x = Double.apply(torch.randn(5, 4, requires_grad=True))
        for reentrant in (True, False):
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward(retain_graph=True)

    assert errors_of(step) == []
    assert array.any()
    assert other.any()
    assert storage.nbytes() == 16


def unseen_by_autograd(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Moves the statistics without making a node."""
    with torch.no_grad():
        norm(x)
    return x


HELD = {
    "a state_dict": lambda norm: norm.state_dict(),
    "views": lambda norm: (norm.running_mean[:2], norm.running_var.view(2, 2)),
    "one flat tensor": lambda norm: flattened(norm),
    "nothing": lambda norm: None,
}


def flattened(norm: nn.BatchNorm1d) -> torch.Tensor:
    flat = torch.cat([torch.zeros(4), torch.ones(4)])
    norm.running_mean, norm.running_var = flat[:4], flat[4:]
    return flat


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("block", ["norm", "norm without a node", "norm with momentum=None"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_statistics_that_others_look_at_may_move_in_a_checkpoint(held: str, block: str, reentrant: bool) -> None:
    norm = nn.BatchNorm1d(4, momentum=None if "None" in block else 0.1)
    keeper = HELD[held](norm)

    def body(x: torch.Tensor) -> torch.Tensor:
        return unseen_by_autograd(norm, x) if "without" in block else norm(x)

    def step() -> None:
        x = Double.apply(torch.randn(5, 4, requires_grad=True))
        (checkpoint(body, x, use_reentrant=reentrant) * 2).square().mean().backward()

    assert errors_of(step) == []
    del keeper


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_input_of_a_checkpoint_may_be_overwritten_in_its_only_backward(reentrant: bool) -> None:
    def step() -> None:
        y = checkpoint(lambda t: Double.apply(t, sab.nothing, sab.by_pointer), leaf() * 1, use_reentrant=reentrant)
        loss = y.square().mean()
        loss.backward()

    assert errors_of(step) == []


@pytest.mark.parametrize("inputs", [False, True])
def test_the_guard_itself_holds_nothing_of_the_call(inputs: bool) -> None:
    """The output is nobody's but its node's, though backward was called on it."""

    def step() -> None:
        x = leaf()
        given = torch.randn(3, 4)
        options = {"inputs": [x]} if inputs else {}
        Double.apply(x * 3, sab.nothing, sab.nothing, sab.by_pointer).backward(given, **options)

    assert errors_of(step) == []


def test_the_output_on_which_backward_is_called_is_read_where_a_variable_holds_it() -> None:
    def step() -> None:
        y = Double.apply(leaf() * 3, sab.nothing, sab.nothing, sab.by_pointer)
        y.backward(torch.randn(3, 4))

    [error] = errors_of(step)
    assert error.readers == ("your own code, through the variable y of step()",)
