"""What may come between a backward and `.grad`: hooks, checkpoints, frozen or unused parameters, errors, the user."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from grad_twins import assert_same, backward_both, in_its_slice, twins
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import takeback
from takeback.errors import GradBufferError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


X = torch.linspace(-1, 1, 12).view(3, 4)


def loss(m: nn.Module) -> torch.Tensor:
    return m(X).square().sum()


def test_a_tensor_hook_sees_and_changes_the_gradient() -> None:
    model, buf, eager = twins(net())
    seen: dict[nn.Module, list[torch.Tensor]] = {model: [], eager: []}
    handles = []
    for m in (model, eager):
        for p in m[2].parameters():
            handles.append(p.register_hook(lambda g, m=m: seen[m].append(g.clone())))
            handles.append(p.register_hook(lambda g: g * 2))
    for _ in range(2):
        backward_both(model, eager, loss)
        assert_same(model, buf, eager)
    assert set(buf.reasons) == {"2.weight", "2.bias"}
    assert buf.reasons["2.weight"] == "a hook on the parameter must see the gradient"
    by_size: Callable[[torch.Tensor], int] = torch.Tensor.numel  # which parameter is first is the engine's affair
    for ours, theirs in zip(sorted(seen[model], key=by_size), sorted(seen[eager], key=by_size), strict=True):
        torch.testing.assert_close(ours, theirs)
    for handle in handles:
        handle.remove()
    for m in (model, eager):
        m.zero_grad()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager, exact=["2.weight"])
    assert (buf.copies, dict(buf.reasons)) == (0, {})


def test_a_hook_added_between_forward_and_backward_is_called() -> None:
    model, buf, eager = twins(net())
    losses = [loss(m) for m in (model, eager)]
    for m in (model, eager):
        m[0].weight.register_hook(lambda g: -g)
    for each in losses:
        each.backward()
    assert_same(model, buf, eager)


def test_hooks_of_a_tied_weight_see_the_whole_gradient_once() -> None:
    layer = nn.Linear(4, 4)
    model, buf, eager = twins(nn.Sequential(layer, nn.Tanh(), layer))
    seen: list[list[torch.Tensor]] = [[], []]
    for m, into in zip((model, eager), seen, strict=True):
        m[0].weight.register_hook(lambda g, into=into: into.append(g.clone()))
    backward_both(model, eager, loss)
    assert [len(s) for s in seen] == [1, 1]
    torch.testing.assert_close(seen[0][0], seen[1][0])
    assert_same(model, buf, eager)


def test_multi_grad_hooks_are_called_with_gradients() -> None:
    model, _, eager = twins(net())
    seen: list[list[torch.Tensor | None]] = [[], []]
    handles = [
        register_multi_grad_hook(list(m.parameters()), lambda grads, into=into: into.extend(grads))
        for m, into in zip((model, eager), seen, strict=True)
    ]
    backward_both(model, eager, loss)
    assert len(seen[0]) == len(seen[1]) == 6
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("step", [False, True])
def test_post_accumulate_hooks_are_called_once_with_the_gradient(step: bool) -> None:
    """With `step`: the optimizer in backward, which updates the parameter and lets the gradient go."""
    model, buf, eager = twins(net())
    calls: dict[nn.Module, list[torch.Tensor]] = {model: [], eager: []}
    handles = []

    def hook(m: nn.Module) -> Callable[[torch.Tensor], None]:
        def called(p: torch.Tensor) -> None:
            assert p.grad is not None
            calls[m].append(p.grad.clone())
            if step:
                with torch.no_grad():
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None

        return called

    for m in (model, eager):
        handles += [p.register_post_accumulate_grad_hook(hook(m)) for p in m.parameters()]
    for _ in range(2):
        backward_both(model, eager, loss)
        assert_same(model, buf, eager)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(calls[model]) == len(calls[eager]) == 12
    if not step:
        assert buf.reasons["0.bias"] == "a post-accumulate hook on the parameter must be called"
    for handle in handles:
        handle.remove()
    model.zero_grad()
    loss(model).backward()
    assert buf.copies == 0


def test_module_hooks_see_the_same_gradients() -> None:
    model, buf, eager = twins(net())
    seen: dict[nn.Module, list[torch.Tensor]] = {model: [], eager: []}
    for m in (model, eager):
        for layer in m:
            layer.register_full_backward_hook(
                lambda _, dx, dy, m=m: seen[m].extend(t for t in (*dx, *dy) if t is not None)
            )
        m[2].register_full_backward_pre_hook(lambda _, dy: (dy[0] * 3,))
        m[4].register_forward_hook(lambda _, args, y: y * 2)
        m[0].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    for _ in range(2):
        backward_both(model, eager, lambda m: m(X.clone().requires_grad_()).square().sum())
        assert_same(model, buf, eager)
    assert len(seen[model]) == len(seen[eager]) > 10
    for ours, theirs in zip(seen[model], seen[eager], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert buf.copies == 0


def test_saved_tensor_hooks_are_honoured() -> None:
    model, buf, eager = twins(nn.Sequential(net(), nn.Unflatten(1, (2, 1)), nn.Conv1d(2, 3, 1)))
    for _ in range(2):
        for m in (model, eager):
            with save_on_cpu():
                result = loss(m)
            result.backward()
        assert_same(model, buf, eager)
    packed: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda t: (packed.append(t), t.clone())[1], lambda t: t):
        result = loss(model)
    result.backward()
    loss(eager).backward()
    assert packed
    assert_same(model, buf, eager)
    assert buf.copies == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_checkpointed_layers_are_right_without_a_copy(use_reentrant: bool, inner: bool) -> None:
    model, buf, eager = twins(net())

    def run(m: nn.Module) -> torch.Tensor:
        x = X.clone().requires_grad_()

        def middle(y: torch.Tensor) -> torch.Tensor:
            return checkpoint(m[2], m[1](y), use_reentrant=use_reentrant) if inner else m[2](m[1](y))

        y = checkpoint(middle, m[0](x), use_reentrant=use_reentrant)
        return checkpoint(m[4], m[3](y), use_reentrant=use_reentrant).square().sum()

    for _ in range(3):
        backward_both(model, eager, run)
        assert_same(model, buf, eager)
    assert buf.copies == 0


def test_parameters_frozen_before_are_left_out_and_may_thaw() -> None:
    source = net()
    source[2].requires_grad_(False)
    source[0].weight.requires_grad_(False)
    model, buf, eager = twins(source)
    assert [s.name for s in buf.slots] == ["0.bias", "4.weight", "4.bias"]
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    assert buf.copies == 0
    for m in (model, eager):
        m.requires_grad_(True)
    for _ in range(2):
        backward_both(model, eager, loss)
        assert_same(model, buf, eager)
    assert model[2].weight.grad is not None


def test_parameters_frozen_afterwards_keep_their_gradient_until_it_is_dropped() -> None:
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    for m in (model, eager):
        m[2].weight.requires_grad_(False)
        m[0].bias.requires_grad_(False)
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    for m in (model, eager):
        m.zero_grad()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    assert float(buf.norm()) == pytest.approx(float(norm(eager)))
    for m in (model, eager):
        m.requires_grad_(True)
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    assert buf.copies == 0


def norm(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("zero", ["none", "zero", "buffer", "buffer then none", "in place then none"])
def test_a_parameter_unused_in_a_step_does_not_count(zero: str) -> None:
    model, buf, eager = twins(net())

    def clear(m: nn.Module) -> None:
        if zero.startswith("buffer") and m is model:
            buf.zero_()
        elif zero == "none":
            m.zero_grad()
        else:
            m.zero_grad(set_to_none=False)

    def short(m: nn.Module) -> torch.Tensor:
        return m[1](m[0](X)).square().sum()

    for run in (loss, short, loss, short):
        backward_both(model, eager, run)
        assert_same(model, buf, eager)
        assert float(buf.norm()) == pytest.approx(float(norm(eager)), rel=1e-5)
        model[4].weight.grad is None or model[4].weight.grad.fill_(torch.inf)
        eager[4].weight.grad is None or eager[4].weight.grad.fill_(torch.inf)
        for m in (model, eager):
            clear(m)
        if zero.endswith("then none"):
            backward_both(model, eager, loss)
            if zero.startswith("in place"):
                for m in (model, eager):
                    m[4].weight.grad.fill_(torch.inf)
            for m in (model, eager):
                m.zero_grad()
        assert bool(buf.isfinite())
        assert float(buf.norm()) == 0.0
    backward_both(model, eager, short)
    total = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
    torch.testing.assert_close(buf.clip_(0.1), total)
    assert_same(model, buf, eager)


def test_a_gradient_assigned_from_outside_is_taken_in() -> None:
    model, buf, eager = twins(net())
    mine = torch.arange(24.0).view(6, 4)
    for m in (model, eager):
        m[0].weight.grad = mine.clone()
    assert float(buf.norm()) == pytest.approx(float(mine.norm()))
    assert in_its_slice(buf, model[0].weight)
    assert buf.reasons == {"0.weight": ".grad was assigned from outside"}
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)


def test_a_backward_adds_to_a_gradient_assigned_from_outside() -> None:
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    for m in (model, eager):
        m[0].weight.grad = torch.ones(6, 4)
        m[2].weight.grad = m[2].weight.grad.detach()  # another tensor, the same bytes
        m[4].weight.grad = m[4].weight.grad.clone() * 2
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    assert set(buf.reasons) == {"0.weight", "4.weight"}
    assert buf.reasons["0.weight"] == ".grad was assigned from outside"


@pytest.mark.parametrize("then", ["norm", "backward", "zero"])
def test_a_gradient_whose_data_was_replaced_is_the_one_that_counts(then: str) -> None:
    """`p.grad.data = ...` moves the very tensor that was the slice to other memory."""
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    for m in (model, eager):
        for p in m.parameters():
            p.grad.data = p.grad.data.clamp(-0.01, 0.01)
    if then == "backward":
        backward_both(model, eager, loss)
    if then == "zero":
        buf.zero_()
        eager.zero_grad(set_to_none=False)
    assert float(buf.norm()) == pytest.approx(float(norm(eager)), rel=1e-5)
    assert_same(model, buf, eager)


def test_gradients_changed_in_place_are_the_buffers() -> None:
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    for m in (model, eager):
        torch.nn.utils.clip_grad_value_(m.parameters(), 0.05)
        m[0].weight.grad.mul_(2)
        m[2].bias.grad.data.add_(1.0)
    assert_same(model, buf, eager)
    assert float(buf.norm()) == pytest.approx(float(norm(eager)))


def test_an_exception_in_a_backward_does_not_spoil_the_next() -> None:
    class Bang(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("bang")

    model, buf, eager = twins(net())
    handles = [m[4].bias.register_hook(lambda g: g) for m in (model, eager)]
    for m in (model, eager):
        with pytest.raises(ArithmeticError, match="bang"):
            m[2:](Bang.apply(m[:2](X))).square().sum().backward()
    assert_same(model, buf, eager)  # as far as it came
    for handle in handles:
        handle.remove()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    for m in (model, eager):
        m.zero_grad()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    assert buf.copies == 0
    F.linear(torch.ones(2), model[4].bias[None]).sum().backward()
    assert list(buf.reasons) == ["4.bias"]
    assert "hook" not in buf.reasons["4.bias"]


def test_a_hook_that_raises_does_not_spoil_the_next_backward() -> None:
    model, buf, eager = twins(net())

    def bang(_: torch.Tensor) -> None:
        raise ArithmeticError("bang")

    handles = [m[2].weight.register_hook(bang) for m in (model, eager)]
    for m in (model, eager):
        with pytest.raises(ArithmeticError):
            loss(m).backward()
    for handle in handles:
        handle.remove()
    for m in (model, eager):
        m.zero_grad()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    assert buf.copies == 0


def test_anomaly_mode_works() -> None:
    model, buf, eager = twins(net())
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        backward_both(model, eager, loss)
    assert_same(model, buf, eager)


def test_the_old_way_to_zero_a_gradient_works() -> None:
    """`p.grad.detach_()` then `p.grad.zero_()`, as torch's own zero_grad did once and many copies of it still do."""
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    for m in (model, eager):
        for p in m.parameters():
            p.grad.detach_()
            p.grad.zero_()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)


