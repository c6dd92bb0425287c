"""Items, or the batch that a collate_fn made of them, come in; a batch padded to one of few lengths goes out.

What a field is padded with is never guessed: it is in `PAD_VALUES` or in `values=`, or an error says what to write.
All fields of a batch get one length, the least that holds the longest of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils.data import default_collate

from takeback.bucket.lengths import checked_to, is_sequence_of_numbers, next_length
from takeback.errors import OptionError

Key: TypeAlias = str | int
Value: TypeAlias = float | int | bool

PAD_VALUES: Mapping[str, Value] = {
    "input_ids": 0,  # or the tokenizer's pad_token_id; only beside an attention_mask
    "attention_mask": 0,
    "token_type_ids": 0,
    "special_tokens_mask": 1,
    "labels": -100,  # what cross_entropy ignores
}
"""What fields of (batch, length) integers are padded with unless `values=` says otherwise."""

_ONE = "the batch"  # the key of a batch that is one tensor


def pad(
    to: int | Iterable[int],
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    values: Mapping[Any, Value | None] | Value | None = None,
    side: str | None = None,
    mask: str | None = None,
) -> Padding:
    """A `collate_fn` for a DataLoader.

    to          the lengths to pad to; each batch gets the least that holds it. See `BatchSampler.to`
    collate_fn  yours, whose batch is padded further, along dimension 1. None: items are padded along dimension 0 and
                stacked, and what has no length is collated as torch does
    values      what a field is padded with, by its name (in a tuple: by its position; for one tensor: the value). None
                as a value: this field has no length. Other names: `PAD_VALUES`
    side        "right" or "left". None: that of collate_fn.tokenizer, if it has one, else right
    mask        adds a field of this name with 1 where there is an item and 0 where there is padding; for dicts
    """
    tokenizer = getattr(collate_fn, "tokenizer", None)
    side = side or getattr(tokenizer, "padding_side", None) or "right"
    if side not in ("right", "left"):
        raise OptionError(f"side must be 'right' or 'left', got {side!r}.")
    if collate_fn is not None and mask is not None:
        raise OptionError("mask= is made of items: with a collate_fn of yours let that make the mask.")
    given: dict[Any, Value | None] = {}
    if isinstance(values, Mapping):
        given = dict(values)
    elif values is not None:
        given = {_ONE: values}
    known: dict[str, Value] = dict(PAD_VALUES)
    if getattr(tokenizer, "pad_token_id", None) is not None:
        known["input_ids"] = int(tokenizer.pad_token_id)  # type: ignore[union-attr]
    return Padding(checked_to(to), collate_fn, given, known, side == "left", mask)


@dataclass(frozen=True)
class Padding:
    """Made by `pad`. Can be pickled, for workers, if its collate_fn can."""

    to: tuple[int, ...]
    collate_fn: Callable[[list[Any]], Any] | None = None
    values: Mapping[Any, Value | None] = field(default_factory=dict)
    known: Mapping[str, Value] = field(default_factory=lambda: dict(PAD_VALUES))
    left: bool = False
    mask: str | None = None

    def __call__(self, items: list[Any]) -> Any:
        if self.collate_fn is None:
            return self._stacked(items)
        batch = self.collate_fn(items)
        fields = _fields(batch, "the batch that collate_fn made")
        self._check_names(fields)
        tensors = {k: v for k, v in fields.items() if isinstance(v, torch.Tensor) and v.dim() >= 2}
        chosen = self._chosen([tensors], dims=2)
        length = self._length([tensors], chosen, dim=1)
        return _with_fields(
            batch, {k: self._longer(k, v, chosen[k], length) for k, v in tensors.items() if k in chosen}
        )

    def _stacked(self, items: list[Any]) -> Any:
        if not items:
            raise OptionError("there is nothing to collate: the batch has no items.")
        rows = [{k: _as_tensor(v) for k, v in _fields(item, f"item {i}").items()} for i, item in enumerate(items)]
        if any(row.keys() != rows[0].keys() for row in rows):
            odd = next(row for row in rows if row.keys() != rows[0].keys())
            raise OptionError(f"items have different fields: {list(rows[0])} and {list(odd)}.")
        self._check_names(rows[0])
        tensors = [{k: v for k, v in r.items() if isinstance(v, torch.Tensor) and v.dim() >= 1} for r in rows]
        chosen = self._chosen(tensors, dims=1)
        length = self._length(tensors, chosen, dim=0)
        made: dict[Key, Any] = {}
        for key in rows[0]:
            if key in chosen:
                made[key] = torch.cat([self._longer(key, r[key][None], chosen[key], length) for r in rows])
            else:
                made[key] = default_collate([r[key] for r in rows])
        if self.mask is not None:
            made[self.mask] = self._mask(items[0], made, tensors, chosen, length)
        return _like(items[0], made)

    def _mask(
        self,
        item: Any,
        made: Mapping[Key, Any],
        rows: Sequence[Mapping[Key, torch.Tensor]],
        chosen: Mapping[Key, Value],
        length: int,
    ) -> torch.Tensor:
        if not isinstance(item, Mapping) or self.mask in made or not chosen:
            raise OptionError(
                f"mask={self.mask!r} names a field to add to a dict of fields with lengths; the batch is a "
                f"{type(item).__name__} of {list(made)}."
            )
        ones = [torch.ones(1, max(len(row[k]) for k in chosen), dtype=torch.long) for row in rows]
        return torch.cat([self._longer("mask", one, 0, length) for one in ones])

    def _check_names(self, fields: Mapping[Key, Any]) -> None:
        strange = [key for key in self.values if key not in fields]
        if strange:
            raise OptionError(f"values= names {strange[0]!r}, and the batch has {list(fields)}.")

    def _chosen(self, rows: Sequence[Mapping[Key, torch.Tensor]], dims: int) -> dict[Key, Value]:
        """The fields that are padded, and with what. `dims`: of a field of `PAD_VALUES`."""
        found: dict[Key, Value] = {}
        for key, sample in rows[0].items():
            if key in self.values:
                value = self.values[key]
                if value is not None:
                    found[key] = value
                continue
            integer = not (sample.is_floating_point() or sample.is_complex())
            if key not in self.known or sample.dim() != dims or not integer:
                raise OptionError(_unknown(key, sample, dims))
            if key == "input_ids" and "attention_mask" not in (*rows[0], self.mask):
                raise OptionError(
                    f"input_ids would be padded with {self.known[key]!r}, and there is no attention_mask that says so "
                    f"to the model: add mask='attention_mask', or say values={{'input_ids': ...}} if the model needs "
                    f"none."
                )
            found[key] = self.known[str(key)]
        return found

    def _length(self, rows: Sequence[Mapping[Key, torch.Tensor]], chosen: Mapping[Key, Value], dim: int) -> int:
        """The one that all fields are padded to. Those of `PAD_VALUES` must be as long as one another: labels of
        another length may be something else."""
        longest = 0
        for row in rows:
            sizes = {k: row[k].shape[dim] for k in chosen if k in row}
            of_table = {k: n for k, n in sizes.items() if k not in self.values}
            if len(set(of_table.values())) > 1:
                raise OptionError(
                    f"fields have different lengths, {of_table}: say values={{name: value}} for those that shall be "
                    f"padded to one length all the same, or {{name: None}} for those without a length."
                )
            longest = max(longest, *sizes.values(), 0)
        return next_length(longest, self.to, "the longest item of a batch") if chosen else 0

    def _longer(self, key: Key, t: torch.Tensor, value: Value, length: int) -> torch.Tensor:
        """`t` with dimension 1 filled up."""
        if t.dim() < 2:
            raise OptionError(f"field {key!r} has no length in some items: say values={{{key!r}: None}}.")
        fill = torch.tensor(value).to(t.dtype)
        if fill.item() != value and value == value:
            raise OptionError(f"field {key!r} is {t.dtype} and cannot hold {value!r}: say another value in values=.")
        out = t.new_full((t.shape[0], length, *t.shape[2:]), fill.item())
        start = length - t.shape[1] if self.left else 0
        out[:, start : start + t.shape[1]] = t
        return out


def _unknown(key: Key, t: torch.Tensor, dims: int) -> str:
    shape = "x".join(map(str, t.shape))
    if key == _ONE:
        return f"it is not known what to pad a {t.dtype} tensor of {shape} with: say values=0, or what it should be."
    other = "" if key not in PAD_VALUES else f" (a {key} of {dims} dimensions and whole numbers would be known)"
    return (
        f"it is not known what to pad {key!r} with, a {t.dtype} tensor of {shape}{other}: say values={{{key!r}: 0}}, "
        f"or what it should be; values={{{key!r}: None}} if it has no length."
    )


# -- batches as fields ---------------------------------------------------------------------------------------------


def _fields(batch: Any, what: str) -> dict[Key, Any]:
    """By name, by position in a tuple or list, or the one tensor there is."""
    if isinstance(batch, torch.Tensor):
        return {_ONE: batch}
    if isinstance(batch, Mapping):
        fields: dict[Key, Any] = dict(batch)
    elif hasattr(batch, "__array__") or is_sequence_of_numbers(batch):
        return {_ONE: batch}
    elif isinstance(batch, tuple | list):
        fields = dict(enumerate(batch))
    else:
        raise OptionError(f"{what} is a {type(batch).__name__}: pad() knows tensors, dicts, tuples and lists of them.")
    nested = next((k for k, v in fields.items() if isinstance(v, Mapping | tuple) or _holds_more(v)), None)
    if nested is not None:
        raise OptionError(
            f"{what} has more fields in its field {nested!r}: pad() looks one level deep. Make it flat, or pad it in a "
            f"collate_fn of yours."
        )
    return fields


def _holds_more(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(v, torch.Tensor | Mapping | tuple) for v in value)


def _as_tensor(value: Any) -> Any:
    """Lists of numbers and arrays, as tokenizers and `datasets` give them."""
    if isinstance(value, list) and not any(isinstance(v, str | bytes) for v in value):
        return torch.tensor(value, dtype=None if value else torch.long)
    return torch.as_tensor(value) if hasattr(value, "__array__") and not isinstance(value, torch.Tensor) else value


def _with_fields(batch: Any, new: Mapping[Key, Any]) -> Any:
    """The same kind of batch, with these fields changed."""
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        for key, value in new.items():
            changed[key] = value
        return changed
    return _like(batch, {**_fields(batch, "the batch"), **new})


def _like(item: Any, fields: Mapping[Key, Any]) -> Any:
    if isinstance(item, Mapping):
        return dict(fields)
    if isinstance(item, tuple) and hasattr(item, "_fields"):  # a namedtuple
        return type(item)(*fields.values())
    if isinstance(item, tuple | list):
        return type(item)(fields.values())
    return fields[_ONE]
