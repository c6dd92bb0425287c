"""What a batch holds besides tensors: what nobody reads costs no plan, floats are read anew, and where something keeps
changing plans are earned. What decides something is never missed."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import logging
import math
import math as m
import operator
import sys
import types
from collections.abc import Callable
from math import floor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.capture.given import WatchedDict
from takeback.compiler.run.earnings import KEEPS_CHANGING, USES, Earnings

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search"),
    pytest.mark.filterwarnings("ignore:takeback made:RuntimeWarning"),
]
FROM = 5  #: the step from which what is given decides otherwise: after two plans, and replays of them


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def assert_right(
    loss_fn: Callable[..., Any],
    batch: Callable[[int], Any],
    *,
    steps: int = 10,
    poke: Callable[[nn.Module, int], None] = lambda model, step: None,
    **options: Any,
) -> Any:
    """The compiled step, whose losses and parameters were eager's after every step."""
    model, twin = mlp(), mlp()
    optimizer, theirs = (torch.optim.AdamW(each.parameters(), 0.05) for each in (model, twin))
    step = tb.compile_step(model, loss_fn, optimizer, **{"memory": "keep", **options})
    for i in range(steps):
        for each in (model, twin):
            poke(each, i)
        args, other = (made if type(made) is tuple else (made,) for made in (batch(i), batch(i)))
        theirs.zero_grad()
        expected = loss_fn(twin, *other)
        loss = expected[0] if isinstance(expected, tuple) else expected
        loss.backward()
        theirs.step()
        got = step(*args)
        assert torch.equal(got[0] if isinstance(got, tuple) else got, loss.detach()), i
        assert all(map(torch.equal, model.parameters(), twin.parameters())), i
    return step


def x(i: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(i))