def test_a_saved_gradient_is_not_called_changed_when_another_is_written() -> None:
    """A learned learning rate saves `.grad` in a graph; slices must not share one version counter."""
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    got = []
    for m in (model, eager):
        rate = torch.tensor(0.1, requires_grad=True)
        moved = m[0].bias.detach() - rate * m[0].bias.grad
        outer = F.linear(moved, m[2].weight).square().sum()
        outer.backward()
        got.append(rate.grad)
    torch.testing.assert_close(*got)
    assert_same(model, buf, eager)


def test_a_sparse_assigned_gradient_is_refused() -> None:
    model, buf, _ = twins(net())
    model[0].weight.grad = torch.eye(6, 4).to_sparse()
    with pytest.raises(GradBufferError, match=r"0\.weight is sparse"):
        buf.norm()


def test_gradients_that_exist_already_are_taken_into_the_buffer() -> None:
    model, eager = net(), net()
    backward_both(model, eager, loss)
    buf = takeback.GradBuffer(model)
    assert_same(model, buf, eager, exact=[n for n, _ in model.named_parameters()])
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_with_a_history_are_taken_without_it() -> None:
    model, eager = net(), net()
    backward_both(model, eager, loss, create_graph=True)
    buf = takeback.GradBuffer(model)
    assert not buf.flat.requires_grad
    for m in (model, eager):
        m.zero_grad()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)


@pytest.mark.parametrize("how", ["thawed", "assigned"])
def test_a_gradient_without_a_slice_is_not_overlooked(how: str) -> None:
    """A norm without it would be too small, and an average over a group would leave it out."""
    model = net()
    if how == "thawed":
        model[0].weight.requires_grad_(False)
    buf = takeback.GradBuffer(model)
    if how == "thawed":
        model[0].weight.requires_grad_(True)
    else:
        model.load_state_dict(model.state_dict(), assign=True)
    loss(model).backward()
    with pytest.raises(takeback.GradBufferError, match="has a gradient but no slice"):
        buf.norm()


def test_a_gradient_with_a_history_keeps_it() -> None:
    model, buf, eager = twins(net())
    for m in (model, eager):
        loss(m).backward(create_graph=True)
    weight = model[0].weight
    torch.testing.assert_close(buf.norm(), torch.nn.utils.get_total_norm([p.grad for p in eager.parameters()]).detach())
    assert weight.grad is not None
    assert weight.grad.requires_grad
