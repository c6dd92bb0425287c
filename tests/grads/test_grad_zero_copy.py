"""The gradients that are computed straight into their slices: no copy is counted, and the profiler sees none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grad_twins import assert_same, backward_both, big_copies, twins
from torch import nn

import takeback

Make = Callable[[], tuple[nn.Module, torch.Tensor]]


def _conv(dims: int, *, last: bool, contiguous_input: bool, stride: int = 1, batch: int = 3) -> tuple[nn.Module, Any]:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](17, 29, 1, stride=stride)
    x = torch.randn(batch, 17, *(5, 4, 3)[:dims])
    memory = {1: None, 2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    if last and memory is not None:
        layer = layer.to(memory_format=memory)
    if not contiguous_input:
        x = x.contiguous(memory_format=memory) if memory is not None else x.transpose(1, 2).contiguous().transpose(1, 2)
    return layer, x


CASES: dict[str, Make] = {
    "linear": lambda: (nn.Linear(17, 29), torch.randn(5, 17)),
    "linear, one row": lambda: (nn.Linear(17, 29), torch.randn(17)),
    "linear, 3-D": lambda: (nn.Linear(17, 29), torch.randn(3, 5, 17)),
    "linear, 4-D": lambda: (nn.Linear(17, 29), torch.randn(2, 3, 5, 17)),
    "linear, no bias": lambda: (nn.Linear(17, 29, bias=False), torch.randn(3, 5, 17)),
    "linear, transposed input": lambda: (nn.Linear(17, 29), torch.randn(17, 5).t()),
    "linear, input with gaps": lambda: (nn.Linear(17, 29), torch.randn(3, 10, 34)[:, ::2, ::2]),
    "linear, batch first of a sequence": lambda: (nn.Linear(17, 29), torch.randn(3, 5, 17).transpose(0, 1)),
    "linear, expanded input": lambda: (nn.Linear(17, 29), torch.randn(1, 17).expand(5, 17)),
    "linear, empty batch": lambda: (nn.Linear(17, 29), torch.randn(0, 17)),
    "linear, float64": lambda: (nn.Linear(17, 29, dtype=torch.float64), torch.randn(5, 17, dtype=torch.float64)),
    "embedding": lambda: (nn.Embedding(23, 11), torch.randint(23, (4, 9))),
    "embedding, repeated": lambda: (nn.Embedding(23, 11), torch.tensor([3, 3, 3, 0, 3])),
    "embedding, padding": lambda: (nn.Embedding(23, 11, padding_idx=2), torch.tensor([[1, 2, 2], [2, 3, 1]])),
    "embedding, last is padding": lambda: (nn.Embedding(23, 11, padding_idx=-1), torch.tensor([22, 1, 22, 1])),
    "embedding, int32": lambda: (nn.Embedding(23, 11), torch.randint(23, (4, 9), dtype=torch.int32)),
    "embedding, one index": lambda: (nn.Embedding(23, 11), torch.tensor(4)),
    "embedding, no index": lambda: (nn.Embedding(23, 11), torch.zeros(0, dtype=torch.int64)),
}
for _dims in (1, 2, 3):
    for _last in (False, True):
        for _contiguous in (False, True):
            for _stride in (1, 2):
                _name = f"conv{_dims}d, weight {_last=}, {_contiguous=}, {_stride=}"
                CASES[_name] = lambda d=_dims, w=_last, c=_contiguous, s=_stride: _conv(
                    d, last=w, contiguous_input=c, stride=s
                )
    CASES[f"conv{_dims}d, empty batch"] = lambda d=_dims: _conv(d, last=False, contiguous_input=True, batch=0)


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return CASES[request.param]()


def loss_of(x: torch.Tensor, seed: int = 1) -> Callable[[nn.Module], torch.Tensor]:
    def loss(m: nn.Module) -> torch.Tensor:
        y = m(x)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)
        return (y * weights).sum()

    return loss


def test_gradient_is_eagers_without_a_copy_and_adds_up(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, buf, eager = twins(case[0])
    for turn in range(3):
        loss = loss_of(case[1], turn)
        backward_both(model, eager, loss)
        same_kernel = turn == 0 and isinstance(model, nn.Linear | nn.Embedding)
        assert_same(model, buf, eager, exact=["weight"] if same_kernel else [], rtol=1e-4, atol=1e-5)
        assert (buf.copies, dict(buf.reasons)) == (0, {})


def test_output_and_input_gradient_have_eagers_bits(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, _, eager = twins(case[0])
    x = case[1]
    ours, theirs = x.detach().clone(), x.detach().clone()
    if x.is_floating_point():
        ours.requires_grad_()
        theirs.requires_grad_()
    y, z = model(ours), eager(theirs)
    assert torch.equal(y, z)
    (y * y.detach()).sum().backward()
    (z * z.detach()).sum().backward()
    if x.is_floating_point():
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_profiler_sees_no_copy_of_a_gradient(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, buf, _ = twins(case[0])
    sizes = {p.numel() for p in model.parameters() if p.dim() > 1}
    for turn in range(2):  # written, then added
        loss = loss_of(case[1], turn)(model)
        assert big_copies(loss.backward, sizes) == []
        assert buf.copies == 0


def test_the_profiler_does_see_the_copy_of_a_packed_functional_gradient() -> None:
    model, buf, _ = twins(nn.Linear(17, 29))
    loss = F.linear(torch.randn(5, 17), model.weight).square().sum()
    assert big_copies(loss.backward, {17 * 29})
    assert buf.copies == 1


@pytest.mark.parametrize("by", ["model-none", "model-zero", "optimizer-none", "optimizer-zero", "buffer", "nothing"])
@pytest.mark.parametrize("then", ["model-none", "model-zero", "buffer"])
def test_gradients_start_anew_however_they_were_zeroed(by: str, then: str) -> None:
    """FairScale 354: flat buffers broken by zero_grad(set_to_none=True)."""
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 2)))
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(eager.parameters(), lr=0.01)
    where = torch.tensor([1, 2, 2])

    def zero(how: str) -> None:
        for m, opt in ((model, ours), (eager, theirs)):
            if how.startswith("model"):
                m.zero_grad(set_to_none=how.endswith("none"))
            elif how.startswith("optimizer"):
                opt.zero_grad(set_to_none=how.endswith("none"))
            elif how == "buffer" and m is model:
                assert buf.zero_() is buf
            elif how == "buffer":
                opt.zero_grad(set_to_none=False)

    for how in (by, then, by):
        for _ in range(2):
            backward_both(model, eager, lambda m: m(where).square().sum())
            assert_same(model, buf, eager, rtol=1e-3, atol=1e-4)
            assert not {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"} & set(buf.reasons)
        ours.step()
        theirs.step()
        zero(how)
        assert float(buf.norm()) == pytest.approx(float(_norm(eager)), rel=1e-5)


def _norm(model: nn.Module) -> torch.Tensor:
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([*grads, torch.zeros(1)]).norm()


def test_buffer_zero_gives_every_parameter_a_zero_slice() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    buf = takeback.GradBuffer(model)
    model[0](torch.randn(2, 3)).sum().backward()
    buf.zero_()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert buf.copies == 0


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"padding": 1}, {"padding": "same"}, {"padding_mode": "reflect"}]
)
def test_other_convolutions_are_right_and_say_why_they_are_copied(kernel: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if options.get("padding_mode"):
        options = options | {"padding": 1}
    model, buf, eager = twins(nn.Conv2d(4, 6, kernel, **options))
    x = torch.randn(2, 4, 6, 6)
    for _ in range(2):
        backward_both(model, eager, lambda m: m(x).square().sum())
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
    if kernel == 3 or options:
        assert buf.reasons["weight"]
        assert buf.copies >= 1
    else:
        assert buf.copies == 0


def test_dilation_and_uneven_strides_of_a_one_by_one_convolution() -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Conv2d(4, 6, 1, stride=(3, 2), dilation=2))
    x = torch.randn(2, 4, 8, 7)
    for _ in range(2):
        backward_both(model, eager, lambda m: m(x).square().sum())
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
    assert buf.copies == 0


def test_unbatched_convolution_is_right() -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 3, 3)))
    backward_both(model, eager, lambda m: m(torch.ones(4, 6, 6)).square().sum())
    assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_with_rules_of_their_own_are_copied_and_right(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Embedding(5, 4, **options))
    where = torch.tensor([1, 1, 2, 4])
    backward_both(model, eager, lambda m: m(where).square().sum())
    assert_same(model, buf, eager)
    assert "max_norm or scale_grad_by_freq" in buf.reasons["weight"]


@pytest.mark.parametrize(
    "make",
    [CASES["linear, 3-D"], CASES["linear"], CASES["embedding"], lambda: _conv(2, last=False, contiguous_input=True)],
)
def test_output_may_be_overwritten_in_place(make: Make) -> None:
    """nn.ReLU(inplace=True) right after a layer, as thousands of models have it."""
    torch.manual_seed(0)
    layer, x = make()
    model, buf, eager = twins(nn.Sequential(layer, nn.ReLU(inplace=True)))
    backward_both(model, eager, lambda m: m(x).sum())
    assert_same(model, buf, eager)


@pytest.mark.parametrize(
    "make", [CASES["linear, 3-D"], CASES["embedding"], lambda: _conv(2, last=False, contiguous_input=True)]
)
def test_input_may_be_given_by_name(make: Make) -> None:
    torch.manual_seed(0)
    layer, x = make()
    model, buf, eager = twins(layer)
    backward_both(model, eager, lambda m: m(input=x).square().sum())
    assert_same(model, buf, eager)


COMPLEX: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5, dtype=torch.complex64), (3, 6)),
    "conv 1×1": (lambda: nn.Conv2d(6, 5, 1, dtype=torch.complex64), (2, 6, 3, 3)),
    "conv 3×3": (lambda: nn.Conv2d(6, 5, 3, dtype=torch.complex64), (2, 6, 4, 4)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_layers_have_eagers_gradient(name: str) -> None:
    torch.manual_seed(0)
    make, shape = COMPLEX[name]
    model, buf, eager = twins(make())
    x = torch.randn(shape, dtype=torch.complex64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):
        model(ours).abs().square().sum().backward()
        eager(theirs).abs().square().sum().backward()
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("make", [CASES["linear"], lambda: _conv(2, last=False, contiguous_input=True)])
def test_weight_may_change_before_backward_where_eager_does_not_need_it(make: Make) -> None:
    """The input wants no gradient, so eager's backward does not read the weight."""
    torch.manual_seed(0)
    layer, x = make()
    model, buf, eager = twins(layer)
    for m in (model, eager):
        loss = loss_of(x)(m)
        with torch.no_grad():
            m.weight.mul_(2.0)
        if isinstance(m, nn.Linear):
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    if isinstance(model, nn.Linear):
        assert_same(model, buf, eager)


def test_weight_changed_before_backward_is_refused_where_eager_refuses() -> None:
    model, _, eager = twins(nn.Linear(4, 3))
    for m in (model, eager):
        loss = m(torch.randn(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            m.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
