"""A GPT-2 style decoder: token ids in, next-token logits out.

`GPT2` has the architecture and parameter count of GPT-2 small; `SMALL` and `BENCH` are smaller. With a
`context_strength` the blocks hand each other the context of attention_context.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from takeback.zoo.attention_context import AttentionContext


@dataclass(frozen=True)
class GPTConfig:
    """`tied` makes the output projection the token embedding's own weight, as in GPT-2. `context` is the most tokens of
    a row; `context_strength` and `context_rate` are those of the attention context, where 0 is none.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    dropout: float = 0.0
    tied: bool = True
    context_strength: float = 0.0
    context_rate: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")


SMALL = GPTConfig(vocabulary=256, width=64, layers=2, heads=4, context=64)
BENCH = GPTConfig(vocabulary=8192, width=384, layers=4, heads=6, context=256)
GPT2 = GPTConfig(vocabulary=50257, width=768, layers=12, heads=12, context=1024)


class Attention(nn.Module):
    """Causal multi-head self-attention, with queries, keys and values from one linear layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        per_head = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(per_head).transpose(1, 2) for part in self.qkv(hidden).split(width, 2))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    """Pre-LayerNorm attention and MLP, each added to the residual stream after dropout."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class GPT(nn.Module):
    """Token and learned position embeddings, the blocks, a last LayerNorm, and the output projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(GPTBlock(config) for _ in range(config.layers)))
        self.attention_context = AttentionContext(config.context_strength, config.context_rate)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.token.weight
        self._initialise_()

    def _initialise_(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Each block adds to the residual stream twice; GPT-2 keeps the sum's variance the same at any depth.
        for block in self.blocks:
            for projection in (block.attention.output, block.mlp[2]):
                nn.init.normal_(projection.weight, std=0.02 / sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"got {length} tokens per row, but the context is {self.config.context}")
        positions = torch.arange(length, device=tokens.device)
        hidden = self.dropout(self.token(tokens) + self.position(positions))
        return self.head(self.norm(self.attention_context(self.blocks, hidden)))


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token over all positions."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
