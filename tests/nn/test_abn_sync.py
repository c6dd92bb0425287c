"""InPlaceABNSync on 2 and 3 processes gives what InPlaceABN gives one process with all of their batches, to 1e-10 in
float64, whatever share of them a rank has; and what cannot be synchronised is an error on every rank.

A scenario is `function(rank, group)`, run on every rank of a launch; every rank draws the whole batch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1] / "parallel"))  # how processes are started is shared with its tests

from ranks import FINE, gathered, run_ranks

import takeback as tb
from takeback.errors import ReduceError
from takeback.nn import InPlaceABN, InPlaceABNSync, inplace_abn, inplace_abn_sync

SIZES = {2: (3, 5), 3: (4, 0, 2)}
ACTIVATIONS = {"identity": 0.01, "leaky_relu": 0.1, "elu": 0.7, "relu": 0.01, "silu": 0.01}
CHANNELS = 4


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained_(module: Any) -> Any:
    """The same on every rank."""
    with torch.no_grad():
        for i, (name, value) in enumerate(module.state_dict().items()):
            if name.endswith("running_var"):
                value.copy_(normal(*value.shape, seed=i).abs() + 0.5)
            elif value.is_floating_point():
                value.copy_(normal(*value.shape, seed=i) / 2 + 0.7 * (i % 2))
    return module.double()


class Batches:
    """One batch, and this rank's part of it."""

    def __init__(self, rank: int, group: Any, tail: tuple[int, ...] = (CHANNELS, 3), seed: int = 7) -> None:
        sizes = SIZES[dist.get_world_size(group)]
        self.x, self.dy = normal(sum(sizes), *tail, seed=seed) + 2, normal(sum(sizes), *tail, seed=seed + 1)
        self.own = slice(start := sum(sizes[:rank]), start + sizes[rank])


def near(got: Tensor, expected: Tensor, what: str) -> None:
    assert got.shape == expected.shape, what
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-10), f"{what}: {got} is not {expected}"


def trace(module: Any, x: Tensor, dy: Tensor, memory_format: Any = torch.contiguous_format) -> tuple[Tensor, Tensor]:
    """Output and dx, through an x that may be overwritten."""
    leaf = x.clone(memory_format=memory_format).requires_grad_()
    y = module(leaf * 1)
    out = y.detach().clone()
    loss = (y * dy).sum()
    del y
    loss.backward()
    assert leaf.grad is not None
    return out, leaf.grad


