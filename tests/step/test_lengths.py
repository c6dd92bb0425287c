"""Batches of different lengths: plans that take over one another's choices (siblings), when a plan is made at all, and
what happens where there are more shapes than plans."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.passes import recompute
from takeback.compiler.run.eager import eager_step
from takeback.compiler.run.earnings import NO_ROOM, NOT_EARNED, Earnings

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

VOCABULARY = 50
LossFn = Callable[..., Tensor]


class Tagger(nn.Module):
    """Reads tokens of any number, with attention, dropout and a loss over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, VOCABULARY)
        self.scale, self.other_scale = 1.0, 1.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training))


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def batch(length: int, seed: int = 0, rows: int = 3) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


class Twins:
    """A compiled step and eager, which must agree in each bit after each step."""

    def __init__(self, loss: LossFn = loss_fn, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or Tagger()
        self.twin = copy.deepcopy(self.model)
        self.loss = loss
        self.optimizer, self.eager = (torch.optim.AdamW(m.parameters(), 0.01) for m in (self.model, self.twin))
        self.step = tb.compile_step(self.model, loss, self.optimizer, **options)
        self.taken = 0

    def take(self, *given: Any) -> None:
        self.taken += 1
        torch.manual_seed(self.taken)
        expected = self.loss(self.twin, *given)
        expected.backward()
        self.eager.step()
        self.eager.zero_grad()
        torch.manual_seed(self.taken)
        found = self.step(*given)
        assert torch.equal(found, expected), f"step {self.taken}"
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(p, q), f"{name} after step {self.taken}"

    def lengths(self, *lengths: int) -> None:
        for length in lengths:
            self.take(batch(length, self.taken))

    @property
    def siblings(self) -> int:
        return sum(plan.is_sibling for plan in self.step._plans)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []
    search = recompute.Search.__init__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        made.append(self)
        search(self, *args, **options)

    monkeypatch.setattr(recompute.Search, "__init__", counted)
    return made


@pytest.mark.parametrize("memory", ["auto", "min", "keep", "0.9x"])
def test_plans_for_other_lengths_take_over_the_choices_of_the_first(memory: str, searches: list[object]) -> None:
    twins = Twins(memory=memory, max_plans=16)
    twins.lengths(24, 24, 24, 12, 7, 20, 12, 7, 20, 24, 23, 23)
    assert len(twins.step._plans) == 5
    assert twins.siblings >= (3 if memory == "0.9x" else 4)
    if memory in ("auto", "min"):
        assert len(searches) == 1


def test_a_length_of_one_is_a_family_of_its_own_and_does_not_part_the_others() -> None:
    """Views of one element need no copies."""
    twins = Twins(memory="keep", max_plans=16)
    twins.lengths(24, 24, 1, 1, 23, 23)
    assert [plan.is_sibling for plan in twins.step._plans] == [True, False, False]


def test_siblings_have_eagers_bits_with_dead_bytes_poisoned() -> None:
    twins = Twins(memory="min", poison=True)
    twins.lengths(24, 24, 12, 12, 20, 20, 5, 5)
    assert twins.siblings == 3


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({"clip_norm": 0.1}, False),
        ({"clip_norm": 0.1}, True),
        ({"accumulate": 2}, False),
        ({"update": "early"}, False),
    ],
    ids=["clip", "scaler and clip", "accumulate", "early"],
)
def test_siblings_have_eagers_bits_with_all_that_comes_after_the_backward(
    options: dict[str, Any], scales: bool
) -> None:
    """A sibling is recorded once: what its recording leaves is what the update gets."""
    model = Tagger()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 0.01) for m in (model, twin))
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3) if scales else None for _ in range(2)]
    step = tb.compile_step(model, loss_fn, ours, max_plans=16, memory="keep", scaler=scalers[0], **options)
    recipe = {name: value for name, value in options.items() if name != "update"}
    for i, length in enumerate((24, 24, 24, 12, 12, 20, 20, 12)):
        given = batch(length, i, rows=4)
        torch.manual_seed(i)
        eager_step(twin, loss_fn, theirs, (given,), scaler=scalers[1], **recipe)
        torch.manual_seed(i)
        step(given)
        for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert torch.equal(p, q[1]), f"{name} after step {i}"
    assert sum(plan.is_sibling for plan in step._plans) == 2


