"""Hypothesis draws come in, small problems go out: any lifetimes, odd and zero sizes, any alignment."""

from __future__ import annotations

from hypothesis import strategies as st

from takeback.plan import Item, ItemId, Problem

_lifetimes = st.tuples(st.integers(0, 20), st.integers(1, 12))
_sizes = st.integers(0, 150)

problems = st.builds(
    lambda drawn, alignment_bytes: Problem(
        tuple(
            Item(ItemId(3 * position), size_bytes, start, start + length)
            for position, (size_bytes, (start, length)) in enumerate(drawn)
        ),
        alignment_bytes,
    ),
    st.lists(st.tuples(_sizes, _lifetimes), max_size=14),
    st.sampled_from([1, 8, 64]),
)
