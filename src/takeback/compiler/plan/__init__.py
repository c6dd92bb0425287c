"""Sizes and lifetimes come in, offsets in one arena go out; `validate` shares no code with `solve`."""

from takeback.compiler.plan.around import solve_around
from takeback.compiler.plan.greedy import enough_bytes, solve
from takeback.compiler.plan.problem import Item, ItemId, Pack, PlacingOrder, Problem, Solution, lower_bound_bytes
from takeback.compiler.plan.validate import validate

__all__ = [
    "Item",
    "ItemId",
    "Pack",
    "PlacingOrder",
    "Problem",
    "Solution",
    "enough_bytes",
    "lower_bound_bytes",
    "solve",
    "solve_around",
    "validate",
]