def test_one_comparison_with_eager_serves_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    from takeback.compiler.run.checked_replay import CheckedReplay

    compared: list[object] = []
    whole = CheckedReplay.beside_a_step

    def counted(self: CheckedReplay) -> Any:
        compared.append(self)
        return whole(self)

    monkeypatch.setattr(CheckedReplay, "beside_a_step", counted)
    twins = Twins(memory="keep", max_plans=16)
    twins.lengths(24, 24, 24, 24)
    before = len(compared)
    twins.lengths(12, 12, 12, 20, 20, 20)
    assert 1 <= len(compared) == before


def test_batches_of_fewer_rows_are_siblings_too() -> None:
    twins = Twins(memory="keep", max_plans=16)
    for rows in (4, 4, 4, 3, 3, 2, 2):
        twins.take(batch(10, rows=rows))
    assert twins.siblings == 2


def test_a_length_that_takes_another_way_is_no_sibling() -> None:
    def two_ways(model: nn.Module, ids: Tensor) -> Tensor:
        out = model(ids)
        if ids.shape[1] > 16:
            out = out.clamp(max=0.1)
        return F.cross_entropy(out.flatten(0, 1), ids.flatten())

    twins = Twins(two_ways, memory="keep", max_plans=16)
    twins.lengths(12, 12, 14, 14, 20, 20, 14, 20, 22, 22)
    assert [plan.is_sibling for plan in sorted(twins.step._plans, key=lambda p: str(p.key))] == [
        False,
        True,
        False,
        True,
    ]


def test_what_only_long_batches_read_is_watched_for_them() -> None:
    def scaled(model: Any, ids: Tensor) -> Tensor:
        scale = model.scale if ids.shape[1] < 16 else model.other_scale
        return F.cross_entropy(model(ids).flatten(0, 1) * scale, ids.flatten())

    twins = Twins(scaled, memory="keep", max_plans=16)
    twins.lengths(12, 12, 14, 14, 20, 20, 22, 22)
    for model in (twins.model, twins.twin):
        model.other_scale = 2.0
    twins.lengths(12, 14, 20, 22, 20, 22)


