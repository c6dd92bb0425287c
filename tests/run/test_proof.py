"""Each part of a proof by itself: measures, parts of a batch, schedules, the memory limit. And in a compiled step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.run.eager import Recipe
from takeback.compiler.run.proof import (
    Bits,
    Every,
    FirstRows,
    Measure,
    Once,
    Proof,
    Skipped,
    Tolerance,
    WholeBatch,
    checksum,
    differing,
    keep,
    part_of,
    same,
)
from takeback.errors import CaptureError

NAN, INF = float("nan"), float("inf")


# -- by which measure --------------------------------------------------------------------------------------------------


def agree(measure: Measure, expected: Tensor, found: Tensor) -> bool:
    """What both ways of asking say: of the tensors themselves, and of what is kept of the first."""
    said = same(measure, expected, found)
    assert (differing(measure, keep(measure, {"x": expected}), {"x": found}) == ()) is said
    return said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_bits_are_equal_to_themselves_in_any_stride_and_to_nothing_else(dtype: torch.dtype) -> None:
    x = (torch.arange(12).reshape(3, 4) % 3 > 0).to(dtype)
    assert agree(Bits(), x, x.clone())
    assert agree(Bits(), x, x.t().contiguous().t())
    for i in range(12):
        other = x.clone()
        other.view(-1)[i] = 1 - other.view(-1)[i].int()
        assert not agree(Bits(), x, other), i


def test_bits_tell_zero_from_minus_zero_and_one_shape_or_dtype_from_another() -> None:
    assert not agree(Bits(), torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same(Bits(), torch.zeros(4), torch.zeros(2, 2))
    assert not same(Bits(), torch.zeros(4), torch.zeros(4, dtype=torch.int32))


def test_one_nan_takes_any_nan_for_any_other_and_nothing_else_for_one() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    x.view(torch.int32)[1], y.view(torch.int32)[1] = -4194304, 0x7FC00000
    assert not agree(Bits(), x, y)
    assert agree(Bits(one_nan=True), x, y)
    assert not agree(Bits(one_nan=True), x, torch.tensor([1.0, INF]))
    assert not agree(Bits(one_nan=True), x, torch.tensor([NAN, 2.0]))


def test_checksum_sees_where_a_byte_is() -> None:
    one = torch.zeros(3 << 20, dtype=torch.uint8)
    sums = set()
    for place in (0, 1, 1 << 20, (1 << 20) + 1, (3 << 20) - 1):
        one.zero_()
        one[place] = 1
        sums.add(checksum(one))
    assert len(sums) == 5


@pytest.mark.parametrize(
    ("expected", "found", "measure", "close"),
    [
        ([1.0, 2.0], [1.0, 2.0019], Tolerance(1e-3), True),
        ([1.0, 2.0], [1.0, 2.0021], Tolerance(1e-3), False),
        ([1e-9, 2.0], [1e-3, 2.0], Tolerance(1e-3), True),  # small beside the largest: what is left of a sum
        ([1e-9, 2.0], [3e-3, 2.0], Tolerance(1e-3), False),
        ([0.0, 0.0], [1e-6, 0.0], Tolerance(1e-3), False),
        ([0.0, 0.0], [1e-6, 0.0], Tolerance(1e-3, absolute=1e-5), True),
        ([0.0, 0.0], [1e-4, 0.0], Tolerance(1e-3, absolute=1e-5), False),
        ([NAN, 1.0], [NAN, 1.0], Tolerance(0.0), True),
        ([NAN, 1.0], [1.0, 1.0], Tolerance(1.0), False),
        ([1.0, 1.0], [NAN, 1.0], Tolerance(1.0), False),
        ([INF, 1.0], [INF, 1.0005], Tolerance(1e-3), True),  # an infinity is no scale
        ([INF, 1.0], [INF, 1.1], Tolerance(1e-3), False),
        ([INF, 1.0], [-INF, 1.0], Tolerance(1.0), False),
        ([INF, 1.0], [NAN, 1.0], Tolerance(1.0), False),
        ([INF, 1.0], [1e30, 1.0], Tolerance(1.0), False),
        ([], [], Tolerance(0.0), True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tolerance_goes_by_the_largest_magnitude_expected(
    expected: list[float], found: list[float], measure: Tolerance, close: bool, dtype: torch.dtype
) -> None:
    assert agree(measure, torch.tensor(expected, dtype=dtype), torch.tensor(found, dtype=dtype)) is close


def test_tolerance_keeps_whole_numbers_equal_and_looks_at_both_parts_of_complex_ones() -> None:
    assert not agree(Tolerance(1.0, 9.0), torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert agree(Tolerance(1.0, 9.0), torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert agree(Tolerance(1e-3), torch.tensor([1 + 1j]), torch.tensor([1 + 1.0005j]))
    assert not agree(Tolerance(1e-3), torch.tensor([1 + 1j]), torch.tensor([1 + 1.1j]))
    assert not agree(Tolerance(1.0), torch.zeros(2), torch.zeros(2, dtype=torch.float64))


def test_what_was_kept_does_not_change_with_the_tensor() -> None:
    for measure in (Bits(), Tolerance(1e-3)):
        x = torch.ones(4)
        kept = keep(measure, {"x": x})
        x.mul_(2)
        assert differing(measure, kept, {"x": torch.ones(4)}) == ()
        assert differing(measure, kept, {"x": x}) == ("x",)


@pytest.mark.parametrize("measure", [Bits(), Tolerance(1e-3)])
def test_names_of_what_differs_or_is_missing_come_in_order(measure: Measure) -> None:
    expected = {name: torch.full((2,), float(i)) for i, name in enumerate("abcd")}
    found = {"e": torch.zeros(1), "a": expected["a"], "c": expected["c"] + 1, "b": expected["b"]}
    assert differing(measure, keep(measure, expected), found) == ("c", "d", "e")


# -- on how much of the batch ------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    x: Tensor
    y: Tensor


def test_first_rows_are_views_of_every_tensor_along_dimension_0() -> None:
    x, y, scale = torch.arange(24.0).reshape(8, 3), torch.arange(8), torch.tensor(2.0)
    args, kwargs = part_of(((Rows(x, y),), {"scale": scale, "name": "n"}), FirstRows(3))
    assert isinstance(args[0], Rows)
    assert torch.equal(args[0].x, x[:3])
    assert torch.equal(args[0].y, y[:3])
    assert args[0].x.data_ptr() == x.data_ptr()
    assert kwargs["scale"] is scale
    assert kwargs["name"] == "n"


def test_whole_batch_and_more_rows_than_there_are_give_the_batch_itself() -> None:
    batch = ((torch.zeros(4, 2), torch.zeros(4)), {})
    assert part_of(batch, WholeBatch()) is batch
    assert part_of(batch, FirstRows(4)) is batch
    assert part_of(batch, FirstRows(9)) is batch
    scalars = ((torch.tensor(1.0), 3), {})
    assert part_of(scalars, FirstRows(1)) is scalars


def test_tensors_that_do_not_agree_on_the_rows_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"first 2 rows .* cannot be taken: its tensors have 3 and 8 rows"):
        part_of(((torch.zeros(8, 3), torch.zeros(3)), {}), FirstRows(2))


def eager(rows: int, extent: FirstRows | WholeBatch, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Loss and gradients of a small model on a part of a batch whose first rows are the same, whatever its size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1)).to(dtype)
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))[:rows].to(dtype)
    recipe = Recipe(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters()))
    loss = recipe.backward_(part_of(((x,), {}), extent))
    return {"loss": loss} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_two_runs_of_eager_agree_on_a_slice_whatever_the_rest_of_the_batch_is() -> None:
    kept = keep(Bits(), eager(16, FirstRows(4)))
    assert differing(Bits(), kept, eager(9, FirstRows(4))) == ()
    names = differing(Bits(), kept, eager(16, WholeBatch()))
    assert names[0] == "loss"
    assert len(names) > 4


def test_another_precision_is_within_a_tolerance_and_has_other_bits() -> None:
    wide = {name: t.float() for name, t in eager(8, FirstRows(4), dtype=torch.float64).items()}
    narrow = eager(8, FirstRows(4))
    assert differing(Bits(), keep(Bits(), wide), narrow)
    assert differing(Tolerance(1e-5), keep(Tolerance(1e-5), wide), narrow) == ()
    narrow["0.weight"] = narrow["0.weight"] * 1.01
    assert differing(Tolerance(1e-5), keep(Tolerance(1e-5), wide), narrow) == ("0.weight",)


# -- how often, and within how much memory -----------------------------------------------------------------------------


def test_once_asks_for_each_new_plan_alone() -> None:
    proof = Proof(schedule=Once())
    assert [proof.is_due(proved=False, replays=n) for n in (1, 7)] == [True, True]
    assert not any(proof.is_due(proved=True, replays=n) for n in range(1, 50))


def test_every_asks_for_each_new_plan_and_for_every_nth_replay() -> None:
    proof = Proof(schedule=Every(3))
    assert [n for n in range(1, 11) if proof.is_due(proved=True, replays=n)] == [3, 6, 9]
    assert all(proof.is_due(proved=False, replays=n) for n in range(1, 11))


def test_reference_beyond_the_limit_is_skipped_with_the_reason() -> None:
    assert Proof().skipped(1 << 50) is None
    proof = Proof(memory_limit_bytes=3 << 20)
    assert proof.skipped(3 << 20) is None
    skipped = proof.skipped((3 << 20) + 1)
    assert skipped == Skipped((3 << 20) + 1, 3 << 20)
    assert "needs 3.0 MiB above what is resident: more than the limit of 3.0 MiB" in skipped.reason


# -- in a compiled step ------------------------------------------------------------------------------------------------


def small(**settings: Any) -> tuple[tb.CompiledStep, list[int], Tensor]:
    """A compiled step, how often its loss_fn has run, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    runs = [0]

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    backward = Recipe.backward_

    def counted(self: Recipe, *args: Any) -> Tensor:
        runs[0] += 1
        return backward(self, *args)

    object.__setattr__(step._recipe, "backward_", counted.__get__(step._recipe))
    return step, runs, torch.randn(4, 6)


