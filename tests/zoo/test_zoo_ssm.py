"""The SSM has mamba2-130m's parameter count, and its chunks compute what one token after the other computes."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor

from takeback.zoo import SSM, SSMConfig, byte_batches, case
from takeback.zoo.ssm import MAMBA2_130M, SMALL, Mixer, loss_fn, scan

TINY = replace(SMALL, width=16, state=5, head_width=8, chunk=4)


def one_by_one(x: Tensor, logs: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """The recurrence as it is written down: a state for each row and head, one token after the other."""
    batch, length, heads, width = x.shape
    rows = []
    for b in range(batch):
        state = [torch.zeros(write.shape[-1], width, dtype=x.dtype) for _ in range(heads)]
        tokens = []
        for t in range(length):
            for h in range(heads):
                state[h] = logs[b, t, h].exp() * state[h] + torch.outer(write[b, t], x[b, t, h])
            tokens.append(torch.stack([read[b, t] @ s for s in state]))
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


def inputs(length: int, dtype: torch.dtype = torch.float64, decay: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, 3, 4), (2, length, 3), (2, length, 5), (2, length, 5)]
    x, logs, write, read = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return [t.to(dtype).requires_grad_() for t in (x, -decay * logs.abs(), write, read)]


@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 64])
@pytest.mark.parametrize("length", [1, 4, 13, 24])
def test_scan_and_its_gradients_are_those_of_the_recurrence(length: int, chunk: int) -> None:
    ours, theirs = inputs(length), inputs(length)
    found, expected = scan(*ours, chunk), one_by_one(*theirs)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("decay", [0.0, 0.01, 1.0, 100.0])
def test_scan_in_single_precision_is_close_however_fast_it_decays(decay: float) -> None:
    ours = inputs(100, torch.float32, decay)
    expected = one_by_one(*inputs(100, decay=decay)).detach()
    found = scan(*ours, 16)
    scale = float(expected.abs().max())
    assert (found.detach().double() - expected).abs().max() < 1e-5 * max(scale, 1.0)
    found.sum().backward()
    assert all(t.grad.isfinite().all() for t in ours)


def plain_mixer(mixer: Mixer, hidden: Tensor) -> Tensor:
    """Projection, convolution, recurrence, skip and gated norm, each by its formula."""
    c = mixer.config
    projected = hidden @ mixer.input.weight.T
    gate, mixed, steps = projected[..., : c.inner], projected[..., c.inner : -c.heads], projected[..., -c.heads :]
    kernel, width = mixer.conv.weight[:, 0], mixer.conv.weight.shape[-1]
    tokens = []
    for t in range(hidden.shape[1]):
        total = mixer.conv.bias.expand(len(hidden), -1)
        for back in range(width):
            if t - back >= 0:
                total = total + mixed[:, t - back] * kernel[:, width - 1 - back]
        tokens.append(total / (1 + torch.exp(-total)))
    mixed = torch.stack(tokens, 1)
    x = mixed[..., : c.inner].reshape(*hidden.shape[:2], c.heads, c.head_width)
    write, read = mixed[..., c.inner : c.inner + c.state], mixed[..., c.inner + c.state :]
    steps = torch.log1p(torch.exp(steps + mixer.step_bias))
    y = one_by_one(x * steps[..., None], -torch.exp(mixer.log_rate) * steps, write, read)
    y = (y + x * mixer.skip[:, None]).reshape(*hidden.shape[:2], c.inner)
    y = y * gate / (1 + torch.exp(-gate))
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.norm.weight
    return y @ mixer.output.weight.T


def plain_logits(model: SSM, tokens: Tensor) -> Tensor:
    hidden = model.token.weight[tokens]
    for block in model.blocks:
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block.norm.weight
        hidden = hidden + plain_mixer(block.mixer, normed)
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * model.norm.weight
    return normed @ model.token.weight.T


def enlarged(config: SSMConfig) -> SSM:
    """Weights that all matter: a wrong mask, decay or norm changes the result by far more than rounding."""
    torch.manual_seed(0)
    model = SSM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def test_logits_loss_and_gradients_match_the_plain_model() -> None:
    model = enlarged(TINY).double()
    twin = copy.deepcopy(model)
    tokens, targets = next(byte_batches(2, 14, seed=0))
    logits = plain_logits(twin, tokens)
    torch.testing.assert_close(model(tokens), logits, atol=1e-10, rtol=0)
    loss = loss_fn(model, tokens, targets)
    loss.backward()
    expected = -logits.log_softmax(2).gather(2, targets[:, :, None]).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert p.grad.abs().max() > 1e-8, name


def test_model_in_single_precision_is_close_to_the_plain_one_in_double() -> None:
    model = enlarged(SMALL)
    tokens, _ = next(byte_batches(2, 40, seed=0))
    expected = plain_logits(copy.deepcopy(model).double(), tokens).detach()
    assert (model(tokens).detach().double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_no_logit_depends_on_a_later_token_within_a_chunk_or_beyond_it() -> None:
    model = enlarged(TINY)
    tokens = torch.randint(256, (1, 20))
    for place in (5, 12):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 256
        difference = (model(tokens) - model(changed)).abs().amax(2)[0]
        assert difference[:place].max() < 1e-5
        assert difference[place:].min() > 1e-4


def test_parameter_count_is_the_published_one() -> None:
    with torch.device("meta"):
        model = SSM(MAMBA2_130M)
    assert sum(p.numel() for p in model.parameters()) == 128_989_632


def test_steps_begin_between_their_bounds() -> None:
    mixer = Mixer(replace(SMALL, width=1024))
    steps, rates = torch.nn.functional.softplus(mixer.step_bias.detach()), mixer.log_rate.detach().exp()
    assert 0.999e-3 <= steps.min() < 0.01 < steps.max() <= 0.1001
    assert 0.999 <= rates.min() < 4 < rates.max() <= 16.001


def test_width_that_does_not_divide_into_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expand \* width = 128 is not a multiple of head_width=48"):
        replace(SMALL, head_width=48)


def test_small_ssm_learns_the_text() -> None:
    built = case("ssm")
    losses = []
    for _, batch in zip(range(30), byte_batches(8, 64, seed=1), strict=False):
        built.optimizer.zero_grad()
        loss = built.loss_fn(built.model, *batch)
        loss.backward()
        built.optimizer.step()
        losses.append(float(loss.detach()))
    assert abs(losses[0] - log(256)) < 0.2
    assert sum(losses[-5:]) / 5 < log(256) - 1.5