def base(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@dataclasses.dataclass
class Item:
    x: Tensor
    id: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    id: Any


class Pair(NamedTuple):
    x: Tensor
    weight: float


def recordings(step: Any) -> int:
    return int(step._plans.made)


# -- what nobody reads -------------------------------------------------------------------------------------------------

UNREAD: dict[str, tuple[Callable[..., Tensor], Callable[[int], Any]]] = {
    "int": (lambda m, b: base(m, b["x"]), lambda i: {"x": x(i), "id": i}),
    "texts": (lambda m, b: base(m, b["x"]), lambda i: {"x": x(i), "id": [f"{i}.png"] * (1 + i % 2)}),
    "float": (lambda m, b: base(m, b["x"]), lambda i: {"x": x(i), "id": 0.5 * i}),
    "numpy": (lambda m, b: base(m, b["x"]), lambda i: {"x": x(i), "id": np.int64(i)}),
    "nested": (lambda m, b: base(m, b[0]["in"]["x"]), lambda i: [{"in": {"x": x(i), "id": i}, "name": str(i)}]),
    "get": (lambda m, b: base(m, b.get("x")), lambda i: {"x": x(i), "id": i}),
    "user dict": (lambda m, b: base(m, b["x"]), lambda i: collections.UserDict({"x": x(i), "id": i})),
    "dataclass": (lambda m, b: base(m, b.x), lambda i: Item(x(i), str(i))),
    "slots": (lambda m, b: base(m, b.x), lambda i: Slotted(x(i), (i, str(i)))),
    "in a dataclass": (lambda m, b: base(m, b.x["x"]), lambda i: Item({"x": x(i), "name": str(i)}, 0.5)),  # type: ignore[arg-type]
    "parameter": (lambda m, b, name: base(m, b), lambda i: (x(i), str(i))),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_the_step_does_not_read_needs_one_more_recording_and_no_plan(case: str) -> None:
    step = assert_right(*UNREAD[case])
    assert (len(step._plans), recordings(step), step.counts.plain) == (1, 2, 0)


def halved(batch: Any) -> Tensor:
    """As code does that walks through containers of certain types, such as a pytree's."""
    return (batch["x"] * 0.5 if type(batch) is dict else batch["x"]) + 0


@pytest.mark.parametrize("drops", [False, True])
def test_code_that_asks_for_the_type_of_a_dict_finds_the_users(drops: bool) -> None:
    """The recording with what stands for it is another step: it is taken back, random numbers and buffers too."""

    def loss(m: nn.Module, b: Any) -> Tensor:
        return m(torch.dropout(halved(b), 0.5, drops)).square().mean()

    def batch(i: int) -> dict[str, Any]:
        torch.manual_seed(100 + i)  # of the twin's step and of ours alike
        return {"x": x(i), "id": i}

    model, twin = (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizer, theirs = (torch.optim.AdamW(each.parameters(), 0.05) for each in (model, twin))
    step = tb.compile_step(model, loss, optimizer, memory="keep")
    for i in range(8):
        given = batch(i)
        step(given)
        theirs.zero_grad()
        loss(twin, batch(i)).backward()
        theirs.step()
        for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(a, b), i


class AttributeDict:
    def __init__(self, table: dict[str, Any]) -> None:
        self.__dict__ = table


def matched(b: Any) -> int:
    match b:
        case {"id": found}:
            return int(found)
    raise AssertionError


def keywords(**given: Any) -> int:
    return int(given["id"])


class Lookup(str):
    __slots__ = ()


class Held:
    batch: Any = None


get_of_dict = dict.get

READS_OF_A_DICT: dict[str, Callable[[Any], int]] = {
    "a dict's own get": lambda b: dict.get(b, "id"),  # type: ignore[return-value]
    "a dict's own values": lambda b: list(dict.values(b))[1],
    "a dict's own get by another name": lambda b: get_of_dict(b, "id"),  # type: ignore[return-value]
    "[]": lambda b: b["id"],
    "another text that equals": lambda b: b[Lookup("id")],
    "get": lambda b: b.get("id", 0),
    "items": lambda b: next(v for k, v in b.items() if k != "x"),
    "values": lambda b: list(b.values())[1],
    "keywords": lambda b: keywords(**b),
    "dict()": lambda b: dict(b)["id"],
    "{**b}": lambda b: {**b}["id"],
    "update": lambda b: (d := {}, d.update(b), d["id"])[2],
    "copy": lambda b: b.copy()["id"],
    "copy.copy": lambda b: copy.copy(b)["id"],
    "deepcopy": lambda b: copy.deepcopy({k: v for k, v in b.items() if k != "x"})["id"],
    "|": lambda b: (b | {"y": 1})["id"],
    "| of another": lambda b: ({"y": 1} | b)["id"],
    "itemgetter": lambda b: operator.itemgetter("id")(b),
    "map": lambda b: list(map(b.get, b))[1],
    "match": matched,
    "format": lambda b: int("{id}".format(**b)),
    "%": lambda b: int("%(id)s" % b),  # noqa: UP031
    "format_map": lambda b: int("{id}".format_map(b)),
    "repr": lambda b: int(repr(b).rpartition(": ")[2].rstrip("}")),
    "namespace": lambda b: types.SimpleNamespace(**b).id,
    "__dict__": lambda b: AttributeDict(b).id,
    "chain map": lambda b: collections.ChainMap({}, b)["id"],
    "partial": lambda b: functools.partial(keywords, **b)(),
    "equal": lambda b: sum(n for n in range(20) if {"id": b["id"]} == {"id": n}),
}


@pytest.mark.parametrize("way", READS_OF_A_DICT)
def test_an_entry_that_decides_later_is_never_missed(way: str) -> None:
    read = READS_OF_A_DICT[way]
    step = assert_right(
        lambda m, b: base(m, b["x"]) * (2 if read(b) >= FROM else 1), lambda i: {"x": x(i), "id": i}, steps=8
    )
    assert recordings(step) > 2


LOOKS_AT_A_FLOAT: dict[str, Callable[[float], Any]] = {
    "a text": lambda weight: float("%.0f" % weight),  # noqa: UP031  what it is about
    "its type": lambda weight: 2 if type(weight) in (float, np.float64) else weight,
    "a tensor of its dtype": lambda weight: torch.tensor(weight),
    "rounded": lambda weight: 1 + round(weight),
    "compared": lambda weight: 2 if 0.3 < weight < 0.8 else 1,
}


@pytest.mark.parametrize("kind", [float, np.float64])
@pytest.mark.parametrize("way", LOOKS_AT_A_FLOAT)
def test_what_a_step_makes_of_a_float_besides_computing_with_it(way: str, kind: type[float]) -> None:
    look = LOOKS_AT_A_FLOAT[way]
    weights = (0.1, 0.2, 0.3, 0.4, 0.45, 0.7, 0.8, 0.3, 1.2)
    assert_right(lambda m, x, weight: base(m, x) * look(weight), lambda i: (x(i), kind(weights[i])), steps=9)


def test_code_that_asks_for_a_devices_type_does_not_look_at_floats() -> None:
    def loss(m: nn.Module, x: Tensor, weight: float) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return base(m, x) * weight

    step = assert_right(loss, lambda i: (x(i), 0.25 + 0.1 * i))
    assert (len(step._plans), recordings(step)) == (1, 2)


def of_the_caller() -> int:
    return int(sys._getframe(1).f_locals["number"])


def test_a_parameter_that_another_function_looks_up_in_the_frame_is_read() -> None:
    def loss(m: nn.Module, x: Tensor, number: int) -> Tensor:
        return base(m, x) * (2 if of_the_caller() >= FROM else 1)

    assert_right(loss, lambda i: (x(i), i), steps=8)


READS_OF_AN_OBJECT: dict[str, Callable[[Any], int]] = {
    "past what it makes of attributes": lambda b: object.__getattribute__(b, "id"),
    "attribute": lambda b: b.id,
    "getattr": lambda b: getattr(b, "".join("id")),
    "attrgetter": lambda b: operator.attrgetter("id")(b),
    "vars": lambda b: vars(b)["id"],
    "fields": lambda b: [getattr(b, f.name) for f in dataclasses.fields(b)][1],
    "replace": lambda b: dataclasses.replace(b, x=0).id,
    "copy": lambda b: vars(copy.copy(b))["id"],
    "reduce": lambda b: b.__reduce_ex__(2)[2]["id"],
    "repr": lambda b: int(repr(b).rpartition("=")[2].rstrip(")")),
    "equal": lambda b: next(n for n in range(20) if Item(b.x, n) == b),
    "match": lambda b: next(n for n in range(20) if _matches(b, n)),
}


def _matches(b: Any, n: int) -> bool:
    match b:
        case Item(id=found):
            return bool(found == n)
    return False


@pytest.mark.parametrize("way", READS_OF_AN_OBJECT)
def test_a_field_that_decides_later_is_never_missed(way: str) -> None:
    read = READS_OF_AN_OBJECT[way]
    step = assert_right(lambda m, b: base(m, b.x) * (2 if read(b) >= FROM else 1), lambda i: Item(x(i), i), steps=8)
    assert recordings(step) > 2


def by_locals(model: nn.Module, b: Tensor, n: int) -> Tensor:
    return base(model, b) * (2 if locals()["n"] >= FROM else 1)


def by_closure(model: nn.Module, b: Tensor, n: int) -> Tensor:
    def inner() -> int:
        return 2 if n >= FROM else 1

    return base(model, b) * inner()


def by_star(model: nn.Module, *rest: Any) -> Tensor:
    return base(model, rest[0]) * (2 if rest[1] >= FROM else 1)


def by_eval(model: nn.Module, b: Tensor, n: int) -> Tensor:
    return base(model, b) * (2 if eval("n") >= FROM else 1)


@pytest.mark.parametrize("loss_fn", [by_locals, by_closure, by_star, by_eval])
def test_an_argument_that_decides_later_is_never_missed(loss_fn: Callable[..., Tensor]) -> None:
    step = assert_right(loss_fn, lambda i: (x(i), i), steps=8)
    assert recordings(step) > 2


def test_an_entry_that_another_entry_makes_matter_is_never_missed() -> None:
    """`mode` is read in each step, `id` in one mode alone."""
    modes = (0, 0, 0, 1, 1, 1, 0, 1, 0, 1)

    def loss_fn(model: nn.Module, b: dict[str, Any]) -> Tensor:
        return base(model, b["x"]) * (b["id"] if b["mode"] else 1)

    assert_right(loss_fn, lambda i: {"x": x(i), "mode": modes[i], "id": i})


def test_an_entry_that_matters_for_long_batches_alone_is_never_missed() -> None:
    def loss_fn(model: nn.Module, b: dict[str, Any]) -> Tensor:
        return base(model, b["x"]) * (b["id"] if len(b["x"]) > 3 else 1)

    lengths = (3, 3, 3, 4, 4, 3, 4, 4, 3, 4)
    assert_right(loss_fn, lambda i: {"x": x(i)[:1].repeat(lengths[i], 1), "id": i})


@pytest.mark.parametrize("kind", [dict, collections.UserDict, Item], ids=["dict", "user dict", "dataclass"])
def test_an_entry_that_the_step_returns_is_that_of_each_step(kind: Any) -> None:
    model = mlp()

    def loss_fn(m: nn.Module, b: Any) -> tuple[Tensor, Any]:
        return base(m, b.x if kind is Item else b["x"]), b

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), memory="keep")
    for i in range(8):
        aux = step(Item(x(i), i) if kind is Item else kind({"x": x(i), "id": i}))[1]
        assert (type(aux), aux.id if kind is Item else aux["id"]) == (kind, i)


def test_a_batch_that_is_kept_is_a_dict_like_any_other() -> None:
    """In an object that takeback does not look into."""
    log = logging.getLogger(__name__)

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        log.batches = [*getattr(log, "batches", ()), b]  # type: ignore[attr-defined]
        return base(m, b["x"])

    model = mlp()
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), memory="keep")
    for i in range(3):
        step({"x": x(i), "id": i})
    for kept in log.batches:  # type: ignore[attr-defined]
        kept["id"] = 7
        assert kept.pop("id") == 7