def compare(rank: int, group: Any, steps: int = 1, tail: tuple[int, ...] = (CHANNELS, 3), **settings: Any) -> Any:
    memory_format = settings.pop("memory_format", torch.contiguous_format)
    ours = trained_(InPlaceABNSync(CHANNELS, group=group, **settings))
    single = trained_(InPlaceABN(CHANNELS, **settings))
    for step in range(steps):
        batch = Batches(rank, group, tail, seed=7 + step)
        out, dx = trace(ours, batch.x[batch.own], batch.dy[batch.own], memory_format)
        expected, expected_dx = trace(single, batch.x, batch.dy)
        near(out, expected[batch.own], "y")
        near(dx, expected_dx[batch.own], "dx")
    for (name, value), other in zip(ours.state_dict().items(), single.state_dict().values(), strict=True):
        near(value, other, name)
    for (name, parameter), other in zip(ours.named_parameters(), single.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        total = parameter.grad.clone()
        dist.all_reduce(total, group=group)
        near(total, other.grad, name)
    return ours


# -- scenarios ---------------------------------------------------------------------------------------------------------


def every_activation(rank: int, group: Any) -> None:
    for activation, param in ACTIVATIONS.items():
        ours = compare(rank, group, activation=activation, activation_param=param)
        assert ours.copies == {}, ours.copies


def settings(rank: int, group: Any) -> None:
    compare(rank, group, steps=3, momentum=None)
    compare(rank, group, scale="absolute")
    compare(rank, group, affine=False)
    compare(rank, group, track_running_stats=False)
    compare(rank, group, tail=(CHANNELS, 2, 3), memory_format=torch.channels_last)
    compare(rank, group, tail=(CHANNELS,), activation="relu")


def same_statistics_on_all_ranks(rank: int, group: Any) -> None:
    ours = compare(rank, group, steps=2)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        first, *others = gathered(getattr(ours, name), group)
        assert all(torch.equal(first, other) for other in others), name


def in_place(rank: int, group: Any) -> None:
    batch = Batches(rank, group)
    x = batch.x[batch.own].clone().requires_grad_() * 1
    where = x.data_ptr()
    y = InPlaceABNSync(CHANNELS, group=group).double()(x)
    assert (y is x, y.data_ptr()) == (True, where)


def strided_and_held(rank: int, group: Any) -> None:
    """A copy changes nothing on this rank or another."""
    batch = Batches(rank, group)
    for activation in ("leaky_relu", "relu"):
        ours, single = (trained_(m(CHANNELS, activation=activation)) for m in (InPlaceABNSync, InPlaceABN))
        ours.set_group(group)
        leaf = batch.x[batch.own].clone().requires_grad_()
        x = (leaf.transpose(0, 2).contiguous().transpose(0, 2) if rank else leaf) * 1
        y = ours(x)
        (y * batch.dy[batch.own]).sum().backward()
        expected, expected_dx = trace(single, batch.x, batch.dy)
        near(y, expected[batch.own], "y")
        near(leaf.grad, expected_dx[batch.own], "dx")
        assert ours.copies


def one_sample_in_all(rank: int, group: Any) -> None:
    module = InPlaceABNSync(CHANNELS, group=group)
    size = 1 if rank == 0 else 0
    with pytest.raises(ValueError, match="more than one sample"):
        module(torch.randn(size, CHANNELS))
    assert module.running_mean is not None
    assert module.running_mean.tolist() == [0] * CHANNELS


def one_sample_each(rank: int, group: Any) -> None:
    x = normal(dist.get_world_size(group), CHANNELS, seed=3)
    out = trained_(InPlaceABNSync(CHANNELS, group=group))(x[rank : rank + 1].clone())
    near(out, trained_(InPlaceABN(CHANNELS))(x.clone())[rank : rank + 1], "y")


def nothing_anywhere(rank: int, group: Any) -> None:
    module = trained_(InPlaceABNSync(CHANNELS, group=group))
    before = module.running_var.clone()
    leaf = torch.zeros(0, CHANNELS, 3, dtype=torch.float64, requires_grad=True)
    module(leaf * 1).sum().backward()
    assert torch.equal(module.running_var, before)
    assert module.weight.grad.tolist() == [0] * CHANNELS


def evaluation(rank: int, group: Any) -> None:
    """Only this rank comes here: a collective would wait for the others."""
    if rank == 0:
        module = trained_(InPlaceABNSync(CHANNELS, group=group)).eval()
        single = trained_(InPlaceABN(CHANNELS)).eval()
        x, dy = normal(5, CHANNELS, seed=1), normal(5, CHANNELS, seed=2)
        for got, expected in zip(trace(module, x, dy), trace(single, x, dy), strict=True):
            near(got, expected, "eval")
        near(
            inplace_abn_sync(x, None, None, *bare(), False, group=group),
            inplace_abn(x, None, None, *bare(), False),
            "y",
        )
    dist.barrier(group)


def bare() -> tuple[Tensor, Tensor]:
    return torch.zeros(CHANNELS, dtype=torch.float64), torch.ones(CHANNELS, dtype=torch.float64)


def evaluation_without_running_statistics(rank: int, group: Any) -> None:
    """Batch statistics are the group's, in eval too."""
    batch = Batches(rank, group)
    ours = trained_(InPlaceABNSync(CHANNELS, group=group, track_running_stats=False)).eval()
    single = trained_(InPlaceABN(CHANNELS, track_running_stats=False)).eval()
    for got, expected in zip(
        trace(ours, batch.x[batch.own], batch.dy[batch.own]), trace(single, batch.x, batch.dy), strict=True
    ):
        near(got, expected[batch.own], "eval")


def functional_form(rank: int, group: Any) -> None:
    batch = Batches(rank, group)
    weight, bias = normal(CHANNELS, seed=1), normal(CHANNELS, seed=2)
    for activation, scale in (("leaky_relu", "absolute"), ("silu", "weight")):
        how: dict[str, Any] = {"momentum": 0.3, "activation": activation, "scale": scale}
        mine, theirs = bare(), bare()
        got = trace(
            lambda x: inplace_abn_sync(x, weight, bias, *mine, group=group, **how),  # noqa: B023
            *(batch.x[batch.own], batch.dy[batch.own]),
        )
        expected = trace(lambda x: inplace_abn(x, weight, bias, *theirs, **how), batch.x, batch.dy)  # noqa: B023
        for a, b in zip(got, expected, strict=True):
            near(a, b[batch.own], activation)
        for a, b in zip(mine, theirs, strict=True):
            near(a, b, "running")


def frozen(rank: int, group: Any) -> None:
    batch = Batches(rank, group)
    for wanted in ((False, False), (True, False), (False, True)):
        ours, single = trained_(InPlaceABNSync(CHANNELS, group=group)), trained_(InPlaceABN(CHANNELS))
        for module in (ours, single):
            module.weight.requires_grad_(wanted[0])
            module.bias.requires_grad_(wanted[1])
        _, dx = trace(ours, batch.x[batch.own], batch.dy[batch.own])
        near(dx, trace(single, batch.x, batch.dy)[1][batch.own], "dx")
        assert [p.grad is not None for p in ours.parameters()] == list(wanted)


def only_parameters(rank: int, group: Any) -> None:
    batch = Batches(rank, group)
    for activation in ("leaky_relu", "relu"):
        ours, single = (trained_(m(CHANNELS, activation=activation)) for m in (InPlaceABNSync, InPlaceABN))
        ours.set_group(group)
        x = batch.x[batch.own].clone()
        (ours(x) * batch.dy[batch.own]).sum().backward()
        (single(batch.x) * batch.dy).sum().backward()
        assert torch.equal(x, batch.x[batch.own])
        for parameter, other in zip(ours.parameters(), single.parameters(), strict=True):
            dist.all_reduce(parameter.grad, group=group)
            near(parameter.grad, other.grad, activation)


def network(norm: type[InPlaceABN], **settings: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv1d(3, CHANNELS, 2, bias=False), norm(CHANNELS, **settings)),
        *(nn.Conv1d(CHANNELS, CHANNELS, 2, bias=False), norm(CHANNELS, activation="silu", **settings)),
        nn.Conv1d(CHANNELS, 2, 1),
    ).double()


