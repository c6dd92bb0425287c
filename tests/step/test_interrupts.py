"""A step is done or it is not: an exception or Ctrl-C anywhere leaves the state of a complete step, never half of one.

Threads are here too: steps off the main thread, several at once, and other threads' tensors meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import gc
import importlib
import io
import pickle
import random
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import Setup, Snapshot, assert_right, assert_same, eager_step, mlp, sgd, snapshot, xy
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import takeback as tb
from takeback.compiler.capture import eager_products, leaks, one_hot, reads
from takeback.compiler.capture.reads import Reads
from takeback.compiler.capture.recorder import Recorder
from takeback.compiler.program import Phase
from takeback.compiler.run import allocator
from takeback.engine import WeakStorage
from takeback.errors import CaptureError
from takeback.grads.half_way import Unfinished

pytestmark = pytest.mark.usefixtures("one_thread", "short_search", "ctrl_c_raises")


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Where SIGINT is ignored (a background job, a worker of pytest-xdist), Ctrl-C is made to raise, as in a shell. And
    what hypothesis has the garbage collector call is taken away: there Python drops what Ctrl-C raises."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    called = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = called
    signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Pair:
    """A compiled step and its eager twin; `advance` takes one step of each and compares everything."""

    def __init__(
        self,
        loss_fn: Callable[..., Any] = cross_entropy,
        optimizer: Callable[..., Any] = adamw,
        **settings: Any,
    ) -> None:
        self.model = normed()
        self.optimizer = optimizer(self.model)
        other, _ = copy.deepcopy((self.model, 0))
        self.twin = Setup(other, cross_entropy, optimizer(other), xy)
        self.step = tb.compile_step(self.model, loss_fn, self.optimizer, **settings)
        self.taken = 0

    def state(self) -> Snapshot:
        return snapshot(self.model, self.optimizer)

    def eager(self) -> Snapshot:
        torch.manual_seed(self.taken)
        eager_step(self.twin, xy(self.taken))
        return snapshot(self.twin.model, self.twin.optimizer)

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            expected = self.eager()
            torch.manual_seed(self.taken)
            self.step(*xy(self.taken))
            assert_same(self.state(), expected, f"after step {self.taken}")
            assert all(p.grad is None for p in self.model.parameters())
            self.taken += 1

    def attempt(self) -> None:
        torch.manual_seed(self.taken)
        self.step(*xy(self.taken))


class Trap:
    """Stands in for the allocator's cell, which the generated code sets before every op: acts before the k-th."""

    def __init__(self, view: Any, position: int, action: Callable[[], None]) -> None:
        self.view, self.position, self.action = view, position, action

    def __setitem__(self, index: int, position: int) -> None:
        self.view[index] = position
        if position == self.position:
            self.position = -2
            self.action()


def set_trap(step: tb.CompiledStep, position: int, action: Callable[[], None]) -> Any:
    executor = step._plans[0].executor
    plain = executor._cell.view
    executor._cell.view = Trap(plain, position, action)
    executor._generation = -1  # the code is bound anew, to the trap
    return executor, plain


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ArithmeticError("this kernel fails")


def run_positions(step: tb.CompiledStep) -> list[tuple[int, Phase]]:
    executor = step._plans[0].executor
    return [(i, op.phase) for i, op in enumerate(executor.program.ops) if f"cell[0] = {i}\n" in executor.code.source]


@pytest.mark.parametrize("action", [press_ctrl_c, fail], ids=lambda f: f.__name__)
def test_interrupt_before_any_op_of_forward_or_backward_takes_the_step_back(action: Callable[[], None]) -> None:
    pair = Pair()
    pair.advance(4)
    computing = [i for i, phase in run_positions(pair.step) if phase is not Phase.UPDATE]
    assert len(computing) > 10
    for position in computing:
        before = pair.state()
        executor, plain = set_trap(pair.step, position, action)
        with pytest.raises((KeyboardInterrupt, ArithmeticError)):
            pair.attempt()
        assert_same(pair.state(), before, f"after an interrupt before op {position}")
        assert torch.is_grad_enabled()
        executor._cell.view, executor._generation = plain, -1
    pair.advance(2)


