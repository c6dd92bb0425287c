"""The DiT computes what plain formulas compute, starts as the identity, and its samplers arrive where they should."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from math import cos, exp, log, pi, sin, sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from takeback.zoo import DiT, DiTConfig, case, shape_batches
from takeback.zoo.dit import (
    DIT_S_2,
    SMALL,
    STEPS,
    ddpm_loss,
    flow_loss,
    sample_ddpm,
    sample_flow,
    signal,
    waves,
)

TINY = DiTConfig(size=8, patch=2, channels=3, classes=4, width=16, layers=2, heads=2, frequencies=8)


def plain_waves(position: float, count: int) -> Tensor:
    half = count // 2
    angles = [position * exp(-log(10_000) * k / half) for k in range(half)]
    return torch.tensor([cos(a) for a in angles] + [sin(a) for a in angles], dtype=torch.float64)


def test_waves_have_the_frequencies_of_the_formula() -> None:
    positions = torch.tensor([0.0, 0.5, 3.0, 999.0])
    expected = torch.stack([plain_waves(p, 10) for p in positions.tolist()])
    torch.testing.assert_close(waves(positions, 10).double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(waves(positions[:3], 10).double(), expected[:3], atol=1e-6, rtol=0)


def linear(x: Tensor, layer: torch.nn.Linear) -> Tensor:
    return x @ layer.weight.T + layer.bias


def normed(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def plain_attention(block: Any, tokens: Tensor) -> Tensor:
    size = tokens.shape[1] // block.heads
    query, key, value = linear(tokens, block.qkv).chunk(3, 1)
    heads = []
    for head in range(block.heads):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / sqrt(size)
        weights = torch.exp(scores - scores.max())
        heads.append(weights / weights.sum(1, keepdim=True) @ value[:, part])
    return linear(torch.cat(heads, 1), block.output)


def plain_block(block: Any, tokens: Tensor, condition: Tensor) -> Tensor:
    """One image: tokens [length, width], condition [width]."""
    width = len(condition)
    parts = [linear(condition, block.modulation)[k * width : (k + 1) * width] for k in range(6)]
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
    tokens = tokens + gate * plain_attention(block, normed(tokens) * (1 + scale) + shift)
    inner = linear(normed(tokens) * (1 + mlp_scale) + mlp_shift, block.mlp[0])
    gelu = 0.5 * inner * (1 + torch.tanh(sqrt(2 / pi) * (inner + 0.044715 * inner**3)))
    return tokens + mlp_gate * linear(gelu, block.mlp[2])


def plain_dit(model: DiT, image: Tensor, time: float, label: int) -> Tensor:
    """One image, patch by patch."""
    c = model.config
    side = c.size // c.patch
    tokens = []
    for row in range(side):
        for column in range(side):
            pixels = image[:, row * c.patch : (row + 1) * c.patch, column * c.patch : (column + 1) * c.patch]
            place = torch.cat((plain_waves(row, c.width // 2), plain_waves(column, c.width // 2)))
            tokens.append(linear(pixels.reshape(-1), model.patches) + place)
    hidden = torch.stack(tokens)
    seen = linear(silu(linear(plain_waves(time, c.frequencies), model.time[0])), model.time[2])
    condition = silu(seen + model.label.weight[label])
    for block in model.blocks:
        hidden = plain_block(block, hidden, condition)
    shift, scale = linear(condition, model.modulation).chunk(2)
    pixels = linear(normed(hidden) * (1 + scale) + shift, model.pixels)
    rows = []
    for row in range(side):
        line = [pixels[row * side + column].reshape(c.channels, c.patch, c.patch) for column in range(side)]
        rows.append(torch.cat(line, 2))
    return torch.cat(rows, 1)


def enlarged(config: DiTConfig) -> DiT:
    """Nothing is zero any more."""
    torch.manual_seed(0)
    model = DiT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def test_prediction_and_gradients_match_the_plain_model() -> None:
    model = enlarged(TINY).double()
    twin = copy.deepcopy(model)
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    times, labels = torch.tensor([0, 1, 3]), torch.tensor([1, 4, 0])
    found = model(images, times, labels)
    pairs = zip(images, times.tolist(), labels.tolist(), strict=True)
    expected = torch.stack([plain_dit(twin, *pair) for pair in pairs])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # the waves are made in single precision
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        scale = float(q[1].grad.abs().max())
        assert (p.grad - q[1].grad).abs().max() < 1e-5 * scale, name
        assert scale > 1e-6, name


def test_block_matches_the_plain_formula_to_the_last_digits() -> None:
    block = enlarged(TINY).double().blocks[0]
    tokens, condition = torch.randn(2, 9, 16, dtype=torch.float64), torch.randn(2, 16, dtype=torch.float64)
    expected = torch.stack([plain_block(block, t, c) for t, c in zip(tokens, condition, strict=True)])
    torch.testing.assert_close(block(tokens, condition), expected, atol=1e-12, rtol=0)


def test_new_model_predicts_zero_and_its_blocks_are_the_identity() -> None:
    model = DiT(TINY)
    tokens, condition = torch.randn(2, 9, 16), torch.randn(2, 16)
    for block in model.blocks:
        assert torch.equal(block(tokens, condition), tokens)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(images, torch.tensor([3, 5]), torch.tensor([0, 1])), torch.zeros(2, 3, 8, 8))


def test_unpatchify_is_the_way_back() -> None:
    model, images = DiT(TINY), torch.randn(2, 3, 8, 8)
    patches = model.patchify(images)
    assert torch.equal(patches[1, 6], images[1, :, 2:4, 4:6].reshape(-1))
    assert torch.equal(model.unpatchify(patches), images)


def test_parameter_count_is_that_of_dit_s_2_without_learned_variances() -> None:
    """Counted by hand: blocks of 18 w² + 15 w, patches, times, classes, and the last layer."""
    with torch.device("meta"):
        model = DiT(DIT_S_2)
    w = 384
    block = (3 * w * w + 3 * w) + (w * w + w) + (8 * w * w + 5 * w) + (6 * w * w + 6 * w)
    times = (256 * w + w) + (w * w + w)
    last = (2 * w * w + 2 * w) + (16 * w + 16)
    count = 12 * block + (16 * w + w) + times + 1001 * w + last
    assert sum(p.numel() for p in model.parameters()) == count
    assert abs(count / 33e6 - 1) < 0.02, "the paper says 33M"


def test_schedule_keeps_all_of_the_image_at_first_and_next_to_nothing_at_last() -> None:
    left = signal(torch.arange(STEPS))
    expected = 1.0
    for t in range(STEPS):
        expected *= 1 - (1e-4 + (0.02 - 1e-4) * t / (STEPS - 1))
        assert abs(float(left[t]) - expected) < 1e-6
    assert left[0] > 0.9998
    assert left[-1] < 1e-4


@pytest.mark.parametrize("loss_fn", [ddpm_loss, flow_loss])
def test_loss_of_a_model_that_knows_the_answer_is_zero(loss_fn: Callable[..., Tensor]) -> None:
    """From the noisy image and the time alone, knowing the clean one."""
    images = torch.randn(5, 3, 8, 8)

    class Knowing(SimpleNamespace):
        def __call__(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
            assert torch.equal(labels, torch.arange(5))
            if loss_fn is flow_loss:
                return (noisy - images) / (times / STEPS)[:, None, None, None]
            left = signal(times)[:, None, None, None]
            return (noisy - left.sqrt() * images) / (1 - left).sqrt()

    assert loss_fn(Knowing(dropped=lambda labels: labels), images, torch.arange(5)) < 1e-3
    assert loss_fn(Knowing(dropped=lambda labels: labels), images + 1, torch.arange(5)) > 0.01


@pytest.mark.parametrize("sample", [sample_ddpm, sample_flow])
@pytest.mark.parametrize("steps", [1, 7, 50])
def test_sampler_arrives_at_the_image_that_the_model_knows(sample: Callable[..., Tensor], steps: int) -> None:
    target = torch.randn(4, 3, 8, 8)

    class Knowing(SimpleNamespace):
        def __call__(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
            clean = target[labels]
            if sample is sample_flow:
                return (images - clean) / (times / STEPS)[:, None, None, None]
            left = signal(times)[:, None, None, None]
            return (images - left.sqrt() * clean) / (1 - left).sqrt()

    labels = torch.tensor([2, 0, 3])
    found = sample(Knowing(config=TINY), labels, steps=steps, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, target[labels], atol=2e-3, rtol=0)


@pytest.mark.parametrize("sample", [sample_ddpm, sample_flow])
def test_guidance_moves_away_from_the_prediction_without_a_class(sample: Callable[..., Tensor]) -> None:
    """With predictions that depend on the class alone, guidance g is the class `blind + g * (seen - blind)`."""
    worth = torch.tensor([0.1, 0.4, 0.0, 0.0, 0.2])

    class Fixed(SimpleNamespace):
        def __call__(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
            return self.worth[labels][:, None, None, None].expand_as(images)

    def drawn(worth: Tensor, guidance: float) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        model = Fixed(config=TINY, worth=worth)
        return sample(model, torch.tensor([1]), steps=5, guidance=guidance, generator=generator)

    torch.testing.assert_close(drawn(worth, 3.0), drawn(torch.full((5,), 0.2 + 3 * 0.2), 1.0))


@pytest.mark.parametrize("sample", [sample_ddpm, sample_flow])
def test_samples_repeat_with_the_generator_and_leave_the_global_random_state(sample: Callable[..., Tensor]) -> None:
    model = enlarged(TINY).eval()
    before = torch.get_rng_state()
    one, same, other = (
        sample(model, torch.arange(4), steps=3, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert one.shape == (4, 3, 8, 8)
    assert not one.requires_grad
    assert one.isfinite().all()
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_classes_are_dropped_in_training_alone() -> None:
    model = DiT(replace(TINY, drop_class=0.25))
    labels = torch.zeros(4000, dtype=torch.long)
    dropped = model.dropped(labels)
    assert set(dropped.tolist()) == {0, 4}
    assert abs(float((dropped == 4).float().mean()) - 0.25) < 0.03
    assert torch.equal(model.eval().dropped(labels), labels)


@pytest.mark.slow  # tests/test_examples.py trains it too
@pytest.mark.parametrize("size", ["small", "flow"])
def test_small_dit_learns_the_shapes(size: str) -> None:
    built = case("dit", size=size)
    losses = []
    torch.manual_seed(0)
    for _, (images, labels) in zip(range(60), shape_batches(16, 16, seed=1), strict=False):
        built.optimizer.zero_grad()
        loss = built.loss_fn(built.model, images, labels)
        loss.backward()
        built.optimizer.step()
        losses.append(float(loss.detach()))
    # A new model predicts zero: the loss is the variance of noise, or of noise less images.
    assert abs(losses[0] - (1.0 if size == "small" else 1.4)) < 0.2
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"size=16 is not a multiple of patch=3"):
        replace(SMALL, patch=3)
    with pytest.raises(ValueError, match=r"width=96 is not a multiple of heads=5 and of 4"):
        replace(SMALL, heads=5)
