"""Functions that draw from numpy's global generator and give an array are called in each replay, where eager calls
them: SpecAugment's masks. Everything is eager's: the bits, and where numpy's generator stands afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from harness import Case, adamw, assert_same, sgd, state_of, train_both
from takeback import CaptureError
from takeback.compiler.capture import record_step
from takeback.compiler.capture.drawn import DRAWN
from takeback.compiler.capture.enclose import SUM_OF_INDEXED
from takeback.compiler.capture.randomness import NumpyGenerator
from takeback.compiler.run.cuda_graph import why_not_captured

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels"),
    pytest.mark.filterwarnings("ignore:takeback made"),
]

Array = np.ndarray[Any, Any]
ROWS, WIDTH = 6, 16


def mask_of(shape: tuple[int, int], part: float, lengths: Tensor | None = None) -> Array:
    """As speech models have it: how many are masked in each row is drawn as well."""
    mask = np.zeros(shape, dtype=bool)
    most = [shape[1]] * shape[0] if lengths is None else lengths.detach().tolist()
    for row, length in zip(mask, most, strict=True):
        row[np.random.choice(int(length), int(part * length + 2 * np.random.rand()), replace=False)] = True
    return mask


def halves(mask: Array) -> Array:
    """Draws, too, and is given what another one has drawn."""
    return mask & (np.random.rand(*mask.shape) < 0.5)


def outer_mask(shape: tuple[int, int]) -> Array:
    """Computes with what an inner one has drawn."""
    return ~mask_of(shape, 0.7)


class Masked(nn.Module):
    """Puts a row that it learns where `pick` says."""

    def __init__(self, pick: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Dropout(0.2)
        self.row, self.pick, self.part = nn.Parameter(torch.ones(WIDTH)), pick, 0.3

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        return self.last(self.pick(self, x, lengths).tanh()).mean(1)

    def drawn(self, shape: tuple[int, int]) -> Array:
        return np.random.rand(*shape) < self.part


def written_by_a_mask(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.tensor(mask_of(tuple(x.shape[:2]), 0.3), device=x.device, dtype=torch.bool)
    x[mask] = model.row.to(x.dtype)
    return x


def chosen_by_a_mask(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.as_tensor(mask_of(tuple(x.shape[:2]), part=0.3)).unsqueeze(-1), model.row, x)


def by_from_numpy(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.from_numpy(mask_of((ROWS, 5), 0.3)).unsqueeze(-1), model.row, x)


def by_lengths(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    """What it reads of a tensor is another one in each step, and no plan holds it."""
    return torch.where(torch.tensor(mask_of((ROWS, 5), 0.3, lengths)).unsqueeze(-1), model.row, x)


def one_after_the_other(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    mask = mask_of((ROWS, 5), 0.6)
    return torch.where(torch.tensor(halves(mask)).unsqueeze(-1), model.row, x) * torch.tensor(mask).unsqueeze(-1)


def one_inside_of_the_other(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.tensor(outer_mask((ROWS, 5))).unsqueeze(-1), model.row, x)


def as_numbers(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    """In numpy's own dtype, and another one."""
    noise = noise_of((ROWS, 5, WIDTH))
    return x + torch.tensor(noise, dtype=torch.float32) + torch.as_tensor(noise).float()  # the second shares its bytes


def noise_of(shape: tuple[int, ...]) -> Array:
    return np.random.standard_normal(shape[::-1]).T  # which is not contiguous, and leaves half a pair for the next draw


def mask_by_all_kinds(shape: list[int], part: dict[str, float], scale: Any, base: Array) -> Array:
    return (np.random.rand(*shape) < part["part"] * scale) & base


