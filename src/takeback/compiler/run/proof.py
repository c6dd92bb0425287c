"""How a plan is compared with its reference: by which measure, on how much of the batch, how often, and within how much
memory. One `Proof` says all four.

Plain data, and functions of tensors that answer with names or reasons. Nothing here runs a step: run/verify.py does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from takeback.compiler.capture.batch import map_tensors, tensors_of
from takeback.compiler.program import Program
from takeback.errors import CaptureError

# -- by which measure --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bits:
    """Every bit is the same. `one_nan`: any NaN equals any other; which one it is may depend on where it lies."""

    one_nan: bool = False


@dataclass(frozen=True, slots=True)
class Tolerance:
    """In each tensor nothing differs by more than `absolute + relative * m`, where m is the largest finite magnitude
    expected in it: what rounding leaves in a sum goes by its largest terms, not by what remains of them. NaNs and
    infinities must be where they are expected, and whole numbers must be equal."""

    relative: float
    absolute: float = 0.0


@dataclass(frozen=True, slots=True)
class Norms:
    """The difference of two tensors has a norm of at most `relative` times that of what is expected, and `floor` times
    that of all that are of its kind: some gradients are nothing but what rounding leaves. What is not finite must be so
    on both sides."""

    relative: float
    floor: float
    kind: float = 0.0  #: the norm of all that are of its kind

    def among(self, tensors: Iterable[Kept]) -> Norms:
        """For a tensor that is one of these."""
        found = (t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point())
        return replace(self, kind=math.sqrt(sum(_norm(t) ** 2 for t in found)))


#: For a step on generated kernels, each of which has been compared by itself: what finds a wrong operand, or an op
#: too many. Where bf16 goes through many layers, two right steps differ by some percent.
NEAR = Norms(relative=0.2, floor=1e-3)
NEAR_IN_FULL = Norms(relative=0.05, floor=1e-4)  #: of a step that computes nothing in half precision

Measure = Bits | Tolerance | Norms
GRADIENT = "the gradient of "  #: how the name of a gradient begins
Kept: TypeAlias = int | torch.Tensor  #: what is remembered of a tensor: a checksum where bits count, else a copy


def keep(measure: Measure, tensors: Mapping[str, torch.Tensor]) -> dict[str, Kept]:
    """What has to be remembered of a reference, by name: of bits a checksum, which takes no memory."""
    if isinstance(measure, Bits):
        return {name: checksum(t, one_nan=measure.one_nan) for name, t in tensors.items()}
    return {name: t.detach().clone() for name, t in tensors.items()}


def differing(measure: Measure, expected: Mapping[str, Kept], found: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """The names of what differs, or is on one side only, in order."""
    if isinstance(measure, Norms):
        measure = measure.among(t for name, t in expected.items() if name.startswith(GRADIENT))
    return tuple(
        name
        for name in dict.fromkeys((*expected, *found))
        if name not in expected or name not in found or not same(measure, expected[name], found[name])
    )


def in_words(measure: Measure) -> str:
    """What is wrong with something that differs."""
    return "has other bits" if isinstance(measure, Bits) else "is further off than rounding explains"


def _norm(tensor: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32)))
    return norm if math.isfinite(norm) else 0.0


def same(measure: Measure, expected: Kept, found: torch.Tensor) -> bool:
    """Whether `found` is what was expected. A checksum can only be asked for bits."""
    if isinstance(expected, int):
        assert isinstance(measure, Bits)
        return expected == checksum(found, one_nan=measure.one_nan)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if isinstance(measure, Bits):
        return bool(torch.equal(_bytes(expected, measure.one_nan), _bytes(found, measure.one_nan)))
    if isinstance(measure, Norms):
        return _is_near(expected.detach(), found.detach(), measure)
    return _is_close(expected.detach(), found.detach(), measure)


def _is_near(expected: torch.Tensor, found: torch.Tensor, measure: Norms) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return bool(torch.equal(expected, found))
    if not bool(expected.isfinite().all()):
        return not bool(found.isfinite().all())
    difference = torch.linalg.vector_norm(found - expected, dtype=torch.promote_types(found.dtype, torch.float32))
    return float(difference) <= measure.relative * _norm(expected) + measure.floor * measure.kind


def _is_close(expected: torch.Tensor, found: torch.Tensor, measure: Tolerance) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return bool(torch.equal(expected, found))
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    finite = expected.isfinite()
    special = torch.where(finite, 0.0, expected)  # NaN and infinities: these must be the very same
    if not torch.equal(finite, found.isfinite()) or not same(Bits(one_nan=True), special, found.where(~finite, 0.0)):
        return False
    wide = expected.where(finite, 0.0).double()
    if not wide.numel():
        return True
    most = measure.absolute + measure.relative * wide.abs().max()
    return bool((found.where(finite, 0.0).double() - wide).abs().max() <= most)


_CHUNK_BYTES = 1 << 20  #: so that a checksum on the device takes a few tens of MiB at most
_MIX = (-7046029254386353131, 2685821657736338717)  #: odd numbers of 64 bits


def checksum(tensor: torch.Tensor, *, one_nan: bool = False) -> int:
    """Equal bits have equal checksums, and different bits almost never do. `one_nan`: any NaN equals any other."""
    flat = _bytes(tensor, one_nan)
    return zlib.crc32(flat.numpy().data) if flat.device.type == "cpu" else _checksum_there(flat)


def _bytes(tensor: torch.Tensor, one_nan: bool) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if one_nan and flat.is_floating_point() and bool(flat.isnan().any()):
        flat = torch.where(flat.isnan(), torch.nan, flat)
    return flat.view(torch.uint8)


def _checksum_there(flat: torch.Tensor) -> int:
    """The same where the tensor lies: whole numbers add up to the same sum in any order."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(min(_CHUNK_BYTES, flat.numel()), device=flat.device)
    places = (places * _MIX[0]) ^ (places >> 7)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        part = flat[start : start + _CHUNK_BYTES]
        mixed = (part.to(torch.int64) + 1) * (places[: part.numel()] * 2 + 1)
        total = total * _MIX[1] + (mixed ^ (mixed >> 29)).sum()
    return int(total.item())


