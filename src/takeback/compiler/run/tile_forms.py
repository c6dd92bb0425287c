"""How kernels that go over rows of channels are cut into tiles, where Inductor's own tiles keep memory waiting.

A sum over many rows: Inductor takes 256 sums and two rows at a time, so that a thread loads eight bytes and waits. With
128 sums and eight rows it has sixteen bytes of each operand under way. What is computed of rows and of one number for
each channel: as one long row, every place loads its channel's numbers anew; in two dimensions a tile loads them once.

Private torch: checked on 2.11 and 2.13. What it brings is in benchmarks/results/tiles-h200.json.
"""

from __future__ import annotations

from typing import Any

#: Rows and channels are two dimensions of a tile, also where a kernel could go over both as one. What is added up stays
#: part of the kernel that makes it, whose tiles it has.
IN_TWO_DIMENSIONS = {"triton.prefer_nd_tiling": True, "triton.tiling_prevents_reduction_fusion": False}

_TILE = {"XBLOCK": 128, "R0_BLOCK": 8, "num_warps": 4, "num_stages": 1}
_LEAST_ROWS = 64  #: fewer are added up at once
_LEAST = 1 << 20  #: numbers; what is smaller does not fill a GPU, whatever its tiles are


def choices() -> Any:
    """What Inductor asks about kernels; all but the tiles of such sums is as it is."""
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
            tiles = groups[0]
            if not features.is_reduction() or not isinstance(tiles, dict) or set(tiles) != {"x", "r0_"}:
                return kernel_kwargs
            if features.get_reduction_hint() is not ReductionHint.OUTER or tiles["r0_"] <= _LEAST_ROWS:
                return kernel_kwargs
            size = tiles["x"] * tiles["r0_"]
            # One operand alone Inductor reads as fast.
            if size < _LEAST or tiles["x"] < _TILE["XBLOCK"] or large_operands(features, size) < 2:
                return kernel_kwargs
            return {**kernel_kwargs, "fixed_config": FixedTritonConfig(dict(_TILE))}

    return TileChoices()
