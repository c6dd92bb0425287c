"""What the buffers of a program hold while it is walked op by op, as symbols: equal symbols stand for equal values.

A symbol is the number of an expression: an op with the symbols of its operands, a part of another symbol, or a tensor
that was there before the step. One `SymbolTable` serves several walks, so that their symbols can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from takeback.compiler.program import Buffer, BufferId, Region

Symbol = int


class SymbolTable:
    """Gives equal expressions one number. An expression is a tuple of numbers, names and other hashable things."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], Symbol] = {}
        self._expressions: list[tuple[object, ...]] = []

    def of(self, *expression: object) -> Symbol:
        number = self._numbers.setdefault(expression, len(self._expressions))
        if number == len(self._expressions):
            self._expressions.append(expression)
        return number

    def expression(self, symbol: Symbol) -> tuple[object, ...]:
        return self._expressions[symbol]


@dataclass(frozen=True, slots=True)
class WriteLayer:
    """What one write left in a buffer."""

    region: Region
    symbol: Symbol


class Contents:
    """The layers of every buffer, oldest first. A layer that covers older ones takes their place."""

    def __init__(self, table: SymbolTable, buffers: Mapping[BufferId, Buffer]) -> None:
        self._table, self._buffers = table, buffers
        self._layers: dict[BufferId, tuple[WriteLayer, ...]] = {}

    def layers(self, buffer: BufferId) -> tuple[WriteLayer, ...]:
        return self._layers.get(buffer, ())

    def is_whole(self, region: Region) -> bool:
        """Whether a region is all of its buffer, each byte once."""
        return _span(region) == (0, self._buffers[region.buffer].size_bytes) and _is_packed(region)

    def read(self, region: Region) -> Symbol:
        """What a region holds now."""
        layers = self._layers.get(region.buffer, ())
        if layers and layers[-1].region.same_place(region):
            return layers[-1].symbol
        over: list[WriteLayer] = []  # newest first, down to one that covers the region
        for layer in reversed(layers):
            if not over and layer.region.same_place(region):
                return layer.symbol
            if not _overlap(layer.region, region):
                continue
            over.append(layer)
            if _covers(layer.region, region):
                return self._part(layer, region) if len(over) == 1 else self._mixed(over, region)
        return self._mixed(over, region) if over else self._before(region)

    def read_under(self, region: Region, whole: Region) -> Symbol | None:
        """What `whole` held when the newest value under `region`, a part of it, was written; None if that covers less
        than `whole`."""
        for layer in reversed(self._layers.get(region.buffer, ())):
            if _overlap(layer.region, region):
                if layer.region.same_place(whole):
                    return layer.symbol
                return self._part(layer, whole) if _covers(layer.region, whole) else None
        return None

    def write(self, region: Region, symbol: Symbol) -> None:
        if _span(region)[1] == 0:
            return
        below = self._layers.get(region.buffer, ())
        kept = tuple(layer for layer in below if not _covers(region, layer.region)) if below else ()
        self._layers[region.buffer] = (*kept, WriteLayer(region, symbol))

    def forget(self, buffer: BufferId) -> None:
        """From now on it holds nothing that is meant."""
        self._layers[buffer] = ()

    def replace(self, buffer: BufferId, layers: tuple[WriteLayer, ...]) -> None:
        self._layers[buffer] = layers

    def final(self, buffer: BufferId) -> tuple[tuple[object, ...], ...]:
        """All that a buffer holds."""
        return tuple((*_place(layer.region), layer.symbol) for layer in self._layers.get(buffer, ()))

    def _before(self, region: Region) -> Symbol:
        """What was there before the step, or was never written."""
        if region.numel == 0:
            return self._table.of("empty", region.dtype, region.shape)
        if self._buffers[region.buffer].role.borrowed:
            return self._table.of("given", region.buffer, *_place(region))
        return self._table.of("nothing", *_place(region))

    def _part(self, layer: WriteLayer, region: Region) -> Symbol:
        own, item = layer.region, layer.region.dtype.itemsize
        distance = region.offset * region.dtype.itemsize - own.offset * item
        look = (own.dtype, own.shape, own.stride, distance, *_place(replace(region, offset=0)))
        kind, *inside = self._table.expression(layer.symbol)
        if kind == "average":  # a part of it is the average of the parts
            return self._table.of("average", self._table.of("part", inside[0], *look))
        return self._table.of("part", layer.symbol, *look)

    def _mixed(self, over: list[WriteLayer], region: Region) -> Symbol:
        below = self._before(region) if not _covers(over[-1].region, region) else None
        begin = region.offset * region.dtype.itemsize
        parts = tuple(
            (*_place(replace(a.region, offset=0)), a.region.offset * a.region.dtype.itemsize - begin, a.symbol)
            for a in over
        )
        return self._table.of("mixed", parts, below, *_place(replace(region, offset=0)))


def _place(region: Region) -> tuple[object, ...]:
    return (region.dtype, region.shape, region.stride, region.offset)


def _overlap(a: Region, b: Region) -> bool:
    first, second = _span(a), _span(b)
    return max(first[0], second[0]) < min(first[1], second[1])


def _covers(a: Region, b: Region) -> bool:
    """Whether each byte of `b` is one of `a`."""
    first, second = _span(a), _span(b)
    return first[0] <= second[0] and second[1] <= first[1] and _is_packed(a)


@functools.lru_cache(maxsize=4096)  # a program has few geometries
def _form(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, bool]:
    """Elements from the first one that is touched to the last, and whether each of them is touched once."""
    region = Region(BufferId(0), torch.uint8, shape, stride, 0)
    return region.span_bytes[1], region.packed


def _span(region: Region) -> tuple[int, int]:
    count, item = _form(region.shape, region.stride)[0], region.dtype.itemsize
    return (region.offset * item, (region.offset + count) * item) if count else (0, 0)


def _is_packed(region: Region) -> bool:
    return _form(region.shape, region.stride)[1]
