"""The parts of the guard by themselves: fingerprints, regions, lines, nesting, and what is left behind."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import overwriters as sab
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from overwriters import Double, leaf
from torch import nn

import takeback as tb
from takeback.guard import fingerprint as prints
from takeback.guard.fingerprint import fingerprints, same
from takeback.guard.graph import Graph
from takeback.guard.judge import Judge
from takeback.guard.region import StorageRegion, Unwatchable, region_of


def region(tensor: torch.Tensor) -> StorageRegion:
    found = region_of(tensor)
    assert found is not None
    return found


def addresses(tensor: torch.Tensor) -> set[int]:
    """Every byte of the tensor, the slow way."""
    item, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    steps = np.ndindex(*tensor.shape)
    firsts = {start + sum(i * s for i, s in zip(at, tensor.stride(), strict=True)) * item for at in steps}
    return {first + k for first in firsts for k in range(item)}


def covered(of: StorageRegion) -> set[int]:
    counts = [count for count, _ in of.outer]
    firsts = {of.start_bytes + sum(i * s for i, (_, s) in zip(at, of.outer, strict=True)) for at in np.ndindex(*counts)}
    return {first + k for first in firsts for k in range(of.run_bytes)}


VIEWS = [
    lambda t: t,
    lambda t: t.transpose(0, 2),
    lambda t: t[1:, :, ::2],
    lambda t: t[:, 1],
    lambda t: t[..., 2],
    lambda t: t.permute(2, 0, 1)[1:3],
    lambda t: t[:1].expand(5, 4, 6),
    lambda t: t.flatten()[3:17],
    lambda t: t[0, 0, 0],
    lambda t: t.to(torch.float16)[::2, ::3],
]


@pytest.mark.parametrize("a", VIEWS)
@pytest.mark.parametrize("b", VIEWS)
def test_regions_cover_the_bytes_of_their_tensors(a: sab.Write, b: sab.Write) -> None:
    base = torch.randn(3, 4, 6)
    x, y = a(base), b(base)
    assert covered(region(x)) == addresses(x)  # type: ignore[arg-type]
    if x.data_ptr() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():  # type: ignore[attr-defined]
        if addresses(x) & addresses(y):  # type: ignore[arg-type]
            assert region(x).overlaps(region(y))  # type: ignore[arg-type]
        if region(x).key == region(y).key:  # type: ignore[arg-type]
            assert addresses(x) == addresses(y)  # type: ignore[arg-type]


def test_pieces_that_interleave_do_not_overlap() -> None:
    q, k, v = (region(t) for t in torch.randn(5, 12).chunk(3, -1))
    assert not q.overlaps(k)
    assert not v.overlaps(q)
    assert q.overlaps(q)


def test_a_region_knows_elements_that_share_bytes() -> None:
    assert region(torch.randn(1, 4).expand(3, 4)).shared
    assert region(torch.arange(10.0).unfold(0, 4, 1)).shared
    assert not region(torch.randn(3, 4).t()).shared


def test_what_has_no_bytes_of_its_own_is_said() -> None:
    assert region_of(torch.empty(0)) is None
    assert region_of(torch.empty(2, device="meta")) is None
    with pytest.raises(Unwatchable, match="sparse"):
        region_of(torch.eye(3).to_sparse())


def test_a_region_does_not_keep_its_storage_and_notices_that_it_is_gone() -> None:
    tensor = torch.randn(64)
    found = region(tensor)
    assert torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2
    [before] = fingerprints([found])
    assert before is not None
    del tensor
    assert fingerprints([found]) == [None]


@pytest.mark.parametrize("how", ["cpu", "exact", "device"])
@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=9000), st.data())
def test_a_fingerprint_sees_any_change(how: str, content: bytes, data: st.DataObject) -> None:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    change = data.draw(st.sampled_from(["bit", "swap", "zero", "negate"]))
    changed = bytearray(content)
    i, j = (data.draw(st.integers(0, len(content) - 1)) for _ in range(2))
    if change == "bit":
        changed[i] ^= 1 << data.draw(st.integers(0, 7))
    elif change == "swap":
        changed[i], changed[j] = changed[j], changed[i]
    elif change == "zero":
        changed[min(i, j) : max(i, j) + 1] = bytes(abs(i - j) + 1)
    else:
        changed[7::8] = bytes(b ^ 0x80 for b in changed[7::8])  # the signs of float64

    def fingerprint() -> prints.Fingerprint:
        if how == "device":  # what runs on a GPU, here on the CPU
            rows, columns = prints._sums(tensor.clone()).tolist()
            return rows, columns
        [found] = fingerprints([region(tensor)], exact=how == "exact")
        assert found is not None
        return found

    before = fingerprint()
    assert same(before, fingerprint())
    tensor.copy_(torch.frombuffer(changed, dtype=torch.uint8))
    assert same(before, fingerprint()) == (bytes(changed) == content)


def test_nan_is_no_change() -> None:
    tensor = torch.full((8,), float("nan"))
    assert same(*fingerprints([region(tensor)] * 2))  # type: ignore[arg-type]


def test_a_guard_inside_a_guard_shares_its_work_and_gets_the_errors() -> None:
    with tb.guard() as outer, tb.guard(on_error="collect") as inner:
        Double.apply(leaf().tanh(), sab.nothing, sab.by_pointer).square().mean().backward()
    assert len(inner.errors) == 1
    assert outer.errors == []
    assert outer.report()["backwards"] == inner.report()["backwards"] == 1


def test_a_guard_is_a_decorator_and_can_be_entered_again() -> None:
    watch = tb.guard()

    @watch
    def step() -> None:
        Double.apply(leaf()).square().mean().backward()

    step()
    step()
    assert watch.report()["backwards"] == 2
    assert watch.report()["checked"] == 2


def test_an_unknown_on_error_is_refused() -> None:
    with pytest.raises(tb.OptionError, match="on_error"):
        tb.guard(on_error="ignore")  # type: ignore[arg-type]


def test_torch_alone_costs_nothing() -> None:
    with tb.guard() as g:
        nn.Linear(4, 4)(torch.randn(2, 4)).square().mean().backward()
    assert g.report()["nodes"] == 6
    assert g.report()["checked"] == g.report()["fingerprinted_bytes"] == 0


def test_nothing_is_left_behind() -> None:
    x = leaf()
    accumulate = (x * 1).grad_fn.next_functions[0][0]
    with tb.guard():
        y = Double.apply(x * 1)
        y.square().mean().backward()
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None
    assert "apply" not in vars(y.grad_fn)
    assert "saved_tensors" not in vars(type(y.grad_fn))
    handle = accumulate.register_hook(lambda *_: None)
    assert len(handle.hooks_dict_ref()) == 1
    handle.remove()


def test_tensors_die_when_they_would_without_a_guard() -> None:
    with tb.guard():
        h = leaf() * 1
        alive = weakref.ref(h)
        y = Double.apply(h).square().mean()
        y.backward()
        del h
        assert alive() is None
        gone = weakref.ref(y)
        del y
        gc.collect()
        assert gone() is None


def test_an_exception_of_the_users_passes_through() -> None:
    def fail(t: torch.Tensor) -> None:
        raise KeyError("mine")

    with tb.guard() as g:
        with pytest.raises(KeyError, match="mine"):
            Double.apply(leaf(), fail).square().mean().backward()
        Double.apply(leaf()).square().mean().backward()
    assert g.errors == []
    assert g.report()["checked"] == 2


def test_where_somebody_traces_already_lines_are_unknown_and_that_is_said() -> None:
    sys.settrace(lambda *_: None)
    try:
        with tb.guard(on_error="collect") as g:
            Double.apply(leaf().tanh(), sab.nothing, sab.by_pointer).square().mean().backward()
        assert sys.gettrace() is not None
    finally:
        sys.settrace(None)
    assert any("debugger" in reason for reason in g.skipped)
    assert g.errors[0].line is None


def test_a_graph_that_cannot_be_read_is_skipped_and_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("strange")

    monkeypatch.setattr(Graph, "add", fail)
    with tb.guard() as g:
        x = leaf()
        Double.apply(x).square().mean().backward()
    assert x.grad is not None
    assert g.skipped == {"a backward whose graph cannot be read (TypeError: strange)": 1}


@pytest.mark.parametrize("part", ["own", "error"])
def test_a_node_that_cannot_be_judged_is_skipped_and_the_program_goes_on(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("strange")

    monkeypatch.setattr(Judge, part, fail)
    with tb.guard() as g:
        x = leaf()
        Double.apply(x.tanh(), sab.nothing, sab.by_memset).square().mean().backward()
    assert x.grad is not None
    assert g.errors == []
    assert g.skipped == {"a node that cannot be read (TypeError: strange)": 1}
