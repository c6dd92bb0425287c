"""A batch's key tells apart what a plan must not confuse, and microbatches are its parts in order."""

from __future__ import annotations

import pytest
import torch

from takeback.compiler.capture.assumptions import Assumptions
from takeback.compiler.capture.batch import microbatch, take_apart


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, 1.0), (1, True), ((1, 2), [1, 2]), (torch.ones(2, 3), torch.ones(3, 2).t())],
    ids=["-0.0", "float", "bool", "list", "strides"],
)
def test_key_tells_values_apart_that_python_calls_equal(one: object, other: object) -> None:
    assert take_apart((one,))[1] != take_apart((other,))[1]
    assert take_apart((one,))[1] == take_apart((one,))[1]


def test_nan_is_the_same_batch_each_time() -> None:
    assert take_apart((float("nan"),))[1] == take_apart((float("nan"),))[1]


def test_microbatches_are_the_parts_of_the_batch_in_order() -> None:
    batch = {"x": torch.arange(12.0).view(6, 2), "scale": torch.tensor(2.0)}
    parts = [microbatch(batch, i, 3) for i in range(3)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert all(part["scale"] is batch["scale"] for part in parts)


def test_exchanged_member_of_a_set_is_seen() -> None:
    active = {"encoder", "decoder"}

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return x.sum() if "encoder" in active else x.mean()

    held = Assumptions(loss_fn=loss_fn)
    assert held.change() is None
    active.remove("encoder")
    active.add("head")
    changed = held.change()
    assert changed is not None
    assert "has other members" in changed
