"""What ranks do in the tests of GradBuffer on many processes: train beside DistributedDataParallel, or get into
trouble."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from ranks import gathered
from scenarios import Branches, Joined, Trouble, convnet, entropy, mlp, momentum, rows
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import takeback as tb

Group = dist.ProcessGroup
Optimizer = torch.optim.Optimizer


class Words(nn.Module):
    """Every kind of gradient at once: rows, sums of norms, a weight that is used twice, and one that torch copies."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.twice, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table((x.abs() * 5).long().clamp(max=10)).mean(1))
        return self.head(self.twice(self.twice(h).tanh()) * self.scale)


def same(a: Tensor | None, b: Tensor | None, group: Group, what: str, *, exact: bool) -> None:
    """Bit for bit on two ranks, if `exact`."""
    assert (a is None) is (b is None), f"{what}: {a} is not {b}"
    if a is None or b is None:
        return
    if exact and dist.get_world_size(group) == 2:
        assert torch.equal(a, b), f"{what}: {a} is not {b}"
    else:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text: f"{what}: {text}")


def same_grads(ours: nn.Module, theirs: nn.Module, group: Group, what: str, *, exact: bool = False) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same(p.grad, q.grad, group, f"gradient of {name} {what}", exact=exact)


def are_slices(buf: tb.GradBuffer) -> None:
    """Every gradient that there is lies in its place in a flat tensor."""
    for slot in buf.slots:
        grad, flat = slot.param.grad, buf.flats[slot.flat]
        if grad is not None:
            assert grad.data_ptr() == flat.data_ptr() + slot.offset * flat.itemsize, slot.name
            assert grad.shape == slot.param.shape