# -- floats ------------------------------------------------------------------------------------------------------------

FLOATS: dict[str, tuple[Callable[..., Tensor], Callable[[int], Any]]] = {
    "argument": (lambda m, b, lam: base(m, lam * b) * (1 - lam), lambda i: (x(i), 0.1 * i)),
    "entry": (lambda m, b: base(m, b["x"]) * b["lam"], lambda i: {"x": x(i), "lam": 0.1 * i}),
    "in a list": (lambda m, b: base(m, b[0]) * b[1] + b[2] * m(b[0]).mean(), lambda i: [x(i), 0.1 * i, 0.3 * i]),
    "namedtuple": (lambda m, b: base(m, b.x) * b.weight, lambda i: Pair(x(i), 0.1 * i)),
    "dataclass": (lambda m, b: base(m, b.x) * b.id, lambda i: Item(x(i), 0.1 * i)),
    "numpy": (lambda m, b, lam: base(m, lam * b) * (1 - lam), lambda i: (x(i), np.float64(0.1 * i))),
    "beside": (
        lambda m, b, lam: base(m, b["x"]) * lam,
        lambda i: ({"x": x(i), "name": f"{i}.png"}, 0.1 * i),
    ),
}


@pytest.mark.parametrize("case", FLOATS)
@pytest.mark.parametrize("memory", ["keep", "min"])
def test_a_float_of_the_batch_is_read_anew_in_each_step(case: str, memory: str) -> None:
    step = assert_right(*FLOATS[case], memory=memory)
    assert (len(step._plans), recordings(step), step.counts.plain) == (1, 2, 0)