def test_a_tensor_that_is_cached_for_each_length_is_right() -> None:
    class Cached(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.masks: dict[int, Tensor] = {}

        def forward(self, ids: Tensor) -> Tensor:
            length = ids.shape[1]
            if length not in self.masks:
                self.masks[length] = torch.full((length, VOCABULARY), 0.5)
            out: Tensor = super().forward(ids) * self.masks[length]
            return out

    twins = Twins(model=Cached(), memory="keep", max_plans=16)
    twins.lengths(12, 12, 14, 14, 20, 20, 12, 14, 20)


def test_a_weight_that_is_changed_between_lengths_is_heard_by_all_of_them() -> None:
    twins = Twins(memory="keep", max_plans=16)
    twins.lengths(12, 12, 14, 14)
    for model in (twins.model, twins.twin):
        model.down.weight.data = model.down.weight.data.clone() * 2  # other memory
    twins.lengths(12, 14, 12, 14, 20, 20)


def test_a_number_that_changes_in_each_step_is_read_anew_for_each_length() -> None:
    def scaled(model: Any, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1) * model.scale, ids.flatten())

    twins = Twins(scaled, memory="keep", max_plans=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several plans in a row
        for i, length in enumerate((12, 12, 14, 14, 12, 14, 20, 20, 12, 14, 20)):
            for model in (twins.model, twins.twin):
                model.scale = 1.0 + i / 8
            twins.lengths(length)


def test_a_longer_batch_for_which_a_choice_is_not_as_good_is_searched_for(searches: list[object]) -> None:
    """The first is so short that hardly anything is worth rebuilding."""
    twins = Twins(memory="min", max_plans=16)
    twins.lengths(2, 2, 96, 96, 48, 48)
    largest = max(twins.step._plans, key=lambda plan: plan.eager_bytes)
    alone = Twins(memory="min", max_plans=16)
    alone.lengths(96)
    [other] = alone.step._plans
    assert largest.executor.layout.placed.size_bytes <= other.executor.layout.placed.size_bytes * 1.06


def test_target_holds_for_a_longer_batch() -> None:
    resident = sum(p.numel() * 4 for p in Tagger().parameters()) * 3
    target = resident + 400_000
    twins = Twins(memory=f"{target}B", max_plans=16)
    twins.lengths(4, 4, 40, 40, 20, 20)
    for plan in twins.step._plans:
        report = plan.executor.layout.placed.size_bytes
        assert report <= 400_000


# -- when a plan is made -----------------------------------------------------------------------------------------------


def test_two_plans_are_free_and_further_ones_are_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(memory="keep")
    monkeypatch.setattr(Earnings, "spent_", lambda *_, **__: None)
    twins.step._earnings.plans_s, twins.step._earnings.steps = 1.0, 1000
    twins.lengths(20, 20, 22, 22, 12, 12, 14)
    assert len(twins.step._plans) == 2
    assert twins.step.counts.reasons == {NOT_EARNED: 3}
    assert NOT_EARNED in " ".join(str(twins.step.report()).split())
    twins.step._earnings.steps_s = 4.0
    twins.lengths(14, 30, 30, 12)
    assert len(twins.step._plans) == 3  # the largest counts for more
    twins.step._earnings.steps_s = 20.0
    twins.lengths(12, 12, 14, 14)
    assert len(twins.step._plans) == 5
    assert twins.step.counts.plain == 5


def test_who_asks_for_the_least_memory_gets_all_plans_at_once() -> None:
    twins = Twins(memory="min")
    twins.step._earnings.plans_s = 1e9
    twins.lengths(20, 12, 14, 16)
    assert len(twins.step._plans) == 4
    assert twins.step.counts.plain == 0


def test_at_the_beginning_plans_may_take_as_long_as_forty_steps() -> None:
    earnings = Earnings(explicit=False, first_s=2.0, plans_s=1.9)
    assert earnings.waits(2, has_room=True, largest=False) == NOT_EARNED  # how long a step takes is not known yet
    earnings.spent_(0.1, on_plan=False)
    assert earnings.waits(2, has_room=True, largest=False) is None
    earnings.spent_(0.2, on_plan=True)
    assert earnings.waits(2, has_room=True, largest=False) == NOT_EARNED


def test_time_is_booked_on_plans_and_on_steps() -> None:
    twins = Twins(memory="keep")
    earnings = twins.step._earnings
    twins.lengths(12)
    assert earnings.first_s is not None
    assert earnings.first_s > 0
    assert earnings.steps_s == earnings.plans_s == 0
    twins.lengths(12)  # the first replay
    plans_s = earnings.plans_s
    assert plans_s > 0
    assert earnings.steps == earnings.steps_s == 0
    twins.lengths(12, 12)
    assert earnings.plans_s == plans_s
    assert earnings.steps == 2
    assert earnings.steps_s > 0
    twins.lengths(14, 14)
    assert earnings.plans_s > plans_s
    twins.lengths(12, 14)
    assert earnings.steps == 4


def test_plans_in_use_are_not_dropped_for_shapes_that_keep_coming() -> None:
    twins = Twins(memory="keep", max_plans=2)
    with pytest.warns(RuntimeWarning, match=r"dimension 1 of a batch tensor varies .*takeback\.bucket") as caught:
        twins.lengths(12, 14, 12, 14, 20, 12, 14, 22, 12, 14, 20)
    assert len([w for w in caught if "no room" in str(w.message)]) == 1
    assert len(twins.step._plans) == 2
    assert twins.step.counts.reasons == {NO_ROOM: 3}
    assert twins.step._plans.dropped == 0


def test_plan_that_has_not_been_used_for_long_makes_room() -> None:
    twins = Twins(memory="keep", max_plans=2)
    twins.lengths(12, 14, *[12] * 9, 20, 20)
    assert [plan.recorded.buffers is not None for plan in twins.step._plans] == [True, True]
    assert twins.step._plans.dropped == 1
    assert twins.step.counts.plain == 0


def test_plain_step_of_a_new_shape_keeps_what_options_promise() -> None:
    twins = Twins(memory="keep", keep_grads=True, clip_norm=0.1)
    twins.step._earnings.plans_s = 1e9
    model, step = twins.model, twins.step
    for length in (12, 14):
        step(batch(length))
    out = step(batch(20))
    assert step.counts.plain == 1
    assert not out.requires_grad
    assert step.grad_norm is not None
    assert all(p.grad is not None for p in model.parameters())
