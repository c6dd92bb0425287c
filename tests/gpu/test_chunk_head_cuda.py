"""On a GPU: heads run in chunks, and a narrow weight's gradient is added up in float32 inside of the product."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))

from heads import (
    CHUNKS,
    HEADS,
    SmallModel,
    distance,
    eager_gradients,
    run_chunked,
    shifted,
    tied,
    words,
)

from takeback.compiler.layout import transient_bytes

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAMES = ("plain", "with_z_loss", "smoothed", "shifted_logits", "over_items", "padded_vocabulary", "by_hand")


@pytest.mark.parametrize("name", NAMES)
def test_head_runs_in_chunks_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    model, batch = SmallModel(bias=True).cuda(), tuple(t.cuda() for t in words())
    run = run_chunked(model, HEADS[name], batch)
    assert run.reasons == []
    assert run.draft.replaced
    assert transient_bytes(run.layout) < 0.8 * transient_bytes(run.whole)
    exact, whole = eager_gradients(model, HEADS[name], batch, double=True), eager_gradients(model, HEADS[name], batch)
    for key, value in exact.items():
        assert distance(run.grads[key], value) <= 2 * distance(whole[key], value) + 1e-6, key


@pytest.mark.parametrize("head", [shifted, tied])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_a_narrow_weight_is_added_up_inside_of_the_product(head: Any, dtype: torch.dtype) -> None:
    """`shifted` has a product of matrices, `tied` one of a batch of one."""

    def loss_fn(m: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype, enabled=m.head.weight.dtype == torch.float32):
            loss: Tensor = head(m, x, y)
            return loss

    torch.manual_seed(0)
    model, batch = SmallModel().cuda(), tuple(t.cuda() for t in words())
    run = run_chunked(model, loss_fn, batch)
    assert run.reasons == []
    onto = [op for op in run.draft.program.ops if op.name in ("addmm.dtype_out", "baddbmm.dtype_out")]
    assert len(onto) == CHUNKS - 1
    assert {op.outputs[0].dtype for op in onto} == {torch.float32}
    exact, whole = eager_gradients(model, loss_fn, batch, double=True), eager_gradients(model, loss_fn, batch)
    for key, value in exact.items():
        assert distance(run.grads[key], value) <= 2 * distance(whole[key], value) + 1e-6, key


def test_weight_in_bfloat16_gets_its_gradient_rounded_once() -> None:
    """All parameters are narrow: the sum in float32 is cast at the end."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SmallModel().to("cuda", torch.bfloat16)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    torch.manual_seed(0)
    model, batch = Narrow(), tuple(t.cuda() for t in words())
    run = run_chunked(model, shifted, batch)
    assert run.reasons == []
    exact, whole = eager_gradients(model, shifted, batch, double=True), eager_gradients(model, shifted, batch)
    for key, value in exact.items():
        assert run.grads[key].dtype == torch.bfloat16
        assert distance(run.grads[key], value) <= 2 * distance(whole[key], value) + 1e-6, key
