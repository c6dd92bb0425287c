"""Finds what this machine does in a second, once: less than a second of small experiments, kept in the cache directory.
A GPU that is known by name is not measured.

The rates decide what is worth rebuilding, so they need to be right within tens of percents, not exact. They are
measured twice over; where the two halves disagree the machine is busy, and the table's row for it is taken instead
(rate_table.py). That is kept as well: the same machine goes on planning with the same rates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from takeback.cache import Cache
from takeback.compiler.passes.cost import Rates, seconds
from takeback.compiler.program import Op, Program
from takeback.compiler.run.rate_table import rates_of, table_rates
from takeback.compiler.run.room import is_out_of_memory
from takeback.options import open_cache

_VERSION = 8
_BYTES = 32 << 20  #: of each tensor: larger than the caches, as the activations of a step are together
_SIDE = 512
_TIMES_ON_GPU = 10  #: each is run between two waits: one alone would be timed with what waiting takes
_OPS = 300
_MATHS_ELEMENTS = 1 << 19  #: an exponential function takes longer than its operand takes from memory
_TURNS = (2, 4, 8, 16, 24)  #: after so many it is asked whether the halves agree
_SURE = 1.1  #: two halves that differ by less need no more turns
_STEADY = 1.3  #: two halves of the turns that differ by more than this factor were measured on a busy machine


def rates(device: str, dtypes: frozenset[torch.dtype], cache: Cache) -> Rates:
    """The rates of a device, products in `dtypes` included: a known GPU's, or the cache's, else measured and kept."""
    known = rates_of(torch.cuda.get_device_name()) if device == "cuda" else None
    return known or _rates(device, dtypes, cache, torch.get_num_threads())


@dataclass(frozen=True)
class OpCost:
    """The predicted time of an op on this machine, as a function, and what is to be known of it."""

    rates: Rates
    #: by id, with the op, which thereby stays the one with this id
    _known: dict[int, tuple[Op, float]] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, op: Op) -> float:
        if id(op) not in self._known:
            self._known[id(op)] = (op, seconds(op, rates=self.rates))
        return self._known[id(op)][1]

    @property
    def notes(self) -> tuple[str, ...]:
        return (_TABLE,) if self.rates.source == "table" else ()


_TABLE = (
    "What an op costs here was taken from a table: this machine was too busy to be measured when it was first asked, "
    "or had no memory for that. What is rebuilt is right all the same, and may be another choice than measured rates "
    "would give; empty the cache folder to measure again."
)


def cost_of(program: Program) -> OpCost:
    """What the ops of a program cost here."""
    dtypes = frozenset(r.dtype for op in program.ops for r in op.outputs)
    return OpCost(rates(program.device_type, dtypes, open_cache()))


def rates_with(program: Program, dtype: torch.dtype) -> Rates:
    """The rates for a program, products in one more dtype included."""
    dtypes = frozenset(r.dtype for op in program.ops for r in op.outputs)
    return rates(program.device_type, dtypes | {dtype}, open_cache())


@functools.cache
def _rates(device: str, dtypes: frozenset[torch.dtype], cache: Cache, threads: int) -> Rates:
    known = _read(cache.read("rates", _machine(device, threads)))
    wanted = {_name(d): d for d in sorted((torch.float32, *dtypes), key=str) if d.is_floating_point}
    missing = [d for name, d in wanted.items() if known is None or name not in known.flops_per_s]
    if known is not None and not missing:
        return known
    try:
        measured = measure(device, missing, known)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _from_table(device, missing, known)  # not kept: the next process may have room
    keep_(cache, device, threads, measured)
    return measured


def measure(device: str, dtypes: Iterable[torch.dtype], known: Rates | None = None) -> Rates:
    """Runs the experiments; the table's rates where they do not agree with themselves. What is `known` is not measured
    again."""
    dtypes = list(dtypes)
    if known is not None and known.source == "table":
        return _from_table(device, dtypes, known)
    tried: dict[str, Experiment] = {}
    with torch.no_grad(), torch.autocast(device, enabled=False):
        if known is None:
            tried |= _general(device)
        tried |= {_name(dtype): _product(device, dtype) for dtype in dtypes}
        halves = _halves(tried, device)
    if any(max(a, b) > _STEADY * min(a, b) for a, b in halves.values()):
        return _from_table(device, dtypes, known)
    best = {name: min(pair) for name, pair in halves.items()}
    speeds = {name: each.amount / best[name] for name, each in tried.items()}
    products = {name: speeds[name] for name in map(_name, dtypes)}
    if known is not None:
        return dataclasses.replace(known, flops_per_s={**known.flops_per_s, **products})
    return Rates(
        bytes_per_s=speeds["bytes"],
        maths_per_s=speeds["maths"],
        op_s=best["op"] / _OPS,
        flops_per_s=products,
        convolution=speeds["convolution"] / products["float32"],
        attention=speeds["attention"] / products["float32"],
    )


@dataclass(frozen=True)
class Experiment:
    """Something to time, and how much of its kind it does."""

    run: Callable[[], object]
    amount: float


def _general(device: str) -> dict[str, Experiment]:
    big = device != "cpu"
    noise = _noise(device)
    x, y, z = (torch.ones(_BYTES // 4, device=device) for _ in range(3))
    some = noise(_MATHS_ELEMENTS if not big else _BYTES // 4)
    other = torch.empty_like(some)
    small = torch.ones(64, device=device)
    gelu = torch._C._nn.gelu  # the public one takes no out=; checked on 2.11 and 2.13
    attend = torch.nn.functional.scaled_dot_product_attention
    q = noise(16, 12, 1024, 64) if big else noise(2, 4, 256, 64)
    image = noise(128 if big else 1, 128, 28, 28)
    wide, narrow = noise(128, 128, 3, 3), noise(256, 128, 1, 1)

    def ops() -> None:
        for _ in range(_OPS):
            torch.add(small, 1.0, out=small)

    def convolutions() -> None:  # those of a network of bottlenecks
        torch.conv2d(image, wide, padding=1)
        torch.conv2d(image, narrow)

    return {
        "bytes": Experiment(lambda: torch.add(x, y, out=z), 3 * _BYTES),
        "maths": Experiment(lambda: gelu(some, approximate="tanh", out=other), some.numel()),
        "op": Experiment(ops, _OPS),
        "convolution": Experiment(convolutions, 2 * image.numel() * (128 * 9 + 256)),
        "attention": Experiment(lambda: attend(q, q, q, is_causal=True), 2 * q.numel() * q.shape[2]),
    }


def _noise(device: str) -> Callable[..., torch.Tensor]:
    """Draws from a generator of its own: the user's is where it was."""
    return functools.partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)


