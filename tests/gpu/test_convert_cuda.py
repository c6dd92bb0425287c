"""The chunked loss and converted language models on a GPU: as near to float64 as torch's, with a lower peak."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from takeback.nn import convert, linear_cross_entropy

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [5000, 5003], ids=["aligned", "odd"])
def test_gradients_are_no_further_from_float64s_than_twice_those_of_the_whole_logits(
    dtype: torch.dtype, classes: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2048, 256, device="cuda").to(dtype)
    weight = (torch.randn(classes, 256, device="cuda") * 0.1).to(dtype)
    targets = torch.randint(classes, (2048,), device="cuda")
    targets[:100] = -100

    def run(loss: Any, to: torch.dtype) -> list[Tensor]:
        leaves = [each.to(to, copy=True).requires_grad_() for each in (hidden, weight)]
        result = loss(*leaves, targets)
        (result * 0.5).backward()
        return [result.detach(), *(each.grad for each in leaves if each.grad is not None)]

    exact, torchs = run(whole, torch.float64), run(whole, dtype)
    ours = run(lambda h, w, t: linear_cross_entropy(h, w, t, rows=128), dtype)
    for e, t, o in zip(exact, torchs, ours, strict=True):
        assert o.dtype == t.dtype
        assert distance(o, e) <= max(2 * distance(t, e), 1e-6)


def test_logits_are_never_whole() -> None:
    hidden = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(32000, (4096,), device="cuda")
    linear_cross_entropy(hidden, weight, targets).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    assert torch.cuda.max_memory_allocated() - before < 4096 * 32000 * 2 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi3"])
def test_a_converted_model_is_as_near_to_float64_and_peaks_lower(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**sizes, **heads),
        "gemma2": lambda: transformers.Gemma2Config(**sizes, **heads, head_dim=64),
        "phi3": lambda: transformers.Phi3Config(**sizes, **heads),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=4096, n_embd=256, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    }
    torch.manual_seed(0)
    config = configs[name]()
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).cuda().train()
    ids = torch.randint(1, 4096, (4, 256), device="cuda")

    def step(of: Any) -> tuple[dict[str, Tensor], int]:
        for _ in range(2):
            of.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            of(input_ids=ids, labels=ids).loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
        return {key: each.grad.double() for key, each in of.named_parameters()}, peak

    exact, _ = step(copy.deepcopy(model).double())
    torchs, eager_peak = step(model)
    ours, peak = step(convert(model))

    def far(one: dict[str, Tensor]) -> float:
        size = sum(float(each.square().sum()) for each in exact.values())
        return (sum(float((one[key] - each).square().sum()) for key, each in exact.items()) / size) ** 0.5

    assert far(ours) <= max(2 * far(torchs), 1e-5)
    assert peak < 0.8 * eager_peak
