"""Passes decide and never allocate: each takes a `Draft` and returns a new one, with every refusal as data."""

from takeback.compiler.passes.draft import Borrowed, Draft, Fresh, Overwrites, Packed, Placement, Refusal
from takeback.compiler.passes.pipeline import PASSES, passes_for, run_passes

__all__ = [
    "PASSES",
    "Borrowed",
    "Draft",
    "Fresh",
    "Overwrites",
    "Packed",
    "Placement",
    "Refusal",
    "passes_for",
    "run_passes",
]