def test_ctrl_c_before_any_op_of_the_update_waits_for_the_commit() -> None:
    pair = Pair()
    pair.advance(4)
    updating = [i for i, phase in run_positions(pair.step) if phase is Phase.UPDATE]
    assert len(updating) > 10
    for position in updating[:: len(updating) // 8]:
        expected = pair.eager()
        executor, plain = set_trap(pair.step, position, press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            pair.attempt()
        assert_same(pair.state(), expected, f"after Ctrl-C before op {position} of the update")
        executor._cell.view, executor._generation = plain, -1
        pair.taken += 1
    pair.advance(2)


def test_ctrl_c_in_the_update_of_a_replay_that_is_compared_takes_all_of_it_back() -> None:
    """It waits for the replay's own commit, and by then only one of the two steps has been made."""
    pair = Pair(verify_every=1)
    pair.advance(4)
    updating = [i for i, phase in run_positions(pair.step) if phase is Phase.UPDATE]
    for position in (updating[0], updating[-1]):
        before = pair.state()
        executor, plain = set_trap(pair.step, position, press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            pair.attempt()
        assert_same(pair.state(), before, f"after Ctrl-C before op {position} of the update")
        executor._cell.view, executor._generation = plain, -1
    pair.advance(2)


def interrupted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the instant between the backward and the commit: just before the gate is shut."""
    from takeback.compiler.run.transaction import Gate

    class Interrupted(Gate):
        pressed = False

        @property
        def open(self) -> bool:
            return self._open

        @open.setter
        def open(self, value: bool) -> None:
            if not value and getattr(self, "_open", False) and not Interrupted.pressed:
                Interrupted.pressed = True
                press_ctrl_c()
            self._open = value

    monkeypatch.setattr("takeback.compiler.run.transaction.Gate", Interrupted)


def test_ctrl_c_between_backward_and_update_of_a_replay_takes_the_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.advance(4)
    before = pair.state()
    interrupted_at_once(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        pair.attempt()
    assert_same(pair.state(), before)
    pair.advance(2)


def test_ctrl_c_between_backward_and_update_of_a_recording_takes_the_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    before = pair.state()
    interrupted_at_once(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        pair.attempt()
    assert_same(pair.state(), before)
    assert all(p.grad is None for p in pair.model.parameters())
    pair.advance(3)


@pytest.mark.parametrize("where", ["before the forward", "after the forward", "in the backward"])
@pytest.mark.parametrize("action", [press_ctrl_c, fail], ids=lambda f: f.__name__)
def test_interrupt_while_recording_takes_the_step_back(where: str, action: Callable[[], None]) -> None:
    armed = types.MappingProxyType({"now": [True]})

    def act(*args: Any) -> None:
        if armed["now"][0]:
            armed["now"][0] = False
            action()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if where == "before the forward":
            act()
        h = model(x)
        if where == "after the forward":
            act()
        if where == "in the backward":
            h.register_hook(act)
        return F.cross_entropy(h, y)

    pair = Pair(loss_fn)
    before = pair.state()
    with pytest.raises((KeyboardInterrupt, ArithmeticError)):
        pair.attempt()
    assert_same(pair.state(), before)
    assert all(p.grad is None for p in pair.model.parameters())
    pair.advance(4)


def test_ctrl_c_in_the_update_of_a_recording_waits_for_the_commit() -> None:
    pair = Pair()
    handle = pair.optimizer.register_step_pre_hook(lambda *a: press_ctrl_c())
    expected = pair.eager()
    with pytest.raises(KeyboardInterrupt):
        pair.attempt()
    handle.remove()
    assert_same(pair.state(), expected)
    pair.taken += 1
    pair.advance(3)


def test_ctrl_c_in_the_update_of_an_optimizers_own_step_waits_for_the_commit() -> None:
    pair = Pair(optimizer=lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01))
    pair.advance(3)
    handle = pair.optimizer.register_step_post_hook(lambda *a: press_ctrl_c())
    expected = pair.eager()
    with pytest.raises(KeyboardInterrupt):
        pair.attempt()
    handle.remove()
    assert_same(pair.state(), expected)
    pair.taken += 1
    pair.advance(2)


def test_index_out_of_range_in_a_replay_raises_torchs_error_and_takes_the_step_back() -> None:
    pair = Pair()
    pair.advance(3)
    before = pair.state()
    x, y = xy(3)
    y[3] = 99
    with pytest.raises(IndexError, match="Target 99 is out of bounds"):
        pair.step(x, y)
    assert_same(pair.state(), before)
    pair.advance(2)


def test_index_out_of_range_in_a_recording_takes_the_step_back() -> None:
    pair = Pair()
    before = pair.state()
    x, y = xy(3)
    y[3] = 99
    with pytest.raises(IndexError, match="Target 99 is out of bounds"):
        pair.step(x, y)
    assert_same(pair.state(), before)
    pair.advance(3)


def test_embedding_index_out_of_range_in_a_replay_takes_the_step_back() -> None:
    model = nn.Sequential(nn.Embedding(16, 6), nn.BatchNorm1d(6), nn.Embedding(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(m: Any, a: Tensor, b: Tensor) -> Tensor:
        return m[1](m[0](a)).sum() + m[2](b).sum()

    step = tb.compile_step(model, loss_fn, optimizer)
    good = torch.arange(8), torch.arange(8) % 4
    for _ in range(3):
        step(*good)
    before = snapshot(model, optimizer)
    with pytest.raises(IndexError, match="out of range"):
        step(good[0], good[1] + 90)
    assert_same(snapshot(model, optimizer), before)
    assert before["model.1.num_batches_tracked"].item() == 3
    step(*good)
    assert model[1].num_batches_tracked.item() == 4


class Moody(torch.optim.Optimizer):
    """An optimizer whose step() raises, before it has touched anything, when told to."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.broken = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.broken:
            raise ZeroDivisionError("the optimizer is broken")
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("steps_before", [0, 3])
def test_optimizer_whose_own_step_raises_takes_statistics_back(steps_before: int) -> None:
    pair = Pair(optimizer=lambda m: Moody(m.parameters()))
    pair.advance(steps_before)
    before = pair.state()
    pair.optimizer.broken = True  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError, match="broken"):
        pair.attempt()
    assert_same(pair.state(), before)
    assert all(p.grad is None for p in pair.model.parameters())
    pair.optimizer.broken = False  # type: ignore[attr-defined]
    pair.advance(3)


def test_ctrl_c_at_any_time_leaves_the_state_of_a_complete_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = adamw(model)
    twin_model, _ = copy.deepcopy((model, 0))
    twin = Setup(twin_model, cross_entropy, adamw(twin_model), xy)
    states = [snapshot(twin.model, twin.optimizer)]
    for i in range(41):
        eager_step(twin, xy(i))
        states.append(snapshot(twin.model, twin.optimizer))
    step = tb.compile_step(model, cross_entropy, optimizer, memory="keep")
    main = threading.main_thread().ident
    assert main is not None

    def press_later(delay: float) -> None:
        time.sleep(delay)
        signal.pthread_kill(main, signal.SIGINT)

    step(*xy(0))
    done, delay, broken_off = 1, 1e-4, 0
    for attempt in range(40):
        presser = threading.Thread(target=press_later, args=(delay,))
        try:
            presser.start()
            step(*xy(done))
            while True:  # the key will be pressed
                time.sleep(1e-4)
        except KeyboardInterrupt:
            pass
        presser.join()
        now = snapshot(model, optimizer)
        if now["model.1.num_batches_tracked"].item() == done + 1:
            done, delay = done + 1, delay * 0.6
        else:
            broken_off, delay = broken_off + 1, delay * 1.5
        assert_same(now, states[done], f"after Ctrl-C in attempt {attempt}")
    assert done > 1
    assert broken_off  # the delay follows the machine's speed, so that both happen


class Stopwatch:
    """Presses Ctrl-C before the n-th line of Python that `work` runs in takeback, or where contexts are left: the same
    one in every run. `struck` says whether there was such a line. Or before the n-th instruction outside finalizers."""

    _WATCHED = ("takeback", "contextlib.py", "_python_dispatch.py", "grad_mode.py", "<")

    def __init__(self, number: int, *, every_instruction: bool = False) -> None:
        self.lines, self._number, self.struck, self._all = 0, number, False, every_instruction

    def __call__(self, work: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            work()
        except KeyboardInterrupt:
            assert self.struck
        finally:
            sys.settrace(before)

    def _trace(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "call" and not any(name in code.co_filename for name in self._WATCHED):
            return None
        if code.co_name == "<genexpr>":
            return None  # what is raised while one is dropped half-way is swallowed by Python
        if self._all and code.co_name == "__del__":
            return None  # likewise
        frame.f_trace_opcodes = self._all
        if code.co_code[frame.f_lasti] == dis.opmap["NOP"]:
            return self._trace  # the line of a try: Python looks for no signals there, and no handler covers it
        self.lines += 1
        if self.lines == self._number:
            self.struck = True
            sys.settrace(None)
            press_ctrl_c()
        return None if self.struck else self._trace


class Course:
    """A compiled step and the states that eager goes through. `interrupt(n)` tries the next step, with Ctrl-C before
    its n-th line, and asserts that the state is that of a complete step."""

    def __init__(self, optimizer: Callable[..., Any], **settings: Any) -> None:
        self.model = normed()
        self.optimizer = optimizer(self.model)
        twin, _ = copy.deepcopy((self.model, 0))
        self._twin = Setup(twin, cross_entropy, optimizer(twin), xy)
        self._states = [snapshot(twin, self._twin.optimizer)]
        self.settings = settings
        self.done = 0
        self.compile()

    def compile(self) -> None:
        self.step = tb.compile_step(self.model, cross_entropy, self.optimizer, **self.settings)

    def take(self) -> None:
        torch.manual_seed(self.done)
        self.step(*xy(self.done))

    def _expected(self, step: int) -> Snapshot:
        while len(self._states) <= step:
            torch.manual_seed(len(self._states) - 1)
            eager_step(self._twin, xy(len(self._states) - 1))
            self._states.append(snapshot(self._twin.model, self._twin.optimizer))
        return self._states[step]

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.take()
            self.done += 1
            assert_same(snapshot(self.model, self.optimizer), self._expected(self.done), f"after step {self.done}")

    def interrupt(self, number: int) -> bool:
        """Whether the step was made nevertheless."""
        watch = Stopwatch(number)
        handler = signal.getsignal(signal.SIGINT)
        watch(self.take)
        assert watch.struck, f"there are {watch.lines} lines"
        when = f"after Ctrl-C before line {number} of step {self.done}, {self.settings}"
        now = snapshot(self.model, self.optimizer)
        made = bool(now["model.1.num_batches_tracked"] == self.done + 1)
        self.done += made
        assert_same(now, self._expected(self.done), when)
        assert torch.is_grad_enabled(), when
        assert signal.getsignal(signal.SIGINT) is handler, when
        assert all(p.grad is None for p in self.model.parameters()), when
        return made

    def lines(self) -> int:
        """How many a step runs."""
        watch = Stopwatch(-1)
        watch(self.take)
        self.done += 1
        return watch.lines


COURSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "planned update": (adamw, {}),
    "own step": (lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01), {}),
    "verified": (adamw, {"verify_every": 1}),
}


# Python drops an interrupt that strikes while a generator is being closed, and says so.
may_be_dropped = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@may_be_dropped
@pytest.mark.parametrize("name", COURSES)
def test_ctrl_c_before_any_line_of_a_replay_leaves_the_state_of_a_complete_step(name: str) -> None:
    optimizer, settings = COURSES[name]
    course = Course(optimizer, **settings)
    course.advance(4)
    lines = course.lines()
    draw = random.Random(0)
    made = [course.interrupt(draw.randrange(1, lines)) for _ in range(60)]
    assert 0 < sum(made) < len(made)
    course.advance(2)


@may_be_dropped
def test_ctrl_c_before_any_line_of_a_plans_first_replay_leaves_the_state_of_a_complete_step() -> None:
    course = Course(adamw)
    draw = random.Random(0)
    for _ in range(8):
        course.compile()
        course.advance()
        course.interrupt(draw.randrange(1, 1200))
    course.advance(3)


@may_be_dropped
def test_ctrl_c_before_any_line_of_a_recording_leaves_the_state_of_a_complete_step() -> None:
    course = Course(adamw, memory="keep")
    course.advance()
    course.compile()
    lines = course.lines()
    draw = random.Random(0)
    made = []
    for _ in range(10):
        course.compile()
        made.append(course.interrupt(1 + int(lines * draw.random() ** 3)))  # most of the lines are planning's
    assert 0 < sum(made) < len(made)
    course.compile()
    course.advance(3)


def left_half_way(*args: Any) -> None:
    """What Ctrl-C leaves when it strikes just before a mode is left."""
    TorchDispatchMode().__enter__()
    torch.set_grad_enabled(False)
    press_ctrl_c()


@pytest.mark.parametrize("modes", [0, 1])
def test_ctrl_c_while_torch_has_taken_a_function_mode_off_is_raised_and_leaves_the_modes_as_they_were(
    modes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes a mode off while it asks it, and puts it on again: between these two lines it is nowhere."""
    take_off = torch.overrides._pop_mode
    struck = []

    def strike() -> TorchFunctionMode:
        mode = take_off()
        if not struck and isinstance(mode, Reads):
            struck.append(mode)
            press_ctrl_c()
        return mode

    course = Course(adamw, memory="keep")
    monkeypatch.setattr(torch.overrides, "_pop_mode", strike)
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(BaseTorchFunctionMode()) for _ in range(modes)]
        with pytest.raises(KeyboardInterrupt):
            course.take()
        assert struck
        assert _get_current_function_mode_stack() == own
    course.compile()
    course.advance(3)


@pytest.mark.parametrize("module", [reads, eager_products, one_hot], ids=["reads", "products", "one_hot"])
def test_ctrl_c_on_the_way_out_of_a_recordings_mode_takes_the_step_back(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is on when counters are put back, and must not take that for an op of the step's."""
    on_stack = module.be_on_function_stack_
    struck: list[TorchFunctionMode] = []

    def strike(mode: TorchFunctionMode) -> None:
        if not struck:
            struck.append(mode)
            press_ctrl_c()
        on_stack(mode)

    course = Course(adamw, memory="keep")
    monkeypatch.setattr(module, "be_on_function_stack_", strike)
    with pytest.raises(KeyboardInterrupt):
        course.take()
    assert struck
    assert _get_current_function_mode_stack() == []
    course.compile()
    course.advance(3)


def test_ctrl_c_while_a_trial_has_taken_the_recorder_off_is_raised_and_leaves_no_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_off = _python_dispatch._pop_mode
    struck = []

    def strike(key: Any = None) -> Any:
        mode = take_off(key)
        if not struck and isinstance(mode, Recorder) and sys._getframe(1).f_code.co_name != "__exit__":
            struck.append(mode)
            press_ctrl_c()
        return mode

    course = Course(adamw, memory="keep")
    monkeypatch.setattr(_python_dispatch, "_pop_mode", strike)
    with pytest.raises(KeyboardInterrupt):
        course.take()
    assert struck
    assert torch._C._len_torch_dispatch_stack() == 0
    assert _get_current_function_mode_stack() == []
    course.compile()
    course.advance(3)


def test_takebacks_own_modes_are_left_without_a_complaint_where_torch_has_lost_them() -> None:
    """Else an error takes the place of Ctrl-C, which capture may take for one of the user's code."""
    recorder = Recorder({}, ())

    def lose(mode: TorchFunctionMode | TorchDispatchMode, take_off: Callable[[], object]) -> None:
        with mode:
            take_off()
            press_ctrl_c()

    with BaseTorchFunctionMode() as own:
        with pytest.raises(KeyboardInterrupt):
            lose(Reads(recorder), torch.overrides._pop_mode)
        assert _get_current_function_mode_stack() == [own]
    with pytest.raises(KeyboardInterrupt):
        lose(recorder, _python_dispatch._pop_mode)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_mode_that_the_loss_enters_and_never_leaves_stays_as_in_eager() -> None:
    modes: list[TorchFunctionMode] = []

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if not modes:
            modes.append(BaseTorchFunctionMode())
            modes[0].__enter__()
        return cross_entropy(model, x, y)

    model = normed()
    step = tb.compile_step(model, loss_fn, sgd(model), unplanned="eager")
    try:
        step(*xy(0))
    finally:
        left = _get_current_function_mode_stack()
        while _get_current_function_mode_stack():
            torch.overrides._pop_mode()
    assert left == modes


@pytest.mark.parametrize("when", ["compile", "record"])
def test_ctrl_c_in_the_check_of_an_early_update_leaves_no_mode_behind(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(adamw, update="early", memory="keep")
    monkeypatch.setattr("takeback.compiler.run.plan_maker.check_early", left_half_way)
    with pytest.raises(KeyboardInterrupt):
        course.compile() if when == "compile" else course.take()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.is_grad_enabled()
    monkeypatch.undo()
    course.advance(3)


def test_ctrl_c_while_traps_are_taken_away_leaves_none_behind() -> None:
    before = torch.manual_seed, torch.seed, torch.Tensor.__dlpack__
    for key in ("armed", "popped"):
        traps = leaks._traps()
        traps.__enter__()
        if key == "popped":
            leaks._recording.clear()  # as if it had struck between the two halves of taking them away
        leaks.disarm_()
        assert not {"numpy", "tolist"} & vars(torch.Tensor).keys()
        assert (torch.manual_seed, torch.seed, torch.Tensor.__dlpack__) == before
        assert not leaks._recording
        del traps


def test_an_aborted_replay_draws_the_same_numbers_again() -> None:
    pair = Pair()
    pair.advance(4)
    computing = [i for i, phase in run_positions(pair.step) if phase is not Phase.UPDATE]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    executor, plain = set_trap(pair.step, computing[-1], fail)
    with pytest.raises(ArithmeticError):
        pair.step(*xy(9))
    assert torch.equal(torch.get_rng_state(), before)
    executor._cell.view, executor._generation = plain, -1
    pair.advance(2)


def test_an_aborted_recording_draws_the_same_numbers_again() -> None:
    armed = types.MappingProxyType({"now": [True]})

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if armed["now"][0]:
            armed["now"][0] = False
            fail()
        return loss

    pair = Pair(loss_fn)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        pair.step(*xy(9))
    assert torch.equal(torch.get_rng_state(), before)
    pair.advance(3)


# -- plans, threads, other steps -----------------------------------------------------------------------------------


def test_arena_that_grows_for_a_second_plan_keeps_the_first_right() -> None:
    def make() -> Setup:
        model = normed()
        return Setup(model, cross_entropy, adamw(model), lambda i: xy(i, (8, 8, 64, 64, 8, 64, 8)[i]))

    step = assert_right(make, steps=7)
    assert len(step._plans) == 2


def test_results_kept_from_earlier_steps_do_not_change() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = m(x)
        return F.cross_entropy(out, y), {"out": out, "view": out[:, 1]}

    model = normed()
    step = tb.compile_step(model, loss_fn, adamw(model), clip_norm=1.0)
    kept: list[tuple[Tensor, Tensor]] = []
    for i in range(5):
        x, y = xy(i)
        loss, aux = step(x, y)
        assert step.grad_norm is not None
        for t in (loss, step.grad_norm, *aux.values()):
            kept.append((t, t.clone()))
            assert not t.requires_grad
        x.zero_()
    for t, then in kept:
        assert torch.equal(t, then)


def test_kept_gradients_are_the_users_own() -> None:
    model = normed()
    step = tb.compile_step(model, cross_entropy, adamw(model), keep_grads=True)
    kept = []
    for i in range(4):
        step(*xy(i))
        kept += [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    assert len(kept) == 4 * len(list(model.parameters()))
    for t, then in kept[: -len(list(model.parameters()))]:
        assert torch.equal(t, then)


def in_a_thread(work: Callable[[], object]) -> None:
    """Runs `work` in a thread of its own, and raises here what it raised there."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_steps_from_a_thread_that_is_not_the_main_one_are_right() -> None:
    in_a_thread(lambda: Pair().advance(4))


def test_step_recorded_on_one_thread_is_replayed_on_another() -> None:
    pair = Pair()
    pair.advance(3)
    in_a_thread(lambda: pair.advance(2))
    pair.advance(2)


def test_two_compiled_steps_interleaved_are_right() -> None:
    one, two = Pair(), Pair(optimizer=sgd)
    for _ in range(5):
        one.advance()
        two.advance()


def test_two_compiled_steps_on_one_model_interleaved_are_right() -> None:
    model, other = normed(), normed()
    optimizer, other_optimizer = sgd(model), sgd(other)
    doubled = lambda m, x, y: 2 * cross_entropy(m, x, y)  # noqa: E731
    steps = [tb.compile_step(model, f, optimizer) for f in (cross_entropy, doubled)]
    for i in range(8):
        torch.manual_seed(i)
        eager_step(Setup(other, (cross_entropy, doubled)[i % 2], other_optimizer, xy), xy(i))
        torch.manual_seed(i)
        steps[i % 2](*xy(i))
        assert_same(snapshot(model, optimizer), snapshot(other, other_optimizer), f"after step {i}")


def test_two_threads_may_record_and_replay_at_the_same_time() -> None:
    barrier = types.MappingProxyType({"meet": threading.Barrier(2, timeout=20)})
    failures: list[BaseException] = []

    def train(model: nn.Module, other: nn.Module) -> None:
        try:
            optimizer, other_optimizer = sgd(model), sgd(other)

            def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
                if m is model:
                    barrier["meet"].wait()  # both record at the same time
                return cross_entropy(m, x, y)

            step = tb.compile_step(model, loss_fn, optimizer)
            for i in range(30):
                eager_step(Setup(other, loss_fn, other_optimizer, xy), xy(i))
                step(*xy(i))
                assert_same(snapshot(model, optimizer), snapshot(other, other_optimizer), f"after step {i}")
        except BaseException as error:
            failures.append(error)
            barrier["meet"].abort()

    threads = [threading.Thread(target=train, args=(mlp(i), mlp(i))) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    leftover = [name for name in ("numpy", "tolist") if name in vars(torch.Tensor)]
    for name in leftover:
        delattr(torch.Tensor, name)
    assert not failures, failures
    assert not leftover, "the recording's watch over Tensor.numpy was left behind"


def test_other_threads_tensors_are_unaffected() -> None:
    stop = threading.Event()
    bad: list[str] = []
    rounds = [0]

    def work() -> None:
        g = torch.Generator().manual_seed(0)
        while not stop.is_set():
            a = torch.randn(64, 64, generator=g)
            b = a @ a
            if (
                not torch.equal(b, a @ a)
                or a.numpy().sum() != a.clone().numpy().sum()
                or a[0].tolist() != a[0].tolist()
            ):
                bad.append("other")
            rounds[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        Pair().advance(25)
    finally:
        stop.set()
        thread.join(20)
    assert not bad
    assert rounds[0] > 0


# -- the objects around a step -------------------------------------------------------------------------------------


def test_model_and_optimizer_can_be_copied_pickled_and_saved_after_compiling() -> None:
    pair = Pair()
    pair.advance(3)
    model, optimizer = copy.deepcopy((pair.model, pair.optimizer))
    assert_same(snapshot(model, optimizer), pair.state())
    assert_same(pickle.loads(pickle.dumps(pair.model)).state_dict(), pair.model.state_dict())
    file = io.BytesIO()
    torch.save({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert_same(saved["model"], pair.model.state_dict())
    pair.advance(2)


def test_model_trained_by_a_step_can_be_used_and_trained_in_eager_in_between() -> None:
    pair = Pair()
    for _ in range(4):
        pair.advance()
        pair.model.eval()
        with torch.no_grad():
            pair.model(xy(0)[0])
        pair.model.train()
        for model, optimizer in ((pair.model, pair.optimizer), (pair.twin.model, pair.twin.optimizer)):
            torch.manual_seed(5)
            eager_step(Setup(model, cross_entropy, optimizer, xy), xy(77))


def test_gradients_left_by_the_user_are_not_added_and_are_none_after_the_step() -> None:
    pair = Pair()
    for _ in range(4):
        for p in pair.model.parameters():
            p.grad = torch.ones_like(p)
        pair.advance()


def test_step_that_is_dropped_gives_its_arena_back() -> None:
    native = allocator.load()
    if native is None:
        pytest.skip("no native allocator")
    gc.collect()
    before = native._library.tb_arena_count()
    pair = Pair()
    pair.advance(4)
    assert native._library.tb_arena_count() == before + 1
    gone = weakref.ref(pair.step)
    model = weakref.ref(pair.model)
    del pair
    gc.collect()
    assert gone() is None
    assert model() is None
    assert native._library.tb_arena_count() == before


def test_evicted_plan_is_freed() -> None:
    model = normed()
    step = tb.compile_step(model, cross_entropy, sgd(model), max_plans=1)
    step(*xy(0, 4))
    step(*xy(0, 4))
    gone = weakref.ref(step._plans[0].executor)
    with pytest.warns(RuntimeWarning, match="no room for more"):
        step(*xy(0, 8))
    for i in range(5):
        step(*xy(i, 8))
    assert step.counts.plain == 5  # then it has not been used for long
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("steps_before", [0, 2])
def test_step_inside_a_step_is_refused_and_changes_neither(steps_before: int) -> None:
    inner_model, model = normed(), mlp(3)
    inner_optimizer = adamw(inner_model)
    inner = tb.compile_step(inner_model, cross_entropy, inner_optimizer)
    for i in range(steps_before):
        inner(*xy(i))
    nested = [True]
    held = types.MappingProxyType({"inner": inner})  # else the outer step looks through all of takeback's own objects
    outer = tb.compile_step(
        model,
        lambda m, x, y: cross_entropy(m, x, y) + (held["inner"](x.clone(), y) if nested[0] else 0.0),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    before = snapshot(inner_model, inner_optimizer), snapshot(model, sgd(model))
    with pytest.raises(CaptureError, match=r"called inside another compiled step.*one after the other"):
        outer(*xy(0))
    assert_same(snapshot(inner_model, inner_optimizer), before[0])
    assert_same(snapshot(model, sgd(model)), before[1])
    nested[0] = False
    for step in (outer, inner):
        for i in range(3):
            step(*xy(i))


@pytest.mark.parametrize("when", ["recording", "replay"])
def test_step_called_on_two_threads_at_once_is_refused_on_the_second(when: str) -> None:
    pair = Pair(verify_every=1)  # so that loss_fn runs in replays too
    inside, go_on = threading.Event(), threading.Event()
    waits = [when == "recording"]

    def hold(*args: Any) -> None:
        if waits[0]:
            waits[0] = False
            inside.set()
            assert go_on.wait(20)

    pair.optimizer.register_step_pre_hook(hold)
    if when == "replay":
        pair.advance(3)
        waits[0] = True
    thread = threading.Thread(target=pair.advance)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(CaptureError, match=r"running on another thread.*lock"):
        pair.step(*xy(0))
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert pair.taken == (1 if when == "recording" else 4)
    pair.advance(2)


def test_turn_left_behind_by_an_interrupt_is_taken_over() -> None:
    pair = Pair()
    pair.advance(2)
    pair.step._turn._lock.acquire()  # as if Ctrl-C had struck just before it was released
    pair.advance(2)
    in_a_thread(lambda: pair.advance(2))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy"])
def test_step_is_copied_as_what_it_was_made_of_without_plans(how: str) -> None:
    pair = Pair(clip_norm=0.5, memory="keep")
    pair.twin.loss_fn = cross_entropy
    model = pair.model
    for i in range(3):
        torch.manual_seed(i)
        pair.step(*xy(i))
    if how == "copy":
        other = copy.copy(pair.step)
        assert other._model is pair.model
    else:
        other = copy.deepcopy(pair.step) if how == "deepcopy" else pickle.loads(pickle.dumps(pair.step))
        assert other._model is not model
        mine = {id(p) for p in other._model.parameters()}
        assert {id(p) for group in other._optimizers.only.param_groups for p in group["params"]} == mine
    assert len(other._plans) == 0
    assert other.options == pair.step.options
    if how == "copy":
        other(*xy(9))
        return
    assert_same(snapshot(other._model, other._optimizers.only), pair.state())
    for i in range(3):
        for step in (pair.step, other):
            torch.manual_seed(10 + i)
            step(*xy(10 + i))
        assert_same(snapshot(other._model, other._optimizers.only), pair.state(), f"after step {i} of both")


@pytest.mark.parametrize("make", [lambda: WeakStorage(torch.ones(2).untyped_storage()), lambda: Unfinished(1)])
def test_ctrl_c_while_an_object_is_made_that_has_a_finalizer(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's StorageWeakRef would say in its own that something is missing."""
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    for moment in range(1, 100):
        watch = Stopwatch(moment, every_instruction=True)
        watch(make)
        gc.collect()
        assert not dropped, moment
        if not watch.struck:
            break
    assert moment > 5


# -- random moments ------------------------------------------------------------------------------------------------


def test_ctrl_c_at_random_moments_of_random_steps_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hunt of benchmarks/interrupts.py, for a few seconds."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    hunter = importlib.import_module("interrupts")
    tally = hunter.run(interrupts=120, seed=1, replays=30)
    assert not tally.faults, tally.examples
    assert tally.interrupts >= 120
    assert tally.struck["replay"] > 0
    assert 0 < sum(tally.stayed.values()) < tally.interrupts
