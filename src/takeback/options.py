"""Every setting of takeback: what `compile_step` was asked for, checked, and what the environment says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from takeback.cache import Cache
from takeback.errors import OptionError
from takeback.parallel import check_group

_TARGET = re.compile(r"[0-9]+(\.[0-9]+)?\s*(x|[KMGT]i?B|B)", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """The settings of one compiled step. Unknown values raise `OptionError`."""

    mode: str = "auto"
    memory: str = "auto"
    update: str = "end"
    accumulate: int = 1
    clip_norm: float | None = None
    scaler: object | None = None
    group: object | None = None
    keep_grads: bool = False
    verify_every: int | None = None
    max_plans: int | None = None
    poison: bool = False
    solve_s: float = 120.0
    unplanned: str = "raise"
    graphs: str = "never"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, ("auto", "exact", "fast"))
        _one_of("graphs", self.graphs, ("auto", "always", "never"))
        _one_of("update", self.update, ("end", "early"))
        _one_of("unplanned", self.unplanned, ("raise", "eager"))
        known = isinstance(self.memory, str) and (
            self.memory in ("auto", "min", "keep") or _TARGET.fullmatch(self.memory.strip())
        )
        if not known:
            raise OptionError(
                f"memory must be 'auto', 'min', 'keep', a part of eager's peak such as '0.6x' or a size such as "
                f"'12GiB', got {self.memory!r}"
            )
        if self.has_target:
            memory_target(self.memory)
        limit = self.solve_s
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < float("inf"):
            raise OptionError(f"solve_s must be a positive number of seconds, got {limit!r}")
        if self.scaler is not None:
            _check_scaler(self.scaler)
        if self.update == "early":
            self._check_early()
        if self.group is not None:
            check_group(self.group)
            if self.unplanned == "eager":
                raise OptionError(
                    "unplanned='eager' and group= do not go together: whether a step is planned is decided on each "
                    "rank by itself. Use unplanned='raise', or make the step plannable."
                )
            if self.scales:
                raise OptionError(
                    "scaler= and group= do not go together yet: gradients are unscaled before they are averaged. Use "
                    "one of them, or bfloat16 without a scaler."
                )
        for name in ("keep_grads", "poison"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _whole("accumulate", self.accumulate, least=1)
        if self.verify_every is not None:
            _whole("verify_every", self.verify_every, least=0)
        if self.max_plans is not None:
            _whole("max_plans", self.max_plans, least=1)
        norm = self.clip_norm
        if norm is not None and not (isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0):
            raise OptionError(f"clip_norm must be a positive number or None, got {norm!r}")

    def is_fast(self, device_type: str) -> bool:
        """Whether a step on such a device runs on generated kernels."""
        return self.mode == "fast" or (self.mode == "auto" and device_type == "cuda")

    def mode_on(self, device_type: str) -> str:
        """In which mode a step on such a device runs, "auto" resolved."""
        return "fast" if self.is_fast(device_type) else "exact"

    @property
    def has_target(self) -> bool:
        """True if `memory` names a peak that may be out of reach."""
        return self.memory not in ("auto", "min", "keep")

    @property
    def scales(self) -> bool:
        """True if there is a scaler that does something."""
        return isinstance(self.scaler, torch.amp.GradScaler) and bool(self.scaler.is_enabled())

    def _check_early(self) -> None:
        if self.clip_norm is not None:
            raise OptionError(_early_needs(f"clip_norm={self.clip_norm!r} needs the norm of all of them"))
        if self.accumulate != 1:
            raise OptionError(_early_needs(f"accumulate={self.accumulate!r} sums them over microbatches first"))
        if self.group is not None:
            raise OptionError(_early_needs("group= averages them over the ranks first, in a few large buckets"))
        if self.keep_grads:
            raise OptionError(_early_needs("keep_grads=True keeps them to the end"))
        if self.scales:
            raise OptionError(_early_needs("scaler= skips every update if one of them is not finite"))


def _early_needs(what: str) -> str:
    return f"update='early' updates each parameter before all gradients are known, but {what}. Use update='end'."


def _check_scaler(scaler: object) -> None:
    known = torch.amp.GradScaler
    if not isinstance(scaler, known):
        raise OptionError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
    kind = type(scaler)
    own = kind.__mro__[: kind.__mro__.index(known)]
    changed = [name for base in own for name in vars(base) if callable(getattr(known, name, None))]
    changed = [name for name in changed if not name.startswith("__")]
    if changed:
        raise OptionError(
            f"scaler is a {kind.__qualname__}, which has a {changed[0]}() of its own, and a replay runs no Python, so "
            f"it would not be called. Use torch.amp.GradScaler."
        )


def memory_target(memory: str) -> float | int:
    """What "0.6x" or "12GiB" asks for: a share of eager's peak (a float), or bytes (an int)."""
    text = memory.strip()
    if not text.lower().endswith("x"):
        return parse_bytes(text)
    share = float(text[:-1])
    if not 0 < share < float("inf"):
        raise OptionError(f"memory={memory!r} is no part of eager's peak: it must be more than 0, and finite")
    return share


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def _whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r}")


CACHE_BYTES, CACHE_ENTRIES = 1 << 30, 4096
"""How much is kept on disk: one library takes about 100 KiB, the rates of a machine less than 1."""


def open_cache(folder: Path | None = None) -> Cache:
    """What is kept between processes: compiled code and measured rates, in `folder` or where `cache_dir` says."""
    return Cache(folder or cache_dir(), limit_bytes=CACHE_BYTES, limit_entries=CACHE_ENTRIES)


def cache_dir() -> Path:
    """The cache's folder: $TAKEBACK_CACHE, else $XDG_CACHE_HOME/takeback, else ~/.cache/takeback."""
    own = os.environ.get("TAKEBACK_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "takeback"


def keeps_plans() -> bool:
    """Whether what was decided for a step is kept between processes: unless $TAKEBACK_PLANS is 0."""
    return os.environ.get("TAKEBACK_PLANS") != "0"


def inductor_folder() -> str | None:
    """Where Inductor keeps what it has made: $TORCHINDUCTOR_CACHE_DIR, which torch sets, too; None before that."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR")


def triton_folder() -> str | None:
    """Where Triton keeps its kernels: $TRITON_CACHE_DIR, which Inductor sets, too, to a folder in its own."""
    return os.environ.get("TRITON_CACHE_DIR")


def set_inductor_folder_(folder: Path) -> None:
    """For this process and those that it starts to compile kernels."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def allocator_settings() -> str:
    """What the user has asked of torch's caching allocator: $PYTORCH_ALLOC_CONF, or its older name."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def compiler() -> str:
    """The C++ compiler for the allocator and the kernels: $CXX, else g++."""
    return os.environ.get("CXX") or "g++"


_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(size: str | int) -> int:
    """Bytes of a size such as "24GiB", "512 MB" or 1048576."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS or not 0 < float(match[1]) < 2**63:
        raise OptionError(f"a size such as '24GiB', '512MiB' or a number of bytes is needed, got {size!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def environment() -> Mapping[str, str]:
    """The process's environment, for whoever has to watch what a user's code reads there."""
    return os.environ
