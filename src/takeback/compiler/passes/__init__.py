"""Passes decide and never allocate: each takes a `Draft` and returns a new one, with every refusal as data."""

from takeback.compiler.passes.draft import Borrowed, Draft, Fresh, Home, Overwrites, Packed, Placement, Refusal
from takeback.compiler.passes.pipeline import PIPELINE, PassSettings, Stage, run_passes

__all__ = [
    "PIPELINE",
    "Borrowed",
    "Draft",
    "Fresh",
    "Home",
    "Overwrites",
    "Packed",
    "PassSettings",
    "Placement",
    "Refusal",
    "Stage",
    "run_passes",
]
