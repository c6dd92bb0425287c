"""Activated norms on a GPU at sizes where a grid, or an offset, has outgrown its place."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from takeback.nn import InPlaceABN, SwiGLU

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(16, 64, 512, 512), (1, 3, 2048, 2048), (4096, 8, 3, 3)], ids=str)
def test_large_images_are_torchs(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    leaf = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=layout).requires_grad_()
    dy = torch.randn_like(leaf)
    norm = InPlaceABN(shape[1], device="cuda")
    norm(leaf * 1).clone().backward(dy)
    ours, leaf.grad = leaf.grad, None
    F.leaky_relu(F.batch_norm(leaf, None, None, norm.weight, norm.bias, training=True), 0.01).backward(dy)
    assert ours is not None
    assert leaf.grad is not None
    assert float((ours - leaf.grad).float().norm() / leaf.grad.float().norm()) < 2**-6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own_launches() -> None:
    for device in ("cuda:0", "cuda:1"):
        x = torch.randn(8, 16, device=device)
        assert torch.allclose(SwiGLU()(x), F.silu(x[:, :8]) * x[:, 8:], atol=1e-5)
