"""Trains the same model twice in an Accelerate loop, in stock and compiled, and compares parameters, optimizer state,
schedulers, losses and norms bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness import assert_same
from takeback.compiler.capture.batch import tensors_of
from takeback.integrations.accelerate import AcceleratedStep, compile_step

CLIP = 0.1


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
    logits = model(x)
    return F.cross_entropy(logits, y), {"logits": logits}


@dataclass
class Trained:
    """What a training left."""

    state: dict[str, Tensor]
    seen: dict[str, Tensor] = field(default_factory=dict)
    step: AcceleratedStep | None = None


def forget() -> None:
    """Accelerators share their state; the next one begins anew, in the same process group."""
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    GradientState._reset_state()
    if not torch.distributed.is_initialized():
        PartialState._reset_state()


def train(
    compiled: bool,
    *,
    clips: bool = True,
    epochs: int = 2,
    rows: int = 40,
    make: Callable[..., Any] = accelerate.Accelerator,
    cpu: bool = True,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Trained:
    """Five batches an epoch, so that the last of an accumulation may lack some."""
    accelerator = make(cpu=cpu, **settings)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(rows, 6, generator=g), torch.randint(4, (rows,), generator=g))
    loader = DataLoader(data, batch_size=8 // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    done = Trained({})
    clip: dict[str, Any] = {"clip_norm": CLIP} if clips else {}
    clip |= {"memory": "keep"} | (options or {})
    step = compile_step(accelerator, model, loss_fn, optimizer, **clip) if compiled else None
    torch.manual_seed(2 + accelerator.process_index)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                if step is not None:
                    loss, aux = step(x, y)
                    norm = step.grad_norm
                else:
                    loss, aux = loss_fn(model, x, y)
                    accelerator.backward(loss)
                    last = accelerator.sync_gradients
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP) if clips and last else None
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step()
                found = {"loss": loss, "logits": aux["logits"], "rate": torch.tensor(scheduler.get_last_lr())}
                found |= {"norm": norm} if norm is not None and accelerator.sync_gradients else {}
                done.seen |= {f"{epoch}.{i} {name}": t.detach().clone() for name, t in found.items()}
    done.state = {n: t.clone() for n, t in accelerator.unwrap_model(model).state_dict().items()}
    done.state |= {f"optimizer {i}": t for i, t in enumerate(tensors_of(optimizer.state_dict()))}
    done.step = step
    forget()
    return done


def train_both(**settings: Any) -> AcceleratedStep:
    stock, ours = train(False, **settings), train(True, **settings)
    assert_same(ours.seen, stock.seen)
    assert_same(ours.state, stock.state)
    assert ours.step is not None
    assert ours.step.compiled._replays > 0, "nothing was replayed"
    return ours.step
