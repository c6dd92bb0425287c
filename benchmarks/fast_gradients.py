"""Gradients of GPT-2 under bf16 autocast, in eager and in mode fast, beside single precision: distance, and bias.

    python benchmarks/fast_gradients.py [--steps 340] [--every 20] [--json PATH]
    python benchmarks/fast_gradients.py --device cpu --tiny --steps 20 --every 5          # to try the script

Eager trains; every so many steps the gradient for the same weights and the same batch is computed in each way. An error
is that of the loss; the distance of the gradient from single precision's, as a part of its norm; and how far it is off
along that gradient, which is what a bias would show in. Losses of two trainings tell less: they drift apart anyway.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback import zoo
from takeback.zoo.gpt import GPT2, SMALL

sys.path.insert(0, str(Path(__file__).parent))

from common import machine

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def single(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def half(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return single(model, tokens, targets)


def flat(model: nn.Module) -> Tensor:
    """The gradient, which is taken away."""
    found = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def eagerly(model: nn.Module, loss_fn: Loss, batch: tuple[Tensor, ...]) -> tuple[float, Tensor]:
    loss = loss_fn(model, *batch)
    loss.backward()
    return float(loss), flat(model)


def errors(got: tuple[float, Tensor], right: tuple[float, Tensor]) -> dict[str, float]:
    away, size = got[1] - right[1], right[1].norm()
    return {
        "loss": got[0] - right[0],
        "distance": float(away.norm() / size),
        "along": float(away @ right[1] / size**2),
    }


def compared(device: str, *, tiny: bool, steps: int, every: int) -> list[dict[str, Any]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    with torch.device(device):
        model = zoo.GPT(replace(SMALL if tiny else GPT2, dropout=0.0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    stays = torch.optim.SGD(model.parameters(), lr=0.0)
    step = tb.compile_step(model, half, stays, mode="fast", keep_grads=True)
    rows: list[dict[str, Any]] = []
    drawn = zoo.byte_batches(*((2, 32) if tiny else (4, 512)), 0)
    for number, given in enumerate(itertools.islice(drawn, steps)):
        batch = tuple(t.to(device) for t in given)
        if number % every == 0:
            right, eager, again = (eagerly(model, loss_fn, batch) for loss_fn in (single, half, half))
            for _ in range(1 if rows else 4):  # until generated kernels run
                loss = float(step(*batch))
            fast = (loss, flat(model))
            row = {"eager": errors(eager, right), "fast": errors(fast, right)}
            apart = float((eager[1] - again[1]).norm() / right[1].norm())
            rows.append({"step": number, "right loss": right[0], **row, "eager and eager again": apart})
        half(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=340)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = compared(asked.device, tiny=asked.tiny, steps=asked.steps, every=asked.every)
    for name in ("eager", "fast"):
        found = {key: [row[name][key] for row in rows] for key in ("loss", "distance", "along")}
        far = f"{min(found['distance']):.4f} to {max(found['distance']):.4f}"
        print(f"{name}: distance {far}, along {fmean(found['along']):+.5f}, loss {fmean(found['loss']):+.5f}")
    if asked.json is not None:
        about = {"date": datetime.date.today().isoformat(), "machine": machine(asked.device)}
        asked.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
