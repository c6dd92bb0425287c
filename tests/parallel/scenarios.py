"""What ranks do in the tests of `group=`: train beside DistributedDataParallel, or get into trouble."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import gathered
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import takeback as tb
from takeback.compiler.passes import Home
from takeback.compiler.run import kernels, plan_maker
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.inductor import NotCompiled
from takeback.flat import cut, lay_out
from takeback.parallel import Reducer

Batches = Callable[[int], tuple[Any, ...]]  #: by step


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 4)
    )


class Branches(nn.Module):
    """Which of its parts get a gradient depends on an argument; one never does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
        self.never = nn.Linear(8, 4)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.heads[which](self.stem(x).relu())


class Joined(nn.Module):
    """Gradients of two parameters are parts of one buffer; and one parameter is in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(5, 6))
        self.last = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, torch.cat([self.a, self.b])).double())


def entropy(model: nn.Module, x: Tensor, y: Tensor, *which: int) -> Tensor:
    return F.cross_entropy(model(x, *which), y)


def rows(rank: int, count: int = 8, shape: tuple[int, ...] = (6,)) -> Batches:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        return torch.randn(count, *shape, generator=generator), torch.randint(4, (count,), generator=generator)

    return batch


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)  # one whose own step() is called


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(model.state_dict())
    for i, p in enumerate(model.parameters()):
        found |= {f"{i}.{k}": v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor)}
        if p.grad is not None:
            found[f"{i}.grad"] = p.grad
    return {name: t.detach().clone() for name, t in found.items()}


def race(
    rank: int,
    group: dist.ProcessGroup,
    make: Callable[[], nn.Module],
    batches: Batches,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    steps: int = 6,
    streams: bool = False,
    **options: Any,
) -> tb.CompiledStep:
    """Trains a model beside DistributedDataParallel: with two ranks every bit is the same after every step."""
    torch.manual_seed(rank)  # other parameters on every rank: rank 0's count
    ours = make()
    torch.manual_seed(rank)
    theirs = make()
    mine, reference = optimizer(ours), optimizer(theirs)
    unused = isinstance(theirs, Branches)
    keep_grads = options.setdefault("keep_grads", True)
    ddp = DistributedDataParallel(theirs, process_group=group, find_unused_parameters=unused)
    step = tb.compile_step(ours, entropy, mine, group=group, **{"memory": "keep", **options})
    if streams:
        step._maker.home, step._maker.native = Home.ALLOCATOR, None
    accumulate, clip_norm = options.get("accumulate", 1), options.get("clip_norm")
    for i in range(steps):
        batch = batches(i)
        torch.manual_seed(50 * rank + i)
        loss = step(*batch)
        torch.manual_seed(50 * rank + i)
        reference.zero_grad()
        total = torch.zeros(())
        for m in range(accumulate):
            part = [t.chunk(accumulate)[m] if isinstance(t, Tensor) else t for t in batch]
            with ddp.no_sync() if m + 1 < accumulate else contextlib.nullcontext():
                scaled = entropy(ddp, *part) / accumulate if accumulate > 1 else entropy(ddp, *part)
                scaled.backward()
            total = total + scaled.detach()
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
            assert step.grad_norm is not None
            same(step.grad_norm, norm, group, f"the norm in step {i}")
        reference.step()
        same(loss, total, group, f"the loss of step {i}")
        if not keep_grads:
            theirs.zero_grad()
        now, expected = state(ours, mine), state(theirs, reference)
        assert now.keys() == expected.keys(), f"step {i}: {now.keys() ^ expected.keys()}"
        for name, value in expected.items():
            same(now[name], value, group, f"{name} after step {i}")
    assert step._last is not None
    assert isinstance(step._last.executor, AllocatorExecutor) is streams
    return step


def same(a: Tensor, b: Tensor, group: dist.ProcessGroup, what: str) -> None:
    if dist.get_world_size(group) == 2:
        assert torch.equal(a, b), f"{what}: {a} is not {b}"
    else:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text: f"{what}: {text}")


# -- beside DistributedDataParallel ------------------------------------------------------------------------------------


def plain(rank: int, group: dist.ProcessGroup) -> None:
    step = race(rank, group, mlp, rows(rank), memory="auto", poison=True)
    assert step._group is not None
    assert step._group.reducer.count > 2, "one bucket alone shows nothing about their order"
    ops = [op.name for op in step._plans[0].executor.program.ops]
    first = ops.index("group.reduce")
    assert any(name.startswith("mm") for name in ops[first : ops.index("group.wait")]), "nothing is started early"
    report = step.report()
    world = dist.get_world_size(group)
    assert any(n.startswith(f"rank {rank} of {world}: gradients are averaged over the group") for n in report.notes)
    assert sum("averaged over the group in bucket" in e.reason for e in report.ledger) == 6
    assert step._plans[0].proved


def in_clusters(rank: int, group: dist.ProcessGroup) -> None:
    """Mode fast, with eager's kernels in its clusters: the same ops, so the same bits."""

    def refuse(*_: object) -> None:
        raise NotCompiled("this is a test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cluster", refuse)
        patch.setattr(plan_maker, "in_one_kernel", lambda optimizers: False)
        step = race(rank, group, convnet, rows(rank, shape=(2, 6, 6)), mode="fast")
    assert step.report().kernels