def under_ddp(rank: int, group: Any) -> None:
    """DDP averages over ranks, so each rank's loss is its sum times their number."""
    world = dist.get_world_size(group)
    ours, single = (
        DistributedDataParallel(network(InPlaceABNSync, group=group), process_group=group),
        network(InPlaceABN),
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (ours, single)]
    for step in range(3):
        batch = Batches(rank, group, (3, 6), seed=10 + step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (ours(batch.x[batch.own]).square().sum() * world / 10).backward()
        (single(batch.x).square().sum() / 10).backward()
        for (name, p), q in zip(ours.module.named_parameters(), single.parameters(), strict=True):
            near(p.grad, q.grad, name)
        for optimizer in optimizers:
            optimizer.step()
    for (name, value), other in zip(ours.module.state_dict().items(), single.state_dict().values(), strict=True):
        near(value, other, name)
    assert all(m.copies == {} for m in ours.module if isinstance(m, InPlaceABN))


def used_twice(rank: int, group: Any) -> None:
    """Two forwards, then both backwards."""
    one, two = Batches(rank, group, seed=1), Batches(rank, group, seed=5)
    ours, single = trained_(InPlaceABNSync(CHANNELS, group=group)), trained_(InPlaceABN(CHANNELS))
    leaves = [b.x[b.own].clone().requires_grad_() for b in (one, two)]
    whole = [b.x.clone().requires_grad_() for b in (one, two)]
    sum((ours(x * 1) * b.dy[b.own]).sum() for x, b in zip(leaves, (one, two), strict=True)).backward()  # type: ignore[union-attr]
    sum((single(x * 1) * b.dy).sum() for x, b in zip(whole, (one, two), strict=True)).backward()  # type: ignore[union-attr]
    for x, full, b in zip(leaves, whole, (one, two), strict=True):
        near(x.grad, full.grad[b.own], "dx")


def compiled(rank: int, group: Any) -> None:
    """Synchronised under torch.compile, or refused; never this rank's own statistics."""
    batch = Batches(rank, group)
    for activation in ("leaky_relu", "relu"):
        ours, single = (trained_(m(CHANNELS, activation=activation)) for m in (InPlaceABNSync, InPlaceABN))
        ours.set_group(group)
        leaf = batch.x[batch.own].clone().requires_grad_()
        y = torch.compile(ours, backend="eager")(leaf)
        (y * batch.dy[batch.own]).sum().backward()
        expected, expected_dx = trace(single, batch.x, batch.dy)
        near(y, expected[batch.own], "y")
        near(leaf.grad, expected_dx[batch.own], "dx")
        near(ours.running_mean, single.running_mean, "running_mean")


def transformed(rank: int, group: Any) -> None:
    """Under torch.func: synchronised, or refused; never this rank's own statistics."""
    batch = Batches(rank, group)
    settings = {"track_running_stats": False}  # torch.func has no buffers that are written
    ours, single = (
        trained_(InPlaceABNSync(CHANNELS, group=group, **settings)),
        trained_(InPlaceABN(CHANNELS, **settings)),
    )
    try:
        got = torch.func.grad(lambda x: (ours(x * 1) * batch.dy[batch.own]).sum())(batch.x[batch.own])
    except (ReduceError, RuntimeError) as error:
        assert "InPlaceABNSync" in str(error) or "functorch" in str(error), error  # noqa: PT017
        return
    near(got, trace(single, batch.x, batch.dy)[1][batch.own], "dx")


def compiled_step(rank: int, group: Any) -> None:
    """takeback.compile_step with a group: every step is eager's, or is refused."""
    batch = Batches(rank, group, (3, 6))
    models = [network(InPlaceABNSync, group=group) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in models]
    world = dist.get_world_size(group)
    refused = False
    try:
        step = tb.compile_step(models[0], lambda m, x: m(x).square().sum(), optimizers[0], group=group)
        for i in range(3):
            step(batch.x[batch.own] + i)
    except tb.TakebackError as error:
        assert "InPlaceABNSync" in str(error), error  # noqa: PT017
        refused = True
    if any(gathered(refused, group)):
        assert all(gathered(refused, group)), "only some ranks were refused"
        return
    for i in range(3):
        optimizers[1].zero_grad()
        models[1](batch.x[batch.own] + i).square().sum().backward()
        for p in models[1].parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= world
        optimizers[1].step()
    for (name, value), other in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        near(value, other, name)


def half_precision(rank: int, group: Any) -> None:
    """The same bits on all ranks where all have the same rows, and float32 statistics."""
    batch = Batches(rank, group)
    for dtype in (torch.bfloat16, torch.float16):
        ours, single = trained_(InPlaceABNSync(CHANNELS, group=group)), trained_(InPlaceABN(CHANNELS))
        out, _ = trace(ours.float(), batch.x[batch.own].to(dtype), batch.dy[batch.own].to(dtype))
        expected, _ = trace(single, batch.x.to(dtype).double(), batch.dy)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(out.double(), expected[batch.own], rtol=eps, atol=eps)
        assert torch.allclose(ours.running_mean.double(), single.running_mean, rtol=1e-6)


def a_subgroup(rank: int, group: Any) -> None:
    """Ranks 0 and 1 together, rank 2 alone; a rank outside a group is told so."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    x = normal(6, CHANNELS, seed=1)
    members = slice(0, 4) if rank < 2 else slice(4, 6)
    own = slice(2 * rank, 2 * rank + 2)
    ours, single = trained_(InPlaceABNSync(CHANNELS, group=pair if rank < 2 else alone)), trained_(InPlaceABN(CHANNELS))
    out = ours(x[own].clone())
    near(out, single(x[members].clone())[2 * rank : 2 * rank + 2] if rank < 2 else single(x[members].clone()), "y")
    near(ours.running_var, single.running_var, "running_var")
    if rank == 2:
        for training in (True, False):
            outside = InPlaceABNSync(CHANNELS, group=pair, track_running_stats=training).train(training)
            with pytest.raises(ReduceError, match="not a member"):
                outside(torch.randn(4, CHANNELS))


def without_a_group(rank: int, group: Any) -> None:
    """None is all processes."""
    ours, single = trained_(InPlaceABNSync(CHANNELS)), trained_(InPlaceABN(CHANNELS))
    batch = Batches(rank, group)
    near(ours(batch.x[batch.own].clone()), single(batch.x.clone())[batch.own], "y")


# -- launches ----------------------------------------------------------------------------------------------------------

BOTH = [
    every_activation,
    settings,
    same_statistics_on_all_ranks,
    in_place,
    strided_and_held,
    one_sample_in_all,
    one_sample_each,
    nothing_anywhere,
    functional_form,
    frozen,
    only_parameters,
    under_ddp,
    used_twice,
    half_precision,
    evaluation,
    evaluation_without_running_statistics,
    without_a_group,
]
TWO = [each.__name__ for each in (*BOTH, compiled, transformed, compiled_step)]
THREE = [each.__name__ for each in (*BOTH, a_subgroup)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(2, "test_abn_sync", TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(3, "test_abn_sync", THREE, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("scenario", TWO)
def test_two_uneven_ranks_are_one(two: dict[str, list[str]], scenario: str) -> None:
    assert two[scenario] == [FINE] * 2, "\n".join(two[scenario])


@pytest.mark.parametrize("scenario", THREE)
def test_three_ranks_of_which_one_has_nothing_are_one(three: dict[str, list[str]], scenario: str) -> None:
    assert three[scenario] == [FINE] * 3, "\n".join(three[scenario])


def test_training_without_init_process_group_raises() -> None:
    assert not dist.is_initialized()
    x, module = torch.randn(5, CHANNELS), InPlaceABNSync(CHANNELS)
    with pytest.raises(ReduceError, match="init_process_group"):
        module(x)
    with pytest.raises(ReduceError, match="init_process_group"):
        inplace_abn_sync(x, None, None, None, None)
    with pytest.raises(ReduceError, match="init_process_group"):
        InPlaceABNSync(CHANNELS, track_running_stats=False).eval()(x)


def test_evaluation_needs_no_process_group() -> None:
    ours, single = trained_(InPlaceABNSync(CHANNELS)).eval(), trained_(InPlaceABN(CHANNELS)).eval()
    x, dy = normal(5, CHANNELS, seed=1), normal(5, CHANNELS, seed=2)
    for got, expected in zip(trace(ours, x, dy), trace(single, x, dy), strict=True):
        assert torch.equal(got, expected)
    near(inplace_abn_sync(x, None, None, *bare(), False), inplace_abn(x, None, None, *bare(), False), "y")


def test_compiling_without_a_process_group_raises_in_training() -> None:
    with pytest.raises(Exception, match="init_process_group"):
        torch.compile(InPlaceABNSync(CHANNELS), backend="eager")(torch.randn(5, CHANNELS))
    torch._dynamo.reset()
