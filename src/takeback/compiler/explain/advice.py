"""What can be done about a peak, as data: tips that are ready to paste, each with what it saves and costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from takeback.compiler.explain.frontier import Frontier

OF_PEAK, OF_COPIES = "peak", "copied per step"


@dataclass(frozen=True)
class Tip:
    """One thing to do. The promise is kept within a tenth (tests/explain/test_advice.py)."""

    do: str  #: ready to paste: an argument of `compile_step`, what to write in your code, or the line to look at
    saves_bytes: int | None  #: 0: time alone; None where it cannot be known without running your code otherwise
    of: str  #: what becomes less: `OF_PEAK` or `OF_COPIES`
    added_share: float | None  #: of the step's time, predicted; None where it is not known
    why: str


@dataclass(frozen=True)
class Advice:
    """The tips, the largest saving first, and the frontier that those for `memory=` are taken from."""

    tips: tuple[Tip, ...] = ()
    frontier: Frontier | None = None
