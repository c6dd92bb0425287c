"""What people look at while they train: returned as aux it works, whatever holds it; kept by the step itself it is
refused, and the message says to return it as aux."""

from __future__ import annotations

import collections
import queue
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import assert_same, mlp, sgd, snapshot
from torch import Tensor, nn
from train_twice import batch

import takeback as tb
from harness import same_bits
from takeback.compiler.capture.aux_objects import open_objects
from takeback.compiler.capture.batch import results_of
from takeback.compiler.run.eager import Recipe
from takeback.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


# -- kept by the step ----------------------------------------------------------------------------------------------


def history_of_losses(kept: list[Any]) -> Callable[..., Any]:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y)
        kept.append(loss.detach())
        return loss

    return loss_fn


def history_of_numbers(kept: list[Any]) -> Callable[..., Any]:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y)
        kept.append(loss.item())
        return loss

    return loss_fn


class Average:
    """As torchmetrics' metrics are: sums and a count, kept in attributes."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, value: Tensor) -> None:
        self.total = self.total + value
        self.count += 1


def metric_object(kept: list[Any]) -> Callable[..., Any]:
    average = Average()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y)
        average.update(loss.detach())
        return loss

    return loss_fn


def last_output(kept: list[Any]) -> Callable[..., Any]:
    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        model.last = out
        return F.cross_entropy(out, y)

    return loss_fn


@pytest.mark.parametrize("make", [history_of_losses, history_of_numbers, metric_object, last_output])
def test_what_the_step_keeps_for_looking_at_is_refused_with_the_way_out(make: Callable[..., Any]) -> None:
    model, kept = mlp(), []
    optimizer = sgd(model)
    step = tb.compile_step(model, make(kept), optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match=r"[Rr]eturn (the tensor|it) as aux"):
        step(*batch(0))
    assert_same(snapshot(model, optimizer), before)
    assert kept == []


def detached(kept: Any, out: Tensor, loss: Tensor) -> Tensor:
    kept.put(out.detach())
    return out


def with_its_graph(kept: Any, out: Tensor, loss: Tensor) -> Tensor:
    kept.put(out)
    return out


def without_a_graph(kept: Any, out: Tensor, loss: Tensor) -> Tensor:
    found = out.argmax(1)
    kept.put(found)
    return found


def whose_graph_keeps_another(kept: Any, out: Tensor, loss: Tensor) -> Tensor:
    squares = out * out
    kept.put(squares.detach())
    return squares


def the_loss(kept: Any, out: Tensor, loss: Tensor) -> Tensor:
    kept.put(loss.detach())
    return out


@pytest.mark.parametrize(
    "keep", [detached, with_its_graph, without_a_graph, whose_graph_keeps_another, the_loss], ids=lambda f: f.__name__
)
def test_what_the_step_returns_and_keeps_as_well_is_refused(keep: Callable[..., Tensor]) -> None:
    """In a queue, which nobody can look into."""
    kept: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        loss = F.cross_entropy(out, y)
        return loss, keep(kept, out, loss)

    model = mlp()
    optimizer = sgd(model)
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match=r"outlives it: the result of .*test_metrics\.py:\d+ in "):
        tb.compile_step(model, loss_fn, optimizer)(*batch(0))
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("kind", ["MeanMetric", "MulticlassAccuracy"])
def test_torchmetrics_in_the_step_is_refused_and_works_outside(kind: str) -> None:
    metrics = pytest.importorskip("torchmetrics")
    inside = metrics.MeanMetric() if kind == "MeanMetric" else metrics.classification.MulticlassAccuracy(4)
    model = mlp()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = F.cross_entropy(out, y)
        inside.update(loss.detach()) if kind == "MeanMetric" else inside.update(out.detach(), y)
        return loss

    with pytest.raises(CaptureError, match=r"as aux"):
        tb.compile_step(model, loss_fn, sgd(model))(*batch(0))

    outside = metrics.classification.MulticlassAccuracy(4)
    step = tb.compile_step(model, lambda m, x, y: (F.cross_entropy(out := m(x), y), out), sgd(model))
    for i in range(4):
        outside.update(step(*batch(i))[1], batch(i)[1])
    assert 0 <= outside.compute() <= 1


def test_number_read_in_every_step_is_warned_of_by_its_line_and_then_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss = cross_entropy(model, x, y)
        return loss, {"loss": loss.item()}

    model = mlp()
    step = tb.compile_step(model, loss_fn, sgd(model), max_plans=6)
    where = r"test_metrics\.py:\d+ in loss_fn.*return the tensor as aux and call \.item\(\) outside"
    for i in range(3):
        loss, aux = step(*batch(i))
        assert aux["loss"] == loss.item()
    with pytest.warns(RuntimeWarning, match=where):
        step(*batch(3))
    for i in range(4, 6):
        step(*batch(i))
    with pytest.raises(CaptureError, match=where):
        step(*batch(6))


# -- returned as aux -----------------------------------------------------------------------------------------------


@dataclass
class Inner:
    out: Tensor
    nothing: Tensor | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: list[Tensor]
    name: str = "outer"


class Holder:
    """No container: attributes, one of them another such object."""

    def __init__(self, out: Tensor, inner: Any = None) -> None:
        self.out, self.inner, self.count = out, inner, 3


def nested(out: Tensor) -> Any:
    return Outer(Inner(out), [out.relu(), out.mean()])


def held(out: Tensor) -> Any:
    return {"object": Holder(out, Holder(out * 2)), "none": None}


def defaulting(out: Tensor) -> Any:
    found = collections.defaultdict(list)
    found["out"].append(out)
    return found


def tensors(aux: Any) -> list[Tensor]:
    if isinstance(aux, Outer):
        return [aux.inner.out, *aux.many]
    if "object" in aux:
        return [aux["object"].out, aux["object"].inner.out]
    return aux["out"]


@pytest.mark.parametrize("shape", [nested, held, defaulting])
def test_aux_of_any_shape_is_eagers_in_every_step(shape: Callable[[Tensor], Any]) -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        out = model(x)
        return F.cross_entropy(out, y), shape(out)

    ours, eager = mlp(), mlp()
    step = tb.compile_step(ours, loss_fn, sgd(ours), memory="keep")
    optimizer = sgd(eager)
    seen = []
    for i in range(4):
        aux = step(*batch(i))[1]
        optimizer.zero_grad()
        loss, expected = loss_fn(eager, *batch(i))
        loss.backward()
        optimizer.step()
        assert type(aux) is type(expected)
        seen += zip(tensors(aux), tensors(expected), strict=True)
    assert step._replays == 3
    for mine, theirs in seen:  # at the end: none was overwritten by a later step
        assert same_bits(mine, theirs)
        assert not mine.requires_grad
    if shape is nested:
        assert (aux.inner.nothing, aux.name) == (None, "outer")
    if shape is held:
        assert (aux["none"], aux["object"].count) == (None, 3)
    if shape is defaulting:
        assert aux["more"] == []


def ratio(out: Tensor, loss: Tensor) -> Any:
    return {"each": loss / (out > 0).sum(), "root": loss.sqrt(), "both": loss * out.mean(), "loss": loss}


def probabilities(out: Tensor, loss: Tensor) -> Any:
    return out.softmax(0), out.norm(), (out * out).max(1)


def in_objects(out: Tensor, loss: Tensor) -> Any:
    return {"object": Holder(out.exp(), Holder(out * out)), "outer": Outer(Inner(out.softmax(1)), [out.log_softmax(1)])}


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shape", [ratio, probabilities, in_objects], ids=lambda f: f.__name__)
@pytest.mark.usefixtures("eagers_kernels", "whole_head")
def test_aux_with_a_graph_that_keeps_tensors_of_the_step_is_eagers(
    shape: Callable[[Tensor, Tensor], Any], accumulate: int, mode: str
) -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        out = model(x)
        loss = F.cross_entropy(out, y)
        return loss, shape(out, loss)

    ours, eager = mlp(), mlp()
    step = tb.compile_step(ours, loss_fn, sgd(ours), accumulate=accumulate, mode=mode, memory="keep")
    optimizer = sgd(eager)
    for i in range(4):
        _, aux = step(*batch(i))
        optimizer.zero_grad()
        gave = Recipe(eager, loss_fn, optimizer, accumulate=accumulate).forward_backward_((batch(i), {}))
        optimizer.step()
        mine, theirs = (results_of(open_objects(a)) for a in (aux, gave.aux))
        assert len(mine) == len(theirs)
        assert all(map(same_bits, mine, theirs)), i
        assert not any(t.requires_grad for t in mine)
    assert step._replays == 3


def test_aux_that_a_hook_fills_in_the_backward_has_the_gradient() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found: dict[str, Tensor] = {}
        out = model(x)
        out.register_hook(lambda grad: found.update(grad=grad))
        found["out"] = out.detach()
        return F.cross_entropy(out, y), found

    ours, eager = mlp(), mlp()
    step, optimizer = tb.compile_step(ours, loss_fn, sgd(ours), memory="keep"), sgd(eager)
    for i in range(4):
        aux = step(*batch(i))[1]
        optimizer.zero_grad()
        loss, expected = loss_fn(eager, *batch(i))
        loss.backward()
        optimizer.step()
        assert list(aux) == list(expected) == ["out", "grad"]
        assert all(map(same_bits, aux.values(), expected.values()))
    assert step._replays == 3


def test_aux_whose_own_gradient_was_asked_for_is_refused() -> None:
    """It would have none."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        out.retain_grad()
        return F.cross_entropy(out, y), out

    model = mlp()
    with pytest.raises(CaptureError, match="a tensor made in the step outlives it"):
        tb.compile_step(model, loss_fn, sgd(model))(*batch(0))


def test_output_of_a_transformers_model_is_aux_with_its_cache_and_its_nones() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()  # no dropout: the output can be computed once more

    def loss_fn(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
        out = model(input_ids=ids, labels=ids)
        return out.loss, out

    step = tb.compile_step(model, loss_fn, sgd(model), memory="keep")
    for i in range(4):
        ids = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(i))
        with torch.no_grad():
            expected = model(input_ids=ids, labels=ids)
        loss, out = step(ids)
        assert type(out) is type(expected)
        assert list(out) == list(expected)
        assert out.hidden_states is None
        assert same_bits(out.loss, loss)
        assert same_bits(out.logits, expected.logits)
        for mine, theirs in zip(out.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert same_bits(mine.keys, theirs.keys)
    assert step._replays == 3


def test_steady_step_with_aux_warns_of_nothing() -> None:
    model = mlp()
    step = tb.compile_step(model, lambda m, x, y: (F.cross_entropy(out := m(x), y), out.argmax(1)), sgd(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(5):
            step(*batch(i))
