"""The models of benchmarks/predict_gpu.py: those of benchmarks/gpu.py, and more that run on other kernels: float32 in
both layouts, attention with a bias, depthwise convolutions, an optimizer on lists of tensors.

None of the figures that predictions are made with was taken from `MORE`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpu_data import Batch, ids, next_ids, pictures
from gpu_models import MODELS, GpuModel, Size, causal, classes, of_transformers
from takeback import zoo
from takeback.zoo import gpt, resnet

_GPT = zoo.GPTConfig(vocabulary=16384, width=768, layers=8, heads=12, context=512)
_causal_lm = partial(of_transformers, "AutoModelForCausalLM")
_SMALL = {"vocab_size": 509, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128}
_SMALL_T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 509}


def _of_torchvision(name: str, **settings: Any) -> nn.Module:
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(**settings)
    return model


def _pairs(rows: int, generator: torch.Generator, *, length: int, vocabulary: int) -> Batch:
    draw = partial(ids, length=length, vocabulary=vocabulary)
    return (*draw(rows, generator), *draw(rows, generator))


def _translated(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


_PICTURES = partial(pictures, side=224, classes=1000)
_SMALL_PICTURES = partial(pictures, side=64, classes=1000)

MORE: dict[str, GpuModel] = {
    "gpt_fp32": GpuModel(
        "GPT of 8 layers (takeback's zoo), 16 × 512, float32, AdamW on lists of tensors",
        Size(partial(zoo.GPT, _GPT), partial(next_ids, length=512, vocabulary=16384), 16),
        Size(partial(zoo.GPT, gpt.SMALL), partial(next_ids, length=64, vocabulary=256), 2),
        gpt.loss_fn,
        autocast=False,
        fused=False,
    ),
    "resnet_fp32": GpuModel(
        "ResNet-50 (takeback's zoo), 64 × 224², float32, NCHW, SGD with momentum",
        Size(partial(zoo.ResNet, resnet.RESNET50), _PICTURES, 64),
        Size(partial(zoo.ResNet, resnet.SMALL), partial(pictures, side=32, classes=4), 4),
        resnet.loss_fn,
        momentum=True,
        autocast=False,
    ),
    "pythia": GpuModel(
        "Pythia 160M (transformers' GPT-NeoX), 16 × 1024, bf16 autocast, AdamW",
        Size(
            partial(
                _causal_lm,
                "GPTNeoXConfig",
                vocab_size=50304,
                hidden_size=768,
                num_hidden_layers=12,
                num_attention_heads=12,
                intermediate_size=3072,
            ),
            partial(ids, length=1024, vocabulary=50304),
            16,
        ),
        Size(
            partial(_causal_lm, "GPTNeoXConfig", **_SMALL, intermediate_size=128),
            partial(ids, length=32, vocabulary=509),
            2,
        ),
        causal,
    ),
    "gemma": GpuModel(
        "Gemma of 8 layers with heads of 256 (transformers), 8 × 1024, bf16 weights, AdamW",
        Size(
            partial(
                _causal_lm,
                "GemmaConfig",
                torch.bfloat16,
                vocab_size=64000,
                hidden_size=1024,
                intermediate_size=8192,
                num_hidden_layers=8,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=256,
            ),
            partial(ids, length=1024, vocabulary=64000),
            8,
        ),
        Size(
            partial(
                *(_causal_lm, "GemmaConfig", torch.bfloat16),
                **_SMALL,
                intermediate_size=128,
                num_key_value_heads=1,
                head_dim=16,
            ),
            partial(ids, length=32, vocabulary=509),
            2,
        ),
        causal,
        autocast=False,
    ),
    "t5": GpuModel(
        "T5-small (transformers), 32 × 512 to 512, bf16 autocast, dropout, AdamW",
        Size(
            partial(of_transformers, "AutoModelForSeq2SeqLM", "T5Config", **_T5, decoder_start_token_id=0),
            partial(_pairs, length=512, vocabulary=32128),
            32,
        ),
        Size(
            partial(of_transformers, "AutoModelForSeq2SeqLM", "T5Config", **_SMALL_T5, decoder_start_token_id=0),
            partial(_pairs, length=32, vocabulary=509),
            2,
        ),
        _translated,
    ),
    "swin": GpuModel(
        "Swin-T (torchvision), 128 × 224², bf16 autocast, stochastic depth, AdamW",
        Size(partial(_of_torchvision, "swin_t"), _PICTURES, 128),
        Size(partial(_of_torchvision, "swin_t"), _SMALL_PICTURES, 2),
        classes,
    ),
    "efficientnet": GpuModel(
        "EfficientNet-B0 (torchvision), 256 × 224², bf16 autocast, channels_last, stochastic depth, AdamW",
        Size(partial(_of_torchvision, "efficientnet_b0"), _PICTURES, 256),
        Size(partial(_of_torchvision, "efficientnet_b0"), _SMALL_PICTURES, 2),
        classes,
        channels_last=True,
    ),
}

PREDICTED: dict[str, GpuModel] = {**MODELS, **MORE}
