"""The activated norm's kernels on a GPU: tiles and grids for activated_triton.py. The contract is activated.py's.

A `LayerLaunches` is for one layer at one size. Partial sums are [k, parts, columns]; the number of parts depends on
sizes and on the device alone.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from takeback.nn.kernels import activated_triton as kernels
from takeback.nn.kernels.launch import Launch, given, on, parts_of, power, processors
from takeback.nn.kernels.width import wide

if TYPE_CHECKING:
    from takeback.nn.kernels.activated import Layer
    from takeback.nn.kernels.norm_call import Into

_TILE, _COLUMNS, _WARPS = 4096, 256, 4  #: of a program that writes as many elements as it reads
_SUM_TILE, _SUM_COLUMNS = 4096, 64  #: of a program that sums over rows of a matrix
_PLANE_TILE = 8192  #: of one that sums over planes
_MANY_SPOTS = 1024  #: from here on sums go over planes
_FEW_SAMPLES = 32  #: below, a sum for each column would take as much as the columns
_WAVES = 4  #: programs that sum, for each processor

WIDTHS = {torch.float32: tl.float32, torch.float64: tl.float64}


def statistics(x: Tensor, layer: Layer) -> Tensor:
    """[2, channels]: mean and biased variance."""
    return torch.stack(_launches_of(x, layer).moments(x, 0.0, None, None, 0.0)[:2])


def batch_statistics(
    x: Tensor,
    layer: Layer,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """mean and 1 / sqrt(variance + eps), after moving the running statistics."""
    mean, _, invstd = _launches_of(x, layer).moments(x, eps, running_mean, running_var, momentum)
    return mean, invstd


def normalise_(x: Tensor, out: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> None:
    """out = act(gamma * (x - mean) * invstd + beta)."""
    with on(x):
        _launches_of(x, layer).normalise(x, out, given(layer.weight, x), given(layer.bias, x), mean, invstd)


def gather(dy: Tensor, saved: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[2, channels]: sums of dz and of dz * xhat; and the gradients of weight and bias that they are."""
    launches = _launches_of(dy, layer)
    sums = dy.new_empty((2, layer.channels), dtype=launches.width)
    of_weight, of_bias = (
        dy.new_empty(layer.channels, dtype=launches.width if parameter is None else parameter.dtype)
        for parameter in (layer.weight, layer.bias)
    )
    if not layer.count:
        return sums.zero_(), of_weight.zero_(), of_bias.zero_()
    with on(dy):
        partial = _partial_sums(launches, dy, saved, layer, mean, invstd)
        launches.combine_sums(partial, sums, given(layer.weight, dy), of_weight, of_bias)
    return sums, of_weight, of_bias


def gather_into_(
    dy: Tensor,
    saved: Tensor,
    layer: Layer,
    mean: Tensor,
    invstd: Tensor,
    weight_grad: Into | None,
    bias_grad: Into | None,
) -> Tensor:
    """The same, with the gradients written where they are wanted; the sums. The weight's own sign is taken."""
    launches = _launches_of(dy, layer)
    if not layer.count:
        return combine_into_(dy.new_zeros((2, 1, layer.channels), dtype=launches.width), 1, weight_grad, bias_grad)
    with on(dy):
        partial = _partial_sums(launches, dy, saved, layer, mean, invstd)
    return combine_into_(partial, launches.sum.spots, weight_grad, bias_grad)


def _partial_sums(
    launches: LayerLaunches, dy: Tensor, saved: Tensor, layer: Layer, mean: Tensor, invstd: Tensor
) -> Tensor:
    partial = dy.new_empty((2, launches.sum.parts, launches.sum.columns), dtype=launches.width)
    launches.sum.launch(dy, saved, given(layer.weight, dy), given(layer.bias, dy), mean, invstd, partial)
    return partial


def combine_into_(partial: Tensor, spots: int, weight_grad: Into | None, bias_grad: Into | None) -> Tensor:
    """Adds up partial sums, [2, parts, channels * spots], in order; [2, channels]: the sums. They are stored, or added,
    where the gradients of bias and weight are wanted."""
    channels = partial.shape[2] // spots
    sums = partial.new_empty((2, channels))
    of_weight, of_bias = (partial if into is None else into.slice for into in (weight_grad, bias_grad))
    launch = _combine_into(
        partial.device,
        (partial.dtype, of_weight.dtype, of_bias.dtype),
        (partial.shape[1], channels, spots),
        (_how(weight_grad), _how(bias_grad)),
    )
    with on(partial):
        launch(partial, sums, partial, of_weight, of_bias)
    return sums


def _how(into: Into | None) -> int:
    """As combine_sums wants it."""
    return 0 if into is None else 2 if into.accumulate else 1


