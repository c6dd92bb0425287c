"""Hypothesis draws come in, small problems go out: any lifetimes, odd and zero sizes, any alignment, any packs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from takeback.compiler.plan import Item, ItemId, Pack, Problem

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


def _packed(problem: Problem, pack_of: list[int]) -> Problem:
    """Every item goes into the pack that is drawn for it, above the members before; 0 stands for none."""
    members: dict[int, list[tuple[ItemId, int]]] = {}
    tops: dict[int, int] = {}
    for item, pack in zip(problem.items, pack_of, strict=False):
        if pack and item.size_bytes:
            distance = tops.get(pack, 0)
            members.setdefault(pack, []).append((item.id, distance))
            tops[pack] = -(-(distance + item.size_bytes) // problem.alignment_bytes) * problem.alignment_bytes
    return replace(problem, packs=tuple(Pack(tuple(each)) for each in members.values()))


packed_problems = st.builds(_packed, problems, st.lists(st.integers(0, 2), min_size=14, max_size=14))
