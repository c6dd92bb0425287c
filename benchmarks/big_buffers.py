"""A step with more than 2^31 elements in one buffer and an arena above 4 GiB, on the CPU, beside eager: bit by bit.

    python benchmarks/big_buffers.py [--elements 2147549184] [--memory keep] [--json PATH]

The step is an outer product in bfloat16, its relu, its mean, and the last row of the product as aux, whose elements lie
past 2^31 in their buffer; two steps of SGD, one recorded and one replayed. By default a buffer has 32,769 x 65,536
elements, 4.3 GB; eager needs about three of them, and takeback as many beside its arena, so this is for a machine with
64 GB or more. Loss, aux, parameters and gradients are compared after each step. Exits with 1 if a bit differs, or if
the step was smaller than it was meant to be.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import takeback as tb

sys.path.insert(0, str(Path(__file__).parent))

from common import machine

COLUMNS = 1 << 16
FULL = ((1 << 15) + 1) * COLUMNS  #: elements: one row more than 2^31
STEPS = 2


class Outer(nn.Module):
    """One number for each column."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, generator=torch.Generator().manual_seed(0)).bfloat16())


def loss_fn(model: Outer, x: Tensor) -> tuple[Tensor, Tensor]:
    product = x[:, None] * model.weight
    last = product[-1].detach().clone()
    return product.relu_().mean(), last


def batch(i: int, rows: int) -> Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(1 + i)).bfloat16()


def eager_step(model: Outer, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, ...]:
    optimizer.zero_grad()
    loss, aux = loss_fn(model, x)
    loss.backward()
    optimizer.step()
    assert model.weight.grad is not None
    return loss.detach(), aux, model.weight.grad, model.weight.detach()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def compare(elements: int, memory: str) -> dict[str, Any]:
    """Trains twice, and says what was found."""
    columns = min(COLUMNS, elements)
    rows = elements // columns
    ours = Outer(columns)
    theirs = copy.deepcopy(ours)
    optimizer, twin = (torch.optim.SGD(m.parameters(), lr=100.0) for m in (ours, theirs))
    step = tb.compile_step(ours, loss_fn, optimizer, mode="exact", memory=memory, keep_grads=True)
    differences, seconds = [], {"eager": [], "takeback": []}
    for i in range(STEPS):
        x = batch(i, rows)
        start = time.perf_counter()
        expected = eager_step(theirs, twin, x)
        middle = time.perf_counter()
        loss, aux = step(x)
        seconds["eager"].append(round(middle - start, 2))
        seconds["takeback"].append(round(time.perf_counter() - middle, 2))
        assert ours.weight.grad is not None
        found = dict(
            zip(("loss", "aux", "gradient", "weight"), (loss, aux, ours.weight.grad, ours.weight.detach()), strict=True)
        )
        differences += [
            f"{name} of step {i}"
            for (name, mine), true in zip(found.items(), expected, strict=True)
            if not same_bits(mine, true)
        ]
        print(f"step {i}: eager {seconds['eager'][-1]} s, takeback {seconds['takeback'][-1]} s", flush=True)
    report = step.report()
    assert step._last is not None
    program = step._last.executor.program
    return {
        "elements in one buffer": max(r.numel for op in program.ops for r in op.outputs),
        "arena bytes": report.arena_bytes,
        "replays": step._replays,
        "differences": differences,
        "seconds": seconds,
        "most resident bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=FULL, help="of the largest buffer")
    parser.add_argument("--memory", default="keep")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    start = time.perf_counter()
    found = compare(asked.elements, asked.memory)
    found |= {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "memory": asked.memory,
        "seconds in all": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(found, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    big = asked.elements < FULL or (found["elements in one buffer"] > 1 << 31 and found["arena bytes"] > 4 << 30)
    return 0 if big and not found["differences"] and found["replays"] == STEPS - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
