"""The models takeback ships and measures: `case(name)` gives a model, its loss, an optimizer and a batch.

The same arguments give the same bits, and the caller's random state is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from takeback.zoo import dit, gpt, mlp, resnet, ssm
from takeback.zoo.attention_context import AttentionContext
from takeback.zoo.data import byte_batches, shape_batches
from takeback.zoo.dit import DiT, DiTConfig
from takeback.zoo.gpt import GPT, GPTConfig
from takeback.zoo.mlp import MLP
from takeback.zoo.resnet import ResNet, ResNetConfig
from takeback.zoo.ssm import SSM, SSMConfig

__all__ = [
    "CASES",
    "GPT",
    "MLP",
    "OPTIMIZERS",
    "SSM",
    "AttentionContext",
    "Case",
    "DiT",
    "DiTConfig",
    "GPTConfig",
    "ResNet",
    "ResNetConfig",
    "SSMConfig",
    "byte_batches",
    "case",
    "shape_batches",
]


@dataclass(frozen=True)
class Case:
    """A training step to compile or measure: `loss_fn(model, *batch)` is the loss `optimizer` steps on."""

    name: str
    model: nn.Module
    loss_fn: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, ...]


@dataclass(frozen=True)
class _CaseRecipe:
    """How one size of a case is made; `draw(batch, seed)` makes its batch."""

    build: Callable[[], nn.Module]
    loss_fn: Callable[..., Tensor]
    draw: Callable[[int, int], tuple[Tensor, ...]]
    batch: int
    optimizer: str


def _flat_shapes(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    images, labels = next(shape_batches(batch, 16, seed))
    return images.flatten(1), labels


def _noise_rows(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, 1024, generator=generator)
    return features, torch.randint(10, (batch,), generator=generator)


def _noise_images(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, 112, 112, generator=generator)
    return images, torch.randint(1000, (batch,), generator=generator)


def _noise_latents(config: DiTConfig) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def draw(batch: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(batch, config.channels, config.size, config.size, generator=generator)
        return latents, torch.randint(config.classes, (batch,), generator=generator)

    return draw


def _noise_tokens(config: GPTConfig | SSMConfig) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def draw(batch: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(config.vocabulary, (batch, config.context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


def _shapes(config: DiTConfig) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda batch, seed: next(shape_batches(batch, config.size, seed))


def _text(config: GPTConfig | SSMConfig) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda batch, seed: next(byte_batches(batch, config.context, seed))


_WITH_CONTEXT = {
    size: replace(config, context_strength=1.0)
    for size, config in {"small": gpt.SMALL, "bench": gpt.BENCH, "full": gpt.GPT2}.items()
}

_RECIPES: Mapping[str, Mapping[str, _CaseRecipe]] = {
    "mlp": {
        "small": _CaseRecipe(
            lambda: MLP((768, 128, 128, 10), activation=nn.GELU, dropout=0.1),
            mlp.loss_fn,
            _flat_shapes,
            batch=32,
            optimizer="adamw",
        ),
        "full": _CaseRecipe(
            lambda: MLP((1024, 2048, 2048, 2048, 10)), mlp.loss_fn, _noise_rows, batch=128, optimizer="adamw"
        ),
    },
    "resnet": {
        "small": _CaseRecipe(
            lambda: ResNet(resnet.SMALL),
            resnet.loss_fn,
            lambda batch, seed: next(shape_batches(batch, 32, seed)),
            batch=16,
            optimizer="momentum",
        ),
        "resnet18": _CaseRecipe(
            lambda: ResNet(resnet.RESNET18), resnet.loss_fn, _noise_images, batch=8, optimizer="momentum"
        ),
        "full": _CaseRecipe(
            lambda: ResNet(resnet.RESNET50), resnet.loss_fn, _noise_images, batch=8, optimizer="momentum"
        ),
    },
    "gpt": {
        "small": _CaseRecipe(lambda: GPT(gpt.SMALL), gpt.loss_fn, _text(gpt.SMALL), batch=8, optimizer="adamw"),
        "bench": _CaseRecipe(
            lambda: GPT(gpt.BENCH), gpt.loss_fn, _noise_tokens(gpt.BENCH), batch=8, optimizer="adamw_fused"
        ),
        "full": _CaseRecipe(
            lambda: GPT(gpt.GPT2), gpt.loss_fn, _noise_tokens(gpt.GPT2), batch=1, optimizer="adamw_fused"
        ),
    },
    "gpt_context": {
        "small": _CaseRecipe(
            lambda: GPT(_WITH_CONTEXT["small"]), gpt.loss_fn, _text(gpt.SMALL), batch=8, optimizer="adamw"
        ),
        "bench": _CaseRecipe(
            lambda: GPT(_WITH_CONTEXT["bench"]),
            gpt.loss_fn,
            _noise_tokens(gpt.BENCH),
            batch=8,
            optimizer="adamw_fused",
        ),
        "full": _CaseRecipe(
            lambda: GPT(_WITH_CONTEXT["full"]), gpt.loss_fn, _noise_tokens(gpt.GPT2), batch=1, optimizer="adamw_fused"
        ),
    },
    "dit": {
        "small": _CaseRecipe(lambda: DiT(dit.SMALL), dit.ddpm_loss, _shapes(dit.SMALL), batch=16, optimizer="adamw"),
        "flow": _CaseRecipe(lambda: DiT(dit.SMALL), dit.flow_loss, _shapes(dit.SMALL), batch=16, optimizer="adamw"),
        "bench": _CaseRecipe(
            lambda: DiT(dit.BENCH), dit.ddpm_loss, _shapes(dit.BENCH), batch=8, optimizer="adamw_fused"
        ),
        "full": _CaseRecipe(
            lambda: DiT(dit.DIT_S_2), dit.ddpm_loss, _noise_latents(dit.DIT_S_2), batch=8, optimizer="adamw_fused"
        ),
    },
    "ssm": {
        "small": _CaseRecipe(lambda: SSM(ssm.SMALL), ssm.loss_fn, _text(ssm.SMALL), batch=8, optimizer="adamw"),
        "bench": _CaseRecipe(
            lambda: SSM(ssm.BENCH), ssm.loss_fn, _noise_tokens(ssm.BENCH), batch=8, optimizer="adamw_fused"
        ),
        "full": _CaseRecipe(
            lambda: SSM(ssm.MAMBA2_130M), ssm.loss_fn, _noise_tokens(ssm.MAMBA2_130M), batch=1, optimizer="adamw_fused"
        ),
    },
}

CASES: Mapping[str, tuple[str, ...]] = MappingProxyType({name: tuple(of) for name, of in _RECIPES.items()})
"""The sizes of each case, by name."""

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = MappingProxyType(
    {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    }
)
"""The optimizers a case can be built with, by name."""


def case(
    name: str, *, size: str = "small", batch: int | None = None, seed: int = 0, optimizer: str | None = None
) -> Case:
    """Build a case of `CASES` on the CPU; `batch` and `optimizer` replace those the size comes with."""
    if name not in _RECIPES:
        raise ValueError(f"unknown case {name!r}; the cases and their sizes are {_listed(CASES)}")
    if size not in _RECIPES[name]:
        raise ValueError(f"unknown size {size!r} of {name!r}; the cases and their sizes are {_listed(CASES)}")
    recipe = _RECIPES[name][size]
    optimizer = recipe.optimizer if optimizer is None else optimizer
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; the optimizers are {', '.join(OPTIMIZERS)}")
    batch = recipe.batch if batch is None else batch
    if batch < 1:
        raise ValueError(f"a batch needs at least one row, got {batch=}")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the caller's GPU generators too.
        torch.default_generator.manual_seed(seed)
        model = recipe.build()
    return Case(
        f"{name}/{size}",
        model,
        recipe.loss_fn,
        OPTIMIZERS[optimizer](model.parameters()),
        recipe.draw(batch, seed),
    )


def _listed(cases: Mapping[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{name}: {', '.join(sizes)}" for name, sizes in cases.items())
