"""Slices are aligned and in order; buckets depend on sizes and dtypes alone, cover every slice once and end with tensor
0; and a plan, a group, a GradBuffer and the flat optimizers put one model's slices at the same places."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn

import takeback as tb
from takeback.compiler.passes import Packed
from takeback.compiler.passes.draft import owner_of
from takeback.compiler.run.group import Group
from takeback.flat import ALIGNMENT_BYTES, BUCKET_BYTES, cut, lay_out

DTYPES = [torch.float32, torch.float16, torch.float64, torch.complex64]
tensors = st.lists(st.tuples(st.integers(1, 300), st.sampled_from(DTYPES)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(tensors, st.integers(1, 4000))
def test_every_slice_is_aligned_and_in_exactly_one_bucket(
    given_tensors: list[tuple[int, torch.dtype]], bucket_bytes: int
) -> None:
    layout = lay_out(given_tensors)
    buckets = cut(layout, bucket_bytes)
    assert sorted(m for b in buckets for m in b.members) == list(range(len(given_tensors)))
    assert buckets[-1].members[0] == 0
    for bucket in buckets:
        top = bucket.start
        for m in bucket.members:
            (numel, dtype), place = given_tensors[m], layout.slices[m]
            assert dtype is bucket.dtype is layout.kinds[place.flat].dtype
            assert layout.start_bytes(m) % ALIGNMENT_BYTES == 0
            assert top <= place.start < top + ALIGNMENT_BYTES // dtype.itemsize, "a gap, or an overlap"
            top = place.start + numel
            assert place.end == top <= layout.numels[place.flat]
        assert bucket.end == top


def test_no_bucket_but_the_last_of_a_dtype_is_small() -> None:
    buckets = cut(lay_out([(1000, torch.float32)] * 10), bucket_bytes=12_000)
    assert [b.members for b in buckets] == [(7, 8, 9), (4, 5, 6), (1, 2, 3), (0,)]
    assert BUCKET_BYTES == 25 * 2**20


def test_each_device_has_flat_tensors_of_its_own() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    layout = lay_out([(5, torch.float32)] * 3, [cpu, meta, cpu])
    assert [(place.flat, place.start) for place in layout.slices] == [(0, 0), (1, 0), (0, 16)]
    assert [kind.device for kind in layout.kinds] == [cpu, meta]
    assert layout.numels == (32, 16)


def model_of_odd_sizes() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


def test_plan_group_grad_buffer_and_optimizer_put_slices_at_the_same_places(tmp_path: Path) -> None:
    expected = [
        place.start * 4 for place in lay_out([(p.numel(), p.dtype) for p in model_of_odd_sizes().parameters()]).slices
    ]
    distances = [b - a for a, b in itertools.pairwise(expected)]

    model = model_of_odd_sizes()
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.randn(4, 5))
    draft = step._plans[0].executor.layout.draft
    packed = [draft.placements[owner_of(draft, r.buffer)] for _, r in sorted(draft.program.grads.items())]
    assert packed == [Packed("float32", start) for start in expected]

    buffer = tb.GradBuffer(model_of_odd_sizes())
    assert [slot.offset * 4 for slot in buffer.slots] == expected

    optimizer = tb.optim.Adam(buffer)
    for slot in buffer.slots:
        slot.give()
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        states = [optimizer.state[slot.param][name] for slot in buffer.slots]
        assert [state.data_ptr() - states[0].data_ptr() for state in states] == expected

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = Group(model_of_odd_sizes(), dist.group.WORLD)
        # The flags, one for each parameter, come first.
        starts = [group._layout.start_bytes(i + 1) for i in range(len(expected))]
        assert [b - a for a, b in itertools.pairwise(starts)] == distances
    finally:
        dist.destroy_process_group()
