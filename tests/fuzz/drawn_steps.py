"""Random training programs: a `Recipe` in, drawn and shrunk by hypothesis; a model, a loss and batches out.

A recipe is a list of instructions, each with the numbers that choose its operands, and how the program is trained. All
values are [rows, WIDTH] and stay bounded. There are modules whose weights are shared, loops, views, writes in place,
other dtypes on the way, dropout, checkpoints, empty parts, buffers that are replaced, batches that are no contiguous
tensors, and row counts that change from step to step, zero and one among them. Some end in a head with a cross-entropy,
are cut into microbatches or called with update=False, run under autocast, with a scaler, or with two optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5
CLASSES = 11
Instruction = tuple[str, int, int]
Apply = Callable[["DrawnModel", Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What is computed, and how it is trained."""

    instructions: tuple[Instruction, ...]
    rows: tuple[int, ...]  #: of the batch of each step
    layout: str = "plain"  #: of the batch: one of LAYOUTS
    optimizer: str = "sgd"
    memory: str = "auto"
    early: bool = False
    poison: bool = False
    clip: bool = False
    aux: bool = False
    loop: str = "plain"  #: or "accumulate": each batch in two parts; or "pending": every other call with update=False
    scaler: bool = False
    autocast: bool = False
    head: str = ""  #: one of HEADS: then the last value goes into a cross-entropy


def _assign(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:3] = y[:, 2:4]
    return x


