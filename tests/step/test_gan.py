"""Two models, two optimizers, two steps: a generator's loss goes through a discriminator that it does not train, and
the discriminator's through double backwards. Both have eager's bits, and so do buffers that either forward writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import mlp, sgd, xy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from train_twice import Training, assert_equal_trainings

import takeback as tb
from takeback.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

Loss = Callable[..., Tensor]


def generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def spectral() -> nn.Sequential:
    norm = torch.nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(12, 16)), nn.Tanh(), norm(nn.Linear(16, 1)))


def old_spectral() -> nn.Sequential:
    norm = torch.nn.utils.spectral_norm
    return nn.Sequential(norm(nn.Linear(12, 16)), nn.Tanh(), norm(nn.Linear(16, 1)))


def old_weight_norm() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norm = torch.nn.utils.weight_norm
        return nn.Sequential(norm(nn.Linear(12, 16)), nn.Tanh(), norm(nn.Linear(16, 1)))


def hinge(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()


def r1(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    real = real.detach().requires_grad_()
    scores = critic(real)
    [slope] = torch.autograd.grad(scores.sum(), real, create_graph=True)
    return hinge(critic, real.detach(), fake) + 5.0 * slope.square().sum(1).mean()


def wgan_gp(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    share = torch.rand(real.shape[0], 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + 10.0 * (slope.norm(2, dim=1) - 1).square().mean()


def data(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(8, 12, generator=g), torch.randn(8, 5, generator=g)


def gan(compiled: bool, make_critic: Callable[[], nn.Module], d_loss: Loss, **options: Any) -> Training:
    """As people write it. D's gradients of the generator's loss are thrown away by D's zero_grad()."""
    maker, critic = generator(), make_critic()
    g_opt = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))

    def critic_loss(critic: nn.Module, real: Tensor, z: Tensor) -> Tensor:
        with torch.no_grad():
            fake = maker(z)
        return d_loss(critic, real, fake)

    def maker_loss(maker: nn.Module, z: Tensor) -> Tensor:
        return F.softplus(-critic(maker(z))).mean()

    if compiled:
        d_step = tb.compile_step(critic, critic_loss, d_opt, memory="keep")
        g_step = tb.compile_step(maker, maker_loss, g_opt, **{"memory": "keep", **options})

        def ours(i: int) -> Tensor:
            real, z = data(i)
            loss = d_step(real, z)
            return torch.stack([loss, g_step(z)])

        return Training([maker, critic], [g_opt, d_opt], ours, [d_step, g_step])

    def eager(i: int) -> Tensor:
        real, z = data(i)
        d_opt.zero_grad()
        first = critic_loss(critic, real, z)
        first.backward()
        d_opt.step()
        g_opt.zero_grad()
        second = maker_loss(maker, z)
        second.backward()
        g_opt.step()
        return torch.stack([first.detach(), second.detach()])

    return Training([maker, critic], [g_opt, d_opt], eager)


@pytest.mark.parametrize(
    ("critic", "d_loss"),
    [
        (with_batch_norm, hinge),
        (spectral, r1),
        (old_spectral, wgan_gp),
        pytest.param(plain, wgan_gp, marks=pytest.mark.slow),
        pytest.param(old_weight_norm, r1, marks=pytest.mark.slow),
    ],
)
def test_gan_trains_to_eagers_bits(critic: Callable[[], nn.Module], d_loss: Loss) -> None:
    done = assert_equal_trainings(lambda compiled: gan(compiled, critic, d_loss))
    d_step, g_step = done.compiled
    [note] = [n for n in g_step.report().notes if "other modules" in n]
    assert f"{len(list(done.modules[1].parameters()))} parameters of other modules (critic." in note
    assert not [n for n in d_step.report().notes if "other modules" in n]
    assert all(p.grad is None for m in done.modules for p in m.parameters())


def test_gan_with_every_step_verified_and_early_update_trains_to_eagers_bits() -> None:
    assert_equal_trainings(lambda compiled: gan(compiled, old_spectral, hinge, verify_every=1))
    assert_equal_trainings(lambda compiled: gan(compiled, with_batch_norm, hinge, update="early"))


def test_gradients_of_another_model_are_neither_computed_nor_touched() -> None:
    maker, critic = generator(), plain().eval()
    step = tb.compile_step(maker, lambda m, z: critic(m(z)).mean(), torch.optim.SGD(maker.parameters(), lr=0.1))
    theirs = [torch.ones_like(p) for p in critic.parameters()]
    for p, grad in zip(critic.parameters(), theirs, strict=True):
        p.grad = grad
    for i in range(3):
        step(data(i)[1])
    for p, grad in zip(critic.parameters(), theirs, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, torch.ones_like(grad))
    shapes = [r.shape for op in step._last.original.ops for r in op.outputs]
    assert (16, 12) not in shapes, "the gradient of the critic's first weight"


def test_other_model_behind_a_reentrant_checkpoint_is_right() -> None:
    def make(compiled: bool) -> Training:
        maker, critic = generator(), plain()
        optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)

        def loss_fn(maker: nn.Module, z: Tensor) -> Tensor:
            return checkpoint(critic, maker(z), use_reentrant=True).mean()

        if compiled:
            step = tb.compile_step(maker, loss_fn, optimizer, memory="keep")
            return Training([maker, critic], [optimizer], lambda i: step(data(i)[1]), [step])

        def eager(i: int) -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(maker, data(i)[1])
            loss.backward()
            optimizer.step()
            return loss

        return Training([maker, critic], [optimizer], eager)

    done = assert_equal_trainings(make)
    assert all(p.grad is None for p in done.modules[1].parameters())


class Adversary:
    """A trainer that holds the other model as an attribute, in a list."""

    def __init__(self) -> None:
        self.nets = [plain()]

    def loss(self, maker: nn.Module, z: Tensor) -> Tensor:
        return self.nets[0](maker(z)).mean()


def test_other_model_held_by_a_trainer_is_found() -> None:
    maker, trainer = generator(), Adversary()
    step = tb.compile_step(maker, trainer.loss, torch.optim.SGD(maker.parameters(), lr=0.1))
    for i in range(3):
        step(data(i)[1])
    assert step._replays == 2
    assert [n for n in step.report().notes if "nets[0]." in n]


@pytest.mark.parametrize("make", [nn.Parameter, lambda t: t.requires_grad_()], ids=["parameter", "tensor"])
def test_leaf_that_belongs_to_no_module_stays_refused(make: Any) -> None:
    """Its optimizer, if it has one, would find no gradient in it."""
    temperature, model = make(torch.ones(())), mlp()
    step = tb.compile_step(model, lambda m, x, y: F.cross_entropy(m(x) * temperature, y), sgd(model))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CaptureError, match=r"shape \(\) that requires grad takes part in the loss"):
        step(*xy(0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_backward_hook_on_the_other_model_is_refused_by_its_line() -> None:
    maker, critic = generator(), plain()
    critic[0].weight.register_hook(lambda g: None)
    step = tb.compile_step(maker, lambda m, z: critic(m(z)).mean(), torch.optim.SGD(maker.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match=r"test_gan\.py:\d+\) in backward_hooks of parameter 'critic\.0\.weight'"):
        step(data(0)[1])
