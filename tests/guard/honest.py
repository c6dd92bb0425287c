"""Ordinary training in many forms, each a function that returns every number it computed."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import takeback as tb
from takeback import zoo

Numbers = list[torch.Tensor]


class Owner(torch.autograd.Function):
    """y = 2 x, in place in the backward where the gradient is its own alone, as takeback.nn decides it."""

    in_place = 0
    copied = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        alone = dy._use_count() == 1 and torch._C._storage_Use_Count(dy.untyped_storage()._cdata) == 2
        if alone and not torch.is_grad_enabled():
            Owner.in_place += 1
            return dy.mul_(2)
        Owner.copied += 1
        return dy * 2


class Recycler(torch.autograd.Function):
    """y = exp(x); the backward writes its result onto its own saved output, which nobody else reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y.clone())
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        with torch.no_grad():
            y.mul_(dy)
        return y


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Owner.apply(x)


class Recycle(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Recycler.apply(x * 0.1)


def train(
    model: nn.Module,
    batch: torch.Tensor,
    *,
    steps: int = 2,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.square().mean(),
) -> Numbers:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(batch))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return [*losses, *numbers_of(model)]


def numbers_of(model: nn.Module) -> Numbers:
    grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *grads)]


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Own(), nn.Linear(16, 16), Recycle(), nn.Linear(16, 4))


def mlp() -> Numbers:
    return train(small_mlp(), torch.randn(6, 8))


def cnn() -> Numbers:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), Own(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)
    )
    return train(model, torch.randn(2, 3, 12, 12))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def residual() -> Numbers:
    blocks = [Residual(nn.Sequential(nn.Linear(8, 8), Own(), nn.Tanh(), Own(), nn.Dropout(0.2))) for _ in range(3)]
    return train(nn.Sequential(*blocks), torch.randn(4, 8))


def transformer() -> Numbers:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return train(nn.Sequential(layer, Own(), nn.Linear(16, 4)), torch.randn(2, 5, 16))


def checkpointed(reentrant: bool) -> Numbers:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), Own(), nn.Dropout(0.3), Recycle())
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    return train(Model(), torch.randn(5, 8))


def checkpoint_reentrant() -> Numbers:
    return checkpointed(True)


def checkpoint_plain() -> Numbers:
    return checkpointed(False)


class Last(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Owner.apply(self.rnn(x)[0])


def lstm() -> Numbers:
    return train(Last(nn.LSTM(4, 6, 2)), torch.randn(5, 2, 4))


def embedding() -> Numbers:
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), Own(), nn.Linear(8, 2))
    tokens = torch.randint(20, (4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        model(tokens).mean().backward()
        optimizer.step()
    return numbers_of(model)


def grad_buffer() -> Numbers:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), Own(), nn.Linear(16, 4))
    buffer = tb.GradBuffer(model)
    optimizer = tb.optim.AdamW(buffer, lr=1e-2, clip_norm=1.0)
    x = torch.randn(6, 8)
    for _ in range(2):
        for _ in range(2):  # the second adds onto the first
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x).mean().backward()
    found = [*numbers_of(model), buffer.flat.clone()]
    buffer.detach()
    return found


