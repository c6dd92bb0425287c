"""A number of blocks comes in, the `RebuildProblem` of a long step goes out; and what tells two answers apart."""

from __future__ import annotations

import hashlib
import random

from takeback.compiler.plan.rebuild_problem import (
    Alike,
    RebuildAnswer,
    RebuildProblem,
    RebuildUnit,
    RebuildValue,
    UnitId,
    ValueId,
)


def long_step(blocks: int, seed: int | None = None) -> RebuildProblem:
    """Blocks of three values, each made of the one before; a backward that reads them all from last to first. Equal
    blocks, or with a seed ones of any size and cost."""
    rng = random.Random(seed)
    n = 3 * blocks
    sizes = [(7, 19, 11)[v % 3] if seed is None else rng.randrange(50, 500) for v in range(n)]
    costs = [3 + v % 3 if seed is None else rng.randrange(20, 90) for v in range(n)]
    values, units, chains = [], [], {}
    carries, runs = {}, {}
    for v in range(n):
        back = 2 * n - v
        stops = sorted({back, *(2 * n - u for u in range(v + 1, min(v + 3, n)))})
        maker = UnitId(v) if v % 3 else None
        value = RebuildValue(ValueId(v), sizes[v], ((v, min(v + 1, n)), (back, back)), tuple(stops), maker)
        values.append(value)
        if maker is not None:
            units.append(RebuildUnit(maker, (v,), (ValueId(v - 1),), (ValueId(v),), costs[v]))
        for stop in stops:
            carries[value.id, stop] = Alike((v % 3, stop - back), v // 3, blocks)
    for v in range(n):
        chain = [u for u in (v - 1, v) if u % 3 and u >= 0 and (u == v or v % 3)]
        if chain:
            chains[2 * n - v] = tuple(UnitId(u) for u in chain)
            for u in chain:
                runs[UnitId(u), 2 * n - v] = Alike((u % 3, v - u), u // 3, blocks)
    ops = 2 * n + 1
    return RebuildProblem(
        tuple(values), tuple(units), dict(sorted(chains.items())), (5,) * ops, (5,) * ops, 40 * n, carries, runs
    )


def digest(answer: RebuildAnswer | None) -> str:
    assert answer is not None
    text = repr((sorted(answer.carried), sorted(answer.rebuilt), answer.peak_bytes, answer.cost_ns))
    return hashlib.sha256(text.encode()).hexdigest()
