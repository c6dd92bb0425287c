"""The models of benchmarks/gpu.py: a name in, a model with its loss, optimizer and batch out, on the device.

Weights are random, from configurations: nothing is downloaded. The same name gives the same weights and the same batch
in every process on the same device. `tiny` sizes are there to try the script on a CPU. Of `HELD_OUT` no kernel, price
or threshold was tuned on: they show whether the rest is more than its benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_data import Batch, Draw, Lessons, ids, masked_ids, next_ids, pictures, shapes, texts
from takeback import zoo
from takeback.zoo import dit, ssm


@dataclass(frozen=True)
class GpuCase:
    """A training step to measure: `loss_fn(model, *batch)` is the loss that `optimizer` steps on."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    batch: Batch


@dataclass(frozen=True)
class Size:
    """One size of a model: how it is made on the default device, and `rows` of what it is fed."""

    build: Callable[[], nn.Module]
    draw: Draw
    rows: int
    lessons: Lessons | None = None


@dataclass(frozen=True)
class GpuModel:
    """A line of the table. `liger`: what Liger-Kernel calls models of this kind, where it knows them."""

    about: str
    full: Size
    tiny: Size
    loss_fn: Callable[..., Tensor]
    lr: float = 1e-4
    momentum: bool = False  #: SGD with momentum instead of AdamW
    fused: bool = True  #: the optimizer; else as torch does by itself, with lists of tensors
    autocast: bool = True
    channels_last: bool = False
    liger: str = ""


# -- losses --------------------------------------------------------------------------------------------------------