def batch_norm(rank: int, group: dist.ProcessGroup) -> None:
    race(rank, group, convnet, rows(rank, 8, (2, 6, 6)), optimizer=momentum)


def own_step(rank: int, group: dist.ProcessGroup) -> None:
    race(rank, group, mlp, rows(rank), optimizer=adagrad, clip_norm=0.05)


def accumulated_and_clipped(rank: int, group: dist.ProcessGroup) -> None:
    # Not Adam: the bias before a BatchNorm has a gradient of rounding errors, which Adam blows up to whole steps.
    race(rank, group, convnet, rows(rank, 8, (2, 6, 6)), optimizer=momentum, accumulate=2, clip_norm=0.2)


def accumulated_over_calls(rank: int, group: dist.ProcessGroup) -> None:
    """`update=False` is DDP's no_sync(): the ranks have other microbatches, and not the same number of them; which
    parts of the model get a gradient differs too. Between the first call and the last nothing is sent."""
    data = rows(rank)
    kinds = ((Branches, adamw, True), (Branches, adagrad, False), (convnet, momentum, False))
    for make, optimizer, streamed_too in kinds:
        for streams in (False, True)[: 1 + streamed_too]:
            torch.manual_seed(rank)
            ours = make()
            torch.manual_seed(rank)
            theirs = make()
            mine, reference = optimizer(ours), optimizer(theirs)
            branches = make is Branches
            ddp = DistributedDataParallel(theirs, process_group=group, find_unused_parameters=branches)
            step = tb.compile_step(ours, entropy, mine, group=group, memory="keep", clip_norm=0.5)
            if streams:
                step._maker.home, step._maker.native = Home.ALLOCATOR, None
            assert step._group is not None
            sent: list[int] = []
            send = step._group.reducer._send
            step._group.reducer._send = lambda tensors, sent=sent, send=send: sent.append(1) or send(tensors)
            for i in range(4):
                parts = 1 if i == 2 and rank == 0 else 2 + (rank + i) % 2
                draws = [data(10 * i + m) if branches else rows(rank, 8, (2, 6, 6))(10 * i + m) for m in range(parts)]
                batches = [(*drawn, (i + m + rank) % 3) if branches else drawn for m, drawn in enumerate(draws)]
                losses = []
                for m, batch in enumerate(batches):
                    last, before = m + 1 == parts, len(sent)
                    torch.manual_seed(m)
                    asks = {"update": False} if not last else {"divide": 3} if i else {}
                    losses.append(step(*batch, **asks))
                    assert len(sent) == before + (step._group.reducer.count if last else 0), "sent before the last call"
                reference.zero_grad()
                for m, batch in enumerate(batches):
                    torch.manual_seed(m)
                    with ddp.no_sync() if m + 1 < parts else contextlib.nullcontext():
                        expected = entropy(ddp, *batch)
                        expected.backward()
                    same(losses[m], expected.detach(), group, f"the loss of call {m} of step {i}")
                for p in theirs.parameters():
                    if p.grad is not None and i:
                        p.grad /= 3
                norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
                assert step.grad_norm is not None
                same(step.grad_norm, norm, group, f"the norm in step {i}")
                reference.step()
                theirs.zero_grad()
                now, then = state(ours, mine), state(theirs, reference)
                assert now.keys() == then.keys()
                for name, value in then.items():
                    same(now[name], value, group, f"{name} after step {i}")