def ranks_agree(model: nn.Module, group: Group) -> None:
    mine = [t.detach() for p in model.parameters() for t in (p, p.grad) if t is not None]
    for other in gathered(mine, group):
        assert len(mine) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def twins(rank: int, make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal models, but others on every rank: rank 0's must count."""
    torch.manual_seed(rank)
    ours = make()
    torch.manual_seed(rank)
    return ours, make()


def race(
    rank: int,
    group: Group,
    make: Callable[[], nn.Module],
    batches: Callable[[int], tuple[Any, ...]],
    *,
    flat_adamw: bool = False,
    steps: int = 4,
    accumulate: int = 1,
    exact: bool = False,
) -> tb.GradBuffer:
    """Trains a model beside DistributedDataParallel, and compares all gradients and parameters in every step."""
    ours, theirs = twins(rank, make)
    ddp = DistributedDataParallel(theirs, process_group=group, find_unused_parameters=isinstance(theirs, Branches))
    buf = tb.GradBuffer(ours, group=group)
    mine: Optimizer
    reference: Optimizer
    if flat_adamw:
        mine = tb.optim.AdamW(buf, lr=0.02, weight_decay=0.1)
        reference = torch.optim.AdamW(theirs.parameters(), lr=0.02, weight_decay=0.1, fused=True)
    else:
        mine, reference = momentum(ours), momentum(theirs)
    for i in range(steps):
        batch = batches(i)
        for model, wrapper, context in ((ours, ours, buf.no_sync), (theirs, ddp, ddp.no_sync)):
            torch.manual_seed(50 * rank + i)
            # What is added to zeros is added inside the product, and may have other bits.
            model.zero_grad(set_to_none=exact or isinstance(model, Branches) or i != 2)
            for m in range(accumulate):
                part = [t.chunk(accumulate)[m] if isinstance(t, Tensor) else t for t in batch]
                with context() if m + 1 < accumulate else contextlib.nullcontext():
                    entropy(wrapper, *part).backward()
            if model is ours:  # before the group is used for anything else
                assert buf.all_reduce() is buf
        are_slices(buf)
        same_grads(ours, theirs, group, f"in step {i}", exact=exact)
        mine.step()
        reference.step()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            same(p, q, group, f"{name} after step {i}", exact=exact)
        ranks_agree(ours, group)
    return buf


# -- group= beside DistributedDataParallel -----------------------------------------------------------------------------


def like_ddp(rank: int, group: Group) -> None:
    for flat_adamw in (False, True):
        buf = race(rank, group, mlp, rows(rank), flat_adamw=flat_adamw, exact=True)
        assert buf.copies == 0
    buf = race(rank, dist.group.WORLD, mlp, rows(rank), exact=True)
    buf.detach()


def other_gradients(rank: int, group: Group) -> None:
    """Convolutions, norms, embeddings, shared weights; and two flat tensors."""
    race(rank, group, convnet, rows(rank, 8, (2, 6, 6)))
    race(rank, group, Words, rows(rank))
    buf = race(rank, group, Joined, rows(rank))
    assert [flat.dtype for flat in buf.flats] == [torch.float32, torch.float64]


def sent_during_the_backward(rank: int, group: Group) -> None:
    """Straight from the flat tensor, in several buckets, the last layers' while the first are still computed."""
    torch.manual_seed(0)
    model = mlp()
    buf = tb.GradBuffer(model, group=group)
    events: list[Tensor | str] = []

    def reach(_: nn.Module, __: Any, out: Tensor) -> None:
        out.register_hook(lambda _: events.append("first"))

    model[0].register_forward_hook(reach)
    with watched(events):
        entropy(model, *rows(rank)(0)).backward()
        events.append("reduce")
        buf.all_reduce()
    first, reduce = (next(i for i, e in enumerate(events) if e is word) for word in ("first", "reduce"))
    sent = [[e for e in part if isinstance(e, Tensor)] for part in (events[:first], events[first:reduce])]
    assert len(sent[0]) >= 2, "nothing is sent before the first layer's gradient is computed"
    assert sent[1], "the first layer is not sent in the backward"
    [used] = [e for e in events[reduce:] if isinstance(e, Tensor)]
    assert used.numel() == 6
    start = buf.flat.data_ptr()
    places = [(t.data_ptr() - start) // 4 for t in (*sent[0], *sent[1])]
    assert places == sorted(places, reverse=True), "not in the order of a backward"
    assert all(0 <= p < buf.flat.numel() for p in places), "a copy is sent"
    assert sum(t.numel() for t in (*sent[0], *sent[1])) >= sum(p.numel() for p in model.parameters())


@contextlib.contextmanager
def watched(events: list[Any], slowly: float = 0) -> Iterator[None]:
    """Notes every tensor that is all-reduced."""
    real = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        events.append(tensor)
        time.sleep(slowly)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = noted
    try:
        yield
    finally:
        dist.all_reduce = real


def unused(rank: int, group: Group) -> None:
    """Which heads are used differs by rank and by step; the last is used by nobody: no gradient, and no decay."""
    order = [(0, 0, 1, 0, 2, 1), (0, 1, 1, 0, 0, 2)][rank % 2]
    data = rows(rank)
    for flat_adamw in (False, True):
        buf = race(rank, group, Branches, lambda i: (*data(i), order[i]), steps=6, exact=True, flat_adamw=flat_adamw)
        never = [slot for slot in buf.slots if slot.name.startswith("never")]
        assert never
        assert all(slot.param.grad is None for slot in never)
    norm = torch.stack([s.param.grad.norm() for s in buf.slots if s.param.grad is not None]).norm()
    torch.testing.assert_close(buf.norm(), norm)  # what is left in other slices does not count


def nothing_used(rank: int, group: Group) -> None:
    """A rank whose backward reaches nothing, or that has none, still takes part."""
    model = mlp()
    buf = tb.GradBuffer(model, group=group)
    buf.all_reduce()
    assert all(p.grad is None for p in model.parameters())
    if rank == 0:
        model(torch.ones(2, 6)).sum().backward()
    buf.all_reduce()
    are_slices(buf)
    ranks_agree(model, group)
    torch.testing.assert_close(model[4].bias.grad, torch.full((4,), 2.0 / dist.get_world_size(group)))


def two_losses(rank: int, group: Group) -> None:
    """Two backwards that reach different parameters are one round; so is one that asks for some of them only."""
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
    buf = tb.GradBuffer(model, group=group)
    x = torch.full((1, 3), rank + 1.0)
    for part in model:
        part(x).sum().backward()
    buf.all_reduce()
    mean = (1 + dist.get_world_size(group)) / 2
    for part in model:
        torch.testing.assert_close(part.weight.grad, torch.full((3, 3), mean))
    model.zero_grad()
    (model[0](x) + model[1](x)).sum().backward(inputs=[model[1].weight])
    buf.all_reduce()
    torch.testing.assert_close(model[1].weight.grad, torch.full((3, 3), mean))
    assert all(p.grad is None for p in (*model[0].parameters(), model[1].bias))


def several_threads(rank: int, group: Group) -> None:
    """As the backward of a model on several devices: what one thread is about to send, no other sends."""
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    buf = tb.GradBuffer(model, group=group)
    x = torch.full((1, 8), rank + 1.0)
    losses = [part(x).sum() for part in model]
    with watched(sent := [], slowly=0.05), ThreadPoolExecutor(4) as pool:
        list(pool.map(Tensor.backward, reversed(losses)))
        buf.all_reduce()
    assert len(sent) == len({t.data_ptr() for t in sent}), "a bucket was sent twice"
    for part in model:
        torch.testing.assert_close(part.weight.grad, torch.full((8, 8), (1 + dist.get_world_size(group)) / 2))


def uneven(rank: int, group: Group) -> None:
    sizes = [8, 8 - 3 * (rank == 1), 8 - 7 * (rank == 0), 5]
    race(rank, group, mlp, lambda i: rows(rank, sizes[i])(i), steps=len(sizes), exact=True)


def accumulated(rank: int, group: Group) -> None:
    race(rank, group, mlp, rows(rank), accumulate=2)
    race(rank, group, convnet, rows(rank, 8, (2, 6, 6)), accumulate=2)
    order = [(0, 0, 1, 0), (0, 1, 1, 2)][rank % 2]
    data = rows(rank)
    race(rank, group, Branches, lambda i: (*data(i), order[i]), accumulate=4)


def no_sync_alone(rank: int, group: Group) -> None:
    """What was not averaged is this rank's own, and may be read; it nests; what only it reached is averaged too."""
    model = Branches()
    buf = tb.GradBuffer(model, group=group)
    x = torch.full((2, 6), rank + 1.0)
    with watched(sent := []):
        with buf.no_sync():
            with buf.no_sync():
                model(x, 0).sum().backward()
            model(x, 1).sum().backward()
        assert not sent
        local = buf.norm()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(local, norm)
        before = [p.grad.clone() for p in model.heads[0].parameters()]
        model(x, 1).sum().backward()
        buf.all_reduce()
        assert sent
    expected = [sum(grads) / len(grads) for grads in zip(*gathered(before, group), strict=True)]
    for p, mean in zip(model.heads[0].parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, mean)
    assert all(p.grad is None for p in model.heads[2].parameters())
    ranks_agree(model, group)


def clipped(rank: int, group: Group) -> None:
    """The norm is that of the mean, and the same everywhere."""
    ours, theirs = twins(rank, mlp)
    ddp = DistributedDataParallel(theirs, process_group=group)
    buf = tb.GradBuffer(ours, group=group)
    optimizer = tb.optim.AdamW(buf, lr=0.02, clip_norm=0.05)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.02, fused=True)
    for i in range(3):
        for model in (ours, ddp):
            model.zero_grad()
            entropy(model, *rows(rank)(i)).backward()
            if model is ours:
                buf.all_reduce()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        torch.testing.assert_close(buf.norm(), norm, rtol=1e-5, atol=0)
        assert len(set(gathered(buf.norm().item(), group))) == 1
        if i == 1:
            torch.testing.assert_close(buf.clip_(0.05), norm, rtol=1e-5, atol=0)
            same_grads(ours, theirs, group, "after clip_")
        assert bool(buf.isfinite())
        optimizer.step()
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            same(p, q, group, f"step {i}", exact=False)
        ranks_agree(ours, group)


def wider_gradients(rank: int, group: Group) -> None:
    """float32 gradients of bfloat16 weights are averaged in float32."""
    torch.manual_seed(rank)
    model = mlp().bfloat16()
    buf = tb.GradBuffer(model, dtype=torch.float32, group=group)
    x, y = rows(rank)(0)
    with buf.no_sync():
        entropy(model, x.bfloat16(), y).backward()
    alone = gathered([p.grad.clone() for p in model.parameters()], group)
    buf.all_reduce()
    for p, *grads in zip(model.parameters(), *alone, strict=True):
        assert p.grad.dtype is torch.float32
        torch.testing.assert_close(p.grad, sum(grads) / len(grads), rtol=0, atol=1e-6)


def bare_parameters(rank: int, group: Group) -> None:
    """Plain leaves too; those of size zero are in no one's way."""
    a = torch.full((3,), float(rank), requires_grad=True)
    b, none = nn.Parameter(torch.full((3,), 5.0 + rank)), nn.Parameter(torch.empty(0, dtype=torch.float64))
    buf = tb.GradBuffer([a, none, b], group=group)
    assert a.tolist() == [0.0] * 3
    assert b.tolist() == [5.0] * 3
    (a * b + none.sum()).sum().mul(rank + 1).backward()
    buf.all_reduce()
    mean = (1 + dist.get_world_size(group)) / 2
    assert a.grad.tolist() == [5.0 * mean] * 3
    assert b.grad.tolist() == [0.0] * 3


# -- without group= ----------------------------------------------------------------------------------------------------


def group_at_the_call(rank: int, group: Group) -> None:
    ours, theirs = twins(0, mlp)
    ddp = DistributedDataParallel(theirs, process_group=group)
    buf = tb.GradBuffer(ours)
    assert buf._exchange is None
    for i in range(4):
        for model in (ours, ddp):
            model.zero_grad()
        with watched(sent := []):
            entropy(ours, *rows(rank)(i)).backward()
            assert not sent
            entropy(ours, *rows(rank)(i + 9)).backward()  # two backwards need no no_sync() here
            buf.norm()
            ours[0].bias.grad = ours[0].bias.grad.clone()  # and .grad may be assigned
            buf.all_reduce(group) if i % 2 else buf.all_reduce()
            assert len(sent) >= 4
        with ddp.no_sync():
            entropy(ddp, *rows(rank)(i)).backward()
        entropy(ddp, *rows(rank)(i + 9)).backward()
        are_slices(buf)
        same_grads(ours, theirs, group, f"in step {i}")
        ranks_agree(ours, group)


def first_backward_at_the_call(rank: int, group: Group) -> None:
    ours, theirs = twins(0, mlp)
    ddp = DistributedDataParallel(theirs, process_group=group)
    buf = tb.GradBuffer(ours)
    for model in (ours, ddp):
        entropy(model, *rows(rank)(0)).backward()
    buf.all_reduce(group)
    same_grads(ours, theirs, group, "", exact=True)


def halves(rank: int, group: Group) -> None:
    """Two groups of two: each has its own mean. Then both together, which all_reduce() without a group means."""
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine, other = (first, second) if rank < 2 else (second, first)
    model = nn.Linear(3, 3)
    buf = tb.GradBuffer(model)
    for mean in (0.5 + 2 * (rank >= 2), 1.5):
        model.zero_grad()
        model(torch.full((1, 3), float(rank))).sum().backward()
        for _ in range(2):  # the second changes nothing
            buf.all_reduce(mine if mean != 1.5 else None)
            assert torch.equal(model.weight.grad, torch.full((3, 3), mean))
    with pytest.raises(tb.OptionError, match="not a member of the group"):
        buf.all_reduce(other)
    torch.manual_seed(rank)
    within = tb.GradBuffer(nn.Linear(3, 3), group=mine)
    assert torch.equal(*gathered(within.slots[0].param.detach(), mine))
    with pytest.raises(tb.GradBufferError, match="made for another group"):
        within.all_reduce(dist.group.WORLD)
    within.all_reduce(mine)


# -- under DistributedDataParallel -------------------------------------------------------------------------------------


def under_ddp(rank: int, group: Group) -> None:
    """Wrapped before the buffer is made, or after; the buffer is given the wrapper, or the model in it."""
    for make, given in ((mlp, "wrapper"), (convnet, "model"), (Joined, "wrapper"), (Words, "first"), (mlp, "first")):
        batches = rows(rank, 8, (2, 6, 6) if make is convnet else (6,))
        ours, theirs = twins(rank, make)
        buf = tb.GradBuffer(ours) if given == "first" else None
        mine, reference = (DistributedDataParallel(m, process_group=group) for m in (ours, theirs))
        buf = buf or tb.GradBuffer(mine if given == "wrapper" else ours)
        assert len(buf.flats) == (2 if make is Joined else 1)
        optimizers = momentum(ours), momentum(theirs)
        for i in range(3):
            for model, optimizer in zip((mine, reference), optimizers, strict=True):
                torch.manual_seed(50 * rank + i)
                optimizer.zero_grad(set_to_none=i != 1)
                if i == 2:
                    with model.no_sync():
                        entropy(model, *batches(7)).backward()
                entropy(model, *batches(i)).backward()
            are_slices(buf)
            what = f"of {make.__name__} in step {i} ({given})"
            same_grads(ours, theirs, group, what, exact=make is mlp and i == 0)
            norm = nn.utils.get_total_norm([p.grad.double() for p in theirs.parameters()])
            torch.testing.assert_close(buf.norm().double(), norm, rtol=1e-5, atol=0)
            for optimizer in optimizers:
                optimizer.step()
            ranks_agree(ours, group)


def unused_under_ddp(rank: int, group: Group) -> None:
    """A gradient that came from the other ranks alone is put beside the buffer by DDP; gather_() fetches it."""
    order = [(0, 0, 1, 0, 2, 1), (0, 1, 1, 0, 0, 2)][rank % 2]
    ours, theirs = twins(rank, Branches)
    mine, reference = (
        DistributedDataParallel(m, process_group=group, find_unused_parameters=True) for m in (ours, theirs)
    )
    buf = tb.GradBuffer(mine)
    optimizer = tb.optim.AdamW(buf, lr=0.02)
    other = torch.optim.AdamW(theirs.parameters(), lr=0.02, fused=True)
    for i, which in enumerate(order):
        for model in (mine, reference):
            model.zero_grad()
            entropy(model, *rows(rank)(i), which).backward()
        same_grads(ours, theirs, group, f"in step {i}", exact=True)
        buf.gather_()
        are_slices(buf)
        same_grads(ours, theirs, group, f"in step {i}, gathered", exact=True)
        assert ours.never.weight.grad is None
        optimizer.step()
        other.step()
        ranks_agree(ours, group)


def bucket_views(rank: int, group: Group) -> None:
    model = mlp()
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    for given in (ddp, nn.Sequential(ddp)):
        with pytest.raises(
            tb.GradBufferError, match=r"gradient_as_bucket_view=True\) keeps .grad in buckets of its own"
        ):
            tb.GradBuffer(given)
    tb.GradBuffer(model).detach()


def bucket_views_unseen(rank: int, group: Group) -> None:
    """Where the buffer cannot know of them: what it reads is right, or there is an error."""
    for first in (True, False):
        ours, theirs = twins(rank, mlp)
        buf = tb.GradBuffer(ours) if first else None
        mine = DistributedDataParallel(ours, process_group=group, gradient_as_bucket_view=True)
        buf = buf or tb.GradBuffer(ours)
        reference = DistributedDataParallel(theirs, process_group=group)
        optimizer = tb.optim.AdamW(buf, lr=0.02)
        optimizers = momentum(ours), momentum(theirs)
        for i in range(4):
            for model in (mine, reference):
                model.zero_grad()
                if i == 2:
                    with model.no_sync():
                        entropy(model, *rows(rank)(7)).backward()
                entropy(model, *rows(rank)(i)).backward()
            same_grads(ours, theirs, group, f"in step {i}")
            with pytest.raises(tb.GradBufferError, match="is not in the GradBuffer"):
                optimizer.step()
            norm = nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
            torch.testing.assert_close(buf.norm(), norm, rtol=1e-5, atol=0)
            are_slices(buf)
            same_grads(ours, theirs, group, f"in step {i}, gathered")
            for each in optimizers:
                each.step()
        buf.detach()


def not_both(rank: int, group: Group) -> None:
    """Averaged by DDP and by the buffer, both at once, in the same memory."""
    model = mlp()
    ddp = DistributedDataParallel(model, process_group=group)
    with pytest.raises(tb.GradBufferError, match="DistributedDataParallel, which averages gradients itself"):
        tb.GradBuffer(ddp, group=group)
    assert type(model[0]) is nn.Linear


def fully_sharded(rank: int, group: Group) -> None:
    model = mlp()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    for given in (model, list(model.parameters())):
        for chosen in (None, group):
            with pytest.raises(
                tb.GradBufferError, match=r"is a DTensor \(FSDP2's fully_shard\): its gradient is sharded"
            ):
                tb.GradBuffer(given, group=chosen)
    rest = tb.GradBuffer(model[2:])  # the modules beside them may be in a buffer
    entropy(model, *rows(rank)(0)).backward()
    are_slices(rest)
    assert rest.copies == 0
    assert all(p.grad is not None for p in model.parameters())


# -- trouble -----------------------------------------------------------------------------------------------------------


def _ready(rank: int, group: Group) -> tuple[nn.Module, tb.GradBuffer]:
    torch.manual_seed(rank)
    model = mlp()
    buf = tb.GradBuffer(model, group=group)
    for i in range(2):
        model.zero_grad()
        entropy(model, *rows(rank)(i)).backward()
        buf.all_reduce()
    return model, buf


def too_early(rank: int, group: Group) -> None:
    """Whoever reads or writes the buffer while it is averaged is stopped, and can go on after all_reduce()."""
    model, buf = _ready(rank, group)
    optimizer, clipping = tb.optim.AdamW(buf), tb.optim.AdamW(buf, clip_norm=1.0)
    model.zero_grad()
    entropy(model, *rows(rank)(5)).backward()

    def accumulate() -> None:
        with buf.no_sync():
            raise AssertionError("not reached")

    touching: list[Callable[[], Any]] = [
        buf.norm,
        lambda: buf.clip_(1.0),
        buf.isfinite,
        buf.gather_,
        buf.zero_,
        lambda: buf.scale_(torch.tensor(2.0)),
        optimizer.step,
        clipping.step,
        lambda: optimizer.zero_grad(set_to_none=False),
        accumulate,
    ]
    for touch in touching:
        with pytest.raises(tb.GradBufferError, match=r"being averaged over the group: call buf.all_reduce\(\)"):
            touch()
    buf.all_reduce()
    ranks_agree(model, group)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    ranks_agree(model, group)


def twice(rank: int, group: Group) -> None:
    """A second backward adds to what is on its way, which nobody can take back."""
    model, buf = _ready(rank, group)
    model.zero_grad()
    entropy(model, *rows(rank)(5)).backward()
    with pytest.raises(tb.GradBufferError, match=r"a second backward reached .* `with buf.no_sync\(\):`"):
        entropy(model, *rows(rank)(6)).backward()
    for use in (buf.all_reduce, buf.norm, buf.zero_):
        with pytest.raises(tb.ReduceError, match=r"failed in an earlier step .*second backward"):
            use()


def assigned(rank: int, group: Group) -> None:
    model, buf = _ready(rank, group)
    model.zero_grad()
    entropy(model, *rows(rank)(5)).backward()
    model[4].weight.grad = torch.zeros(4, 16)
    with pytest.raises(tb.GradBufferError, match=r"the .grad of 4.weight was assigned between .* and all_reduce\(\)"):
        buf.all_reduce()
    with pytest.raises(tb.ReduceError, match=r"the gradient of 4.weight was assigned"):
        buf.norm()


def other_models(rank: int, group: Group) -> None:
    wide = nn.Linear(6, 4 + rank)
    before = wide.weight.detach().clone()
    with pytest.raises(tb.ReduceError, match=r"rank 1 has another model than rank 0: parameter 'weight' .*\(5, 6\)"):
        tb.GradBuffer(wide, group=group)
    assert torch.equal(wide.weight, before)
    assert type(wide) is nn.Linear
    with pytest.raises(tb.ReduceError, match="4 parameters and buffers there, 2 on rank 0"):
        tb.GradBuffer(nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank))), group=group)
    frozen = nn.Linear(6, 4)
    frozen.bias.requires_grad_(rank == 0)
    with pytest.raises(tb.ReduceError, match="frozen"):
        tb.GradBuffer(frozen, group=group)
    with pytest.raises(
        tb.ReduceError, match=r"other gradients than rank 0: weight .*float32 there, .*bfloat16 on rank 0"
    ):
        tb.GradBuffer(nn.Linear(6, 4).bfloat16(), dtype=torch.float32 if rank else None, group=group)
    for models in ((nn.Linear(4, 4), nn.Linear(4, 6)), (nn.Linear(4, 4), nn.Linear(4, 4, bias=False))):
        buf = tb.GradBuffer(models[rank])
        models[rank](torch.ones(1, 4)).sum().backward()
        grad = models[rank].weight.grad.clone()
        with pytest.raises(tb.ReduceError, match="rank 1 has other gradients than rank 0"):
            buf.all_reduce(group)
        assert torch.equal(models[rank].weight.grad, grad)


