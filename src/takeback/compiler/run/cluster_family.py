"""Finds what clusters of several shapes have in common: their texts in, one text with a number that varies out.

Clusters of plans for other lengths are the same ops on regions of other sizes. In three of them every number that
differs must be the same expression of the smallest such number, the `base`; a fourth cluster is of the family if its
text is what the expressions give for its own base, number by number. No torch here, and nothing is guessed: what does
not fit has no family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

MEMBERS = 3  #: two fix an expression, the third confirms it
LEAST_BASE = 2  #: sizes of 0 and 1 are another matter
_NUMBER = re.compile(r"-?0x[0-9a-f.]+p[+-]\d+|\d+")  #: fractions are written in hexadecimals
_MOST_TRIED = 6  #: the latest members of which three are looked for
_MOST_BITS = 40  #: of what a fraction divides by: more places than a tensor has


@dataclass(frozen=True)
class Expression:
    """square · base² + times · base + plus."""

    square: int = 0
    times: int = 0
    plus: int = 0

    def of(self, base: Any) -> Any:
        """For a number or what stands for one; as few steps as it takes."""
        terms: list[Any] = []
        if self.square:
            terms.append(base * base if self.square == 1 else self.square * base * base)
        if self.times:
            terms.append(base if self.times == 1 else self.times * base)
        if self.plus or not terms:
            terms.append(self.plus)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total


def fitted(values: Sequence[int], bases: Sequence[int]) -> Expression | None:
    """Of a number with these values for these bases, at least three of which are different."""
    if len(set(values)) == 1:
        return Expression(plus=values[0])
    rise, run = values[1] - values[0], bases[1] - bases[0]
    tried = [Expression(square=values[0] // bases[0] ** 2)]
    if run and rise % run == 0:
        times = rise // run
        tried.insert(0, Expression(times=times, plus=values[0] - times * bases[0]))
    fits = (e for e in tried if all(e.of(b) == v for v, b in zip(values, bases, strict=True)))
    return next(fits, None)


@dataclass(frozen=True)
class Ratio:
    """What a norm over so many rows divides by."""

    above: Expression
    below: Expression

    def of(self, base: Any) -> Any:
        return self.above.of(base) / self.below.of(base)


def fitted_ratio(values: Sequence[float], bases: Sequence[int]) -> Ratio | None:
    """Of a fraction with these values for these bases: each is what its ratio is rounded to."""
    ratios = [ratio for value in values if (ratio := _simplest(value)) is not None]
    if len(ratios) < len(values):
        return None
    above, below = (fitted(numbers, bases) for numbers in zip(*(r.as_integer_ratio() for r in ratios), strict=True))
    return None if above is None or below is None else Ratio(above, below)


def _simplest(value: float) -> Fraction | None:
    """With the smallest denominator, about, of all that are rounded to this value."""
    if not math.isfinite(value):
        return None
    tried = (Fraction(value).limit_denominator(1 << bits) for bits in range(1, _MOST_BITS))
    return next((ratio for ratio in tried if float(ratio) == value), None)


@dataclass(frozen=True)
class ClusterFamily:
    """The texts of clusters that differ by a base."""

    between: tuple[str, ...]  #: the text around its numbers
    numbers: tuple[Expression | str, ...]  #: fractions as they are
    base_at: int  #: which number the base is

    def base_of(self, text: str) -> int | None:
        """Of a cluster of this family; None for another one's text."""
        between, numbers = _apart(text)
        if between != self.between:
            return None
        at = numbers[self.base_at]
        if not at.isdigit():
            return None
        base = int(at)
        same = (
            found == (expression if isinstance(expression, str) else str(expression.of(base)))
            for found, expression in zip(numbers, self.numbers, strict=True)
        )
        return base if all(same) else None

    @property
    def text(self) -> str:
        """What all of it have in common, for a key."""
        return "\n".join((repr(self.between), repr(self.numbers)))


def outline_of(text: str) -> str:
    """Equal for all texts that might be of one family."""
    return _NUMBER.sub("#", text)


def family_of(texts: Sequence[str]) -> tuple[ClusterFamily, tuple[str, ...]] | None:
    """The first family among texts of one outline, and those of them that show it, by their bases; the last text is one
    of them."""
    latest = list(dict.fromkeys(texts))[-_MOST_TRIED:]
    for others in combinations(latest[:-1], MEMBERS - 1):
        found = _family((*others, latest[-1]))
        if found is not None:
            members = sorted((*others, latest[-1]), key=lambda text: found.base_of(text) or 0)
            return found, tuple(members)
    return None


def _family(texts: Sequence[str]) -> ClusterFamily | None:
    apart = [_apart(text) for text in texts]
    if len({between for between, _ in apart}) != 1:
        return None
    columns = list(zip(*(numbers for _, numbers in apart), strict=True))
    varying = {i: tuple(map(int, c)) for i, c in enumerate(columns) if len(set(c)) > 1 and _whole(c)}
    if not varying:
        return None
    base_at = min(varying, key=lambda i: (varying[i], i))
    bases = varying[base_at]
    if len(set(bases)) < MEMBERS or min(bases) < LEAST_BASE:
        return None
    numbers = tuple(_expressions(columns, bases))
    if None in numbers:
        return None
    return ClusterFamily(apart[0][0], tuple(n for n in numbers if n is not None), base_at)


def _expressions(columns: Sequence[Sequence[str]], bases: Sequence[int]) -> Iterator[Expression | str | None]:
    for column in columns:
        if _whole(column):
            yield fitted([int(v) for v in column], bases)
        else:
            yield column[0] if len(set(column)) == 1 else None


def _whole(column: Sequence[str]) -> bool:
    return all(value.isdigit() for value in column)


def _apart(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(_NUMBER.split(text)), tuple(_NUMBER.findall(text))