@functools.lru_cache(maxsize=1024)
def _combine_into(
    device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, int, int], how: tuple[int, int]
) -> Launch:
    return combine_launch(dtypes[0], sizes, how=how)


def combine_launch(
    width: torch.dtype, sizes: tuple[int, int, int], *, absolute: bool = False, how: tuple[int, int] = (1, 1)
) -> Launch:
    """The launch of combine_sums for `sizes`: parts, channels, spots."""
    form = {"ABSOLUTE": absolute, "WEIGHT": how[0], "BIAS": how[1], "ACC": WIDTHS[width], "BLOCK_P": 64, "BLOCK_N": 16}
    return Launch(kernels.combine_sums, (parts_of(sizes[1], 16),), sizes, form)


def put_(
    dy: Tensor,
    saved: Tensor,
    out: Tensor,
    layer: Layer,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor | None,
    count: int,
) -> None:
    """out = gamma * invstd * (dz - sums[0] / count - xhat * sums[1] / count)."""
    launches = _launches_of(dy, layer)
    tensors = dy, saved, out, given(layer.weight, dy), given(layer.bias, dy), mean, invstd, given(sums, mean)
    with on(dy):
        (launches.put_constant if sums is None else launches.put)(*tensors, scalars=(count,))


def worst_ratio(weight: Tensor, bias: Tensor | None, least: float, depth: float, absolute_eps: float | None) -> Tensor:
    """The largest |beta| / |gamma| of all channels, infinite beyond `least` and `depth`."""
    dtypes = weight.dtype, None if bias is None else bias.dtype
    launch = _worst_ratio(weight.device, weight.numel(), *dtypes, least, depth, absolute_eps)
    worst = weight.new_empty((), dtype=torch.float32)
    with on(weight):
        launch(weight, given(bias, weight), worst)
    return worst


@functools.lru_cache(maxsize=1024)
def _worst_ratio(
    device: torch.device,
    channels: int,
    weight: torch.dtype,
    bias: torch.dtype | None,
    least: float,
    depth: float,
    absolute_eps: float | None,
) -> Launch:
    form: dict[str, Any] = {
        "LEAST": least,
        "DEPTH": min(depth, 1e30),
        "HAS_BIAS": bias is not None,
        "ABSOLUTE": absolute_eps is not None,
    }
    return Launch(
        kernels.worst_ratio, (1,), (channels,), form | {"EPS": absolute_eps or 0.0, "BLOCK": min(1024, power(channels))}
    )


# -- launches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """A launch that leaves `parts` partial sums of each of `columns`; `spots` columns in a row are of one channel."""

    launch: Launch
    parts: int
    columns: int
    spots: int


