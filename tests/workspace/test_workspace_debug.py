"""Debug mode: a use of scratch after its step raises, meets NaN, or is noticed when the bytes are handed out again."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import inspect
import math
import pickle
import threading

import pytest
import torch

import takeback as tb

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def stale(ws: tb.Workspace, name: str | None = None) -> torch.Tensor:
    with ws.step():
        return ws.take((4, 4), name=name).fill_(1.0)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: torch.ones(4, 4) + t,
        lambda t: t.fill_(0.0),
        lambda t: torch.mm(torch.ones(4, 4), torch.ones(4, 4), out=t),
        lambda t: torch.cat([torch.ones(4, 4), t]),
        lambda t: t[0],
        lambda t: t.numpy(),
        lambda t: t.tolist(),
        lambda t: torch.ones(4, 4).copy_(t),
        lambda t: t.data,
        lambda t: torch.nn.functional.linear(input=torch.ones(4), weight=t),
        lambda t: copy.deepcopy(t),
        lambda t: pickle.dumps(t),
    ],
)
@pytest.mark.parametrize("when", ["between steps", "in the next step"])
def test_any_use_of_a_tensor_after_its_step_raises(use: object, when: str) -> None:
    ws = tb.Workspace(debug=True)
    assert callable(use)
    line = inspect.getsourcelines(stale)[1] + 2
    t = stale(ws)
    message = rf"taken at .*{__name__}.py:{line} in step 1 .* after that step is over"
    place = ws.step() if when == "in the next step" else contextlib.nullcontext()
    with place, pytest.raises(tb.WorkspaceError, match=message):
        use(t)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1:],
        lambda t: t.T,
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.view(torch.int32),
        lambda t: t.unbind()[2],
        lambda t: t.requires_grad_().view(2, 8)[0],
    ],
)
def test_a_view_knows_its_step_too(view: object) -> None:
    ws = tb.Workspace(debug=True)
    assert callable(view)
    with ws.step():
        v = view(ws.take((4, 4)).fill_(1.0))
        v.sum()
    with pytest.raises(tb.WorkspaceError, match="after that step is over"):
        v.sum()


def test_a_result_is_a_plain_tensor_and_outlives_the_step() -> None:
    ws = tb.Workspace(debug=True)
    with ws.step():
        t = ws.take((4, 4)).fill_(2.0)
        results = [t * 2, t.clone(), torch.mm(t, t), copy.deepcopy(t), *torch.max(t, dim=0)]
    assert {type(r) for r in results} == {torch.Tensor}
    assert results[0].tolist() == [[4.0] * 4] * 4


def test_the_error_names_the_scratch() -> None:
    ws = tb.Workspace(debug=True)
    t = stale(ws, name="scores")
    with pytest.raises(tb.WorkspaceError, match=r"^scratch 'scores', taken at .* is used by add after"):
        torch.add(t, 1)


def test_another_thread_that_uses_it_after_its_step_raises_too() -> None:
    ws = tb.Workspace(debug=True)
    t = stale(ws)
    raised: list[BaseException] = []

    def use() -> None:
        try:
            t.sum()
        except tb.WorkspaceError as error:
            raised.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(raised) == 1


# -- by version --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["operand", "result in place", "view"])
def test_a_backward_after_the_step_raises(saved: str) -> None:
    ws = tb.Workspace(debug=True)
    w = torch.ones(4, 4, requires_grad=True)
    with ws.step():
        if saved == "operand":
            loss = (ws.take((4, 4)).fill_(3.0) * w).sum()
        elif saved == "view":
            loss = (ws.take((8, 4)).fill_(3.0)[4:] * w).sum()
        else:
            loss = ws.take((4, 4)).copy_(w).exp_().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_within_the_step_has_the_gradient_of_plain_tensors() -> None:
    grads = []
    for make in (torch.empty, tb.Workspace(debug=True).take):
        w = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
        with make.__self__.step() if isinstance(getattr(make, "__self__", None), tb.Workspace) else torch.enable_grad():
            y = make((4, 4)).copy_(w).exp_()
            z = make((4, 4)).fill_(2.0)
            (torch.mm(w, z) * y).sum().backward()
        grads.append(w.grad)
    assert torch.equal(grads[0], grads[1])


def test_inference_tensors_have_no_version_and_are_found_all_the_same() -> None:
    ws = tb.Workspace(debug=True)
    with torch.inference_mode():
        t = stale(ws)
        with pytest.raises(tb.WorkspaceError, match="after that step"):
            t.sum()


# -- by poison ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_scratch_is_nan_until_it_is_written(dtype: torch.dtype) -> None:
    ws = tb.Workspace(debug=True)
    for _ in range(2):
        with ws.step():
            t = ws.take(64, dtype)
            assert t.float().isnan().all()
            t.zero_()
            del t
            again = ws.take(64, dtype)  # the same bytes, within the step
            assert again.float().isnan().all()
            del again
    assert ws.stats().misses == 1


@pytest.mark.parametrize("name", [None, "scores"])
def test_what_numpy_still_sees_after_the_step_is_nan(name: str | None) -> None:
    ws = tb.Workspace(debug=True)
    with ws.step():
        seen = ws.take(16, name=name).fill_(1.0).numpy()
        assert seen[3] == 1.0
    assert all(math.isnan(x) for x in seen)


@pytest.mark.parametrize("name", [None, "scores"])
def test_a_write_after_the_step_is_noticed_when_the_bytes_are_handed_out_again(name: str | None) -> None:
    ws = tb.Workspace(debug=True)
    with ws.step():
        t = ws.take(16, name=name).fill_(1.0)
        seen = t.numpy()
        del t
    seen[15] = 2.0
    del seen
    with ws.step(), pytest.raises(tb.WorkspaceError, match=r"taken at .*debug.py:\d+ in step 1 .* was written after"):
        ws.take(16, name=name)
    with ws.step():
        ws.take(16, name=name).fill_(1.0)  # said once, and the buffer is not lost
    assert ws.stats().misses == 1


def test_a_write_through_a_pointer_is_noticed_anywhere_in_the_capacity() -> None:
    ws = tb.Workspace(debug=True)
    with ws.step():
        address = ws.take(100, torch.uint8).data_ptr()
    ctypes.c_char.from_address(address + 511).value = b"\x00"
    with ws.step(), pytest.raises(tb.WorkspaceError, match=r"512 bytes.*was written after that step"):
        ws.take(100, torch.uint8)


def test_what_is_held_over_its_step_is_poisoned_once_and_comes_back() -> None:
    ws = tb.Workspace(debug=True)
    t = stale(ws)
    for _ in range(2):
        with ws.step():
            ws.take((4, 4)).fill_(2.0)
    assert ws.stats().kept_buffers == 1
    del t
    assert ws.stats().kept_buffers == 0
    with ws.step():
        taken = [ws.take((4, 4)) for _ in range(2)]
        assert ws.stats().misses == 2
        assert len(taken) == 2


def test_without_debug_a_kept_tensor_stays_what_it_was() -> None:
    ws = tb.Workspace()
    t = stale(ws)
    assert type(t) is torch.Tensor
    with ws.step():
        ws.take((4, 4)).fill_(2.0)
    assert t.tolist() == [[1.0] * 4] * 4