# -- on how much of the batch ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """All of it."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first `rows` of every tensor along dimension 0; a tensor without dimensions is taken as it is."""

    rows: int


Extent = WholeBatch | FirstRows


def part_of(batch: Any, extent: Extent) -> Any:
    """What a plan and its reference are compared on: views of the batch's tensors in containers of their own. Raises
    `CaptureError` where the tensors do not agree on how many rows there are."""
    if isinstance(extent, WholeBatch):
        return batch
    counts = {t.shape[0] for t in tensors_of(batch) if t.dim()}
    if len(counts) > 1:
        raise CaptureError(
            f"the first {extent.rows} rows of this batch cannot be taken: its tensors have "
            f"{' and '.join(map(str, sorted(counts)))} rows along dimension 0."
        )
    if not counts or extent.rows >= min(counts):
        return batch
    return map_tensors(batch, lambda t: t.narrow(0, 0, extent.rows) if t.dim() else t)


# -- how often ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Once:
    """Each new plan is compared when it is used for the first time."""

    def again(self, replays: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Every:
    """A new plan as with `Once`, and besides every `count`-th replay of the step."""

    count: int

    def again(self, replays: int) -> bool:
        return replays % self.count == 0


@dataclass(frozen=True, slots=True)
class Thinning:
    """A new plan as with `Once`. Besides, ever more rarely, its loss is compared with that of eager's forward, which is
    run without gradients and so within the plan's own memory."""

    def again(self, replays: int) -> bool:
        return False

    def samples(self, replays: int) -> bool:
        """`replays`: of the plan, this one included. Its first one was compared as a whole."""
        return replays in (3, 10, 100) or replays % 1000 == 0


Schedule = Once | Every | Thinning


# -- all of it ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Skipped:
    """A comparison that was due and not made, because its reference needs more memory than is allowed."""

    needed_bytes: int
    limit_bytes: int

    @property
    def reason(self) -> str:
        return (
            f"the plan was not compared with its reference, which needs {self.needed_bytes / 2**20:,.1f} MiB above "
            f"what is resident: more than the limit of {self.limit_bytes / 2**20:,.1f} MiB"
        )


@dataclass(frozen=True, slots=True)
class Proof:
    """How the plans of a step are compared with their references. `memory_limit_bytes`: the most that a reference may
    take above what is resident anyway; None: as much as it needs."""

    measure: Measure = Bits()
    extent: Extent = WholeBatch()
    schedule: Schedule = Once()
    memory_limit_bytes: int | None = None

    def is_due(self, *, proved: bool, replays: int) -> bool:
        """`proved`: the plan has been compared before. `replays`: of the step, this one included."""
        return not proved or self.schedule.again(replays)

    def of(self, program: Program) -> Proof:
        """For this step: nearer, where nothing is rounded to half precision."""
        made = (r.dtype for op in program.ops for r in op.outputs)
        if self.measure != NEAR or any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in made):
            return self
        return replace(self, measure=NEAR_IN_FULL)

    def samples(self, replays: int) -> bool:
        """Whether the loss of a plan's replay, of which there were so many, is compared with eager's forward."""
        return isinstance(self.schedule, Thinning) and self.schedule.samples(replays)

    def skipped(self, needed_bytes: int) -> Skipped | None:
        """Why a comparison is left out whose reference needs that much; None if it is made."""
        limit = self.memory_limit_bytes
        return Skipped(needed_bytes, limit) if limit is not None and needed_bytes > limit else None