def parts_and_dtypes(rank: int, group: dist.ProcessGroup) -> None:
    race(rank, group, Joined, rows(rank), clip_norm=0.3)


def unused(rank: int, group: dist.ProcessGroup) -> None:
    """Which heads are used differs by rank and by step; the last is used by nobody, and must not decay."""
    order = [(0, 0, 1, 0, 0, 2, 1, 0, 0, 1), (0, 1, 1, 0, 0, 2, 1, 2, 1, 0)][rank % 2]
    data = rows(rank)
    step = race(rank, group, Branches, lambda i: (*data(i), order[i]), steps=len(order), clip_norm=0.5)
    assert max(plan.rehearsals for plan in step._plans) > 0, "no plan was ever replayed"


def unused_with_own_step(rank: int, group: dist.ProcessGroup) -> None:
    order = [(0, 0, 1, 0, 0, 1), (0, 1, 1, 0, 1, 0)][rank % 2]
    data = rows(rank)
    race(rank, group, Branches, lambda i: (*data(i), order[i]), optimizer=adagrad, steps=len(order))


def part_of_the_parameters(rank: int, group: dist.ProcessGroup) -> None:
    """The optimizer has the heads alone: the other gradients travel, and nobody reads them."""
    order = [(0, 0, 1, 0, 0, 1), (0, 1, 1, 0, 1, 0)][rank % 2]
    data = rows(rank)

    def heads(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Branches)
        return torch.optim.AdamW(model.heads.parameters(), lr=0.02)

    for streams in (False, True):
        race(
            rank,
            group,
            Branches,
            lambda i: (*data(i), order[i]),
            optimizer=heads,
            steps=len(order),
            streams=streams,
            keep_grads=False,
            poison=True,
        )


def uneven(rank: int, group: dist.ProcessGroup) -> None:
    """One rank has fewer rows now and then, so it records a new plan while the others replay theirs."""
    sizes = [8, 8, 8 - 3 * (rank == 1), 8, 8 - 5 * (rank == 0), 8 - 3 * (rank == 1), 8]
    race(rank, group, convnet, lambda i: rows(rank, sizes[i], (2, 6, 6))(i), optimizer=momentum, steps=len(sizes))


def verified(rank: int, group: dist.ProcessGroup) -> None:
    """Ranks compare with eager in different steps, and the collectives still meet."""
    step = race(rank, group, mlp, rows(rank), verify_every=1 + rank, steps=7)
    assert step._replays >= 6


def streamed(rank: int, group: dist.ProcessGroup) -> None:
    """The executor for CUDA, on CPU tensors: a bucket is several tensors, reduced together."""
    race(rank, group, mlp, rows(rank), streams=True, poison=True)
    order = [(0, 0, 1, 0, 0), (0, 1, 1, 0, 1)][rank % 2]
    data = rows(rank)
    race(rank, group, Branches, lambda i: (*data(i), order[i]), steps=5, streams=True, clip_norm=0.5)


