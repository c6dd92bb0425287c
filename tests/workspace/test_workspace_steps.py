"""Steps: nested, left by an exception, suspended in generators, forked, copied; and takes without one."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Iterator

import pytest
import torch

import takeback as tb


def test_a_take_outside_of_a_step_raises() -> None:
    ws = tb.Workspace()
    with pytest.raises(tb.WorkspaceError, match="outside of a step"):
        ws.take(3)
    with ws.step():
        ws.take(3)
    with pytest.raises(tb.WorkspaceError, match="outside of a step"):
        ws.take(3)


def test_an_inner_step_ends_what_was_taken_in_it_and_nothing_else() -> None:
    ws = tb.Workspace(debug=True)
    with ws.step():
        outer = ws.take(4).fill_(1)
        with ws.step():
            inner = ws.take(4).fill_(2)
            assert (outer + inner).tolist() == [3.0] * 4
        assert outer.tolist() == [1.0] * 4
        with pytest.raises(tb.WorkspaceError, match="in step 2"):
            inner.sum()
        after = ws.take(4).fill_(3)
        assert (outer + after).tolist() == [4.0] * 4
    assert ws.stats().generations == 2


def test_a_step_is_entered_once() -> None:
    ws = tb.Workspace()
    step = ws.step()
    with step, pytest.raises(tb.WorkspaceError, match="entered once"), step:
        pass
    with pytest.raises(tb.WorkspaceError, match="entered once"), step:
        pass
    with ws.step():
        ws.take(3)


def test_an_exception_ends_the_step_and_loses_no_buffer() -> None:
    ws = tb.Workspace()

    def fails() -> None:
        with ws.step():
            a, b = ws.take(10), ws.take(10, name="b")
            raise ZeroDivisionError(a.numel() + b.numel())

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fails()
    with pytest.raises(tb.WorkspaceError, match="outside of a step"):
        ws.take(3)
    held = ws.stats()
    with ws.step():
        taken = [ws.take(10) for _ in range(held.buffers - 1)], ws.take(10, name="b")
    assert ws.stats().misses == held.misses
    del taken


def test_what_a_traceback_holds_is_kept_back() -> None:
    ws = tb.Workspace()
    try:
        with ws.step():
            mine = ws.take(10).fill_(5)
            raise ZeroDivisionError
    except ZeroDivisionError:
        with ws.step():
            ws.take(10).fill_(6)
    assert mine.tolist() == [5.0] * 10


def test_steps_of_generators_may_end_in_any_order() -> None:
    ws = tb.Workspace()

    def chunks(value: float) -> Iterator[torch.Tensor]:
        with ws.step():
            t = ws.take(10).fill_(value)
            yield t
            yield t * 2

    first, second = chunks(1), chunks(2)
    a, b = next(first), next(second)
    assert a.data_ptr() != b.data_ptr()
    assert (next(first)[0], next(second)[0]) == (2, 4)
    first.close()  # opened before the second
    c = ws.take(10)  # the second is still open
    assert len({a.data_ptr(), b.data_ptr(), c.data_ptr()}) == 3
    assert list(second) == []
    with pytest.raises(tb.WorkspaceError, match="outside of a step"):
        ws.take(10)
    assert ws.stats().generations == 2


def test_scratch_belongs_to_the_step_that_is_still_open_whichever_ended_before() -> None:
    ws = tb.Workspace(debug=True)
    first, second = ws.step(), ws.step()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    t = ws.take(10).fill_(1.0)
    assert t.sum() == 10
    second.__exit__(None, None, None)
    with pytest.raises(tb.WorkspaceError, match="in step 2"):
        t.sum()


def _in_child(ws: tb.Workspace, held: torch.Tensor, queue: multiprocessing.SimpleQueue[object]) -> None:
    with ws.step():
        t = ws.take(10).fill_(9)
        queue.put((held.tolist(), t.data_ptr() != held.data_ptr(), ws.stats().misses))


def test_a_forked_child_takes_on_its_own_and_leaves_the_parent_alone() -> None:
    ws = tb.Workspace()
    with ws.step():
        ws.take(10)
        held = ws.take(10).fill_(4)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_in_child, args=(ws, held, queue))
        child.start()
        content, apart, misses = queue.get()
        child.join()
        assert child.exitcode == 0
        assert content == [4.0] * 10
        assert apart
        assert misses == 2
        assert held.tolist() == [4.0] * 10
    assert ws.stats().takes == 2


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda ws: pickle.loads(pickle.dumps(ws))])
def test_a_copy_is_an_empty_workspace_with_the_same_settings(how: object) -> None:
    ws = tb.Workspace(debug=True)
    with ws.step():
        ws.take(10)
        assert callable(how)
        other = how(ws)
        assert (other.debug, other.stats().held_bytes, other.stats().takes) == (True, 0, 0)
        with pytest.raises(tb.WorkspaceError, match="outside of a step"):
            other.take(3)


def test_a_model_with_a_workspace_can_be_copied() -> None:
    model = torch.nn.Linear(2, 2)
    model.ws = tb.Workspace()
    with model.ws.step():
        model.ws.take(10)
    twin = copy.deepcopy(model)
    assert twin.ws is not model.ws
    assert twin.ws.stats().buffers == 0