def test_step_runs_eager_once_for_a_plan_and_never_again() -> None:
    step, runs, x = small()
    counts = []
    for _ in range(6):
        step(x)
        counts.append(runs[0])
    assert step._plans[0].proved
    assert counts[0] == 1, "a recording is run once more without the recorder"
    assert counts[1] == 2, "a new plan's first replay is compared"
    assert counts[-1] == counts[-3], "a steady step runs no eager"


def test_step_runs_eager_every_nth_time_if_asked() -> None:
    step, runs, x = small(verify_every=2)
    for _ in range(5):
        step(x)
    before = runs[0]
    for _ in range(6):
        step(x)
    assert runs[0] == before + 3


def test_step_whose_reference_is_beyond_the_limit_is_not_compared_and_the_report_says_so() -> None:
    step, runs, x = small()
    step._replayer._proof = dataclasses.replace(step._proof, memory_limit_bytes=16)
    for _ in range(4):
        step(x)
    assert runs[0] == 1, "only the recording was run again"
    assert not step._plans[0].proved
    [note] = step.report().notes
    assert note.startswith("the plan was not compared with its reference, which needs 0.0 MiB above what is resident")
    assert "not compared with its" in str(step.report())
    step._replayer._proof = step._proof
    step(x)
    assert step._plans[0].proved
    assert step.report().notes == ()
