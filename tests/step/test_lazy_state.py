"""State that a step makes when it first runs, and writes in every run, begins in a compiled step as it does in eager.

Such a step is recorded twice: the second time the state is there. What the first recording wrote into it must be taken
back, or the state would be one update ahead for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import Case, adamw, sgd, train_both
from takeback import CaptureError, compile_step

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


class Lazy(nn.Module):
    """Subtracts a running mean, which `keep` makes and puts somewhere; a buffer, an attribute, or in a table."""

    def __init__(self, keep: Callable[[Lazy, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.keep = keep
        self.register_buffer("mean", None)
        self.attribute: Tensor | None = None
        self.table: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mean = self.keep(self, x)
        mean.lerp_(x.detach().mean(0), 0.5)
        return self.last((x - mean).tanh())


def in_a_buffer(model: Lazy, x: Tensor) -> Tensor:
    if model.mean is None:
        model.mean = torch.zeros(8)
    return model.mean


def in_an_attribute(model: Lazy, x: Tensor) -> Tensor:
    if model.attribute is None:
        model.attribute = x.new_full((8,), 0.3)
    return model.attribute


def as_a_part(model: Lazy, x: Tensor) -> Tensor:
    """What is written is a view of what is held."""
    if model.mean is None:
        model.mean = torch.ones(2, 8)
    return model.mean[1]


def in_a_table(model: Lazy, x: Tensor) -> Tensor:
    if "mean" not in model.table:
        model.table["mean"] = torch.zeros(8)
    return model.table["mean"]


def written_before_it_is_held(model: Lazy, x: Tensor) -> Tensor:
    if model.mean is None:
        mean = torch.zeros(8)
        mean.add_(x.detach().mean(0))
        model.mean = mean
    return model.mean.mul_(0.9)


def written_before_it_is_held_and_not_after(model: Lazy, x: Tensor) -> Tensor:
    if model.mean is None:
        mean = torch.zeros(8)
        model.mean = mean.add_(x.detach().mean(0))
    else:
        model.mean.add_(x.detach().mean(0))
    return model.mean.clone()


def held_for_a_while(model: Lazy, x: Tensor) -> Tensor:
    model.attribute = torch.zeros(8)
    model.attribute.add_(0.1)
    mean, model.attribute = model.attribute, None
    return mean


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def noise(i: int) -> tuple[Tensor]:
    return (torch.randn(6, 8, generator=torch.Generator().manual_seed(i)),)


def case(keep: Callable[[Lazy, Tensor], Tensor], **settings: Any) -> Case:
    return Case(lambda: Lazy(keep), square, noise, sgd, settings=settings)


@pytest.mark.parametrize("keep", [in_a_buffer, in_an_attribute, as_a_part, written_before_it_is_held, held_for_a_while])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"verify_every": 2}], ids=str)
def test_state_made_in_the_first_step_has_eagers_bits(
    keep: Callable[[Lazy, Tensor], Tensor], settings: dict[str, Any]
) -> None:
    step = train_both(case(keep, **settings), steps=6)
    model = step._model
    if keep is in_an_attribute:  # not among the buffers that are compared
        torch.manual_seed(0)
        eager = Lazy(keep)
        optimizer = sgd(eager)
        for i in range(6):
            for part in noise(i)[0].chunk(settings.get("accumulate", 1)):
                (square(eager, part) / settings.get("accumulate", 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.attribute, eager.attribute)


def test_state_that_is_made_anew_for_another_shape_has_eagers_bits() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("mean", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.mean is None or self.mean.shape != x.shape[1:]:
                self.mean = torch.zeros(x.shape[1:])
            self.mean.lerp_(x.mean(0), 0.5)
            return self.scale * x - self.mean

    def draw(i: int) -> tuple[Tensor]:
        width = 8 if i < 5 else 5
        return (torch.randn(6, width, generator=torch.Generator().manual_seed(i)),)

    # The plan for the first shape goes: the mean that it reads is nobody's any more.
    train_both(Case(Wide, square, draw, adamw), steps=10, plans=1)


@pytest.mark.parametrize("keep", [in_a_table, written_before_it_is_held_and_not_after])
def test_state_whose_beginning_is_not_known_is_refused_and_taken_back(keep: Callable[[Lazy, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Lazy(keep)
    before = [p.detach().clone() for p in model.parameters()]
    step = compile_step(model, square, sgd(model))
    with pytest.raises(CaptureError, match=r"makes a tensor of shape \(8,\) the first time it runs"):
        step(*noise(0))
    assert (model.mean, model.table) == (None, {})
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_state_whose_beginning_is_not_known_may_be_made_before_the_first_step() -> None:
    def build() -> Lazy:
        model = Lazy(in_a_table)
        model.table["mean"] = torch.zeros(8)
        return model

    train_both(replace(case(in_a_table), build=build), steps=5)


class RandomWhenFirstNeeded(nn.Module):
    """Puts another layer into itself the first time it runs, as BigBird does for short texts."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.register_buffer("mixing", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.mixing is None:
            self.mixing = torch.randn(8, 8)
        return self.last(self.dropout(x @ self.mixing))