def main_grad() -> Numbers:
    """As Megatron fuses accumulation: the Function writes a buffer that hangs on the parameter."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            x, w = ctx.saved_tensors
            w.main_grad.addmm_(x.t(), dy)
            return dy @ w.t(), None

    flat = torch.zeros(40)
    a, b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    a.main_grad, b.main_grad = flat[:16].view(4, 4), flat[20:36].view(4, 4)  # type: ignore[attr-defined]
    for _ in range(2):
        h = Fused.apply(torch.randn(3, 4, requires_grad=True), a)
        Fused.apply(h, b).square().mean().backward()
    return [flat.clone()]


def distributed_model() -> Numbers:
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}.store", rank=0, world_size=1)
        try:
            model = nn.Sequential(nn.Linear(8, 8), Own(), nn.Linear(8, 2))
            found = train(nn.parallel.DistributedDataParallel(model), torch.randn(3, 8))
            view = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            return found + train(view, torch.randn(3, 8))
        finally:
            dist.destroy_process_group()


def scaled() -> Numbers:
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 8)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return numbers_of(model)


def optimizer_in_hooks() -> Numbers:
    model = small_mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
    return numbers_of(model)


def kept_graph() -> Numbers:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Own(), nn.Linear(8, 2))
    loss = model(torch.randn(3, 8)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return numbers_of(model)


def gradient_penalty() -> Numbers:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Own(), nn.Linear(8, 1))
    x = torch.randn(3, 8, requires_grad=True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (g.square().sum() + model(x).mean()).backward()
    return [*numbers_of(model), x.grad]  # type: ignore[list-item]


def returned_gradients() -> Numbers:
    x = torch.randn(4, 4, requires_grad=True)
    h = Owner.apply(x * 3).sin()
    y = Owner.apply(h.exp())
    first = torch.autograd.grad(y.square().mean(), [x, h], retain_graph=True)
    return [*first, *torch.autograd.grad([y, h], [x], [torch.ones(4, 4), torch.ones(4, 4)])]


def some_inputs() -> Numbers:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Own(), nn.Linear(8, 2))
    first = next(model.parameters())
    loss = model(torch.randn(3, 8)).square().mean()
    loss.backward(inputs=[first], retain_graph=True)
    loss.backward(inputs=list(model[-1].parameters()))  # type: ignore[index]
    return numbers_of(model)


def hooks() -> Numbers:
    model = small_mlp()
    seen: Numbers = []
    own = torch.zeros(())

    def write_own(module: nn.Module, given: Any, got: Any) -> None:
        own.add_(got[0].detach().sum())

    model[3].register_full_backward_hook(write_own)  # type: ignore[index]
    x = torch.randn(6, 8, requires_grad=True)
    h = model[:3](x)  # type: ignore[index]
    h.retain_grad()
    h.register_hook(lambda g: g * 2)
    h.grad_fn.register_hook(lambda a, b: seen.append(b[0].clone()))
    model[3:](h).square().mean().backward()  # type: ignore[index]
    return [*numbers_of(model), own, h.grad, *seen]  # type: ignore[list-item]


def in_place_forward() -> Numbers:
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    h = model(x)
    h = torch.relu_(h)
    h = Owner.apply(h)
    h.mul_(2)
    h[:, 1:3] += 1
    h[:, 0] = Owner.apply(h[:, 1].clone())
    h.square().mean().backward()
    return numbers_of(model)


def views() -> Numbers:
    model = nn.Linear(8, 24)
    q, k, v = Owner.apply(model(torch.randn(2, 5, 8))).chunk(3, -1)
    out = F.scaled_dot_product_attention(*(t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v)))
    Owner.apply(out.transpose(1, 2).flatten(-2)).square().mean().backward()
    return numbers_of(model)


def complex_numbers() -> Numbers:
    x = torch.randn(8, requires_grad=True)
    y = Owner.apply(torch.fft.fft(Owner.apply(x)) * 1j)
    y.abs().square().mean().backward()
    return [x.grad]  # type: ignore[list-item]


def two_losses() -> Numbers:
    trunk, one, two = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 3)
    h = Owner.apply(trunk(torch.randn(4, 8)).tanh())
    one(h).square().mean().backward(retain_graph=True)
    two(Owner.apply(h)).square().mean().backward()
    return [n for m in (trunk, one, two) for n in numbers_of(m)]


def nested_backward() -> Numbers:
    inner = nn.Linear(4, 4)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return inner(x).detach()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = Owner.apply(inner(x))
            y.backward(dy)
            return x.grad  # type: ignore[return-value]

    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        Nested.apply(Nested.apply(x * 2)).square().mean().backward()
    return [*numbers_of(inner), x.grad]  # type: ignore[list-item]


def offloaded() -> Numbers:
    model = small_mlp()
    with save_on_cpu():
        model(torch.randn(3, 8)).square().mean().backward()
    with saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
        model(torch.randn(3, 8)).square().mean().backward()
    return numbers_of(model)


def scratch() -> Numbers:
    """A workspace that a Function keeps from call to call, and a counter that it updates."""
    space = torch.empty(64)
    counter = nn.Module()
    counter.register_buffer("calls", torch.zeros(()))

    class Uses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            counter.calls.add_(1)
            out = space[: dy.numel()].view_as(dy)
            torch.mul(dy, 2, out=out)
            return out.clone()

    x = torch.randn(4, 4, requires_grad=True)
    Uses.apply(Uses.apply(x).sin()).square().mean().backward()
    return [x.grad, counter.calls.clone()]  # type: ignore[list-item, operator]


def threads() -> Numbers:
    found: dict[int, Numbers] = {}

    def work(i: int) -> None:
        generator = torch.Generator().manual_seed(i)
        w = torch.randn(4, 4, generator=generator).requires_grad_()
        for _ in range(3):
            Recycler.apply(Recycler.apply(w * 0.1).sin() * 0.1).square().mean().backward()
        found[i] = [w.grad]  # type: ignore[list-item]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [n for i in range(3) for n in found[i]]


def compiled() -> Numbers:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8)
    for _ in range(2):
        Owner.apply(run(x)).square().mean().backward()
    return numbers_of(model)


def compiled_in_pieces() -> Numbers:
    """Between the pieces Python runs, and the guard's trace function with it."""
    model = nn.Linear(8, 8)

    @torch.compile(backend="eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        h = model(x).sin()
        torch._dynamo.graph_break()
        return h.cos()

    for _ in range(2):
        Owner.apply(run(torch.randn(3, 8))).square().mean().backward()
    return numbers_of(model)


def custom_op() -> Numbers:
    x = torch.randn(4, requires_grad=True)
    twice(twice(x).sin()).square().mean().backward()
    return [x.grad]  # type: ignore[list-item]


@torch.library.custom_op("takeback_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_autograd(lambda ctx, dy: dy * 2)


def transforms() -> Numbers:
    x = torch.randn(4)
    found = [torch.func.grad(lambda t: t.sin().sum())(x), torch.func.jacrev(torch.sin)(x)]
    leaf = x.clone().requires_grad_()
    found.append(torch.autograd.functional.hessian(lambda t: t.pow(3).sum(), leaf))
    y = leaf.sin()
    found += torch.autograd.grad(y, leaf, torch.eye(4), is_grads_batched=True)
    return found


def modes() -> Numbers:
    model = small_mlp()
    with FlopCounterMode(display=False) as flops, torch.device("cpu"):
        model(torch.randn(3, 8)).square().mean().backward()
    return [*numbers_of(model), torch.tensor(flops.get_total_flops())]


def nested_tensors() -> Numbers:
    a, b = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    packed = torch.nested.as_nested_tensor([Owner.apply(a), Owner.apply(b)], layout=torch.jagged)
    torch.sin(packed).values().square().mean().backward()
    return [a.grad, b.grad]  # type: ignore[list-item]


def shared_weights() -> Numbers:
    layer = nn.Linear(8, 8)
    return train(nn.Sequential(layer, Own(), nn.ReLU(), layer, nn.BatchNorm1d(8), Recycle(), layer), torch.randn(5, 8))


def zoo_models() -> Numbers:
    found: Numbers = []
    for name in ("mlp", "gpt", "resnet"):
        case = zoo.case(name, size="small")
        loss = case.loss_fn(case.model, *case.batch)
        (Owner.apply(loss) if name != "gpt" else loss).backward()
        found += numbers_of(case.model)
    return found


CASES: list[Callable[[], Numbers]] = [
    mlp,
    cnn,
    residual,
    transformer,
    checkpoint_reentrant,
    checkpoint_plain,
    lstm,
    embedding,
    grad_buffer,
    main_grad,
    distributed_model,
    scaled,
    optimizer_in_hooks,
    kept_graph,
    gradient_penalty,
    returned_gradients,
    some_inputs,
    hooks,
    in_place_forward,
    views,
    complex_numbers,
    two_losses,
    nested_backward,
    offloaded,
    scratch,
    threads,
    compiled,
    compiled_in_pieces,
    custom_op,
    transforms,
    modes,
    nested_tensors,
    shared_weights,
    zoo_models,
]