def _loop(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    for i in range(3):
        x = m.linear(x).tanh() + y * 0.1 * i
    return x


def _rows_apart(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([row * (i + 1) for i, row in enumerate(x.unbind(0))]) * 0.2 if len(x) else x * y


def _in_half(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    return (x.bfloat16() * y.bfloat16().tanh()).float()


def _under_autocast(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.linear(x).float() * 0.5


def _attention(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (t.unsqueeze(0).unsqueeze(0) for t in (x, y, x * 0.5))
    return F.scaled_dot_product_attention(q, k, v)[0, 0]


def _scatter(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    places = (y.detach().abs() * 7).long() % WIDTH
    return torch.zeros_like(x).scatter_add(1, places, x) * 0.5


def _decides(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    """By a value: then statistics are written, or random numbers are drawn."""
    if len(x) > 1 and bool(y.detach().sum() > 0):
        return m.seen(x)
    return F.dropout(x, 0.2) if x.numel() and bool(x.detach().amax() > 1) else x * 0.9


def _half(x: Tensor, y: Tensor) -> Tensor:
    """A mask of rows: half of them, or now and then all."""
    ranks = y.detach()[:, 0].argsort(0)
    return ranks < (len(x) + 1) // 2 if bool(y.detach().sum() > -3) else ranks >= 0


def _picked(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    some = x[_half(x, y)]
    return y * 0.5 + m.linear(some).sum(0) / (1 + len(some))


def _written(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[y.detach()[:, 0] > y.detach()[:, 1].amax()] = m.linear.bias  # seldom more than none
    return x * 0.7


def _no_grad(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean() if x.numel() else x.sum()
    return y * scale.clamp(0, 1)


def _replaced(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    """A moving average, in a buffer that is replaced and not written."""
    m.average = m.average * 0.9 + (x.detach().float().mean() * 0.1 if x.numel() else 0.1)
    return x - m.average


def _checkpointed(m: DrawnModel, x: Tensor, y: Tensor) -> Tensor:
    def part(a: Tensor, b: Tensor) -> Tensor:
        return F.dropout(m.norm(m.linear(a)).tanh(), 0.1) * b

    return checkpoint(part, x, y, use_reentrant=False)


APPLY: dict[str, Apply] = {
    "add": lambda m, x, y: (x + y) * 0.5,
    "mul": lambda m, x, y: x * y.tanh(),
    "div": lambda m, x, y: x / (y.abs() + 1),
    "linear": lambda m, x, y: m.linear(x) * 0.5,
    "linear-other": lambda m, x, y: m.other(y) * 0.5,
    "tied": lambda m, x, y: F.linear(x, m.linear.weight.t()) * 0.4,
    "twin": lambda m, x, y: m.twin(x) * 0.5,
    "replaced": _replaced,
    "checkpoint": _checkpointed,
    "outer": lambda m, x, y: x @ (y.t() @ x) / (1 + len(x)),
    "bmm": lambda m, x, y: torch.bmm(x.unsqueeze(1), m.linear.weight.expand(len(x), WIDTH, WIDTH)).squeeze(1) * 0.4,
    "layer_norm": lambda m, x, y: m.norm(x),
    "batch_norm": lambda m, x, y: m.seen(x) if len(x) > 1 else x,
    "rms_norm": lambda m, x, y: F.rms_norm(x, (WIDTH,), m.norm.weight),
    "gru": lambda m, x, y: m.cell(x, y.tanh()),
    "embedding": lambda m, x, y: x + m.words((y.detach().abs() * 5).long().clamp(0, 6)[:, 0]),
    "conv": lambda m, x, y: m.conv(x.unsqueeze(1)).squeeze(1) * 0.5,
    "attention": _attention,
    "loop": _loop,
    "softmax": lambda m, x, y: x.softmax(1),
    "log_softmax": lambda m, x, y: F.log_softmax(x + y, 1) * 0.3,
    "gelu": lambda m, x, y: F.gelu(x),
    "silu-gate": lambda m, x, y: F.silu(x) * y * 0.5,
    "relu": lambda m, x, y: x.relu(),
    "exp": lambda m, x, y: x.tanh().exp() * 0.5,
    "where": lambda m, x, y: torch.where(x > y, x, y * 0.5),
    "maximum": lambda m, x, y: torch.maximum(x, y),
    "clamp": lambda m, x, y: x.clamp(-0.7, 0.9),
    "sort": lambda m, x, y: x.sort(1).values,
    "topk": lambda m, x, y: torch.cat([x.topk(2, 1).values, y[:, 2:]], 1),
    "gather": lambda m, x, y: x.gather(1, y.detach().argsort(1)),
    "scatter": _scatter,
    "one-hot": lambda m, x, y: x * F.one_hot(y.detach().argmax(1), WIDTH),
    "cumsum": lambda m, x, y: x.cumsum(0) / (1 + len(x)),
    "dropout": lambda m, x, y: F.dropout(x, 0.3),
    "noise": lambda m, x, y: x + torch.randn_like(y) * 0.1,
    "row-mean": lambda m, x, y: x - x.mean(1, keepdim=True),
    "total": lambda m, x, y: y + x.sum() / (1 + x.numel()),
    "deviation": lambda m, x, y: x / (x.var(1, keepdim=True) + 1).sqrt(),
    "logsumexp": lambda m, x, y: y - x.logsumexp(1, keepdim=True) * 0.2,
    "half": _in_half,
    "autocast": _under_autocast,
    "double": lambda m, x, y: (x.double() * y.double().sin()).float(),
    "whole": lambda m, x, y: x * (y.detach() * 3).int().clamp(-2, 2),
    "complex": lambda m, x, y: torch.view_as_real(torch.complex(x, y) * 1j).sum(2) * 0.5,
    "twice-transposed": lambda m, x, y: (x.t() * y.t()).t(),
    "reshape": lambda m, x, y: x.t().reshape(-1).reshape(x.shape),
    "roll": lambda m, x, y: x.roll(1, 1),
    "flip": lambda m, x, y: x.flip(0),
    "expand": lambda m, x, y: x[:, :1].expand(-1, WIDTH) + y * 0.1,
    "columns": lambda m, x, y: torch.cat([x[:, 1:4], y[:, ::3]], 1),
    "pad": lambda m, x, y: F.pad(x[:, 1:], (1, 0)) + F.pad(y[:, :2], (0, 3)),
    "strided": lambda m, x, y: x.contiguous().as_strided(x.shape, x.stride()) * 0.9,
    "unfold": lambda m, x, y: F.pad(x, (1, 1)).unfold(1, 3, 1).mean(2),
    "split": lambda m, x, y: torch.cat([part * (i + 1) for i, part in enumerate(x.split(2, 1))], 1) * 0.4,
    "rows-apart": _rows_apart,
    "empty-part": lambda m, x, y: torch.cat([x[:0], y, x[len(x) :]]),
    "empty-sum": lambda m, x, y: y + x[:, :0].sum(1, keepdim=True),
    "detach": lambda m, x, y: x.detach() * y,
    "no_grad": _no_grad,
    "decides": _decides,
    "picked": _picked,
    "written": _written,
    "selected": lambda m, x, y: x * (1 + x.masked_select(y.detach() > 2.5).sum()).clamp(0, 2),
    "places": lambda m, x, y: x + torch.zeros_like(x).index_add(0, _half(x, y).nonzero()[:, 0], y[_half(x, y)]) * 0.3,
    "assign": _assign,
    "relu_": lambda m, x, y: x.relu_(),
    "add_": lambda m, x, y: x.add_(y, alpha=0.1),
    "mul_": lambda m, x, y: x.mul_(0.7),
    "mul_-tensor": lambda m, x, y: x.mul_(y.tanh()),
    "copy_": lambda m, x, y: x.copy_(y * 0.5),
    "slice_": lambda m, x, y: (x[:, 1:3].mul_(0.5), x)[1],
    "fill_": lambda m, x, y: (x[:, 0].fill_(0.25), x)[1],
    "view-relu_": lambda m, x, y: (x.t()[1:].relu_(), x)[1],
    "masked_fill_": lambda m, x, y: x.masked_fill_(y.detach() > 0.5, 0.1),
    "dropout_": lambda m, x, y: F.dropout(x, 0.2, inplace=True),
    "prod": lambda m, x, y: x * (1 + 0.2 * y.tanh()).prod(1, keepdim=True) * 0.5,
    "prod-of-all": lambda m, x, y: y + 0.1 * (1 + 0.1 * x.tanh()).prod().clamp(0, 2),
    "prod-with-zeros": lambda m, x, y: x + 0.1 * y.clamp(0, 2).prod(0).tanh(),
    "filled": lambda m, x, y: x.masked_fill(y.detach() > 0.5, m.linear.bias[0]),
    "filled-rows_": lambda m, x, y: x.masked_fill_(y.detach()[:, :1] > 0.5, m.norm.bias.sum()),
}
IN_PLACE = frozenset(name for name in APPLY if name.endswith("_") and name != "no_grad") | {"mul_-tensor"}
Head = Callable[["DrawnModel", Tensor, Tensor], Tensor]  #: of the last value, and targets of which some are -100
HEADS: dict[str, Head] = {
    "plain": lambda m, x, t: F.cross_entropy(m.head(x), t),
    "summed": lambda m, x, t: F.cross_entropy(m.head(x), t, reduction="sum") / 8,
    "smoothed": lambda m, x, t: F.cross_entropy(m.head(x), t, label_smoothing=0.1),
    "capped": lambda m, x, t: F.cross_entropy(torch.tanh(m.head(x) / 3) * 3, t),
    "wide": lambda m, x, t: F.cross_entropy(m.head(x).double(), t).float(),
    "z": lambda m, x, t: F.cross_entropy(z := m.head(x), t) + 1e-2 * z.logsumexp(1).square().mean(),
    "weighted": lambda m, x, t: (F.cross_entropy(m.head(x), t, reduction="none") * x.detach()[:, 0].sigmoid()).mean(),
    "weighted, smoothed": lambda m, x, t: F.cross_entropy(m.head(x), t, weight=m.weights, label_smoothing=0.1),
    "tied": lambda m, x, t: F.cross_entropy(F.linear(m.norm(x), m.words.weight), t.clamp(max=6)),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.cat([t, t + 1], 1)[:, :WIDTH],
    "every other": lambda t: torch.stack([t, -t], 2).flatten(1)[:, ::2],
    "expanded": lambda t: t[:, :1].expand(-1, WIDTH),
    "reversed rows, offset": lambda t: torch.cat([t[:1] * 0, t.flip(0)])[1:] if len(t) else t,
}


class DrawnModel(nn.Module):
    """`forward` follows the recipe and adds up what nobody has read."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.seen = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.cell, self.words = nn.GRUCell(WIDTH, WIDTH), nn.Embedding(7, WIDTH)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.twin, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.twin.weight = self.linear.weight
        self.register_buffer("average", torch.zeros(1))
        self.register_buffer("weights", torch.linspace(0.5, 1.5, CLASSES))
        self.recipe = recipe

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        values: list[Tensor] = [self.linear(x), x, y]
        read = set()
        for name, first, second in self.recipe.instructions:
            a, b = first % len(values), second % len(values)
            if name in IN_PLACE and a in (1, 2):
                a = 0  # the batch is not for writing
            read |= {a, b}
            values.append(APPLY[name](self, values[a], values[b]))
        ends = [v for i, v in enumerate(values) if i not in (1, 2) and i not in read]
        loss = torch.stack([v.float().square().sum() / (1 + v.numel()) for v in (*ends, self.other.weight)]).sum()
        if self.recipe.head:
            targets = (y.detach().abs().sum(1) * 9).long() % CLASSES
            targets = targets.masked_fill(y.detach()[:, 1] > 0.8, -100)
            loss = loss + HEADS[self.recipe.head](self, values[-1], targets)
        return loss, values[-1]


def loss_fn(model: DrawnModel, x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=model.recipe.autocast):
        loss, last = model(x, y)
    return (loss, last.detach().abs().sum()) if model.recipe.aux else loss


def batch(recipe: Recipe, i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    x, y = torch.randn(2, recipe.rows[i], WIDTH, generator=g)
    return LAYOUTS[recipe.layout](x), y


def optimizers_of(recipe: Recipe, model: nn.Module) -> list[torch.optim.Optimizer]:
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=1e-3)]
    if recipe.optimizer == "two":
        first, *others = model.parameters()
        return [torch.optim.SGD([first], lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
    return [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9 if recipe.optimizer == "momentum" else 0.0)]


_instruction = st.tuples(st.sampled_from(sorted(APPLY)), st.integers(0, 12), st.integers(0, 12))
_rows = st.sampled_from((6, 3, 7, 1, 0))


@st.composite
def recipes(draw: st.DrawFn, most: int = 14, least: int = 1) -> Recipe:
    """Steps in one shape or two, of which the first comes back. So many instructions."""
    instructions = tuple(draw(st.lists(_instruction, min_size=least, max_size=most)))
    loop = draw(st.sampled_from(("plain", "plain", "accumulate", "pending")))
    rows = st.sampled_from((6, 8, 2)) if loop == "accumulate" else _rows
    first, second = draw(rows), draw(rows)
    scaler = draw(st.sampled_from((False, False, True)))
    early = loop == "plain" and not scaler and draw(st.booleans())
    kinds = ("sgd", "momentum", "adamw") if scaler else ("sgd", "momentum", "adamw", "two")
    return Recipe(
        instructions,
        draw(st.sampled_from(((first,) * 4, (first, first, second, first, second, first)))),
        draw(st.sampled_from(sorted(LAYOUTS))),
        draw(st.sampled_from(kinds)),
        draw(st.sampled_from(("auto", "min", "keep"))),
        early,
        draw(st.booleans()),
        not early and draw(st.booleans()),
        loop == "plain" and draw(st.booleans()),
        loop,
        scaler,
        draw(st.sampled_from((False, False, False, True))),
        draw(st.sampled_from(("", *sorted(HEADS)))),
    )