def test_a_random_tensor_made_in_the_first_step_leaves_the_generator_where_eager_does() -> None:
    def train(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = RandomWhenFirstNeeded(0.0)
        optimizer = sgd(model)
        step = compile_step(model, square, optimizer) if compiled else None
        found = []
        for _ in range(4):
            batch = torch.randn(6, 8)  # drawn after what the step before it has drawn
            if step is None:
                optimizer.zero_grad()
                loss = square(model, batch)
                loss.backward()
                optimizer.step()
            else:
                loss = step(batch)
            found += [batch, loss.detach().clone()]
        return found

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_a_random_tensor_made_in_the_first_step_beside_dropout_is_made_by_a_plain_step() -> None:
    step = train_both(Case(lambda: RandomWhenFirstNeeded(0.5), square, noise, sgd), steps=5, plans=1)
    assert (step.counts.planned, step.counts.plain) == (4, 1)
    assert any("makes something of random numbers the first time" in note for note in step.report().notes)


def test_the_second_time_that_happens_the_step_is_refused_and_taken_back() -> None:
    torch.manual_seed(0)
    model = RandomWhenFirstNeeded(0.5)
    step = compile_step(model, square, sgd(model))
    for i in range(3):
        step(*noise(i))
    model.mixing = None
    state, before = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CaptureError, match="draws other random numbers the first time it runs"):
        step(*noise(0))
    assert model.mixing is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_random_tensor_beside_dropout_may_be_made_before_the_first_step() -> None:
    def build() -> RandomWhenFirstNeeded:
        model = RandomWhenFirstNeeded(0.5)
        model(torch.zeros(6, 8))
        return model

    train_both(Case(build, square, noise, sgd), steps=4, plans=1)


class SizedWhenFirstNeeded(nn.Module):
    """Keeps the least and the greatest that it has seen, as torch.ao's observers do: empty buffers at first."""

    def __init__(self, give_bytes_: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("least", torch.empty(0))
        self.register_buffer("greatest", torch.empty(0))
        self.give_bytes_ = give_bytes_
        self.sized = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.dropout(self.first(x))
        low, high = torch.aminmax(x.detach(), dim=0)
        if not self.least.numel():
            self.sized += 1
            self.give_bytes_(self.least, low)
            self.give_bytes_(self.greatest, high)
        self.least.copy_(torch.minimum(self.least, low))
        self.greatest.copy_(torch.maximum(self.greatest, high))
        return self.last((x - self.least) / (self.greatest - self.least + 1.0))


SIZES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "resize_": lambda t, seen: t.resize_(seen.shape).copy_(seen),
    "resize_as_": lambda t, seen: t.resize_as_(seen).copy_(seen),
    "out": lambda t, seen: torch.add(seen, 0, out=t),
}


@pytest.mark.parametrize("how", SIZES)
def test_buffer_that_gets_its_size_in_the_first_step_has_eagers_bits_after_a_plain_one(how: str) -> None:
    step = train_both(Case(lambda: SizedWhenFirstNeeded(SIZES[how]), square, noise, sgd), steps=6)
    assert (step.counts.planned, step.counts.plain) == (5, 1)
    assert step._model.sized == 1  # not once more for the recording that was given up


def test_the_second_time_a_buffer_gets_its_size_the_step_is_refused_and_taken_back() -> None:
    torch.manual_seed(0)
    model = SizedWhenFirstNeeded(SIZES["resize_"])
    step = compile_step(model, square, sgd(model))
    for i in range(3):
        step(*noise(i))
    model.least = torch.empty(0)
    state, before = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(
            CaptureError, match=r"resize_.* gives the buffer 'least', which is empty, 32 bytes.*run the"
        ):
            step(*noise(0))
        assert model.sized == 1
        assert model.least.shape == (0,)
        assert model.least.untyped_storage().nbytes() == 0
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_observers_of_quantization_get_their_sizes_in_a_plain_step() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")

    def build() -> nn.Module:
        model = nn.Sequential(quantization.QuantStub(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        prepared: nn.Module = quantization.prepare_qat(model)
        return prepared

    step = train_both(Case(build, square, noise, sgd), steps=8, plans=None)
    assert step.counts.plain == 1
