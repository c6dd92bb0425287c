"""Models with a head and a loss, recorded, planned with `chunk_head` in the place of `chunk_loss`, and run for real."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.layout import Layout, lay_out
from takeback.compiler.passes import PIPELINE, Draft, Home, PassSettings, Stage, run_passes
from takeback.compiler.passes.chunk_head import chunk_head
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.arena_executor import ArenaExecutor

ROWS, LENGTH, VOCABULARY, WIDTH = 6, 20, 96, 8
LOGIT_BYTES = ROWS * LENGTH * VOCABULARY * 4
CHUNKS = 4
STAGES = tuple(Stage(chunk_head, lambda s: {"chunks": CHUNKS}) if s.name == "chunk_loss" else s for s in PIPELINE)

LossFunction = Callable[..., Any]


class SmallModel(nn.Module):
    """Embedding, one hidden layer, head."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(self.words(x)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


def flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)


def plain(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(*flat(m(x), y))


def soft_capped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(*flat(torch.tanh(m(x) / 3) * 3, y))


def with_z_loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
    logits, targets = flat(m(x), y)
    return F.cross_entropy(logits, targets) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def smoothed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(*flat(m(x), y), label_smoothing=0.1)


def shifted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """As transformers does it: logits upcast, labels padded at the end and shifted."""
    logits = _wide(m(x))
    y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(*flat(logits, y), ignore_index=-100)


def shifted_logits(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """As it was done before: the last position of each sequence is cut off."""
    return F.cross_entropy(*flat(m(x)[..., :-1, :].contiguous(), y[..., 1:].contiguous()))


def over_items(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(*flat(m(x), y), reduction="sum") / (y != -100).sum()


def weighted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    classes = torch.linspace(0.1, 2.0, VOCABULARY, dtype=m.head.weight.dtype)
    return F.cross_entropy(*flat(m(x), y), weight=classes)


def padded_vocabulary(m: Any, x: Tensor, y: Tensor) -> Tensor:
    logits, targets = flat(m(x)[..., :-6], y)
    return F.cross_entropy(logits, targets.clamp(max=VOCABULARY - 7))


def words_left_out(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A padded vocabulary, in place: the backward writes rows into a tensor that it made before."""
    logits = m(x)
    logits[..., -6:] = -1e9
    return F.cross_entropy(*flat(logits, y.clamp(max=VOCABULARY - 7)))


def by_hand(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Without any operator for losses: the backward makes a value as large as the logits out of the targets alone."""
    logits, targets = flat(m(x), y.clamp(min=0))
    return (torch.logsumexp(logits, -1) - logits.gather(1, targets.unsqueeze(1)).squeeze(1)).mean()


def one_hot(m: Any, x: Tensor, y: Tensor) -> Tensor:
    logs = F.log_softmax(m(x), -1)
    return -(F.one_hot(y.clamp(min=0), VOCABULARY).to(logs.dtype) * logs).sum(-1).mean()


def tied(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(*flat(torch.einsum("btd,vd->btv", m.features(x), m.words.weight), y))


def two_heads(m: Any, x: Tensor, y: Tensor) -> Tensor:
    features = m.features(x)
    return F.cross_entropy(*flat(m.head(features), y)) + 0.3 * F.cross_entropy(*flat(m.head(features * 2), x))


def in_bfloat16(m: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=m.head.weight.dtype == torch.float32):
        return shifted(m, x, y)


def with_narrow_mean(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A mean in bfloat16 that is widened afterwards: it must be divided before that."""
    with torch.autocast("cpu", torch.bfloat16, enabled=m.head.weight.dtype == torch.float32):
        logits = m(x)
        more = logits.square().mean()
    return F.cross_entropy(*flat(_wide(logits), y)) + _wide(more)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


HEADS: dict[str, LossFunction] = {
    f.__name__: f
    for f in (
        *(plain, soft_capped, with_z_loss, smoothed, shifted, shifted_logits, over_items, weighted),
        *(padded_vocabulary, words_left_out, by_hand, one_hot, tied, two_heads, in_bfloat16, with_narrow_mean),
    )
}


def words() -> tuple[Tensor, Tensor]:
    """A batch; some targets are ignored, in each chunk others."""
    torch.manual_seed(1)
    x, y = torch.randint(VOCABULARY, (ROWS, LENGTH)), torch.randint(VOCABULARY, (ROWS, LENGTH))
    y[0, 5:9] = y[3] = -100
    return x, y


@dataclass(frozen=True)
class ChunkedRun:
    """A step on the rewritten plan, and what stands beside it."""

    draft: Draft
    layout: Layout
    whole: Layout  #: the plan of mode exact
    loss: Tensor
    rest: Any  #: what the loss function returned besides
    grads: dict[str, Tensor]

    @property
    def reasons(self) -> list[str]:
        return [r.reason for r in self.draft.refusals if r.decision == "chunk_head"]


def compiled(model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...], **settings: Any) -> tb.CompiledStep:
    """A step that was recorded, and compared with eager."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = tb.compile_step(model, loss_fn, optimizer, memory="keep", keep_grads=True, **settings)
    step(*batch)
    step(*batch)
    return step


def run_chunked(model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...]) -> ChunkedRun:
    """In poison mode."""
    step = compiled(model, loss_fn, batch)
    plan, maker = step._plans[0], step._maker
    settings = PassSettings(home=maker.home)
    draft = run_passes(plan.original, plan.finished.kept, settings, stages=STAGES)
    layout, whole = lay_out(draft), lay_out(run_passes(plan.original, plan.finished.kept, settings))
    if maker.home is Home.ARENA:
        plan.executor = ArenaExecutor(layout, maker.arena, maker.native, poison=True)
    else:
        plan.executor = AllocatorExecutor(layout, poison=True)
    model.zero_grad(set_to_none=True)
    out = step(*batch)
    loss, rest = out if isinstance(out, tuple) else (out, None)
    return ChunkedRun(draft, layout, whole, loss, rest, gradients(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def eager_gradients(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, ...], *, double: bool = False
) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    if double:
        model = model.double()
    model.zero_grad(set_to_none=True)
    out = loss_fn(model, *batch)
    (out[0] if isinstance(out, tuple) else out).backward()
    return gradients(model)


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))