def classes(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def causal(model: nn.Module, tokens: Tensor) -> Tensor:
    return _labelled(model, tokens, tokens)


def _labelled(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


# -- how models are made; libraries are imported when one of theirs is ---------------------------------------------


def of_transformers(kind: str, config: str, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    import transformers

    made = getattr(transformers, config)(**settings)
    made.use_cache = False
    model: nn.Module = getattr(transformers, kind).from_config(made, dtype=dtype)
    return model


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50()
    return model


def _tiny_resnet() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    model: nn.Module = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=16)
    return model


def _vit(**settings: int) -> nn.Module:
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(**settings)
    return model


def _convnext_tiny() -> nn.Module:
    from torchvision.models import convnext_tiny

    model: nn.Module = convnext_tiny()
    return model


def _smallest_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    model: nn.Module = ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=10)
    return model


_causal_lm = partial(of_transformers, "AutoModelForCausalLM")
_masked_lm = partial(of_transformers, "AutoModelForMaskedLM")
_BF16 = torch.bfloat16
_SMALL_LM = {
    "vocab_size": 509,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
_QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_VIT_B_16 = {
    "image_size": 224,
    "patch_size": 16,
    "num_layers": 12,
    "num_heads": 12,
    "hidden_dim": 768,
    "mlp_dim": 3072,
}
_SMALL_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
_DIT_B_2 = zoo.DiTConfig(size=32, patch=2, channels=4, classes=1000, width=768, layers=12, heads=12)

_PICTURES = partial(pictures, side=224, classes=1000)
_SMALL_PICTURES = partial(pictures, side=32, classes=10)
_SMALL_IDS = partial(ids, length=32, vocabulary=509)
_SMALL_TEXT = partial(texts, length=32)

HELD_OUT = ("qwen2", "convnext")
SMALL_BATCHES = {"gpt2-1": ("gpt2", 1), "resnet50-32": ("resnet50", 32)}  #: where launching kernels is what takes time

MODELS: dict[str, GpuModel] = {
    "resnet50": GpuModel(
        "ResNet-50 (torchvision), 256 × 224², bf16 autocast, channels_last, SGD with momentum",
        Size(_resnet50, _PICTURES, 256, partial(shapes, side=224)),
        Size(_tiny_resnet, _SMALL_PICTURES, 4, partial(shapes, side=32)),
        classes,
        lr=0.02,
        momentum=True,
        channels_last=True,
    ),
    "gpt2": GpuModel(
        "GPT-2 124M (transformers), 16 × 1024, bf16 autocast, dropout, AdamW",
        Size(
            partial(_causal_lm, "GPT2Config"),
            partial(ids, length=1024, vocabulary=50257),
            16,
            partial(texts, length=1024),
        ),
        Size(
            partial(_causal_lm, "GPT2Config", vocab_size=509, n_embd=64, n_layer=2, n_head=4, n_positions=32),
            _SMALL_IDS,
            2,
            _SMALL_TEXT,
        ),
        causal,
        lr=3e-4,
    ),
    "llama": GpuModel(
        "Llama 1.2 B (transformers), 4 × 2048, bf16 weights, AdamW",
        Size(
            partial(_causal_lm, "LlamaConfig", _BF16, **_LLAMA),
            partial(ids, length=2048, vocabulary=128256),
            4,
            partial(texts, length=2048),
        ),
        Size(
            partial(_causal_lm, "LlamaConfig", _BF16, **_SMALL_LM, num_key_value_heads=2, tie_word_embeddings=True),
            _SMALL_IDS,
            2,
            _SMALL_TEXT,
        ),
        causal,
        autocast=False,
        liger="llama",
    ),
    "vit": GpuModel(
        "ViT-B/16 (torchvision), 256 × 224², bf16 autocast, AdamW",
        Size(partial(_vit, **_VIT_B_16), _PICTURES, 256, partial(shapes, side=224)),
        Size(partial(_vit, **_SMALL_VIT, num_classes=10), _SMALL_PICTURES, 4, partial(shapes, side=32)),
        classes,
    ),
    "bert": GpuModel(
        "BERT-base (transformers), masked words, 64 × 512, bf16 autocast, dropout, AdamW",
        Size(partial(_masked_lm, "BertConfig"), partial(masked_ids, length=512, vocabulary=30522), 64),
        Size(partial(_masked_lm, "BertConfig", **_SMALL_LM), partial(masked_ids, length=32, vocabulary=509), 2),
        _labelled,
    ),
    "dit": GpuModel(
        "DiT-B/2 (takeback's zoo), 256 × 32² latents, bf16 autocast, AdamW",
        Size(
            partial(zoo.DiT, _DIT_B_2),
            partial(pictures, side=32, classes=1000, channels=4),
            256,
        ),
        Size(partial(zoo.DiT, dit.SMALL), partial(pictures, side=16, classes=10), 2),
        dit.ddpm_loss,
    ),
    "ssm": GpuModel(
        "Mamba-2 130M (takeback's zoo), 16 × 1024, bf16 autocast, AdamW",
        Size(partial(zoo.SSM, ssm.MAMBA2_130M), partial(next_ids, length=1024, vocabulary=50288), 16),
        Size(partial(zoo.SSM, ssm.SMALL), partial(next_ids, length=64, vocabulary=256), 2),
        ssm.loss_fn,
    ),
    "qwen2": GpuModel(
        "Qwen2 0.5 B (transformers), 4 × 2048, bf16 weights, AdamW",
        Size(partial(_causal_lm, "Qwen2Config", _BF16, **_QWEN), partial(ids, length=2048, vocabulary=151936), 4),
        Size(
            partial(_causal_lm, "Qwen2Config", _BF16, **_SMALL_LM, num_key_value_heads=2, tie_word_embeddings=True),
            _SMALL_IDS,
            2,
        ),
        causal,
        autocast=False,
        liger="qwen2",
    ),
    "convnext": GpuModel(
        "ConvNeXt-T (torchvision), 256 × 224², bf16 autocast, channels_last, stochastic depth, AdamW",
        Size(_convnext_tiny, _PICTURES, 256),
        Size(_smallest_convnext, _SMALL_PICTURES, 4),
        classes,
        channels_last=True,
    ),
}

for _name, (_of, _rows) in SMALL_BATCHES.items():
    _model = MODELS[_of]
    _about = _model.about.replace(f" {_model.full.rows} ×", f" {_rows} ×")
    MODELS[_name] = replace(_model, about=_about, full=replace(_model.full, rows=_rows))


def size_of(name: str, *, tiny: bool) -> Size:
    return MODELS[name].tiny if tiny else MODELS[name].full


def build(name: str, device: str, *, tiny: bool) -> GpuCase:
    """The model and its batch on the device, which makes them itself: a large model takes long to draw on a CPU."""
    return made(MODELS[name], device, tiny=tiny)


def made(kind: GpuModel, device: str, *, tiny: bool, trains_on: str | None = None) -> GpuCase:
    """`trains_on`: the kind of device that the step is for, if it is another one."""
    size = kind.tiny if tiny else kind.full
    torch.manual_seed(0)
    with torch.device(device):
        model = size.build().train()
    batch = size.draw(size.rows, torch.Generator(device).manual_seed(0))
    if kind.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer: torch.optim.Optimizer
    if kind.momentum:
        optimizer = torch.optim.SGD(model.parameters(), lr=kind.lr, momentum=0.9, fused=kind.fused or None)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=kind.lr, fused=kind.fused or None)
    loss_fn = _under_autocast(kind.loss_fn, trains_on or device) if kind.autocast else kind.loss_fn
    return GpuCase(model, loss_fn, optimizer, _placed(kind, batch, device))


def lessons(name: str, device: str, *, tiny: bool) -> Iterator[Batch]:
    """Batches from which there is something to learn, the same in every process."""
    size = size_of(name, tiny=tiny)
    if size.lessons is None:
        known = [other for other in MODELS if size_of(other, tiny=tiny).lessons]
        raise SystemExit(f"there is nothing to learn for {name}; there is for {', '.join(known)}")
    return (placed(name, batch, device) for batch in size.lessons(size.rows, 0))


def placed(name: str, batch: Batch, device: str) -> Batch:
    return _placed(MODELS[name], batch, device)


def _placed(kind: GpuModel, batch: Batch, device: str) -> Batch:
    layout = torch.channels_last if kind.channels_last else torch.contiguous_format
    return tuple(t.to(device, memory_format=layout) if t.dim() == 4 else t.to(device) for t in batch)


def _under_autocast(loss_fn: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    def cast(model: nn.Module, *batch: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss_fn(model, *batch)

    return cast