class _Turn(torch.autograd.Function):
    """Reads a value into Python in the backward, when most gradients are complete: whether `x` sums to more than 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        return grads[0] * 2 if bool(x.sum() > 0) else grads[0] * 1


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        turned = _Turn.apply(self.first(x) * 0 + x[:, :1])
        return self.rest(turned + self.first(x))


def held(rank: int, group: dist.ProcessGroup) -> None:
    """A plan turns out to be the wrong one late in the backward, on one rank: by then it must have sent nothing."""
    signs = [(1, 1, 1, -1, -1, 1, -1, -1, 1), (1, -1, -1, 1, -1, 1, 1, 1, -1)][rank % 2]
    data = rows(rank)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        x, y = data(i)
        return torch.cat([x[:, :1].abs() * signs[i], x[:, 1:]], 1), y

    step = race(rank, group, Turning, batch, steps=len(signs))
    assert len(step._plans) == 2
    program = step._plans[0].executor.program
    names = [op.name for op in program.ops]
    reads = [i for i, op in enumerate(program.ops) if op.expected is not None]
    assert reads, "nothing is read into Python: this shows nothing"
    assert min(i for i, name in enumerate(names) if name == "group.reduce") > max(reads)
    complete = max(
        i for i, op in enumerate(program.ops) if any(r.buffer == program.grads[5].buffer for r in op.outputs)
    )
    assert complete < max(reads), "no bucket is complete before the value is read: this shows nothing"


def buckets_in_any_order(rank: int, group: dist.ProcessGroup) -> None:
    """Ranks complete buckets in different orders, and they are still sent in one."""
    layout = lay_out([(5, torch.float32), (70, torch.float32), (3, torch.float64), (64, torch.float32)])
    made = cut(layout, bucket_bytes=64)
    assert [b.members for b in made] == [(3,), (2,), (1,), (0,)]
    flats = [
        torch.full((numel,), 4.0 * rank, dtype=kind.dtype)
        for kind, numel in zip(layout.kinds, layout.numels, strict=True)
    ]
    reducer = Reducer(group, len(made))
    for hold in (False, True):
        reducer.begin(hold=hold)
        for i in [(3, 1, 0, 2), (0, 2, 3, 1)][rank]:
            bucket = made[i]
            reducer.ready(i, [flats[bucket.flat][bucket.start : bucket.end]])
        reducer.finish()
        for bucket in made:
            assert torch.all(flats[bucket.flat][bucket.start : bucket.end] == 2), f"{bucket}"


def frozen(rank: int, group: dist.ProcessGroup) -> None:
    def make() -> nn.Module:
        model = mlp()
        for p in model[0].parameters():
            p.requires_grad_(False)
        return model

    step = race(rank, group, make, rows(rank), steps=4)
    for p in step._model.parameters():
        p.requires_grad_(True)
    with pytest.raises(tb.CaptureError, match=r"0\.weight has a gradient, but was frozen when the step was compiled"):
        step(*rows(rank)(0))


def extended(rank: int, group: dist.ProcessGroup) -> None:
    model = mlp()
    step = tb.compile_step(model, entropy, adamw(model), group=group, memory="keep")
    step(*rows(rank)(0))
    model.append(nn.Linear(4, 4))
    with pytest.raises(tb.CaptureError, match="the model has other parameters than when the step was compiled"):
        step(*rows(rank)(1))


# -- trouble -----------------------------------------------------------------------------------------------------------


def other_models(rank: int, group: dist.ProcessGroup) -> None:
    def compiled(model: nn.Module) -> None:
        tb.compile_step(model, entropy, adamw(model), group=group)

    wide = nn.Linear(6, 4 + rank)
    before = wide.weight.detach().clone()
    with pytest.raises(tb.ReduceError, match=r"rank 1 has another model than rank 0: parameter 'weight' .*\(5, 6\)"):
        compiled(wide)
    assert torch.equal(wide.weight, before)
    with pytest.raises(tb.ReduceError, match="4 parameters and buffers there, 2 on rank 0"):
        compiled(nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank))))
    with pytest.raises(tb.ReduceError, match="float64"):
        compiled(nn.Linear(6, 4).to(torch.float64 if rank else torch.float32))
    with pytest.raises(tb.ReduceError, match="frozen"):
        compiled(nn.Linear(6, 4).requires_grad_(rank == 0))


def refused_options(rank: int, group: dist.ProcessGroup) -> None:
    model = mlp()
    for wrong in (True, "nccl", 3, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(tb.OptionError, match="group"):
            tb.compile_step(model, entropy, adamw(model), group=wrong)
    with pytest.raises(tb.OptionError, match=r"update='early' .* group= averages them"):
        tb.compile_step(model, entropy, adamw(model), group=group, update="early")
    wrapped = DistributedDataParallel(model, process_group=group)
    for given in (None, group):
        with pytest.raises(tb.CaptureError, match="the model is wrapped in DistributedDataParallel"):
            tb.compile_step(wrapped, entropy, adamw(model), group=given)
    odd = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4))
    with pytest.raises(tb.OptionError, match="SyncBatchNorm"):
        tb.compile_step(odd, entropy, adamw(odd), group=group)
    still = mlp().requires_grad_(False)
    with pytest.raises(tb.OptionError, match="no parameter of the model is trainable"):
        tb.compile_step(still, entropy, adamw(still), group=group)


class Trouble(Exception):
    """Raised by a user's loss function."""


@contextlib.contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = state(model, optimizer)
    yield
    now = state(model, optimizer)
    assert now.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(now[name], value), f"{name} was changed by a step that failed"


