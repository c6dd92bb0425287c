"""A transaction takes everything back, in order, whatever is raised; and Ctrl-C strikes only where it may."""

from __future__ import annotations

import dis
import functools
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _device
from torch.utils._python_dispatch import (
    BaseTorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from takeback.compiler.capture.uncompiled import uncompiled
from takeback.compiler.run.transaction import Transaction


@pytest.fixture(autouse=True)
def _python_handles_interrupts() -> Iterator[None]:
    """Also where SIGINT is ignored, as for a process in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_abort_takes_back_last_first_then_cleans_up_and_an_end_only_cleans_up() -> None:
    done: list[str] = []

    def work(*, fails: bool) -> None:
        with Transaction() as step:
            for name in ("a", "b"):
                step.on_abort(functools.partial(done.append, f"undo {name}"))
                step.at_end(functools.partial(done.append, f"end {name}"))
            if fails:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work(fails=True)
    assert done == ["undo b", "undo a", "end b", "end a"]
    done.clear()
    work(fails=False)
    assert done == ["end b", "end a"]


def test_nothing_is_taken_back_after_done() -> None:
    done: list[str] = []

    def work() -> None:
        with Transaction() as step:
            step.on_abort(lambda: done.append("undo"))
            step.at_end(lambda: done.append("end"))
            step.done()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert done == ["end"]


def test_one_that_fails_to_put_back_does_not_stop_the_others() -> None:
    done: list[str] = []

    def fail() -> None:
        raise MemoryError("no room to put it back")

    def work() -> None:
        with Transaction() as step:
            step.on_abort(lambda: done.append("first"))
            step.on_abort(fail)
            step.on_abort(lambda: done.append("last"))
            raise ZeroDivisionError

    with pytest.raises(MemoryError) as raised:
        work()
    assert done == ["last", "first"]
    assert isinstance(raised.value.__context__, ZeroDivisionError)


@pytest.mark.parametrize("mode", [True, False])
def test_grad_mode_is_as_before_and_off_while_things_are_put_back(mode: bool) -> None:
    seen: list[bool] = []
    with torch.set_grad_enabled(mode):

        def work() -> None:
            with Transaction() as step:
                step.on_abort(lambda: seen.append(torch.is_grad_enabled()))
                torch._C._set_grad_enabled(not mode)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work()
        assert torch.is_grad_enabled() is mode
        with Transaction():
            torch._C._set_grad_enabled(not mode)
        assert torch.is_grad_enabled() is mode
    assert seen == [False]


def test_modes_that_are_lost_or_left_on_when_a_step_is_aborted_are_as_before() -> None:
    def work() -> None:
        with Transaction():
            _pop_mode()
            _push_mode(BaseTorchFunctionMode())
            _disable_current_modes().__enter__()
            BaseTorchDispatchMode().__enter__()
            torch.set_default_device("meta")
            raise ZeroDivisionError

    with BaseTorchFunctionMode() as low, BaseTorchFunctionMode() as high, BaseTorchDispatchMode() as below:
        with pytest.raises(ZeroDivisionError):
            work()
        assert _get_current_function_mode_stack() == [low, high]
        assert _get_current_dispatch_mode_stack() == [below]
        assert _device.CURRENT_DEVICE is None
        torch.set_default_device(None)
        assert _get_current_function_mode_stack() == [low, high]


def test_default_device_that_a_step_sets_stays_when_it_ends() -> None:
    try:
        with Transaction():
            torch.set_default_device("meta")
        assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("lost", ["while it is asked", "while a device is entered", "while a device is left"])
def test_ctrl_c_is_raised_and_not_what_torch_says_of_a_mode_that_it_lost(lost: str) -> None:
    def work() -> None:
        with Transaction() as step:
            step.compute()
            if lost == "while it is asked":
                with BaseTorchFunctionMode():
                    _pop_mode()
                    press_ctrl_c()
            elif lost == "while a device is entered":
                with BaseTorchFunctionMode(), BaseTorchFunctionMode():
                    for _ in range(2):
                        _pop_mode()
                    press_ctrl_c()
            else:
                with BaseTorchFunctionMode(), torch.device("cpu"):
                    while _get_current_function_mode_stack():
                        _pop_mode()
                    _push_mode(BaseTorchFunctionMode())
                    press_ctrl_c()

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert raised.value.__cause__ is None
    assert not _get_current_function_mode_stack()
    assert _device.CURRENT_DEVICE is None


def test_error_that_the_user_raises_in_place_of_ctrl_c_is_raised() -> None:
    def work() -> None:
        with Transaction() as step:
            step.compute()
            try:
                press_ctrl_c()
            except KeyboardInterrupt:
                raise ZeroDivisionError("stopped") from None

    with pytest.raises(ZeroDivisionError, match="stopped"):
        work()


def test_error_of_torchs_modes_that_no_ctrl_c_caused_is_raised() -> None:
    def work() -> None:
        with Transaction() as step:
            step.compute()
            _pop_mode()

    with pytest.raises(RuntimeError, match="empty mode stack"):
        work()


def test_ctrl_c_strikes_while_computing_and_waits_while_committing() -> None:
    done: list[str] = []

    def work() -> None:
        with Transaction() as step:
            step.on_abort(lambda: done.append("undo"))
            step.compute()
            press_ctrl_c()
            done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["undo"]

    done.clear()

    def commit() -> None:
        with Transaction() as step:
            step.on_abort(lambda: done.append("undo"))
            step.compute()
            step.commit()
            press_ctrl_c()
            done.append("after")

    with pytest.raises(KeyboardInterrupt):
        commit()
    assert done == ["after"]


def test_ctrl_c_while_things_are_put_back_waits_for_all_of_them() -> None:
    done: list[str] = []

    def undo() -> None:
        press_ctrl_c()
        done.append("undo")

    def end() -> None:
        press_ctrl_c()
        done.append("end")

    def work() -> None:
        with Transaction() as step:
            step.on_abort(undo)
            step.at_end(end)
            step.compute()
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["undo", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_inner_ctrl_c_that_waited_takes_the_outer_transaction_back() -> None:
    done: list[str] = []

    def work() -> None:
        with Transaction() as outer:
            outer.on_abort(lambda: done.append("outer undo"))
            outer.compute()
            with Transaction() as inner:
                inner.on_abort(lambda: done.append("inner undo"))
                press_ctrl_c()
                done.append("inner committed")
            done.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner committed", "outer undo"]


@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_before_any_line_of_it_leaves_all_or_nothing(fails: bool) -> None:
    """Struck at each line event of Python inside the block and inside the transaction's own code."""
    state = {"value": 0, "mode": True}

    def work() -> None:
        with Transaction() as step:
            before = dict(state)
            step.on_abort(lambda: state.update(before))
            step.at_end(lambda: state.update(mode=True))
            state["mode"] = False
            step.compute()
            state["value"] += 1
            if fails:
                raise ZeroDivisionError  # and `__exit__` is called while the gate is open
            step.commit()
            state["value"] += 1

    def interrupted_at(number: int) -> bool:
        """Whether there was such a line."""
        left = number

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            # The line of a `with` comes once more before its `__exit__`; Python looks for no signals there.
            unwinding = frame.f_code.co_code[frame.f_lasti] in (dis.opmap["PUSH_EXC_INFO"], dis.opmap["NOP"])
            if event in ("line", "call") and not unwinding:
                if left == 0:
                    left = -1
                    press_ctrl_c()
                left -= left > 0
            return trace

        sys.settrace(trace)
        try:
            work()
        except (KeyboardInterrupt, ZeroDivisionError):
            pass
        finally:
            sys.settrace(None)
        return left < 0

    lines = taken = 0
    while True:
        before = state["value"]
        struck = interrupted_at(lines)
        assert state["mode"] is True, lines
        assert state["value"] - before in (0, 2), lines
        taken += state["value"] > before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not struck:
            break
        lines += 1
    assert lines > 30
    assert taken == 0 if fails else 0 < taken < lines


def test_other_threads_are_not_concerned() -> None:
    done: list[str] = []

    def work() -> None:
        with Transaction() as step:
            step.compute()
            done.append("computed")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert done == ["computed"]


def test_stance_of_torch_compile_is_put_back_where_nobody_could_leave_it() -> None:
    """Ctrl-C may strike in the context that leaves it."""
    eval_frame = importlib.import_module("torch._dynamo.eval_frame")
    before = eval_frame._stance
    with Transaction():
        inside = uncompiled()
        inside.__enter__()
        assert eval_frame._stance.stance == "force_eager"
    assert eval_frame._stance is before
    inside.__exit__(None, None, None)
    assert eval_frame._stance is before


def test_stance_of_torch_compile_is_put_back_by_the_last_thread_that_leaves() -> None:
    eval_frame = importlib.import_module("torch._dynamo.eval_frame")
    before = eval_frame._stance
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        with uncompiled():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=run)
    with uncompiled():
        thread.start()
        assert entered.wait(60)
    assert eval_frame._stance.stance == "force_eager"
    leave.set()
    thread.join()
    assert eval_frame._stance is before
