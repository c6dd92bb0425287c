"""How kernels that go over rows of channels are cut into tiles, where Inductor's own tiles keep memory waiting.

A sum over many rows: Inductor takes 256 sums and two rows at a time, so that a thread loads eight bytes and waits. With
128 sums and eight rows it has sixteen bytes of each operand under way. What is computed of rows and of one number for
each channel: as one long row, every place loads its channel's numbers anew; in two dimensions a tile loads them once.
Such tiles are given, not tried out: there is one kernel to compile instead of six.

Private torch: checked on 2.11 and 2.13. What it brings is in benchmarks/results/tiles-h200.json.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

#: What is added up stays part of the kernel that makes it, whose tiles it has.
BESIDE_TWO_DIMENSIONS = {"triton.tiling_prevents_reduction_fusion": False}

_TILE = {"XBLOCK": 128, "R0_BLOCK": 8, "num_warps": 4, "num_stages": 1}
_CHANNELS, _PLACES, _WARPS = 256, 2048, 8  #: of a tile in two dimensions: at most, in all, and who goes over it
_LEAST_ROWS = 64  #: fewer are added up at once
_LEAST = 1 << 20  #: numbers; what is smaller does not fill a GPU, whatever its tiles are


def choices(*, by_channels: bool) -> Any:
    """What Inductor asks about kernels; all but such tiles is as it is. `by_channels`: kernels are in `two_dimensions`,
    of which the last is that of the channels."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.triton import FixedTritonConfig
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.runtime.hints import ReductionHint

    def large_operands(features: Any, size: int) -> int:
        nodes = features.scheduler_nodes()
        made = {dep.name for node in nodes for dep in node.read_writes.writes}
        read = [dep for node in nodes for dep in node.read_writes.reads if isinstance(dep, MemoryDep)]
        return len({dep.name for dep in read if dep.name not in made and dep.get_numel() == size})

    class TileChoices(InductorChoices):
        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
            tile, tiles = None, groups[0]
            known = isinstance(tiles, dict) and all(count.is_number for count in tiles.values())
            if known and features.is_reduction():
                tile = self._of_sums(features, tiles)
            elif known and by_channels:
                tile = _of_channels(tiles)
            return kernel_kwargs if tile is None else {**kernel_kwargs, "fixed_config": FixedTritonConfig(tile)}

        def _of_sums(self, features: Any, tiles: dict[str, Any]) -> dict[str, int] | None:
            if set(tiles) != {"x", "r0_"} or features.get_reduction_hint() is not ReductionHint.OUTER:
                return None
            size = tiles["x"] * tiles["r0_"]
            if tiles["r0_"] <= _LEAST_ROWS or size < _LEAST or tiles["x"] < _TILE["XBLOCK"]:
                return None
            # One operand alone Inductor reads as fast.
            return dict(_TILE) if large_operands(features, size) > 1 else None

    return TileChoices()


@contextlib.contextmanager
def two_dimensions(channels: int | None) -> Iterator[None]:
    """Kernels that compute each place by itself go over rows and channels, also where they could go over both as one.
    None: as Inductor does by itself. Its own setting for it (prefer_nd_tiling) looks for all such ways, for minutes."""
    if channels is None:
        yield
        return
    import sympy  # type: ignore[import-untyped]  # torch brings it
    from torch._inductor.codegen.simd import SIMDScheduling

    before, mine = vars(SIMDScheduling)["get_tiling_and_scores"], threading.get_ident()

    def told(cls: Any, nodes: Any, numel: Any, reduction_numel: Any = sympy.S.One, *more: Any, **named: Any) -> Any:
        if threading.get_ident() == mine and reduction_numel == 1 and numel.is_number and numel >= _LEAST:
            wanted = cls.create_tiling([numel // channels, sympy.Integer(channels)], [reduction_numel])
            if numel % channels == 0 and cls.tiling_is_compatible(nodes, numel, reduction_numel, wanted):
                return wanted, None
        return before.__func__(cls, nodes, numel, reduction_numel, *more, **named)

    SIMDScheduling.get_tiling_and_scores = classmethod(told)
    try:
        yield
    finally:
        SIMDScheduling.get_tiling_and_scores = before


def _of_channels(tiles: dict[str, Any]) -> dict[str, int] | None:
    if {"x", "y"} != {name for name, count in tiles.items() if count != 1} or tiles["x"] * tiles["y"] < _LEAST:
        return None
    channels = min(_CHANNELS, 1 << (int(tiles["x"]) - 1).bit_length())
    return {"XBLOCK": channels, "YBLOCK": _PLACES // channels, "num_warps": _WARPS, "num_stages": 1}
