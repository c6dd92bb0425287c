"""Buckets depend on sizes and dtypes alone, cover every slice once, and end with the one that holds tensor 0."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from takeback.parallel import ALIGNMENT_BYTES, BUCKET_BYTES, cut

DTYPES = [torch.float32, torch.float16, torch.float64, torch.complex64]
tensors = st.lists(st.tuples(st.integers(1, 300), st.sampled_from(DTYPES)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(tensors, st.integers(1, 4000))
def test_every_slice_is_aligned_and_in_exactly_one_bucket(
    given_tensors: list[tuple[int, torch.dtype]], bucket_bytes: int
) -> None:
    made = cut(given_tensors, bucket_bytes)
    assert sorted(m for b in made.buckets for m in b.members) == list(range(len(given_tensors)))
    assert made.buckets[-1].members[0] == 0
    for bucket in made.buckets:
        top = bucket.start
        for m in bucket.members:
            numel, dtype = given_tensors[m]
            assert dtype is bucket.dtype
            assert made.offsets[m] * dtype.itemsize % ALIGNMENT_BYTES == 0
            assert top <= made.offsets[m] < top + ALIGNMENT_BYTES // dtype.itemsize, "a gap, or an overlap"
            top = made.offsets[m] + numel
        assert bucket.end == top


def test_no_bucket_but_the_last_of_a_dtype_is_small() -> None:
    made = cut([(1000, torch.float32)] * 10, bucket_bytes=12_000)
    assert [b.members for b in made.buckets] == [(7, 8, 9), (4, 5, 6), (1, 2, 3), (0,)]
    assert BUCKET_BYTES == 25 * 2**20
