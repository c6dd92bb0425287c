"""The guard names the node, the tensor, the reader and the line of every unsafe overwrite."""

from __future__ import annotations

import inspect
import re

import overwriters as sab
import pytest
import torch
import torch.nn.functional as F
from overwriters import Anything, Double, errors_of, leaf
from torch import nn
from torch.utils.checkpoint import checkpoint

import takeback as tb


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("write", sab.WRITES)
def test_a_saved_tensor_of_another_node(write: sab.Write, exact: bool) -> None:
    a = leaf()

    def step() -> None:
        line = inspect.currentframe().f_lineno  # type: ignore[union-attr]
        h = torch.tanh(a)
        y = Double.apply(h, sab.nothing, write)
        step.lines = (line + 1, line + 2)  # type: ignore[attr-defined]
        y.square().mean().backward()

    [error] = errors_of(step, exact=exact)
    assert error.node == "DoubleBackward"
    assert error.tensor == "its saved_tensors[0] (float32 [3, 4])"
    here = "test_guard_finds.py"
    tanh, double = step.lines  # type: ignore[attr-defined]
    assert error.line == f"{here}:{double} in step()"
    assert error.readers == (f"TanhBackward0, which saved it as result, {here}:{tanh} in step()",)
    assert "h = torch.tanh(a)" in str(error)
    assert "y = Double.apply(h, sab.nothing, write)" in str(error)
    assert max(map(len, str(error).splitlines())) <= 80


@pytest.mark.parametrize("write", [w for w in sab.WRITES if w is not sab.by_swap])
def test_a_gradient_that_waits_at_the_other_branch_of_an_addition(write: sab.Write) -> None:
    def step() -> None:
        x = leaf()
        a, b = x.sin(), x.cos()
        e = a.exp()
        y = Double.apply(b, write)  # made last, so it runs first
        (e + y).square().mean().backward()  # z = a + y hands one gradient to both

    [error] = errors_of(step)
    assert error.tensor.startswith("its incoming gradient 0")
    assert re.match(r"ExpBackward0, as its incoming gradient 0, test_guard_finds.py:\d+ in step\(\)", error.readers[0])


def test_two_saboteurs_that_share_a_gradient_are_one_error() -> None:
    """The first ruins what the second reads; the second ruins nobody's."""

    def step() -> None:
        x = leaf()
        (Double.apply(x, sab.by_pointer) + Double.apply(x, sab.by_pointer)).square().mean().backward()

    [error] = errors_of(step)
    assert error.readers[0].startswith("DoubleBackward, as its incoming gradient 0")


def test_an_expanded_gradient() -> None:
    [error] = errors_of(lambda: Double.apply(leaf(), sab.by_numpy).sum().backward())
    assert "expanded" in error.readers[0]


def test_a_gradient_that_the_user_passed_and_holds() -> None:
    def step() -> None:
        mine = torch.ones(3, 4)
        Double.apply(leaf(), sab.by_pointer).backward(mine)

    [error] = errors_of(step)
    assert error.readers == ("your own code, through the variable mine of step()",)


def test_a_gradient_that_torch_autograd_grad_returns() -> None:
    def step() -> None:
        x = leaf()
        y = Double.apply(x * 1, sab.by_pointer)
        torch.autograd.grad(y.square().mean(), [y, x])

    [error] = errors_of(step)
    assert "the caller of torch.autograd.grad" in error.readers[0]


def test_a_gradient_that_was_kept_by_a_hook() -> None:
    def step() -> None:
        kept: list[torch.Tensor] = []
        y = Double.apply(leaf(), sab.by_pointer)
        y.register_hook(kept.append)
        y.square().mean().backward()

    [error] = errors_of(step)
    assert error.readers == ("your own code, through a list in the variable kept of step()",)


def test_a_gradient_that_a_module_hook_will_read() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(x, sab.by_pointer)

    module = Module()
    module.register_full_backward_hook(lambda module, given, got: None)
    [error] = errors_of(lambda: module(leaf() * 1).square().mean().backward())
    assert "BackwardHook" in error.readers[0]


