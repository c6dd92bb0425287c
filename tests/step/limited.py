"""Run as a program, with a factor, a `memory=` and a mode: limits itself to what eager needs, divided by the factor,
and trains compiled where eager is refused memory. Prints what the report says; ends with an error where anything is
not as in an unlimited eager training.

glibc is told to map every large tensor by itself (MALLOC_MMAP_THRESHOLD_), so that what is freed counts no more.
"""

from __future__ import annotations

import copy
import os
import resource
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.passes import recompute

WIDTH, INNER, ROWS = 16, 128, 24576


class Block(nn.Module):
    """Saves much that can be rebuilt, and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(torch.sigmoid(torch.tanh(F.silu(self.up(self.norm(x)))))), 0.1)


def training(rows: int, blocks: int) -> tuple[nn.Module, Any, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    """A model with running statistics and dropout, whose loss is a mean over the batch, and two batches."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    body = [Block() for _ in range(blocks)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), *body, nn.Linear(WIDTH, 4))
    batches = [
        (torch.randn(rows, WIDTH, generator=generator), torch.randint(4, (rows,), generator=generator))
        for _ in range(2)
    ]
    return model, lambda m, x, y: F.cross_entropy(m(x), y), torch.optim.AdamW(model.parameters(), lr=1e-2), batches


def in_eager(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = loss_fn(model, *batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [v for table in optimizer.state.values() for v in table.values()]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *state, torch.get_rng_state())]


def virtual_bytes(name: str) -> int:
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def main(factor: float, memory: str, mode: str) -> None:
    torch.set_num_threads(1)
    # What is there must hold one of them; and a kernel beside eager's, and double precision.
    blocks = 3 if factor < 2 and mode == "exact" else 6
    for name in ("_ALIKE_VISITS", "_LOWEST_VISITS", "_LEVEL_VISITS"):  # a fair choice of what to rebuild will do
        setattr(recompute, name, 4)
    # What a compiler takes for itself, whatever the batch is, is not what is limited.
    model, loss_fn, optimizer, batches = training(16, blocks)
    warm = tb.compile_step(model, loss_fn, optimizer, memory=memory, mode=mode)
    warm(*batches[0])
    del warm

    model, loss_fn, optimizer, batches = training(ROWS, blocks)
    torch.manual_seed(5)
    start = virtual_bytes("VmSize")
    losses = [in_eager(model, loss_fn, optimizer, batch) for batch in batches]
    wanted = everything(model, optimizer)
    needed = virtual_bytes("VmPeak") - start
    del model, optimizer

    model, loss_fn, optimizer, _ = training(16, blocks)
    torch.manual_seed(5)
    limit = virtual_bytes("VmSize") + int(needed / factor)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = everything(model, optimizer)
    doomed = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        in_eager(doomed, loss_fn, torch.optim.AdamW(doomed.parameters()), batches[0])
    del doomed
    torch.manual_seed(5)
    step = tb.compile_step(model, loss_fn, optimizer, memory=memory, mode=mode)
    if os.environ.get("EXPECT") == "NoRoomError":
        with pytest.raises(tb.NoRoomError) as told:
            step(*batches[0])
        print(told.value)
        assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))
        return
    found = [step(*batch) for batch in batches]
    now = everything(model, optimizer)
    if mode == "exact":
        assert all(torch.equal(a, b) for a, b in zip(losses, found, strict=True)), (losses, found)
        assert all(torch.equal(a, b) for a, b in zip(wanted, now, strict=True))
    else:
        assert all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(losses, found, strict=True)), (losses, found)
    report = step.report()
    assert any("eager has no room for this step" in note for note in report.notes), report.notes
    print(f"eager needs {needed / 2**20:.0f} MiB, {needed / factor / 2**20:.0f} were there")
    print(*report.notes, sep="\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3])