def _product(device: str, dtype: torch.dtype) -> Experiment:
    side = _SIDE if device == "cpu" else 8 * _SIDE
    a = _noise(device)(side, side).to(dtype)
    out = torch.empty_like(a)
    return Experiment(lambda: torch.mm(a, a, out=out), 2 * side**3)


def _halves(tried: Mapping[str, Experiment], device: str) -> dict[str, tuple[float, float]]:
    """The least time of each in the first and in the second half of the turns: whatever disturbs the machine makes
    times longer, for all alike."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    count = _TIMES_ON_GPU if device == "cuda" else 1
    times: dict[str, list[float]] = {name: [] for name in tried}
    halves: dict[str, tuple[float, float]] = {}
    for turn in range(_TURNS[-1] + 1):
        for name, each in tried.items():
            wait()
            start = time.perf_counter()
            for _ in range(count):
                each.run()
            wait()
            if turn:  # the first ones warm up
                times[name].append((time.perf_counter() - start) / count)
        if turn in _TURNS:
            halves = {name: (min(taken[: turn // 2]), min(taken[turn // 2 :])) for name, taken in times.items()}
            if all(max(pair) < _SURE * min(pair) for pair in halves.values()):
                break
    return halves


def _from_table(device: str, dtypes: Iterable[torch.dtype], known: Rates | None) -> Rates:
    """The table's row. Of what is `known`, only the missing products are taken from it."""
    row = table_rates(device, torch.cuda.get_device_name() if device == "cuda" else "", torch.get_num_threads())
    products = {_name(dtype): row.product(dtype) for dtype in dtypes}
    if known is None:
        return dataclasses.replace(row, flops_per_s=products)
    return dataclasses.replace(known, flops_per_s={**known.flops_per_s, **products}, source="table")


def _machine(device: str, threads: int) -> str:
    """What the rates hold for."""
    what = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}-{_processor()}"
    text = f"{device}-{what}-{threads}-{torch.__version__}-{_VERSION}"
    return "".join(c if c.isalnum() else "-" for c in text)


@functools.cache
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(text: bytes | None) -> Rates | None:
    if text is None:
        return None
    try:
        data = json.loads(text)
        found = Rates(**data)
        plain = [v for k, v in data.items() if k not in ("flops_per_s", "source")]
        numbers = plain + list(found.flops_per_s.values())
        usable = found.source in ("measured", "table") and all(
            isinstance(n, float) and 0 < n < float("inf") for n in numbers
        )
        return found if usable and len(data) == len(dataclasses.fields(Rates)) else None
    except (ValueError, TypeError, AttributeError):
        return None


def keep_(cache: Cache, device: str, threads: int, found: Rates) -> None:
    """For the next process, if the cache can be written; measured again there if not."""
    cache.write("rates", _machine(device, threads), json.dumps(dataclasses.asdict(found)).encode())
