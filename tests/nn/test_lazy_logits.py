"""Logits that were never made: what is noted, what makes them, and that nothing is silently another number."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from takeback.nn.lazy_logits import LazyLogits, lazy_logits
from takeback.nn.owner import Copies

CLASSES = 11


def pair(dtype: torch.dtype = torch.float32) -> tuple[LazyLogits, Tensor, Copies, list[Tensor]]:
    """Lazy logits, the same made of leaves of their own, and all four leaves."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 8).to(dtype), torch.randn(CLASSES, 8).to(dtype)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, hidden, weight)]
    copies = Copies()
    return lazy_logits(leaves[0], leaves[1], None, copies), F.linear(leaves[2], leaves[3]), copies, leaves


TARGETS = torch.tensor([[1, 2, 3, 4, 5], [6, -100, 8, 9, 10]])

HEADS: dict[str, Callable[[Any], Tensor]] = {
    "flat": lambda z: F.cross_entropy(z.view(-1, CLASSES), TARGETS.view(-1)),
    "flat by its own size": lambda z: F.cross_entropy(z.float().reshape(-1, z.size(-1)), TARGETS.view(-1)),
    "of a module": lambda z: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(z.flatten(0, 1), TARGETS.view(-1)),
    "shifted": lambda z: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, CLASSES), TARGETS[..., 1:].reshape(-1), reduction="sum"
    ),
    "capped": lambda z: F.cross_entropy(
        (torch.tanh(z / 3.0) * 3.0).to(torch.float32).view(-1, CLASSES), TARGETS.view(-1)
    ),
    "scaled": lambda z: F.cross_entropy((z.tanh().mul(2) * 0.5).float().view(-1, CLASSES), TARGETS.view(-1)),
    "twice capped": lambda z: F.cross_entropy(z.tanh().tanh().float().tanh().view(-1, CLASSES), TARGETS.view(-1)),
    "padded vocabulary": lambda z: F.cross_entropy(z[:, :, :11].float()[..., :11].view(-1, 11), TARGETS.view(-1)),
    "fewer classes": lambda z: F.cross_entropy(z[..., :7].reshape(-1, 7), TARGETS.view(-1).clamp(max=6)),
    "with a bias": lambda z: F.cross_entropy(
        (z + torch.linspace(0, 1, CLASSES, dtype=z.dtype)[None]).view(-1, CLASSES), TARGETS.view(-1)
    ),
    "masked": lambda z: F.cross_entropy(z[TARGETS > 3], TARGETS[TARGETS > 3]),
    "one row": lambda z: F.cross_entropy(z[:, -1], TARGETS[:, 0]),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_loss_is_computed_without_the_logits(head: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.03)):
        lazy, made, copies, leaves = pair(dtype)
        ours, torchs = HEADS[head](lazy), HEADS[head](made)
        ours.backward()
        torchs.backward()
        assert str(copies) == "none"
        assert ours.dtype == torchs.dtype
        torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=tolerance)
        for one, other in zip(leaves[:2], leaves[2:], strict=True):
            assert float((one.grad - other.grad).norm()) <= 4 * tolerance * float(other.grad.norm())


READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a method": (lambda z: z.argmax(-1), r"\.argmax"),
    "a function": (lambda z: torch.softmax(z, -1), "softmax"),
    "an operator": (lambda z: 1 - z, "__rsub__"),
    "the other side of one": (lambda z: torch.ones(CLASSES) * 2 - z, "sub"),
    "a list of them": (lambda z: torch.stack([z, z * 1]), "stack"),
    "an index": (lambda z: z[..., 3], "indexing"),
    "numpy": (lambda z: torch.from_numpy(np.asarray(z.detach())), "detach"),
    "another loss": (
        lambda z: F.cross_entropy(z.view(-1, CLASSES), TARGETS.view(-1), reduction="none"),
        "another form",
    ),
    "classes first": (lambda z: F.cross_entropy(z.transpose(1, 2), TARGETS), "transpose"),
    "a transposed view": (lambda z: z.view(CLASSES, 2, 5), "view"),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_them_gets_the_layers_own_and_is_counted(reader: str) -> None:
    lazy, made, copies, _ = pair()
    read, name = READERS[reader]
    assert torch.equal(read(lazy), read(made))
    assert any("made whole" in reason for reason in copies)
    assert __import__("re").search(name, str(copies))


def test_what_is_known_without_making_them() -> None:
    lazy, made, copies, _ = pair()
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.ndim) == (made.shape, made.dtype, made.device, made.ndim)
    assert (lazy.size(), lazy.size(-1), lazy.dim(), len(lazy), lazy.numel()) == (made.shape, 11, 3, 2, made.numel())
    assert lazy.float().to(torch.bfloat16).dtype == torch.bfloat16
    assert lazy.requires_grad
    assert "not made" in repr(lazy)
    assert str(copies) == "none"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lazy.nonsense


def test_after_the_backward_of_its_loss_it_is_too_late_and_it_says_so() -> None:
    lazy, made, _, _ = pair()
    early = lazy.float()
    with torch.no_grad():
        assert torch.equal(early.argmax(-1), made.argmax(-1))
    F.cross_entropy(lazy.view(-1, CLASSES), TARGETS.view(-1)).backward()
    assert torch.equal(early.argmax(-1), made.argmax(-1))  # that one was made in time
    with pytest.raises(RuntimeError, match=r"never made.*Read outputs.logits before backward"):
        lazy.argmax(-1)


def test_changed_weights_are_noticed_before_a_loss_too() -> None:
    lazy, _, _, leaves = pair()
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="its inputs changed"):
        F.cross_entropy(lazy.view(-1, CLASSES), TARGETS.view(-1))


def test_logits_that_a_metric_made_under_no_grad_still_give_gradients() -> None:
    lazy, made, _, leaves = pair()
    with torch.no_grad():
        lazy.argmax(-1)
    lazy.logsumexp(-1).mean().backward()
    made.logsumexp(-1).mean().backward()
    assert torch.equal(leaves[1].grad, leaves[3].grad)


def test_they_are_made_as_autocast_had_it() -> None:
    lazy, _, _, leaves = pair()
    with torch.autocast("cpu", torch.bfloat16):
        lazy, made = lazy_logits(leaves[0], leaves[1], None, Copies()), F.linear(leaves[0], leaves[1])
    assert lazy.dtype == torch.bfloat16
    assert torch.equal(lazy.made(), made)


def test_they_pickle_and_copy_as_tensors() -> None:
    for other in (pickle.loads(pickle.dumps(pair()[0])), copy.deepcopy(pair()[0])):
        assert torch.equal(other, pair()[1])
