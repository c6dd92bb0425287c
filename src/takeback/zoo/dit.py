"""A diffusion transformer after Peebles and Xie: noisy images, times and classes in, something image-shaped out.

Two ways to train it, each a loss and a sampler: `ddpm_loss` and `sample_ddpm` for a diffusion in steps, whose noise is
predicted; `flow_loss` and `sample_flow` for a flow, whose velocity is. The losses draw times and noise inside the step,
from torch's own random numbers. `DIT_S_2` has the architecture of DiT-S/2; `SMALL` and `BENCH` are smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 1000  #: of the diffusion; the flow's time in [0, 1] is shown to the model as [0, STEPS]


@dataclass(frozen=True)
class DiTConfig:
    """Images are `channels` x `size` x `size`, in patches of `patch` x `patch`. `drop_class` is the part of the classes
    that training replaces by "no class", which is what guidance compares with.
    """

    size: int
    patch: int
    channels: int
    classes: int
    width: int
    layers: int
    heads: int
    drop_class: float = 0.1
    frequencies: int = 256

    def __post_init__(self) -> None:
        if self.size % self.patch:
            raise ValueError(f"size={self.size} is not a multiple of patch={self.patch}")
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads} and of 4")


SMALL = DiTConfig(size=16, patch=2, channels=3, classes=10, width=96, layers=4, heads=4, frequencies=64)
BENCH = DiTConfig(size=32, patch=2, channels=3, classes=10, width=256, layers=6, heads=4)
DIT_S_2 = DiTConfig(size=32, patch=2, channels=4, classes=1000, width=384, layers=12, heads=6)


def waves(positions: Tensor, count: int) -> Tensor:
    """Cosines and sines of the positions at `count // 2` frequencies from 1 down to 1 / 10000: [*positions, count]."""
    half = count // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions.device)
    angles = positions.float()[..., None] * torch.exp(steps * (-log(10_000.0) / half))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x scaled and shifted for each image: all its tokens alike."""
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    """Attention and MLP whose LayerNorms are shifted, scaled and gated by the condition. All gates start at zero, so a
    new block is the identity (adaLN-Zero).
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition).chunk(6, dim=1)
        tokens = tokens + gate[:, None] * self._attended(modulated(self.attention_norm(tokens), shift, scale))
        return tokens + mlp_gate[:, None] * self.mlp(modulated(self.mlp_norm(tokens), mlp_shift, mlp_scale))

    def _attended(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        per_head = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(per_head).transpose(1, 2) for part in self.qkv(tokens).split(width, 2))
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class DiT(nn.Module):
    """Patches with fixed position waves, the blocks, and a last modulated projection back to pixels."""

    position: Tensor

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width, pixels = config.width, config.channels * config.patch**2
        self.patches = nn.Linear(pixels, width)
        self.time = nn.Sequential(nn.Linear(config.frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(config.classes + 1, width)  # the last one is "no class"
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.pixels = nn.Linear(width, pixels)
        side = torch.arange(config.size // config.patch)
        rows, columns = (part.flatten() for part in torch.meshgrid(side, side, indexing="ij"))
        position = torch.cat((waves(rows, width // 2), waves(columns, width // 2)), dim=1)
        self.register_buffer("position", position, persistent=False)
        self._initialise_()

    def _initialise_(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for layer in (self.time[0], self.time[2], self.label):
            nn.init.normal_(layer.weight, std=0.02)
        for layer in (*(block.modulation for block in self.blocks), self.modulation, self.pixels):
            nn.init.zeros_(layer.weight)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """`times` in [0, STEPS] and `labels`, one for each image; the label `config.classes` stands for no class."""
        seen = waves(times, self.config.frequencies).to(self.label.weight.dtype)
        condition = F.silu(self.time(seen) + self.label(labels))
        tokens = self.patches(self.patchify(images)) + self.position
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        return self.unpatchify(self.pixels(modulated(self.norm(tokens), shift, scale)))

    def patchify(self, images: Tensor) -> Tensor:
        """[batch, channels, size, size] -> [batch, patches, channels * patch²], row by row."""
        c = self.config
        side = c.size // c.patch
        parts = images.reshape(-1, c.channels, side, c.patch, side, c.patch)
        return parts.permute(0, 2, 4, 1, 3, 5).reshape(-1, side * side, c.channels * c.patch**2)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """The way back."""
        c = self.config
        side = c.size // c.patch
        parts = tokens.reshape(-1, side, side, c.channels, c.patch, c.patch)
        return parts.permute(0, 3, 1, 4, 2, 5).reshape(-1, c.channels, c.size, c.size)

    def dropped(self, labels: Tensor) -> Tensor:
        """The labels, in training with some of them replaced by "no class"."""
        if not self.training or self.config.drop_class == 0.0:
            return labels
        drop = torch.rand(labels.shape, device=labels.device) < self.config.drop_class
        return torch.where(drop, self.config.classes, labels)


# -- diffusion in steps --------------------------------------------------------------------------------------------


def signal(times: Tensor) -> Tensor:
    """The part of an image's variance that is left at each time, under Ho et al.'s linear schedule of variances."""
    variances = torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64, device=times.device)
    return (1 - variances).cumprod(0).float()[times]


def ddpm_loss(model: DiT, images: Tensor, labels: Tensor) -> Tensor:
    """Mean square error of the noise that the model sees in noisy images."""
    times = torch.randint(STEPS, (len(images),), device=images.device)
    noise = torch.randn_like(images)
    left = signal(times)[:, None, None, None]
    noisy = left.sqrt() * images + (1 - left).sqrt() * noise
    return F.mse_loss(model(noisy, times, model.dropped(labels)), noise)


def sample_ddpm(
    model: DiT, labels: Tensor, *, steps: int = 50, guidance: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """One image for each label, from noise, in `steps` deterministic steps (DDIM)."""
    images = _noise(model, labels, generator)
    times = torch.linspace(STEPS - 1, 0, steps, device=labels.device).round().long()
    left = signal(times)
    for index in range(steps):
        noise = _guided(model, images, times[index].expand(len(labels)), labels, guidance)
        clean = (images - (1 - left[index]).sqrt() * noise) / left[index].sqrt()
        after = left[index + 1] if index + 1 < steps else torch.ones_like(left[0])
        images = after.sqrt() * clean + (1 - after).sqrt() * noise
    return images


# -- flow matching -------------------------------------------------------------------------------------------------


def flow_loss(model: DiT, images: Tensor, labels: Tensor) -> Tensor:
    """Mean square error of the velocity along the straight line from each image (time 0) to noise (time 1)."""
    times = torch.rand(len(images), device=images.device)
    noise = torch.randn_like(images)
    noisy = torch.lerp(images, noise, times[:, None, None, None])
    return F.mse_loss(model(noisy, times * STEPS, model.dropped(labels)), noise - images)


def sample_flow(
    model: DiT, labels: Tensor, *, steps: int = 50, guidance: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """One image for each label, from noise, against the velocity in `steps` Euler steps."""
    images = _noise(model, labels, generator)
    for index in range(steps):
        times = torch.full((len(labels),), STEPS * (1 - index / steps), device=labels.device)
        images = images - _guided(model, images, times, labels, guidance) / steps
    return images


# -- both ----------------------------------------------------------------------------------------------------------


def _noise(model: DiT, labels: Tensor, generator: torch.Generator | None) -> Tensor:
    c = model.config
    return torch.randn(len(labels), c.channels, c.size, c.size, device=labels.device, generator=generator)


def _guided(model: DiT, images: Tensor, times: Tensor, labels: Tensor, guidance: float) -> Tensor:
    """The prediction, moved away from the one without a class: 1 is the plain prediction, more is more of the class."""
    with torch.no_grad():
        seen = model(images, times, labels)
        if guidance == 1.0:
            return seen
        blind = model(images, times, torch.full_like(labels, model.config.classes))
        return torch.lerp(blind, seen, guidance)
