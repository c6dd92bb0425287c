"""The lengths of a data set come in; the few lengths to pad to that add the least padding in all go out.

The choice is the best there is, not a heuristic: dynamic programming over the histogram of lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from takeback.errors import OptionError


def choose_lengths(lengths: Iterable[int], count: int, *, multiple_of: int = 1) -> tuple[int, ...]:
    """At most `count` lengths, ascending, so that padding each item to the next of them adds the fewest tokens.

    The last one is the longest item's. `multiple_of` rounds each up (tensor cores like 8 or 16)."""
    whole("count", count, least=1)
    whole("multiple_of", multiple_of, least=1)
    items = Counter(-(-length // multiple_of) * multiple_of for length in checked_lengths(lengths))
    return _fewest_tokens(sorted(items), items, count)


def _fewest_tokens(sizes: Sequence[int], items: Mapping[int, int], count: int) -> tuple[int, ...]:
    """`tokens[j]`: the fewest for the items of the first j sizes, with so many lengths as were allowed so far.

    With size = sizes[j - 1], one length more allows tokens'[j] = min over i < j of tokens[i] + (below[j] - below[i]) *
    size. Each i is a line in size, of slope -below[i]: slopes fall and sizes rise, so the lowest line moves one way."""
    if len(sizes) <= count:
        return tuple(sizes)
    below = [0]
    for size in sizes:
        below.append(below[-1] + items[size])
    tokens: list[int] = [0] + [n * size for n, size in zip(below[1:], sizes, strict=True)]
    chosen: list[list[int]] = [[0] * len(tokens)]
    for _ in range(count - 1):
        hull: list[int] = []
        first, after, came = 0, [0] * len(tokens), [0] * len(tokens)
        for j in range(1, len(tokens)):
            while len(hull) - first >= 2 and _never_lowest(hull[-2], hull[-1], j - 1, tokens, below):
                hull.pop()
            hull.append(j - 1)
            size = sizes[j - 1]
            while first + 1 < len(hull) and _at(hull[first + 1], size, tokens, below) <= _at(
                hull[first], size, tokens, below
            ):
                first += 1
            came[j] = hull[first]
            after[j] = _at(hull[first], size, tokens, below) + below[j] * size
        tokens = after
        chosen.append(came)
    found, j = [], len(sizes)
    for came in reversed(chosen):
        if j == 0:
            break
        found.append(sizes[j - 1])
        j = came[j]
    return tuple(reversed(found))


def _at(i: int, size: int, tokens: Sequence[int], below: Sequence[int]) -> int:
    return tokens[i] - below[i] * size


def _never_lowest(a: int, b: int, c: int, tokens: Sequence[int], below: Sequence[int]) -> bool:
    """Whether line b is nowhere below both a and c (slopes a > b > c)."""
    return (tokens[c] - tokens[a]) * (below[b] - below[a]) <= (tokens[b] - tokens[a]) * (below[c] - below[a])


def lengths_of(data: Sequence[Any], key: str | int | None = None) -> list[int]:
    """The length of each item. `key`: what to measure of a dict or a tuple; "input_ids", or its first element. Reads
    every item once: give the lengths yourself where that is slow."""
    return [_length_of(data[i], key, i) for i in range(len(data))]


def _length_of(item: Any, key: str | int | None, index: int) -> int:
    part = item
    if isinstance(item, Mapping):
        key = "input_ids" if key is None else key
        if key not in item:
            raise OptionError(f"item {index} has no {key!r}, but {list(item)}: say key= of what has the length.")
        part = item[key]
    elif key is not None or (isinstance(item, tuple | list) and not is_sequence_of_numbers(item)):
        part = item[0 if key is None else key]
    try:
        return len(part)
    except TypeError:
        raise OptionError(
            f"item {index} has no length (a {type(part).__name__}): say key= of what has, or give lengths yourself."
        ) from None


def is_sequence_of_numbers(item: Any) -> bool:
    """Whether a list is one field, as tokenizers give it, and not several."""
    return isinstance(item, list) and all(isinstance(v, bool | int | float) for v in item)


# -- checks that the sampler and the padding share -----------------------------------------------------------------


def checked_lengths(lengths: Iterable[int]) -> list[int]:
    """As plain ints; a tensor or an array will do."""
    values = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if not values:
        raise OptionError("lengths is empty: there must be one length for each item.")
    for i, length in enumerate(values):
        if isinstance(length, bool) or not hasattr(length, "__index__") or length < 0:
            raise OptionError(f"lengths must be whole numbers and not negative, got {length!r} for item {i}.")
    return [int(length) for length in values]


def checked_to(to: int | Iterable[int]) -> tuple[int, ...]:
    """The lengths to pad to, ascending and each once."""
    values = [to] if isinstance(to, int) else to.tolist() if hasattr(to, "tolist") else list(to)
    bad = [v for v in values if isinstance(v, bool) or not hasattr(v, "__index__") or v < 1]
    if bad or not values:
        raise OptionError(f"to= must be one or more lengths to pad to, whole and at least 1, got {to!r}.")
    return tuple(sorted({int(v) for v in values}))


def next_length(length: int, to: Sequence[int], what: str) -> int:
    """The least of the lengths that `length` fits into. `what` is so long."""
    at = bisect_left(to, length)
    if at == len(to):
        raise OptionError(
            f"{what} is {length} long, and the longest length to pad to is {to[-1]}: truncate it, or add a length that "
            f"holds it to to=."
        )
    return to[at]


def whole(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r}.")