@pytest.mark.parametrize("place", ["variable", "list", "attribute", "dict", "closure", "global"])
def test_an_activation_that_the_user_holds(
    place: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if place == "global":
        request.getfixturevalue("whole_heap")  # the module that holds it is older than this test
    holder = nn.Module()

    def step() -> None:
        h = leaf() * 3
        y = Double.apply(h, sab.nothing, sab.by_pointer)
        kept: object = None
        if place == "list":
            kept = [h]
        elif place == "attribute":
            holder.kept = h
        elif place == "dict":
            kept = {"a": {"b": h}}
        elif place == "closure":
            kept = (lambda h: lambda: h)(h)
        elif place == "global":
            monkeypatch.setattr(sab, "kept", h, raising=False)
        if place != "variable":
            del h
        y.square().mean().backward()
        del kept

    [error] = errors_of(step)
    assert error.tensor.startswith("its saved_tensors[0]")
    assert error.readers[0].startswith("your own code, through ")
    expected = {
        "variable": "the variable h of step()",
        "list": "a list in the variable kept of step()",
        "attribute": "'kept' in the variable holder of",
        "dict": "'b' in the variable kept of step()",
        "closure": "a closure",
        "global": "the global variable kept of overwriters",
    }
    assert expected[place] in error.readers[0]


def test_a_parameter() -> None:
    model = nn.Linear(4, 4)

    def step() -> None:
        y = Anything.apply(model(torch.randn(2, 4)), lambda dy: sab.by_memset(model.weight.detach()))
        y.square().mean().backward()

    [error] = errors_of(step)
    assert error.readers == ("your own code, through 'weight' in the variable model of step()",)
    errors = errors_of(lambda: Anything.apply(model.bias, lambda dy: sab.by_memset(model.bias.data)).sum().backward())
    assert errors[0].readers == ("your own code, through 'bias' in the variable model of <lambda>()",)


def test_a_buffer_of_a_module_that_a_raw_write_hits() -> None:
    norm = nn.BatchNorm1d(4)

    def step() -> None:
        assert norm.running_mean is not None
        mean = norm.running_mean.numpy()
        y = Anything.apply(norm(leaf()), lambda dy: mean.fill(9))
        y.square().mean().backward()

    [error] = errors_of(step)
    assert "running_mean" in error.readers[0]


def test_a_grad_of_another_leaf() -> None:
    def step() -> None:
        a, b = leaf(), leaf()
        b.grad = torch.ones(3, 4)
        raw = b.grad.numpy()
        Anything.apply(a, lambda dy: raw.fill(3)).square().mean().backward()

    [error] = errors_of(step)
    assert "the .grad of a leaf [3, 4]" in error.readers[0]


class OneBuffer(torch.autograd.Function):
    """Returns one buffer as the gradient of both inputs, as two views: both `.grad`s are stolen from it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = dy * 1
        return buffer.view(-1).view(3, 4), buffer.view(-1).view(3, 4)


def test_accumulation_into_a_grad_that_shares_its_bytes() -> None:
    """pytorch 34082."""
    a, b = leaf(), leaf()

    def step() -> None:
        OneBuffer.apply(a, b).square().mean().backward()

    assert errors_of(step) == []
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.data_ptr() == b.grad.data_ptr()
    errors = errors_of(lambda: (a * 2 + b * 3).square().mean().backward())
    assert [error.node for error in errors] == ["torch::autograd::AccumulateGrad"] * 2
    assert ".grad of a leaf" in errors[0].readers[0]


def test_an_optimizer_in_a_hook_that_updates_a_weight_which_is_still_read() -> None:
    w, x = leaf(4, 4), torch.randn(2, 4)

    def update(p: torch.Tensor) -> None:
        p.data.sub_(p.grad)  # .data: the version check of autograd does not see it
        p.grad = None

    w.register_post_accumulate_grad_hook(update)

    def step() -> None:
        v = leaf(2, 4)
        early = (v @ w.detach()).tanh()  # shares the bytes of w, and is read after w's gradient is complete
        F.linear(early.detach() * 1 + x, w).square().mean().add(early.mean()).backward()

    [error] = errors_of(step)
    assert error.node == "torch::autograd::AccumulateGrad"
    assert error.readers[0].startswith("MmBackward0, which saved it as mat2")


def test_own_saved_tensor_where_the_graph_is_kept() -> None:
    def step(**options: bool) -> None:
        Double.apply(leaf() * 1, sab.nothing, sab.nothing, sab.by_pointer).square().mean().backward(**options)

    assert errors_of(step) == []
    [error] = errors_of(lambda: step(retain_graph=True))
    itself = "itself, which saved it as saved_tensors[1] and reads it in a second backward"
    assert any(reader.startswith(itself) for reader in error.readers)


def test_a_node_that_already_ran_but_whose_graph_is_kept() -> None:
    def step(**options: bool) -> None:
        h = leaf().exp() * 1
        y = Double.apply(h, sab.nothing, sab.by_pointer)
        z = h.sin()  # made last, so it runs first
        del h
        (y + z).square().mean().backward(**options)

    assert errors_of(step) == []
    [error] = errors_of(lambda: step(retain_graph=True))
    assert any(reader.startswith("SinBackward0, which saved it as self and reads") for reader in error.readers)


def test_the_graph_of_a_second_loss_that_has_not_run() -> None:
    def step() -> None:
        h = leaf() * 2
        first = Double.apply(h, sab.nothing, sab.by_pointer).square().mean()
        second = h.sin().mean()
        del h
        first.backward()
        second.detach()

    [error] = errors_of(step)
    assert error.readers[0].startswith("SinBackward0, which saved it as self")


def test_a_tensor_that_a_function_keeps_on_its_context() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = {"x": x}
            return x * 2

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> torch.Tensor:
            return dy * ctx.kept["x"]

    def step() -> None:
        h = leaf() * 1
        y = Keeps.apply(h)
        z = Double.apply(h, sab.nothing, sab.by_pointer)  # made last, so it runs first
        del h
        (y + z).square().mean().backward()

    [error] = errors_of(step)
    assert error.readers[0].startswith("KeepsBackward, which saved it as ctx.kept")


def test_views_are_the_same_bytes() -> None:
    def step() -> None:
        h = leaf() * 1
        y = h.t().sin()
        z = Double.apply(h.view(-1), sab.nothing, sab.by_pointer)
        w = h.view(2, 6).cos()
        del h
        (y.mean() + z.square().mean() + w.mean()).backward()

    [error] = errors_of(step)
    assert len(error.readers) == 1  # the cosine ran before
    assert error.readers[0].startswith("SinBackward0")


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        h = x.tanh()
        return Double.apply(h, sab.nothing, sab.by_pointer)

    def step() -> None:
        x = leaf() * 1
        checkpoint(block, x, use_reentrant=reentrant).square().mean().backward()

    [error] = errors_of(step)
    assert error.node == "DoubleBackward"
    assert error.tensor.startswith("its saved_tensors[0]")
    assert ("TanhBackward0" if reentrant else "torch.utils.checkpoint, which computed it again") in error.readers[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_that_the_last_op_of_a_checkpoint_overwrites(reentrant: bool) -> None:
    """A reentrant one runs a backward of its own, and who waits for the gradient is outside of it."""

    def step() -> None:
        x = leaf() * 1
        y = x.sin()
        z = checkpoint(lambda t: Double.apply(t.cos(), sab.by_pointer), x, use_reentrant=reentrant)
        (y + z).square().mean().backward()

    [error] = errors_of(step)
    assert error.node == "DoubleBackward"
    assert error.tensor.startswith("its incoming gradient 0")
    assert error.readers[0].startswith("SinBackward0, as its incoming gradient 0")


@pytest.mark.parametrize("reentrant", [True, False])
def test_saved_tensor_outside_that_the_first_op_of_a_checkpoint_overwrites(reentrant: bool) -> None:
    def step() -> None:
        x = leaf().tanh()
        z = checkpoint(lambda t: Double.apply(t, sab.nothing, sab.by_pointer), x, use_reentrant=reentrant)
        del x
        z.square().mean().backward()

    [error] = errors_of(step)
    assert error.readers[0].startswith("TanhBackward0, which saved it as result")


@pytest.mark.parametrize("reentrant", [True, False])
def test_input_of_a_checkpoint_that_a_second_backward_computes_again_from(reentrant: bool) -> None:
    def step() -> None:
        z = checkpoint(lambda t: Double.apply(t, sab.nothing, sab.by_pointer), leaf() * 1, use_reentrant=reentrant)
        z.square().mean().backward(retain_graph=True)

    [error] = errors_of(step)
    who = "CheckpointFunctionBackward, which saved it" if reentrant else "torch.utils.checkpoint, which keeps it"
    assert error.readers[0].startswith(who)


def test_input_that_another_checkpoint_has_yet_to_compute_from() -> None:
    def step() -> None:
        x = leaf() * 1
        y = checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False)
        z = checkpoint(lambda t: Double.apply(t, sab.nothing, sab.by_pointer), x, use_reentrant=False)
        del x
        (y + z).square().mean().backward()

    [error] = errors_of(step)
    assert error.node == "DoubleBackward"
    assert any(reader.startswith("torch.utils.checkpoint, which keeps it") for reader in error.readers)


def test_create_graph_saves_a_gradient_that_is_then_overwritten() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            dx = dy * (2 * x)  # records dy
            sab.by_pointer(dy)
            return dx

    def step() -> None:
        x = leaf()
        (g,) = torch.autograd.grad(Square.apply(x).square().sum(), x, create_graph=True)
        g.sum().backward()

    [error] = errors_of(step)
    assert "create_graph made" in error.readers[0]


def test_the_module_is_named() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.act = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(self.act(self.fc(x)), sab.nothing, sab.by_pointer)

    net = nn.Sequential(Block(), Block())
    first = errors_of(lambda: net(torch.randn(2, 4)).square().mean().backward())[0]
    assert re.search(r"test_guard_finds.py:\d+ in 1 \(Block\)", first.line or "")
    assert re.search(r"TanhBackward0, .* test_guard_finds.py:\d+ in 1.act \(Tanh\)", first.readers[0])


def test_a_graph_made_before_the_guard_is_watched_too() -> None:
    loss = Double.apply(leaf().tanh(), sab.nothing, sab.by_pointer).square().mean()
    [error] = errors_of(loss.backward)
    assert error.line is None
    assert error.readers[0].startswith("TanhBackward0, which saved it as result, made before the guard")


def test_the_error_is_raised_and_everything_is_put_back() -> None:
    engine_run = torch.autograd.graph._engine_run_backward
    h = leaf().tanh()
    y = Double.apply(h, sab.nothing, sab.by_pointer)
    with pytest.raises(tb.OverwriteError, match="DoubleBackward overwrote its saved_tensors"), tb.guard() as g:
        y.square().mean().backward()
    assert len(g.errors) == 1
    assert torch.autograd.graph._engine_run_backward is engine_run
    assert torch.autograd._engine_run_backward is engine_run  # type: ignore[attr-defined]
    assert "apply" not in vars(y.grad_fn)
    assert isinstance(g.errors[0], RuntimeError)
    y2 = Double.apply(leaf())
    y2.square().mean().backward()


def test_several_errors_in_one_backward_are_collected() -> None:
    def step() -> None:
        h = leaf()
        for _ in range(3):
            h = Double.apply(h.tanh(), sab.nothing, sab.by_pointer)
        h.square().mean().backward()

    assert len(errors_of(step)) == 3


def test_bf16_and_strided_and_complex() -> None:
    for dtype in (torch.bfloat16, torch.complex64, torch.float64):
        x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
        [error] = errors_of(lambda: _strided(x))  # noqa: B023
        assert "TanhBackward0" in error.readers[0]


def _strided(x: torch.Tensor) -> None:
    h = x.tanh()[:, 1::2]
    y = Double.apply(h, sab.nothing, lambda t: t.data.mul_(2))
    y.abs().mean().backward()