def refused_groups(rank: int, group: Group) -> None:
    model = mlp()
    for wrong in (True, "nccl", 3, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(tb.OptionError, match="group"):
            tb.GradBuffer(model, group=wrong)
        assert type(model[0]) is nn.Linear
    buf = tb.GradBuffer(model)
    for wrong in (True, "nccl", 3, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(tb.OptionError, match="group"):
            buf.all_reduce(wrong)


def a_rank_fails(rank: int, group: Group) -> None:
    """Before its backward. The others wait for it until the group's time is up, and no longer."""
    model, buf = _ready(rank, group)
    started = time.monotonic()
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 1:
        with pytest.raises(Trouble):
            raise Trouble
        return
    with pytest.raises(tb.ReduceError, match=r"could not be averaged over the group \(rank 0 of 2\)"):
        _step(model, buf, rank)
    assert time.monotonic() - started < 3 * a_rank_fails.timeout_s  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for use in (buf.all_reduce, buf.norm, lambda: _step(model, buf, rank)):
        with pytest.raises(tb.ReduceError, match="rank 0 has failed in an earlier step"):
            use()


a_rank_fails.timeout_s = 2  # type: ignore[attr-defined]


def _step(model: nn.Module, buf: tb.GradBuffer, rank: int) -> None:
    entropy(model, *rows(rank)(9)).backward()
    buf.all_reduce()


def a_rank_fails_in_its_backward(rank: int, group: Group) -> None:
    """By then some of its buckets are sent, so it cannot begin again."""
    model, buf = _ready(rank, group)
    model.zero_grad()
    if rank == 0:
        with pytest.raises(tb.ReduceError, match="Another rank has failed or ended"):
            _step(model, buf, rank)
        return

    def trouble(_: Tensor) -> None:
        raise Trouble

    handle = model[0].register_forward_hook(lambda _, __, out: out.register_hook(trouble) and None)
    with watched(sent := []), pytest.raises(Trouble):
        _step(model, buf, rank)
    assert sent
    handle.remove()
    model.zero_grad()
    with pytest.raises(tb.GradBufferError, match="a second backward reached"):
        _step(model, buf, rank)


a_rank_fails_in_its_backward.timeout_s = 2  # type: ignore[attr-defined]


def a_rank_never_comes(rank: int, group: Group) -> None:
    """Not to the making of the buffer; nor to its first all_reduce()."""
    if rank == 1:
        return
    model = mlp()
    with pytest.raises(tb.ReduceError, match="the models could not be compared"):
        tb.GradBuffer(model, group=group)
    assert type(model[0]) is nn.Linear
    with pytest.raises(tb.ReduceError, match="the ranks' gradients could not be compared"):
        tb.GradBuffer(model).all_reduce(group)


a_rank_never_comes.timeout_s = 2  # type: ignore[attr-defined]


def a_rank_dies(rank: int, group: Group) -> None:
    model, buf = _ready(rank, group)
    if rank == 1:
        os._exit(3)
    started = time.monotonic()
    with pytest.raises(tb.ReduceError, match="Another rank has failed or ended"):
        _step(model, buf, rank)
    assert time.monotonic() - started < 15