def test_a_step_that_takes_entries_out_of_its_batch_has_its_numbers_followed() -> None:
    """A number of the model, and a float beside the dict: neither has the dict watched, whose entries go."""

    def loss_fn(m: nn.Module, b: dict[str, Any], lam: float) -> Tensor:
        y = b.pop("y", 0.0)
        return (m(b["x"]) - y).square().mean() * m.beta * lam

    step = assert_right(
        loss_fn,
        lambda i: ({"x": x(i)}, 0.1 * i),
        poke=lambda model, i: setattr(model, "beta", 0.5 * i),
    )
    assert (len(step._plans), recordings(step)) == (1, 2)


def helper(number: float) -> int:
    return math.floor(number)


def sign(number: float) -> float:
    return m.copysign(1.0, number)


def sign_of(container: Any) -> float:
    """Of the last member, whatever holds it."""
    held = container() if callable(container) else container
    return m.copysign(1.0, list(held.values() if isinstance(held, dict) else held)[-1])


DECIDERS: dict[str, Callable[[float], int]] = {
    "if": lambda v: 2 if v > 0.45 else 1,
    "math under another name": lambda v: 2 if m.copysign(1.0, v - 0.45) > 0 else 1,
    "a function of math": lambda v: 1 + floor(v + 0.55),
    "in another function": lambda v: 1 + helper(v + 0.55),
    "numpy": lambda v: int(1 + np.floor(v + 0.55)),
    "a sign in another function": lambda v: 2 if sign(v - 0.45) > 0 else 1,
    "in a list": lambda v: 2 if sign_of([v - 0.45]) > 0 else 1,
    "in a dict": lambda v: 2 if sign_of({"v": v - 0.45}) > 0 else 1,
    "in an iterator": lambda v: 2 if sign_of(iter((v - 0.45,))) > 0 else 1,
    "in a function": lambda v: 2 if sign_of(lambda: [v - 0.45]) > 0 else 1,
    "in an object": lambda v: 2 if sign_of(functools.partial(list, [v - 0.45])) > 0 else 1,
    "round": lambda v: round(v + 0.05) + 1,
    "format": lambda v: 1 + int(float(f"{v:.1f}") > 0.45),
    "max": lambda v: int(max(v, 0.45) > 0.45) + 1,
    "list": lambda v: 1 + sorted([0.45, v]).index(0.45) ^ 1,
}


