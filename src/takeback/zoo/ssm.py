"""A selective state space model after Mamba-2 (Dao and Gu): token ids in, next-token logits out.

Each head keeps a state of `state` x `head_width` numbers. At every token the state decays by a factor that the token
chooses, takes the token in, and is read. `scan` computes this in chunks, by matrix products alone. `MAMBA2_130M` has
the architecture and parameter count of mamba2-130m; `SMALL` and `BENCH` are smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class SSMConfig:
    """The mixer works at `expand * width`, in heads of `head_width`; `chunk` is how many tokens are one product."""

    vocabulary: int
    width: int
    layers: int
    state: int
    context: int
    head_width: int = 64
    expand: int = 2
    kernel: int = 4
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.inner % self.head_width:
            raise ValueError(f"expand * width = {self.inner} is not a multiple of head_width={self.head_width}")

    @property
    def inner(self) -> int:
        return self.expand * self.width

    @property
    def heads(self) -> int:
        return self.inner // self.head_width


SMALL = SSMConfig(vocabulary=256, width=64, layers=2, state=16, context=64, head_width=32, chunk=16)
BENCH = SSMConfig(vocabulary=8192, width=256, layers=4, state=64, context=256)
MAMBA2_130M = SSMConfig(vocabulary=50288, width=768, layers=24, state=128, context=1024, chunk=256)


def decay_between(logs: Tensor) -> Tensor:
    """exp of the sum of logs over (j, i] for every i >= j, and 0 for i < j: [..., n] -> [..., n, n].

    The sum is masked before the exponential: above the diagonal it would be positive, and might overflow.
    """
    total = logs.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=logs.device).triu(1)
    return between.masked_fill(later, -torch.inf).exp()


def scan(x: Tensor, logs: Tensor, write: Tensor, read: Tensor, chunk: int) -> Tensor:
    """y[t] = read[t] · h[t], where h[t] = exp(logs[t]) h[t-1] + write[t] x[t]ᵀ and h[-1] = 0.

    x is [batch, length, heads, head_width], logs (which must be <= 0) [batch, length, heads]; write and read are
    [batch, length, state], the same for all heads. y is like x. Three kinds of products for each chunk: within it, from
    it to its last state, and from the state before it; and one between the chunks.
    """
    batch, length, heads, width = x.shape
    state = write.shape[-1]
    padding = -length % chunk
    if padding:  # nothing is written there, and what is read there is cut off
        x, logs = F.pad(x, (0, 0, 0, 0, 0, padding)), F.pad(logs, (0, 0, 0, padding))
        write, read = F.pad(write, (0, 0, 0, padding)), F.pad(read, (0, 0, 0, padding))
    chunks = x.shape[1] // chunk
    x = x.view(batch, chunks, chunk, heads, width)
    write, read = write.view(batch, chunks, chunk, state), read.view(batch, chunks, chunk, state)
    logs = logs.view(batch, chunks, chunk, heads).transpose(2, 3)
    total = logs.cumsum(-1)  # [batch, chunks, heads, chunk]

    scores = (read @ write.mT)[:, :, None] * decay_between(logs)
    within = (scores @ x.transpose(2, 3)).transpose(2, 3)
    # All heads are one product here: write and read are the same for all of them.
    to_end = (total[..., -1:] - total).exp().transpose(2, 3)
    added = write.mT @ (x * to_end[..., None]).flatten(3)  # [batch, chunks, state, heads * width]
    # The state before a chunk is what the chunks before it added, decayed over those in between.
    whole = F.pad(total[..., -1].transpose(1, 2), (1, 0))
    across = decay_between(whole)[..., :-1, 1:]  # [batch, heads, chunks, chunks]
    added = added.view(batch, chunks, state, heads, width).permute(0, 3, 1, 2, 4)
    before = (across @ added.flatten(3)).view(batch, heads, chunks, state, width).permute(0, 2, 3, 1, 4)
    carried = (read @ before.flatten(3)).view(x.shape) * total.exp().transpose(2, 3)[..., None]
    return (carried + within).reshape(batch, chunks * chunk, heads, width)[:, :length]


class GatedNorm(nn.Module):
    """RMSNorm of x, gated: the gate goes in before the norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.norm(x * F.silu(gate))


class Mixer(nn.Module):
    """Projection in, a causal convolution over time, the scan, the gated norm, projection out."""

    def __init__(self, config: SSMConfig) -> None:
        super().__init__()
        self.config = config
        self.mixed = config.inner + 2 * config.state  # what is convolved: x, write and read
        self.input = nn.Linear(config.width, config.inner + self.mixed + config.heads, bias=False)
        self.conv = nn.Conv1d(self.mixed, self.mixed, config.kernel, groups=self.mixed, padding=config.kernel - 1)
        # Steps between 0.001 and 0.1 to begin with, and decays between 1 and 16 for a step of 1.
        steps = torch.exp(torch.empty(config.heads).uniform_(log(1e-3), log(0.1)))
        self.step_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the steps back
        self.log_rate = nn.Parameter(torch.empty(config.heads).uniform_(1.0, 16.0).log())
        self.skip = nn.Parameter(torch.ones(config.heads))
        self.norm = GatedNorm(config.inner)
        self.output = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        c = self.config
        length = hidden.shape[1]
        gate, mixed, steps = self.input(hidden).split((c.inner, self.mixed, c.heads), dim=-1)
        mixed = F.silu(self.conv(mixed.mT)[..., :length]).mT.contiguous()  # tokens are rows again, for all that follows
        x, write, read = mixed.split((c.inner, c.state, c.state), dim=-1)
        x = x.unflatten(-1, (c.heads, c.head_width))
        steps = F.softplus(steps + self.step_bias)
        y = scan(x * steps[..., None], -self.log_rate.exp() * steps, write, read, c.chunk)
        return self.output(self.norm((y + x * self.skip[:, None]).flatten(2), gate))


class SSMBlock(nn.Module):
    """The mixer of the normed input, added to the residual stream."""

    def __init__(self, config: SSMConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mixer = Mixer(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mixer(self.norm(hidden))


class SSM(nn.Module):
    """Token embedding, the blocks, a last norm, and the embedding's own weight as output projection."""

    def __init__(self, config: SSMConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.Sequential(*(SSMBlock(config) for _ in range(config.layers)))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)
        for block in self.blocks:
            with torch.no_grad():  # the residual stream keeps its variance at any depth
                block.mixer.output.weight.div_(config.layers**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens))))


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token over all positions."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
