"""A batch's key tells apart what a plan must not confuse, and microbatches are its parts in order."""

from __future__ import annotations

import pytest
import torch

from takeback.compiler.capture.assumptions import Assumptions
from takeback.compiler.capture.batch import cut, take_apart
from takeback.errors import CaptureError


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
    parted = cut(batch, 3)
    parts = [parted.part(batch, i) for i in range(3)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert all(part["scale"] is batch["scale"] for part in parts)


@pytest.mark.parametrize(("rows", "count"), [(10, 4), (6, 4), (3, 4), (8, 3), (1, 2), (9, 3), (0, 2)])
def test_uneven_microbatches_are_torch_chunks_and_weigh_their_rows(rows: int, count: int) -> None:
    batch = (torch.arange(2.0 * rows).view(rows, 2), torch.arange(rows))
    parted = cut(batch, count)
    parts = [parted.part(batch, i) for i in range(parted.count)]
    for position, tensor in enumerate(batch):
        chunks = tensor.chunk(count)
        assert [p[position].tolist() for p in parts] == [c.tolist() for c in chunks]
    weights = [parted.weigh(torch.tensor(1.0, dtype=torch.float64), i).item() for i in range(parted.count)]
    if rows:
        assert weights == pytest.approx([len(p[0]) / rows for p in parts])


def test_uneven_microbatches_of_tensors_with_other_rows_are_refused() -> None:
    assert cut((torch.zeros(8), torch.zeros(4)), 2).count == 2
    with pytest.raises(
        CaptureError, match=r"accumulate=4 does not divide a batch of 6 rows.*others.*12.*multiple of 4"
    ):
        cut((torch.zeros(12), torch.zeros(6)), 4)


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
