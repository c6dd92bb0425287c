"""Every listed case builds, the same bits for the same seed, and leaves the caller's random state alone."""

from __future__ import annotations

import pytest
import torch

from pairwise import quick_ones
from takeback.zoo import CASES, OPTIMIZERS, Case, case

QUICK = [f"{name}/small" for name in CASES]
ALL = [f"{name}/{size}" for name, sizes in CASES.items() for size in sizes]


def build(which: str, **settings: object) -> Case:
    name, size = which.split("/")
    return case(name, size=size, **settings)  # type: ignore[arg-type]


def train_step(of: Case) -> float:
    of.optimizer.zero_grad()
    loss = of.loss_fn(of.model, *of.batch)
    loss.backward()
    of.optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("which", QUICK)
def test_every_small_case_takes_a_finite_step_that_reaches_every_parameter(which: str) -> None:
    built = build(which)
    before = [parameter.detach().clone() for parameter in built.model.parameters()]
    for _ in range(3 if built.name.startswith("dit") else 1):  # its gates are zero at first: what they gate comes later
        assert 0.0 < train_step(built) < 20.0
    after = list(built.model.parameters())
    assert all(parameter.grad is not None for parameter in after)
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


# The largest ones are for `make test-all`: to fill them takes longest.
@pytest.mark.parametrize("which", quick_ones(ALL, [w for w in ALL if w == "resnet/full" or not w.endswith("/full")]))
def test_every_listed_case_builds_with_one_row(which: str) -> None:
    built = build(which, batch=1)
    assert built.name == which
    assert all(part.shape[0] == 1 for part in built.batch)
    assert {id(p) for group in built.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in built.model.parameters()
    }


@pytest.mark.parametrize("which", QUICK)
def test_same_seed_gives_the_same_bits_and_another_seed_does_not(which: str) -> None:
    one, same, other = build(which, seed=3), build(which, seed=3), build(which, seed=4)
    weights = [torch.cat([p.detach().flatten() for p in of.model.parameters()]) for of in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert all(torch.equal(a, b) for a, b in zip(one.batch, same.batch, strict=True))
    assert not torch.equal(one.batch[0], other.batch[0])


@pytest.mark.parametrize("which", QUICK)
def test_caller_random_state_is_untouched_and_has_no_influence(which: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(which)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build(which)
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_gpu_generators_are_not_reseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", calls.append)
    case("mlp")
    assert calls == []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
    assert calls == [7], "torch.manual_seed no longer reseeds the GPUs: this test proves nothing"


def test_benchmark_sizes_are_the_agreed_ones() -> None:
    gpt = case("gpt", size="bench")
    assert [tuple(part.shape) for part in gpt.batch] == [(8, 256), (8, 256)]
    assert int(gpt.batch[0].max()) < 8192
    assert isinstance(gpt.optimizer, torch.optim.AdamW)
    assert gpt.optimizer.defaults["fused"] is True
    assert not any(module.p for module in gpt.model.modules() if isinstance(module, torch.nn.Dropout))
    resnet = case("resnet", size="full")
    assert [tuple(part.shape) for part in resnet.batch] == [(8, 3, 112, 112), (8,)]
    assert isinstance(resnet.optimizer, torch.optim.SGD)
    assert resnet.optimizer.defaults["momentum"] == 0.9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_lowers_the_loss_of_a_repeated_batch(optimizer: str) -> None:
    built = case("mlp", optimizer=optimizer)
    losses = [train_step(built) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.05


def test_targets_are_the_tokens_that_follow() -> None:
    for size in ("small", "bench"):
        tokens, targets = case("gpt", size=size).batch
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown case 'vgg'.*mlp: small, full; resnet: small.*gpt: small"):
        case("vgg")
    with pytest.raises(ValueError, match=r"unknown size 'huge' of 'gpt'.*gpt: small, bench, full"):
        case("gpt", size="huge")
    with pytest.raises(ValueError, match=r"unknown optimizer 'lion'.*sgd, momentum, adam, adamw"):
        case("gpt", optimizer="lion")
    with pytest.raises(ValueError, match=r"at least one row, got batch=0"):
        case("gpt", batch=0)
