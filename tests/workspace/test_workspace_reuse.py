"""Bytes are used again, by capacity and by name; what is held is read off the buffers."""

from __future__ import annotations

import gc
import weakref
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import takeback as tb
from takeback.workspace import pool
from takeback.workspace.pool import SMALLEST_CLASS, class_for


def steps(ws: tb.Workspace, shapes: list[tuple[int, ...]], count: int) -> list[set[int]]:
    """Takes tensors of these shapes, all held at the same time, in each of some steps. The addresses of each step."""
    found = []
    for _ in range(count):
        with ws.step():
            taken = [ws.take(shape) for shape in shapes]
            found.append({t.data_ptr() for t in taken})
            assert len(found[-1]) == len(taken)
            del taken
    return found


def test_a_steady_step_allocates_nothing_and_uses_the_same_bytes() -> None:
    ws = tb.Workspace()
    found = steps(ws, [(3, 5), (700,), (16, 16), (16, 16), ()], 6)
    assert all(addresses == found[0] for addresses in found)
    assert (ws.stats().misses, ws.stats().hits) == (5, 25)


@pytest.mark.parametrize(
    ("size_bytes", "capacity_bytes"),
    [(0, 512), (1, 512), (512, 512), (513, 1024), (1024, 1024), (1025, 2048), ((1 << 20) + 1, 1 << 21)],
)
def test_capacities_are_the_powers_of_two_above(size_bytes: int, capacity_bytes: int) -> None:
    ws = tb.Workspace()
    with ws.step():
        t = ws.take(size_bytes, torch.uint8)
        assert t.untyped_storage().nbytes() == capacity_bytes == ws.stats().held_bytes
    assert 1 << class_for(size_bytes) == capacity_bytes


@given(st.integers(0, 1 << 50))
def test_a_class_is_the_smallest_that_is_large_enough(size_bytes: int) -> None:
    found = class_for(size_bytes)
    assert 1 << found >= size_bytes
    assert found == SMALLEST_CLASS or 1 << (found - 1) < size_bytes


def test_a_smaller_shape_of_the_same_class_reuses_the_buffer_and_a_larger_class_does_not() -> None:
    ws = tb.Workspace()
    first, smaller, larger = steps(ws, [(1000,)], 1)[0], steps(ws, [(600,)], 1)[0], steps(ws, [(2000,)], 1)[0]
    assert first == smaller
    assert ws.stats().misses == 2
    assert larger != first


def test_what_was_dropped_is_used_again_within_the_step() -> None:
    ws = tb.Workspace()
    with ws.step():
        for _ in range(10):
            ws.take(1000).fill_(1.0)
    assert ws.stats().buffers == 1


def test_a_step_that_never_ends_does_not_grow() -> None:
    """The newest are always held, so that what was dropped is not among them."""
    ws = tb.Workspace()
    window: deque[torch.Tensor] = deque(maxlen=20)
    with ws.step():
        for _ in range(2000):
            window.append(ws.take(10))
    assert ws.stats().buffers <= 2 * 21


def test_a_take_looks_at_few_buffers_however_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    count = pool.holders

    def counted(storage: torch.UntypedStorage) -> int:
        nonlocal looks
        looks += 1
        return count(storage)

    monkeypatch.setattr(pool, "holders", counted)
    ws = tb.Workspace()
    with ws.step():
        held = [ws.take(10) for _ in range(1000)]
        assert looks <= 12 * len(held)  # 8 newest, one at its making, and now and then all
        monkeypatch.undo()


def test_dtype_and_shape_may_change_on_the_same_bytes() -> None:
    ws = tb.Workspace()
    for dtype, shape in [(torch.float64, (8, 16)), (torch.bool, (1024,)), (torch.bfloat16, (2, 2, 128)), (None, 256)]:
        with ws.step():
            t = ws.take(shape, dtype)
            expected = torch.empty(shape, dtype=dtype)
            assert (t.shape, t.dtype, t.stride()) == (expected.shape, expected.dtype, expected.stride())
            assert t.is_leaf
            assert not t.requires_grad
            del t
    assert ws.stats().buffers == 1


def test_defaults_are_those_of_torch() -> None:
    ws = tb.Workspace()
    torch.set_default_dtype(torch.float64)
    try:
        with ws.step(), torch.device("meta"), pytest.raises(tb.WorkspaceError, match="on the CPU and on CUDA"):
            ws.take(3)
        with ws.step():
            assert ws.take(3).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["keep", "drop"])), max_size=30), st.integers(1, 3))
def test_tensors_held_at_the_same_time_never_share_bytes(takes: list[tuple[int, str]], count: int) -> None:
    ws = tb.Workspace()
    held: list[tuple[torch.Tensor, int]] = []
    for step in range(count):
        with ws.step():
            for i, (size, fate) in enumerate(takes):
                t = ws.take(size, torch.int64).fill_(step * 1000 + i)
                if fate == "keep":
                    held.append((t, step * 1000 + i))
                del t
        if step % 2:
            del held[::2]
    assert all((t == value).all() for t, value in held)
    stats = ws.stats()
    assert stats.kept_buffers == len(held)
    assert stats.held_bytes >= stats.in_use_bytes == stats.kept_bytes


# -- names -------------------------------------------------------------------------------------------------------