@pytest.mark.parametrize("way", DECIDERS)
@pytest.mark.parametrize("kind", [float, np.float64])
def test_a_float_of_the_batch_that_decides_later_is_never_missed(way: str, kind: type) -> None:
    decide = DECIDERS[way]
    step = assert_right(lambda m, b, lam: base(m, b) * lam * decide(lam), lambda i: (x(i), kind(0.1 * i)), steps=8)
    assert recordings(step) > 2


@pytest.mark.parametrize("way", DECIDERS)
def test_a_number_of_numpys_that_decides_later_is_never_missed(way: str) -> None:
    decide = DECIDERS[way]
    step = assert_right(
        lambda m, b: base(m, b) * m.lam * decide(m.lam),
        x,
        steps=8,
        poke=lambda model, i: setattr(model, "lam", np.float64(0.1 * i)),
    )
    assert recordings(step) > 2


def test_a_number_of_numpys_is_read_anew_in_each_step() -> None:
    step = assert_right(
        lambda m, b: base(m, m.lam * b) * (1 - m.lam),
        x,
        poke=lambda model, i: setattr(model, "lam", np.linspace(0, 1, 20)[i]),
    )
    assert (len(step._plans), recordings(step)) == (1, 2)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_a_number_of_numpys_may_divide_by_zero() -> None:
    assert_right(
        lambda m, b: base(m, b) * (1 / (1 + 1 / m.lam)),
        x,
        steps=8,
        poke=lambda model, i: setattr(model, "lam", np.float64((1.0, 0.5, 0.25, 0.1, 0.0, 0.2, 0.0, 1.0)[i])),
    )


def test_a_number_of_numpys_that_is_returned_stays_numpys() -> None:
    model = mlp()

    def loss_fn(m: nn.Module, b: Tensor, lam: Any) -> tuple[Tensor, Any]:
        return base(m, b) * lam, 1 - lam

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), memory="keep")
    for i in range(6):
        aux = step(x(i), np.float64(0.1 * i))[1]
        assert (type(aux), aux) == (np.float64, 1 - np.float64(0.1 * i))


def test_a_float_of_the_batch_goes_with_microbatches() -> None:
    step = assert_right(
        lambda m, b, lam: base(m, b) * lam, lambda i: (x(i), 0.1 * i), memory="min", poke=lambda model, i: None
    )
    assert recordings(step) == 2
    models = mlp(), mlp()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
    step = tb.compile_step(models[0], lambda m, b: base(m, b["x"]) * b["lam"], optimizers[0], memory="keep")
    for i in range(6):
        optimizers[1].zero_grad()
        for part, update in ((0, False), (1, True)):
            b = {"x": x(2 * i + part), "lam": 0.1 * i + part}
            (base(models[1], b["x"]) * b["lam"]).backward()
            step(b, update=update)
        optimizers[1].step()
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters())), i
    assert recordings(step) == 2


def test_a_float_of_the_batch_goes_with_accumulation() -> None:
    model, twin = mlp(), mlp()
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin))

    def loss_fn(m: nn.Module, b: dict[str, Any]) -> Tensor:
        return base(m, b["x"]) * b["lam"]

    step = tb.compile_step(model, loss_fn, ours, accumulate=2, memory="keep")
    for i in range(6):
        b = {"x": torch.cat([x(i), x(i + 1)]), "lam": 0.1 * i, "id": 7}
        theirs.zero_grad()
        for part in (x(i), x(i + 1)):
            (loss_fn(twin, {**b, "x": part}) / 2).backward()
        theirs.step()
        step(b)
        assert all(map(torch.equal, model.parameters(), twin.parameters())), i
    assert recordings(step) == 2


# -- what keeps changing -----------------------------------------------------------------------------------------------


def structure(i: int) -> Any:
    return [x(i)] * (1 + i)


