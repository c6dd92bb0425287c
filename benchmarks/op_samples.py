"""PyTorch's own samples of its differentiable operators, each trained by takeback beside eager.

    python benchmarks/op_samples.py [--mode fast|exact] [--memory min] [--samples 1] [--limit N] [--only NAME ...]
        [--json FILE]

From `torch.testing._internal.common_methods_invocations.op_db`: on the CPU, in float32, the first samples of each. A
step multiplies the sample's first tensor by a parameter, calls the op, and adds up what it gives, each number between
-1 and 1; three steps of SGD on values that change, with `poison=True`. In mode fast clusters run with eager's
kernels, so that what is looked at is the plan. Outcomes: equal in bits, near (1e-4 of the loss and of the parameter's
change), refused with a reason (a sample that is skipped, because nothing of it can be differentiated, is counted
here), wrong, foreign exception.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import takeback as tb
from common import machine
from takeback.compiler.program import Cluster
from takeback.compiler.run import kernels
from takeback.compiler.run.inductor import Compiled, NotCompiled
from takeback.errors import TakebackError

STEPS = 3
OUTCOMES = ("equal", "near", "refused", "wrong", "foreign exception")
NEAR = 1e-4


@dataclass(frozen=True)
class Row:
    """What became of one sample."""

    op: str
    sample: int
    outcome: str
    reason: str = ""


class Scaled(nn.Module):
    """One number, by which the first tensor is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.9))


def differentiable() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")]


def samples_of(op: Any, count: int) -> Iterator[Any]:
    torch.manual_seed(0)
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=False)):
        if number >= count:
            return
        yield sample


def total(out: Any) -> torch.Tensor:
    """A real number that depends on all that an op gives."""
    found = []
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.is_complex():
            leaf = torch.view_as_real(leaf.resolve_conj())
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            found.append(torch.nn.functional.softsign(leaf).sum())
    if not found:
        raise Unusable("it gives no numbers that could be differentiated")
    return sum(found[1:], found[0])


class Unusable(Exception):
    """Eager itself cannot make a step of this sample; says why."""


def step_of(op: Any, sample: Any) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """The loss of a step, and the tensors of its batch."""
    leaves, form = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    scaled = next((i for i in places if leaves[i].is_floating_point() or leaves[i].is_complex()), None)
    if scaled is None:
        raise Unusable("none of its operands is a floating-point tensor")

    def loss(model: Scaled, *tensors: torch.Tensor) -> torch.Tensor:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor * model.weight if place == scaled else tensor
        first, args, named = pytree.tree_unflatten(given, form)
        return total(op(first, *args, **named))

    return loss, [leaves[i].detach() for i in places]


def batch(tensors: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Other values of the same kind: a little smaller in each step, so that they stay where the op is defined."""
    return [t * (1 - 0.01 * step) if t.is_floating_point() or t.is_complex() else t.clone() for t in tensors]


def eager(loss_fn: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> tuple[list[float], float]:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for i in range(STEPS):
        torch.manual_seed(i)
        try:
            loss = loss_fn(model, *batch(tensors, i))
        except Unusable:
            raise
        except Exception as error:
            raise Unusable(f"eager raises {type(error).__name__}: {str(error)[:120]}") from error
        if not loss.requires_grad:
            raise Unusable("what it gives does not depend on its first operand's gradient")
        try:
            loss.backward()
        except Exception as error:
            raise Unusable(f"eager's backward raises {type(error).__name__}: {str(error)[:120]}") from error
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.weight.item()


def compiled(
    loss_fn: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], mode: str, memory: str
) -> tuple[list[float], float]:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = tb.compile_step(model, loss_fn, optimizer, mode=mode, memory=memory, poison=True, solve_s=2.0)
    losses = []
    for i in range(STEPS):
        torch.manual_seed(i)
        losses.append(step(*batch(tensors, i)).item())
    return losses, model.weight.item()


def is_near(found: float, expected: float, scale: float) -> bool:
    if not math.isfinite(expected):
        return repr(found) == repr(expected)
    return abs(found - expected) <= NEAR * max(scale, 1e-6)


def outcome(op: Any, number: int, sample: Any, mode: str, memory: str) -> Row:
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    try:
        loss_fn, tensors = step_of(op, sample)
        losses, weight = eager(loss_fn, tensors)
    except Unusable as error:
        return Row(name, number, "refused", f"skipped: {' '.join(str(error).split())}")
    try:
        ours, mine = compiled(loss_fn, tensors, mode, memory)
    except TakebackError as error:
        return Row(name, number, "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    except Exception:
        return Row(name, number, "foreign exception", traceback.format_exc()[-1500:])
    if repr((ours, mine)) == repr((losses, weight)):
        return Row(name, number, "equal")
    moved = abs(weight - Scaled().weight.item())
    near = all(is_near(a, b, abs(b)) for a, b in zip(ours, losses, strict=True)) and is_near(mine, weight, moved)
    said = f"losses {ours}, eager's {losses}; parameter {mine}, eager's {weight}"
    return Row(name, number, "near" if near and mode == "fast" else "wrong", said)


def not_compiled(cluster: Cluster, device: torch.device) -> Compiled:
    raise NotCompiled("eager's kernels were asked for")


def counts(rows: Sequence[Row]) -> dict[str, int]:
    found = collections.Counter(r.outcome for r in rows)
    return {o: found[o] for o in OUTCOMES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("exact", "fast"), default="fast")
    parser.add_argument("--memory", default="min")
    parser.add_argument("--samples", type=int, default=1, help="of each op")
    parser.add_argument("--limit", type=int, help="so many ops")
    parser.add_argument("--only", nargs="*", help="ops by name")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kernels.compile_cluster = not_compiled
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ops = [op for op in differentiable() if not arguments.only or op.name in arguments.only][: arguments.limit]
    rows: list[Row] = []
    start = time.perf_counter()
    for op in ops:
        for number, sample in enumerate(samples_of(op, arguments.samples)):
            rows.append(outcome(op, number, sample, arguments.mode, arguments.memory))
            if rows[-1].outcome in ("wrong", "foreign exception") or arguments.only:
                print(rows[-1], flush=True)
        if len(rows) % 20 == 0:
            print(f"{time.perf_counter() - start:.0f} s, {len(rows)} samples: {counts(rows)}", flush=True)
        if arguments.json is not None:
            found = {
                "machine": machine() | {"mode": arguments.mode, "memory": arguments.memory, "steps": STEPS},
                "ops": len(ops),
                "counts": counts(rows),
                "samples": [asdict(r) for r in rows],
            }
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(counts(rows))


if __name__ == "__main__":
    main()