def test_a_name_has_the_same_bytes_in_every_step_whatever_is_taken_around_it() -> None:
    ws = tb.Workspace()
    found = set()
    for i in range(5):
        with ws.step():
            others = [ws.take(100) for _ in range(i)]
            found.add(ws.take(100 - i, name="scores").data_ptr())
            del others
    assert len(found) == 1


def test_two_names_never_share_bytes() -> None:
    ws = tb.Workspace()
    with ws.step():
        a = ws.take(10, name="a").data_ptr()
    with ws.step():
        assert ws.take(10, name="b").data_ptr() != a
        assert ws.take(10).data_ptr() != a


def test_a_name_taken_twice_at_a_time_raises_and_loses_nothing() -> None:
    ws = tb.Workspace()
    with ws.step():
        a = ws.take(10, name="a").fill_(7)
        with pytest.raises(tb.WorkspaceError, match="'a' was taken before in this step and is still held"):
            ws.take(10, name="a")
        with ws.step(), pytest.raises(tb.WorkspaceError, match="still held"):
            ws.take(10, name="a")
        assert (a == 7).all()
        address = a.data_ptr()
        del a
        assert ws.take(10, name="a").data_ptr() == address
    assert ws.stats().buffers == 1


def test_a_name_that_is_held_over_its_step_gets_other_bytes_and_the_old_ones_come_back() -> None:
    ws = tb.Workspace()
    with ws.step():
        a = ws.take(10, name="a").fill_(7)
    with ws.step():
        assert ws.take(10, name="a").fill_(8).data_ptr() != a.data_ptr()
        assert (a == 7).all()
    assert ws.stats().kept_buffers == 1
    address = a.data_ptr()
    del a
    with ws.step():
        assert ws.take(10).data_ptr() == address


def test_a_name_that_grows_leaves_its_bytes_to_others() -> None:
    ws = tb.Workspace()
    with ws.step():
        small = ws.take(10, name="a").data_ptr()
        assert ws.take(1000, name="a").data_ptr() != small
        assert ws.take(10).data_ptr() == small
    assert ws.stats().buffers == 2


# -- what is held ------------------------------------------------------------------------------------------------


def test_nothing_shrinks_until_trim_and_trim_gives_back_what_is_free() -> None:
    ws = tb.Workspace()
    with ws.step():
        kept = ws.take(1000)
        stats = ws.stats()
        assert (stats.in_use_bytes, stats.kept_bytes, stats.kept_buffers) == (4096, 0, 0)
        ws.take(5000)
        ws.take(10, name="a")
    steps(ws, [(3,)], 5)
    held = ws.stats().held_bytes
    assert held == 4096 + 32768 + 512 + 512
    assert ws.trim() == held - 4096
    stats = ws.stats()
    assert (stats.held_bytes, stats.in_use_bytes, stats.kept_bytes, stats.peak_bytes) == (4096, 4096, 4096, held)
    kept.fill_(1.0)
    del kept
    assert ws.trim() == 4096
    assert ws.stats().held_bytes == 0


def test_capacity_is_read_off_a_buffer_that_its_holder_resized() -> None:
    ws = tb.Workspace()
    with ws.step():
        t = ws.take(1000)
        t.untyped_storage().resize_(100_000)
        assert ws.stats().held_bytes == 100_000
        del t
    with ws.step():
        assert ws.take(65536, torch.uint8).untyped_storage().nbytes() == 100_000
    assert ws.stats().misses == 1
    with ws.step():
        t = ws.take(65536, torch.uint8)
        t.untyped_storage().resize_(0)
        del t
        assert ws.take(65536, torch.uint8).untyped_storage().nbytes() == 65536
    assert ws.stats().held_bytes == 65536


def test_peak_is_of_what_was_held_at_one_time() -> None:
    ws = tb.Workspace()
    for _ in range(3):
        steps(ws, [(1024,), (1024,)], 2)
        ws.trim()
    assert ws.stats().peak_bytes == 8192
    assert ws.stats().held_bytes == 0


def test_memory_goes_at_once_with_the_workspace() -> None:
    gc.collect()
    gc.disable()
    try:
        ws = tb.Workspace()
        steps(ws, [(10,), (10,)], 2)
        with ws.step():
            refs = [weakref.ref(ws.take(10).untyped_storage()), weakref.ref(ws.take(10, name="a").untyped_storage())]
        refs.append(weakref.ref(ws))
        assert all(r() is not None for r in refs)
        del ws
        assert [r() for r in refs] == [None] * 3
    finally:
        gc.enable()


def test_a_tensor_outlives_its_workspace() -> None:
    ws = tb.Workspace()
    with ws.step():
        t = ws.take(10).fill_(3)
    del ws
    gc.collect()
    assert (t == 3).all()


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (-2, -3)])
def test_a_negative_size_is_refused(shape: tuple[int, ...]) -> None:
    ws = tb.Workspace()
    with ws.step(), pytest.raises(tb.WorkspaceError, match="no negative sizes"):
        ws.take(shape)


def test_an_allocation_that_fails_says_what_was_asked_for() -> None:
    ws = tb.Workspace()
    with ws.step(), pytest.raises(RuntimeError) as raised:
        ws.take((1 << 46) + 1, torch.uint8)
    assert "70,368,744,177,665" in raised.value.__notes__[0]
    assert ws.stats().buffers == 0