def of_arguments_of_all_kinds(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    mask = mask_by_all_kinds([ROWS, 5], {"part": 0.5}, scale=np.float64(0.9), base=np.ones((ROWS, 5), dtype=bool))
    assert isinstance(mask, np.ndarray)
    assert (mask.shape, mask.ndim, mask.size, mask.dtype) == ((ROWS, 5), 2, 5 * ROWS, np.dtype(bool))
    return torch.where(torch.tensor(mask).unsqueeze(-1), model.row, x)


PICKS = (
    written_by_a_mask,
    chosen_by_a_mask,
    by_from_numpy,
    by_lengths,
    one_after_the_other,
    one_inside_of_the_other,
    as_numbers,
    of_arguments_of_all_kinds,
)


def draw(i: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    np.random.seed(100 + i)
    g = torch.Generator().manual_seed(i)
    lengths = torch.randint(3, 6, (rows,), generator=g)
    return torch.randn(rows, 5, WIDTH, generator=g), lengths, torch.randint(4, (rows,), generator=g)


def loss_of(model: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, lengths), y)


def case(pick: Callable[..., Any], **settings: Any) -> Case:
    return Case(lambda: Masked(pick), loss_of, draw, settings=settings)


def ops_of(step: tb.CompiledStep, target: object) -> list[Any]:
    return [op for op in step._last.executor.program.ops if op.target is target]  # type: ignore[union-attr]


@pytest.mark.parametrize("pick", PICKS, ids=lambda f: f.__name__)
def test_training_is_eagers_from_one_plan(pick: Callable[..., Any]) -> None:
    step = train_both(case(pick), steps=8, memory="min", poison=True)
    assert ops_of(step, DRAWN)
    assert any("draws from numpy.random, and is called in each step" in note for note in step.report().notes)


def test_number_of_rows_that_a_mask_picks_is_held_by_no_plan() -> None:
    """Else each step would need a plan of its own."""
    step = train_both(case(written_by_a_mask), steps=8)
    assert len(ops_of(step, SUM_OF_INDEXED)) == 1


def test_rows_whose_number_the_users_own_backward_sees_are_held() -> None:
    step = train_both(
        Case(lambda: Masked(seen_in_a_backward), loss_of, lambda i: draw(0)), steps=5
    )  # the same numbers in each step: it could not be planned otherwise
    assert not ops_of(step, SUM_OF_INDEXED)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return torch.where(mask.unsqueeze(-1), row, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        picked = grad[ctx.saved_tensors[0]]
        return grad, picked.sum(0) / len(picked), None


def seen_in_a_backward(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return _Counted.apply(x, model.row, torch.tensor(mask_of(tuple(x.shape[:2]), 0.3)))


@pytest.mark.parametrize(
    "settings",
    [{"verify_every": 1}, {"accumulate": 2}, {"clip_norm": 0.1}, {"update": "early", "keep_grads": False}],
    ids=lambda s: next(iter(s)),
)
def test_options_are_as_ever(settings: dict[str, Any]) -> None:
    train_both(case(chosen_by_a_mask, **settings), steps=6)


def trained(compiled: bool, steps: int = 6, **settings: Any) -> tuple[dict[str, Tensor], bytes]:
    """Without a seed between the steps: numpy goes on where the last one left it."""
    torch.manual_seed(0)
    model = Masked(chosen_by_a_mask)
    optimizer = sgd(model)
    step = tb.compile_step(model, loss_of, optimizer, memory="keep", **settings) if compiled else None
    batches = [draw(i) for i in range(steps)]
    np.random.seed(7)
    for batch in batches:
        torch.manual_seed(1)
        if step is not None:
            step(*batch)
        else:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
    return state_of(model, optimizer), bytes(NumpyGenerator().get_state().numpy())


@pytest.mark.parametrize("settings", [{}, {"verify_every": 1}], ids=["", "verified"])
def test_numpy_goes_on_where_eager_leaves_it(settings: dict[str, Any]) -> None:
    ours, eagers = trained(True, **settings), trained(False)
    assert_same(ours[0], eagers[0])
    assert ours[1] == eagers[1]


def test_mode_fast_draws_the_same() -> None:
    ours, eagers = trained(True, mode="fast"), trained(False)
    assert ours[1] == eagers[1]
    for name, value in eagers[0].items():
        torch.testing.assert_close(ours[0][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("when", [1, 3], ids=["a first replay", "a later one"])
def test_step_that_fails_takes_the_draws_back(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Masked(chosen_by_a_mask)
    optimizer = adamw(model)
    step = tb.compile_step(model, loss_of, optimizer)
    for i in range(when):
        step(*draw(i))
    batch = draw(when)
    before, stood = {k: v.clone() for k, v in state_of(model, optimizer).items()}, NumpyGenerator().get_state()

    def fails(*args: Any, **kwargs: Any) -> Any:
        drawn = mask_of(*args, **kwargs)
        raise KeyboardInterrupt(str(drawn))

    call = step._maker.drawers.generator.calls[-1]
    object.__setattr__(call, "function", fails)
    with pytest.raises(KeyboardInterrupt):
        step(*batch)
    assert torch.equal(NumpyGenerator().get_state(), stood)
    assert_same(state_of(model, optimizer), before)
    object.__setattr__(call, "function", mask_of)
    twin = Masked(chosen_by_a_mask)
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    loss = step(*batch)
    NumpyGenerator().set_state(stood)
    torch.manual_seed(5)
    assert torch.equal(loss, loss_of(twin, *batch).detach())


def test_function_that_gives_another_dtype_later_is_refused_and_nothing_is_lost() -> None:
    model = Masked(as_numbers)
    optimizer = adamw(model)
    step = tb.compile_step(model, loss_of, optimizer)
    step(*draw(0))
    (call,) = {id(c): c for c in step._maker.drawers.generator.calls}.values()
    object.__setattr__(call, "function", lambda shape: np.random.rand(*shape).astype(np.float32))
    batch = draw(1)
    before, stood = {k: v.clone() for k, v in state_of(model, optimizer).items()}, NumpyGenerator().get_state()
    with pytest.raises(CaptureError, match="gave float32, and float64 when the step was recorded"):
        step(*batch)
    assert torch.equal(NumpyGenerator().get_state(), stood)
    assert_same(state_of(model, optimizer), before)


def other_mask(shape: tuple[int, int], part: float, lengths: Tensor | None = None) -> Array:
    return np.random.rand(*shape) < part


def test_function_that_is_replaced_between_steps_is_the_one_that_is_called() -> None:
    before = mask_of

    def between(i: int, *others: Any) -> None:
        globals()["mask_of"] = other_mask if i >= 3 else before

    try:
        train_both(Case(lambda: Masked(chosen_by_a_mask), loss_of, draw, between=between), steps=7, plans=2)
        assert mask_of is other_mask
    finally:
        globals()["mask_of"] = before


def test_function_that_gives_what_it_is_given_is_refused() -> None:
    model = Masked(lambda m, x, lengths: x * torch.tensor(given_back(np.ones((ROWS, 5), dtype=bool))).unsqueeze(-1))
    step = tb.compile_step(model, loss_of, adamw(model))
    with pytest.raises(CaptureError, match="gives what it is given"):
        step(*draw(0))


def given_back(base: Array) -> Array:
    np.random.rand()
    return base


def test_further_shapes_are_recorded_with_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Masked(chosen_by_a_mask)
    step = tb.compile_step(model, loss_of, adamw(model), max_plans=4)
    attempts: list[int] = []
    attempt = record_step._attempt

    def counted(*args: Any, **kwargs: Any) -> Any:
        attempts.append(len(kwargs.get("drawers", ())))
        return attempt(*args, **kwargs)

    monkeypatch.setattr(record_step, "_attempt", counted)
    step(*draw(0))
    assert attempts == [0, 0, 1], "once to see that it draws, once to see who, once to record"
    step(*draw(1, rows=4))
    assert attempts[3:] == [1]


def test_graph_is_not_captured_around_it() -> None:
    step = train_both(case(chosen_by_a_mask), steps=2)
    program = step._last.executor.program  # type: ignore[union-attr]
    assert "mask_of" in str(why_not_captured(program, program.ops))
    picks = ops_of(train_both(case(written_by_a_mask), steps=2), SUM_OF_INDEXED)
    assert "counts the rows" in str(why_not_captured(program, picks))


# -- what stays refused, and says so -----------------------------------------------------------------------------------


def decides(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    mask = mask_of((ROWS, 5), 0.3)
    return x if mask.sum() > 6 else -x


def computes(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.tensor(~mask_of((ROWS, 5), 0.3)).unsqueeze(-1), model.row, x)


def goes_through_a_list(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.tensor(mask_of((ROWS, 5), 0.3).tolist()).unsqueeze(-1), model.row, x)


def draws_by_itself(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return chosen_by_a_mask(model, x, lengths) * float(np.random.rand())


def in_a_function_of_its_own(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    def inner() -> Array:
        return mask_of((ROWS, 5), 0.3)[::-1]

    hidden = [inner]
    return torch.where(torch.tensor(hidden[0]().copy()).unsqueeze(-1), model.row, x)


def reads_what_it_is_not_given(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    global _aside
    _aside = x
    try:
        return torch.where(torch.tensor(mask_by_what_lies_about()).unsqueeze(-1), model.row, x)
    finally:
        _aside = None


_aside: Tensor | None = None


def mask_by_what_lies_about() -> Array:
    assert _aside is not None
    return mask_of((ROWS, 5), 0.3) & np.array((_aside.detach().mean(-1) > 0).tolist())


def draws_from_torch_too(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.tensor(mask_of_both()).unsqueeze(-1), model.row, x)


def mask_of_both() -> Array:
    return mask_of((ROWS, 5), 0.3) & np.array((torch.rand(ROWS, 5) < 0.5).tolist())


def of_a_method(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.tensor(model.drawn((ROWS, 5))).unsqueeze(-1), model.row, x)


_table: list[Array] = []


def from_a_table() -> Array:
    """Draws more the first time."""
    if not _table:
        _table.append(np.random.rand(50, 5) < 0.3)
    return _table[0][np.random.randint(50, size=ROWS)]


def fills_a_cache(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    _table.clear()
    return torch.where(torch.tensor(from_a_table()).unsqueeze(-1), model.row, x)


def counted_mask(count: dict[str, int]) -> Array:
    count["n"] += 1
    return mask_of((ROWS, 5), 0.1 * count["n"])


def counts_in_an_argument(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.tensor(counted_mask({"n": 1})).unsqueeze(-1), model.row, x)


def doubled_mask(lengths: Tensor) -> Array:
    lengths.mul_(2)
    return mask_of((ROWS, 5), 0.3)


def writes_a_tensor(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.tensor(doubled_mask(lengths.clone())).unsqueeze(-1), model.row, x)


def mask_of_object(model: Masked) -> Array:
    return mask_of((ROWS, 5), model.part)


def gives_an_object(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.tensor(mask_of_object(model)).unsqueeze(-1), model.row, x)


def is_written_where_bytes_are_shared(model: Masked, x: Tensor, lengths: Tensor) -> Tensor:
    mask = mask_of((ROWS, 5), 0.3)
    torch.from_numpy(mask)[0] = True
    return torch.where(torch.tensor(mask).unsqueeze(-1), model.row, x)


REFUSED = (
    (of_a_method, "Masked.drawn is in no module"),
    (fills_a_cache, "from_a_table uses _table, a list"),
    (counts_in_an_argument, "writes into what it is given"),
    (writes_a_tensor, "writes into what it is given"),
    (gives_an_object, "is given a Masked"),
    (is_written_where_bytes_are_shared, "after torch.from_numpy"),
    (decides, r"is used in Python \(\.sum\)"),
    (computes, r"is used in Python \(__invert__\)"),
    (goes_through_a_list, r"is used in Python \(\.tolist\)"),
    (draws_by_itself, "draws from numpy.random"),
    (in_a_function_of_its_own, r"is used in Python \(__getitem__\)"),
    (reads_what_it_is_not_given, r"is used in Python \(__and__\)"),
    (draws_from_torch_too, "draws from torch, too"),
)


@pytest.mark.parametrize(("pick", "said"), REFUSED, ids=[pick.__name__ for pick, _ in REFUSED])
def test_what_no_replay_could_repeat_is_refused_and_nothing_is_lost(pick: Callable[..., Any], said: str) -> None:
    torch.manual_seed(0)
    model = Masked(pick)
    optimizer = adamw(model)
    step = tb.compile_step(model, loss_of, optimizer)
    batch = draw(0)
    before, stood = {k: v.clone() for k, v in state_of(model, optimizer).items()}, NumpyGenerator().get_state()
    named = dict(globals())
    with pytest.raises(CaptureError, match=said) as refused:
        step(*batch)
    assert "numpy.random" in str(refused.value)
    assert torch.equal(NumpyGenerator().get_state(), stood), "numpy's generator has moved"
    assert_same(state_of(model, optimizer), before)
    assert named == globals(), "functions are not back in their places"
    assert torch.from_numpy(np.ones(2)).sum() == 2


@pytest.mark.filterwarnings("ignore:this step is not planned")
def test_refused_step_can_run_plainly() -> None:
    model = Masked(computes)
    step = tb.compile_step(model, loss_of, adamw(model), unplanned="eager")
    for i in range(3):
        step(*draw(i))
    assert step.counts.plain == 3


@pytest.mark.filterwarnings("ignore:this step is not planned")  # both draw from one generator, so it may be refused
def test_another_thread_draws_as_ever_while_a_step_is_recorded() -> None:
    drawn: list[object] = []
    started, stop = threading.Event(), threading.Event()

    def work() -> None:
        started.wait(10)
        while not stop.wait(0.001):
            drawn.append(mask_of((2, 3), 0.5))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        model = Masked(lambda m, x, lengths: slow_mask(m, x, started))
        step = tb.compile_step(model, loss_of, adamw(model), unplanned="eager")
        for i in range(3):
            step(*draw(i))
    finally:
        started.set()
        stop.set()
        thread.join()
    assert drawn
    assert all(type(each) is np.ndarray for each in drawn)


def slow_mask(model: Masked, x: Tensor, started: threading.Event) -> Tensor:
    started.set()
    mask = mask_of((ROWS, 5), 0.3)
    threading.Event().wait(0.01)
    return torch.where(torch.tensor(mask).unsqueeze(-1), model.row, x)