def nothing(model: nn.Module, i: int) -> None:
    pass


def level(model: nn.Module, i: int) -> None:
    model.level = i  # type: ignore[assignment]


CHANGING: dict[str, tuple[Callable[..., Tensor], Callable[[int], Any], Callable[[nn.Module, int], None], str]] = {
    "a text": (
        lambda m, b, name: base(m, b) * len(name),
        lambda i: (x(i), "a" * (i + 1)),
        nothing,
        "argument name: 'aaa' is",
    ),
    "an entry": (
        lambda m, b: base(m, b["x"]) * b["n"],
        lambda i: {"x": x(i), "n": i},
        nothing,
        r"argument b\['n'\]: 2 is now 3",
    ),
    "a float": (
        lambda m, b, lam: base(m, b.abs().pow(lam)),
        lambda i: (x(i), 1.5 + i),
        nothing,
        "argument lam: 3.5 is now 4.5",
    ),
    "the form": (lambda m, b: sum(base(m, t) for t in b), structure, nothing, "the argument b has 3 entries, then 4"),  # type: ignore[misc, arg-type, return-value]
    "an attribute": (lambda m, b: base(m, b) * m.level, x, level, "model.level: 2 is now 3"),
}


@pytest.mark.parametrize("case", CHANGING)
@pytest.mark.parametrize("memory", ["keep", "min"])
@pytest.mark.filterwarnings("default:takeback made:RuntimeWarning")
def test_what_keeps_changing_has_four_plans_and_the_rest_is_earned(
    case: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_fn, batch, poke, told = CHANGING[case]
    monkeypatch.setattr(Earnings, "spent_", lambda self, *_, **__: setattr(self, "plans_s", 1.0))
    with pytest.warns(RuntimeWarning, match=rf"4 plans in a row: .*{told}.*run plainly in eager\. ") as caught:
        step = assert_right(loss_fn, batch, poke=poke, steps=9, memory=memory)
    assert len(caught) == 1
    assert recordings(step) == 4
    assert step.counts.reasons == {KEEPS_CHANGING: 5}


def test_what_keeps_changing_is_planned_again_when_steps_have_earned_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Earnings, "spent_", lambda *_, **__: None)
    model = mlp()
    step = tb.compile_step(model, lambda m, b, n: base(m, b) * n, torch.optim.SGD(model.parameters(), 0.1))
    step._earnings.plans_s = 1.0
    for i in range(8):
        step(x(i), i)
    assert recordings(step) == 4
    step._earnings.steps_s = 20.0
    for i in range(3):
        step(x(i), 7)
    assert (recordings(step), step._replays) == (5, 2)


def test_plans_that_are_used_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are unfrozen one after the other, and domains that take turns."""
    monkeypatch.setattr(Earnings, "spent_", lambda self, *_, **__: setattr(self, "plans_s", 1.0))

    def thaw(model: nn.Module, i: int) -> None:
        for stage, p in enumerate(model.parameters()):
            p.requires_grad_(stage <= 0 or stage <= i // (USES + 1) or stage == 3)

    assert assert_right(base, x, poke=thaw, steps=3 * (USES + 1)).counts.plain == 0
    step = assert_right(lambda m, b, n: base(m, b) * n, lambda i: (x(i), i % 4), steps=12)
    assert (recordings(step), step.counts.plain) == (4, 0)


def test_plans_for_values_that_come_once_more_are_earned_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Earnings, "spent_", lambda self, *_, **__: setattr(self, "plans_s", 1.0))
    step = assert_right(lambda m, b, n: base(m, b) * n, lambda i: (x(i), i // 2), steps=12)
    assert recordings(step) == 4


def test_ranks_and_whoever_debugs_get_all_plans() -> None:
    step = assert_right(lambda m, b, n: base(m, b) * n, lambda i: (x(i), i), steps=6, verify_every=2)
    assert (recordings(step), step.counts.plain) == (6, 0)


def test_both_kinds_of_iteration_are_there() -> None:
    """What makes C ask a watched dict for its entries one by one is that it has an `__iter__` of its own."""
    read: set[str] = set()
    watched = WatchedDict({"a": 1, "b": 2}, {"a": "[a]", "b": "[b]"}, read)
    assert list(itertools.chain(watched)) == ["a", "b"]
    assert not read
    assert dict(watched) == {"a": 1, "b": 2}
    assert read == {"[a]", "[b]"}
