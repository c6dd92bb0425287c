"""Which kernels get tiles of takeback's, by what Inductor knows of them; tests/gpu runs such kernels."""

from __future__ import annotations

import types
from typing import Any

import pytest
import sympy
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.hints import ReductionHint

from takeback.compiler.run.tile_forms import choices

_PLACE = sympy.Symbol("i")


def features(reads: dict[str, int], hint: ReductionHint = ReductionHint.OUTER, made: tuple[str, ...] = ()) -> Any:
    """A kernel that reads so many numbers of each of these, and makes others itself."""

    def dep(name: str, count: int) -> MemoryDep:
        return MemoryDep(name, _PLACE, (_PLACE,), (sympy.Integer(count),))

    access = types.SimpleNamespace(
        reads={dep(name, count) for name, count in reads.items()}, writes={dep(name, 1) for name in made}
    )
    return types.SimpleNamespace(
        is_reduction=lambda: True,
        get_reduction_hint=lambda: hint,
        scheduler_nodes=lambda: (types.SimpleNamespace(read_writes=access),),
    )


def tiles(sums: int, rows: int, kernel: Any, **more: int) -> Any:
    groups = [
        {**{name: sympy.Integer(n) for name, n in more.items()}, "x": sympy.Integer(sums), "r0_": sympy.Integer(rows)},
        kernel,
    ]
    return choices(by_channels=True).triton_kernel_kwargs(object, kernel, groups, {"given": 1})


def test_sum_over_many_rows_of_two_operands_has_wide_tiles() -> None:
    found = tiles(4096, 512, features({"a": 4096 * 512, "b": 4096 * 512, "scale": 4096}))
    assert found["given"] == 1
    assert found["fixed_config"].config == {"XBLOCK": 128, "R0_BLOCK": 8, "num_warps": 4, "num_stages": 1}


def test_kernel_of_sizes_that_are_not_known_is_left_as_it_is() -> None:
    kernel = features({"a": 4096 * 512, "b": 4096 * 512})
    groups = [{"x": sympy.Integer(4096), "r0_": sympy.Symbol("rows")}, kernel]
    assert choices(by_channels=True).triton_kernel_kwargs(object, kernel, groups, {}) == {}


_TWO = {"a": 4096 * 512, "b": 4096 * 512}


@pytest.mark.parametrize(
    ("sums", "rows", "kernel", "more"),
    [
        (4096, 512, features({"a": 4096 * 512, "scale": 4096}), {}),
        (4096, 512, features(_TWO, made=("b",)), {}),
        (4096, 512, features(_TWO, ReductionHint.INNER), {}),
        (4096, 512, features(_TWO), {"y": 2}),
        (32768, 64, features({"a": 32768 * 64, "b": 32768 * 64}), {}),
        (64, 65536, features({"a": 64 * 65536, "b": 64 * 65536}), {}),
        (1024, 512, features({"a": 1024 * 512, "b": 1024 * 512}), {}),
    ],
    ids=["one operand", "one it makes", "along rows", "three dimensions", "few rows", "few sums", "small"],
)
def test_any_other_kernel_is_left_as_it_is(sums: int, rows: int, kernel: Any, more: dict[str, int]) -> None:
    assert tiles(sums, rows, kernel, **more) == {"given": 1}


@pytest.mark.parametrize(("channels", "wide"), [(64, 64), (72, 128), (2048, 256)])
def test_rows_of_channels_have_tiles_as_wide_as_the_channels(channels: int, wide: int) -> None:
    kernel = types.SimpleNamespace(is_reduction=lambda: False)
    groups = [{"y": sympy.Integer(1 << 17), "x": sympy.Integer(channels), "r0_": sympy.Integer(1)}, kernel]
    found = choices(by_channels=True).triton_kernel_kwargs(object, kernel, groups, {})
    tile = found["fixed_config"].config
    assert (tile["XBLOCK"], tile["XBLOCK"] * tile["YBLOCK"], tile["num_warps"]) == (wide, 2048, 8)
    assert choices(by_channels=False).triton_kernel_kwargs(object, kernel, groups, {}) == {}
    assert (
        choices(by_channels=True).triton_kernel_kwargs(object, kernel, [{"x": sympy.Integer(1 << 24)}, kernel], {})
        == {}
    )
