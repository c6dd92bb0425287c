"""The attention context with its products in a Workspace has the bits of the plain form: its kernels are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import takeback as tb

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import context_products as products

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def given(batch: int, length: int, width: int) -> Given:
    torch.manual_seed(0)
    x_in, x_out, grad = torch.randn(3, batch, length, width).unbind()
    x_in[..., 0] = 2.0  # a column without variance: its correlation is 0
    return x_in, x_out, grad, torch.randn(width, width) / width


SIZES = [(1, 3, 4), (4, 64, 48), (2, 512, 96), (4, 512, 768)]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results_and_gradients_are_those_of_the_plain_form(size: tuple[int, int, int], debug: bool) -> None:
    x_in, x_out, grad, context = given(*size)
    ws = tb.Workspace(debug=debug)
    mine = context.clone()
    for _ in range(3):
        plain_context = context = products.update(context, x_in, x_out)
        x, strength = x_out.clone().requires_grad_(), torch.tensor(0.7, requires_grad=True)
        out = products.apply(x, context, strength)
        expected = torch.autograd.grad(out, (x, strength), grad)
        with ws.step():
            products.update_(mine, x_in, x_out, ws)
            got_out = products.apply_in(x, mine, strength, ws)
            got = torch.autograd.grad(got_out, (x, strength), grad)
            assert torch.equal(mine, plain_context)
            assert torch.equal(got_out, out)
            assert torch.equal(got[0], expected[0])
            torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)
            del got_out, got
    assert mine[0].any()
    assert (products.update(torch.zeros_like(mine), x_in, x_out)[0] == 0).all()


def test_a_steady_step_allocates_no_product() -> None:
    x_in, x_out, grad, context = given(4, 64, 48)
    ws = tb.Workspace()

    def step() -> None:
        x, strength = x_out.clone().requires_grad_(), torch.tensor(0.7, requires_grad=True)
        with ws.step():
            products.update_(context, x_in, x_out, ws)
            torch.autograd.grad(products.apply_in(x, context, strength, ws), (x, strength), grad)

    step()
    before = ws.stats()
    for _ in range(3):
        step()
    after = ws.stats()
    assert (after.misses, after.held_bytes) == (before.misses, before.held_bytes)
    assert after.hits > before.hits