def _trained(rank: int, group: dist.ProcessGroup) -> tuple[tb.CompiledStep, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = convnet()
    optimizer = adamw(model)
    step = tb.compile_step(model, entropy, optimizer, group=group, memory="keep")
    for i in range(4):
        step(*rows(rank, 8, (2, 6, 6))(i))
    return step, model, optimizer


def a_rank_fails(rank: int, group: dist.ProcessGroup) -> None:
    """Its batch is no batch, so its step raises; the others wait for it until the group's time is up, and no longer."""
    step, model, optimizer = _trained(rank, group)
    x, y = rows(rank, 8, (2, 6, 6))(9)
    started = time.monotonic()
    with unchanged(model, optimizer):
        if rank == 1:
            with pytest.raises(RuntimeError):
                step(x[:, :1], y)
        else:
            with pytest.raises(
                tb.ReduceError, match=rf"could not be averaged over the group \(rank {rank} of {group.size()}\)"
            ):
                step(x, y)
            assert time.monotonic() - started < 3 * a_rank_fails.timeout_s  # type: ignore[attr-defined]
        with pytest.raises(tb.ReduceError, match=rf"rank {rank} has failed in an earlier step"):
            step(x, y)


a_rank_fails.timeout_s = 3  # type: ignore[attr-defined]


def a_rank_hangs(rank: int, group: dist.ProcessGroup) -> None:
    """The others wait until the group's time is up, and no longer. When it comes back it is told, too."""
    step, model, optimizer = _trained(rank, group)
    started = time.monotonic()
    with unchanged(model, optimizer):
        if rank == 1:
            time.sleep(3 * a_rank_hangs.timeout_s)  # type: ignore[attr-defined]
        with pytest.raises(tb.ReduceError, match="Another rank has failed or ended, or did not come to the same step"):
            step(*rows(rank, 8, (2, 6, 6))(9))
        assert rank == 1 or time.monotonic() - started < 3 * a_rank_hangs.timeout_s  # type: ignore[attr-defined]
        with pytest.raises(tb.ReduceError, match=rf"rank {rank} has failed in an earlier step"):
            step(*rows(rank, 8, (2, 6, 6))(9))


a_rank_hangs.timeout_s = 3  # type: ignore[attr-defined]


def a_target_is_out_of_reach(rank: int, group: dist.ProcessGroup) -> None:
    """The step that found it out is taken back on every rank, buffers included."""
    torch.manual_seed(rank)
    model = convnet()
    optimizer = adamw(model)
    step = tb.compile_step(model, entropy, optimizer, group=group, memory="1KiB")
    batch = rows(rank, 8, (2, 6, 6))(0)
    with unchanged(model, optimizer):
        with pytest.raises(tb.MemoryTargetError):
            step(*batch)
        with pytest.raises(tb.ReduceError, match="has failed in an earlier step"):
            step(*batch)


def a_rank_dies(rank: int, group: dist.ProcessGroup) -> None:
    step, model, optimizer = _trained(rank, group)
    if rank == 1:
        os._exit(3)
    with unchanged(model, optimizer), pytest.raises(tb.ReduceError, match="Another rank has failed or ended"):
        step(*rows(rank, 8, (2, 6, 6))(9))


def a_rank_is_caught_by_its_proof(rank: int, group: dist.ProcessGroup) -> None:
    """A rank whose new plan differs from eager sends nothing, so nothing of it reaches the others."""
    torch.manual_seed(rank)
    model = mlp()
    optimizer = adamw(model)
    step = tb.compile_step(model, entropy, optimizer, group=group, memory="keep")
    step(*rows(rank)(0))
    if rank == 1:  # the plan computes with another weight than eager
        program = step._plans[0].executor.program
        weight = next(b for b, t in program.externals.items() if program.buffers[b].name == "0.weight")
        program.externals[weight] = program.externals[weight] + 1.0  # type: ignore[index]
    error = tb.VerifyError if rank == 1 else tb.ReduceError
    with unchanged(model, optimizer), pytest.raises(error):
        step(*rows(rank)(1))


a_rank_is_caught_by_its_proof.timeout_s = 3  # type: ignore[attr-defined]


def ranks_agree(rank: int, group: dist.ProcessGroup) -> None:
    """After steps with every kind of plan, all ranks have the same parameters."""
    _, model, _ = _trained(rank, group)
    parameters = [p.detach() for p in model.parameters()]
    for other in gathered(parameters, group):
        assert all(torch.equal(a, b) for a, b in zip(parameters, other, strict=True))