@dataclass(frozen=True)
class Key:
    """Everything that the launches of a layer depend on."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    channels: int
    spots: int
    last: bool
    weight: torch.dtype | None
    bias: torch.dtype | None
    activation: int
    param: float
    absolute_eps: float | None
    from_output: bool


def _launches_of(x: Tensor, layer: Layer) -> LayerLaunches:
    weight, bias = layer.weight, layer.bias
    return _launches(
        x.device,
        x.dtype,
        layer.batch,
        layer.channels,
        layer.spots,
        layer.last,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        int(layer.activation),
        float(layer.param),
        None if weight is None else layer.absolute_eps,
        layer.from_output,
    )


@functools.lru_cache(maxsize=4096)
def _launches(*of: Any) -> LayerLaunches:
    return LayerLaunches(Key(*of))


class LayerLaunches:
    """The launches of one layer at one size, made when they are first needed."""

    def __init__(self, key: Key) -> None:
        from takeback.nn.kernels.activated import reach  # its backends are imported from there

        self.key = key
        self.width = wide(key.dtype)
        self.count = key.batch * key.spots
        rows = (self.count, key.channels, 1) if key.last else (key.batch, key.channels * key.spots, key.spots)
        self.rows, self.columns, self.spots = rows
        limits = reach(key.dtype)
        far = self.count * key.channels >= (1 << 31) - (1 << 20)  # a last tile may reach beyond the tensor
        self._shape = {"ACC": WIDTHS[self.width], "WIDE": far}
        self._form = self._shape | {
            "HAS_WEIGHT": key.weight is not None,
            "HAS_BIAS": key.bias is not None,
            "ABSOLUTE": key.absolute_eps is not None,
            "EPS": key.absolute_eps or 0.0,
            "ACT": key.activation,
            "PARAM": key.param,
        }
        self._inversion = {
            "FROM_OUTPUT": key.from_output,
            "RATIO": limits.ratio,
            "LEAST": limits.least,
            "FLOOR": torch.finfo(self.width).eps - 1.0,
        }
        self._combine_moments: dict[tuple[Any, ...], Launch] = {}

    def moments(
        self, x: Tensor, eps: float, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """mean, biased variance, 1 / sqrt(variance + eps), in storages of their own; running statistics are moved."""
        one, channels = self.moment_sum, self.key.channels
        key = eps, *(None if running is None else running.dtype for running in (running_mean, running_var))
        combine = self._combine_moments.get(key)
        if combine is None:
            form = {"EPS": eps, "HAS_MEAN": running_mean is not None, "HAS_VAR": running_var is not None}
            tile = {"ACC": WIDTHS[self.width], "BLOCK_P": 64, "BLOCK_N": 16}
            sizes = one.parts, channels, one.spots
            combine = Launch(kernels.combine_moments, (parts_of(channels, 16),), sizes, form | tile)
            self._combine_moments[key] = combine
        with on(x):
            partial = x.new_empty((3, one.parts, one.columns), dtype=self.width)
            mean, variance, invstd = (x.new_empty(channels, dtype=self.width) for _ in range(3))
            one.launch(x, partial)
            running = given(running_mean, mean), given(running_var, mean)
            combine(partial, mean, variance, invstd, *running, scalars=_halves(momentum))
        return mean, variance, invstd

    @functools.cached_property
    def moment_sum(self) -> Sum:
        return self._sum(kernels.moments_columns, kernels.moments_planes, self._shape, with_spots=False, warps=(8, 16))

    @functools.cached_property
    def sum(self) -> Sum:
        return self._sum(
            kernels.sum_columns, kernels.sum_planes, self._form | self._inversion, with_spots=True, warps=(4, 8)
        )

    @functools.cached_property
    def combine_sums(self) -> Launch:
        sizes = self.sum.parts, self.key.channels, self.sum.spots
        return combine_launch(self.width, sizes, absolute=self.key.absolute_eps is not None)

    @functools.cached_property
    def normalise(self) -> Launch:
        return self._elementwise(kernels.normalise_columns, {})

    @functools.cached_property
    def put(self) -> Launch:
        return self._elementwise(kernels.put_columns, self._inversion | {"TRAINING": True})

    @functools.cached_property
    def put_constant(self) -> Launch:
        return self._elementwise(kernels.put_columns, self._inversion | {"TRAINING": False})

    def _elementwise(self, kernel: Any, form: dict[str, Any]) -> Launch:
        block_n = min(_COLUMNS, power(self.columns))
        block_m = min(_TILE // block_n, power(self.rows))
        block_n = min(_TILE // block_m, power(self.columns))
        grid = (parts_of(self.rows, block_m) * parts_of(self.columns, block_n),)
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n}
        return Launch(kernel, grid, (self.rows, self.columns, self.spots), self._form | form | tile, num_warps=_WARPS)

    def _sum(
        self, over_columns: Any, over_planes: Any, form: dict[str, Any], *, with_spots: bool, warps: tuple[int, int]
    ) -> Sum:
        key = self.key
        if not key.last and (key.spots >= _MANY_SPOTS or key.batch < _FEW_SAMPLES):
            block_s = min(_PLANE_TILE, power(key.spots))
            block_n = min(_PLANE_TILE // block_s, power(key.batch))
            chunks = parts_of(key.spots, block_s)
            tasks = chunks * parts_of(key.batch, block_n)
            parts = max(1, min(tasks, parts_of(2 * _WAVES * processors(key.device), key.channels)))
            tile = {"BLOCK_N": block_n, "BLOCK_S": block_s, "STEP": math.gcd(key.spots, 16)}
            sizes = key.batch, key.channels, key.spots, chunks, tasks
            launch = Launch(over_planes, (key.channels, parts), sizes, form | tile, num_warps=warps[1])
            return Sum(launch, parts, key.channels, 1)
        block_n = min(_SUM_COLUMNS, max(8, power(self.columns)))
        block_m = min(_SUM_TILE // block_n, power(self.rows))
        tiles = parts_of(self.columns, block_n)
        most = max(1, _WAVES * processors(key.device) // tiles)
        rows_each = parts_of(parts_of(self.rows, most), block_m) * block_m
        parts = parts_of(self.rows, rows_each)
        spots = (self.spots,) if with_spots else ()
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n}
        sizes = self.rows, self.columns, *spots, rows_each
        launch = Launch(over_columns, (tiles, parts), sizes, form | tile, num_warps=warps[0])
        return Sum(launch, parts, self.columns, self.spots)


def _halves(value: float) -> tuple[float, float]:
    """A scalar reaches a kernel as float32: the value as the sum of two of those."""
    high = ctypes.c_float(value).value
    return high, value - high
