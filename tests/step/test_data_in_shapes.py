"""A shape that depends on the data is held: a plan is for the recorded one, and a replay in which it is another one is
taken back and recorded anew. Where it is another one each time, the step is refused, and nothing is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import Setup, Snapshot, assert_same, eager_step, snapshot
from torch import Tensor, nn

import takeback as tb
from harness import same
from takeback.compiler.form import FormError, check_form
from takeback.compiler.passes import Home
from takeback.compiler.program import Phase
from takeback.errors import CaptureError

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels", "whole_head"),
    pytest.mark.filterwarnings("ignore:takeback made"),
]

Loss = Callable[..., Any]
HERE = r"test_data_in_shapes\.py"
ROWS = 12


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))


def picks(i: int, count: int) -> tuple[Tensor, Tensor]:
    """Rows, and labels of which `count` are another than 0."""
    g = torch.Generator().manual_seed(i)
    y = torch.zeros(ROWS, dtype=torch.int64)
    y[torch.randperm(ROWS, generator=g)[:count]] = 3
    return torch.randn(ROWS, 6, generator=g), y


def masked_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[y != 0], y[y != 0])


def selected(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).masked_select((y > 0)[:, None]).sum()


def nonzero(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x)[y.nonzero().squeeze(-1)].square().sum()


def of_floats(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x)[(y.float() * 0.5).nonzero().squeeze(-1)].square().sum()


def where(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x)[torch.where(y > 1)].sum()


def unique(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).sum() * torch.unique(y * torch.arange(1, ROWS + 1)).numel()


def unique_consecutive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).sum() * torch.unique_consecutive(y.sort().values * torch.arange(1, ROWS + 1)).numel()


def repeated(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.repeat_interleave(model(x), y, dim=0).square().sum()


def counted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).sum() * torch.bincount((y > 0).cumsum(0)).numel()


def length_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Nobody reads the selection; Python knows how long it is."""
    return F.cross_entropy(model(x), y) * len(y[y != 0])


def written(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The shape is met in the backward alone, and by code of the user's."""
    out = _Written.apply(model[0](x), model[0].bias, y != 0)
    return F.cross_entropy(model[1:](out), y)


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return torch.where(mask.unsqueeze(-1), row, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad.masked_fill(mask.unsqueeze(-1), 0), grad[mask].sum(0), None


LOSSES = (masked_rows, selected, nonzero, of_floats, where, unique, unique_consecutive, repeated, counted, length_alone)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "early": {"update": "early", "memory": "min"},
    "fast": {"mode": "fast"},
    "streamed": {},
}


class Pair:
    """A compiled step and its eager twin, on batches with so many labels that are picked."""

    def __init__(self, loss_fn: Loss, name: str = "plain", **settings: Any) -> None:
        self.model = normed()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        other, optimizer = copy.deepcopy((self.model, self.optimizer))
        self.twin = Setup(other, loss_fn, optimizer, lambda i: ())
        self.step = tb.compile_step(
            self.model, loss_fn, self.optimizer, poison=name != "fast", **{**SETTINGS[name], **settings}
        )
        if name == "streamed":  # torch's allocator places, as on a GPU
            self.step._maker.home, self.step._maker.native = Home.ALLOCATOR, None
        self.taken = 0

    def state(self) -> Snapshot:
        return snapshot(self.model, self.optimizer) | {"random state": torch.get_rng_state()}

    def take(self, counts: Sequence[int]) -> None:
        for count in counts:
            batch = picks(self.taken, count)
            torch.manual_seed(self.taken)
            expected = eager_step(self.twin, batch)
            theirs = snapshot(self.twin.model, self.twin.optimizer) | {"random state": torch.get_rng_state()}
            torch.manual_seed(self.taken)
            assert same(self.step(*batch), expected)
            assert_same(self.state(), theirs, f"after step {self.taken}")
            self.taken += 1


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("loss_fn", [*LOSSES, written], ids=lambda f: f.__name__)
def test_step_is_eagers_whatever_the_shape_and_each_shape_has_its_plan(loss_fn: Loss, name: str) -> None:
    pair = Pair(loss_fn, name)
    pair.take((5, 5, 5, 7, 7, 5, 7, 0, 5, ROWS, ROWS))
    assert len(pair.step._plans) == 4
    assert any("a shape that depends on the data" in note for note in pair.step.report().notes)


@pytest.mark.parametrize("loss_fn", [*LOSSES, written], ids=lambda f: f.__name__)
def test_shape_that_is_new_each_time_is_refused_with_op_line_and_advice(loss_fn: Loss) -> None:
    pair = Pair(loss_fn)
    pair.take((5, 6, 7))
    torch.manual_seed(0)
    before = pair.state()
    at = "" if loss_fn is written else rf" at .*{HERE}:\d+ in {loss_fn.__name__}"
    with pytest.raises(
        CaptureError, match=f"shape depends on the data{at}.* another one 3 times in a row.*torch.where"
    ):
        pair.step(*picks(3, 8))
    assert_same(pair.state(), before, "after the refusal")
    assert all(p.grad is None for p in pair.model.parameters())
    pair.take((5, 5, 5))


def test_shape_that_is_met_in_the_backward_alone_is_met_before_an_early_update() -> None:
    pair = Pair(written, "early")
    pair.take((5, 5))
    program = pair.step._plans[0].executor.program
    meets = [i for i, op in enumerate(program.ops) if op.has_data_in_shape]
    assert meets
    assert all(program.ops[i].phase is Phase.BACKWARD for i in meets)
    assert max(meets) < min(i for i, op in enumerate(program.ops) if op.phase is Phase.UPDATE)
    late = replace(program, ops=(*program.ops, program.ops[meets[-1]]))  # sabotage: nothing can be sent back by then
    with pytest.raises(FormError, match="after the update has begun"):
        check_form(late)


def written_by_torch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of how many rows autograd adds up the gradient, nobody sees."""
    out = model[0](x).clone()
    out[y != 0] = model[0].bias
    return F.cross_entropy(model[1:](out), y)


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_that_autograd_adds_up_at_once_need_no_plan_for_each_number(name: str) -> None:
    pair = Pair(written_by_torch, name)
    pair.take((5, 7, 0, 1, ROWS, 6, 3))
    assert len(pair.step._plans) == 1
    assert not any("a shape that depends on the data" in note for note in pair.step.report().notes)


def test_steps_with_new_shapes_run_plainly_where_that_is_asked_for() -> None:
    pair = Pair(masked_rows, unplanned="eager")
    with pytest.warns(RuntimeWarning, match="another one 3 times in a row"):
        pair.take((2, 3, 4, 5, 6, 7))
    assert pair.step.counts.plain == 3
    assert not len(pair.step._plans), "before each plain step plans would be tried in vain"


def test_result_that_is_given_a_place_is_refused_at_once() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        places = torch.empty(0, dtype=torch.int64)
        torch.nonzero(y, out=places)
        return model(x)[places.squeeze(-1)].sum()

    pair = Pair(loss_fn)
    with pytest.raises(CaptureError, match=r"shape depends on the data|resized a tensor"):
        pair.step(*picks(0, 5))


def test_integer_indices_hold_no_shape() -> None:
    pair = Pair(lambda m, x, y: m(x)[y].sum())
    pair.take((3, 4, 5, 6, 7))
    assert len(pair.step._plans) == 1
