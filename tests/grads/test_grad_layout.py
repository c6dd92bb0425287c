"""Where the slices lie, and which arguments are refused."""

from __future__ import annotations

import re

import pytest
import torch
from grad_twins import assert_same, backward_both, in_its_slice, twins
from torch import nn

import takeback
from takeback.errors import GradBufferError, OptionError
from takeback.flat import ALIGNMENT_BYTES


class Mixed(nn.Module):
    """A float32 layer, a float64 one and a bfloat16 parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(5, 7)
        self.wide = nn.Linear(7, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.wide(self.single(x).double()).float() * self.scale.float())


def odd_net() -> nn.Sequential:
    """Sizes that fill no cache line, so that every slice but the last is followed by padding."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 33, bias=False), nn.Linear(33, 3))


def test_slices_follow_each_other_in_parameter_order_at_aligned_offsets() -> None:
    model = odd_net()
    buf = takeback.GradBuffer(model)
    model(torch.randn(4, 5)).sum().backward()
    assert [s.name for s in buf.slots] == [n for n, _ in model.named_parameters()]
    ends = [s.offset + s.numel for s in buf.slots]
    assert all(end <= s.offset for end, s in zip(ends, buf.slots[1:], strict=False))
    for slot, p in zip(buf.slots, model.parameters(), strict=True):
        assert slot.offset * 4 % ALIGNMENT_BYTES == 0
        assert p.grad is not None
        assert (p.grad.data_ptr() - buf.flat.data_ptr()) % ALIGNMENT_BYTES == 0
        assert p.grad.data_ptr() % 64 == 0
        assert in_its_slice(buf, p)
    assert ends[-1] <= buf.flat.numel()


def test_slices_do_not_overlap_and_padding_stays_zero() -> None:
    model = odd_net()
    buf = takeback.GradBuffer(model)
    for _ in range(3):
        model(torch.randn(4, 5)).square().sum().backward()
    buf.clip_(0.1)
    count = torch.zeros(buf.flat.numel(), dtype=torch.int32)
    for slot in buf.slots:
        count.as_strided(slot.view.shape, slot.view.stride(), slot.offset).add_(1)
    assert int(count.max()) == 1
    assert not buf.flat[count == 0].any()


def test_writing_the_flat_writes_every_grad() -> None:
    model = odd_net()
    buf = takeback.GradBuffer(model)
    model(torch.randn(4, 5)).sum().backward()
    buf.flat.fill_(3.0)
    assert all(bool((p.grad == 3.0).all()) for p in model.parameters())


def test_each_dtype_has_a_flat_of_its_own() -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(Mixed())
    x = torch.randn(4, 5)
    backward_both(model, eager, lambda m: m(x).square().sum())
    assert_same(model, buf, eager)
    assert [f.dtype for f in buf.flats] == [torch.bfloat16, torch.float32, torch.float64]
    assert [buf.flats[s.flat].dtype for s in buf.slots] == [p.dtype for p in model.parameters()]


def test_flat_is_refused_where_there_are_several() -> None:
    buf = takeback.GradBuffer(Mixed())
    with pytest.raises(GradBufferError, match=r"there are 3 flat buffers .*use \.flats"):
        _ = buf.flat


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_strides_of_a_channels_last_weight_are_kept(dims: int) -> None:
    torch.manual_seed(0)
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](6, 10, 3)
    if dims > 1:
        layer = layer.to(memory_format={2: torch.channels_last, 3: torch.channels_last_3d}[dims])
        assert not layer.weight.is_contiguous()
    model, buf, eager = twins(layer)
    x = torch.randn(2, 6, *[5] * dims)
    for _ in range(2):
        backward_both(model, eager, lambda m: m(x).square().sum())
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)


def test_a_transposed_weight_keeps_its_strides_without_a_copy() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 10)
    layer.weight = nn.Parameter(torch.randn(6, 10).t())
    table = nn.Embedding(9, 6)
    table.weight = nn.Parameter(torch.randn(6, 9).t())
    model, buf, eager = twins(nn.Sequential(table, layer))
    assert model[1].weight.stride() == (1, 10)
    where = torch.tensor([[1, 2, 1], [8, 0, 1]])
    for _ in range(2):
        backward_both(model, eager, lambda m: m(where).square().sum())
        assert_same(model, buf, eager)
        assert buf.copies == 0


def test_scalar_and_empty_parameters_have_slices_too() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.0))
            self.none = nn.Parameter(torch.empty(0, 3))
            self.nothing = nn.Parameter(torch.empty(3, 0))
            self.shift = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.gain + self.shift).sum() + self.none.sum() + self.nothing.sum()

    model, buf, eager = twins(Odd())
    backward_both(model, eager, lambda m: m(torch.ones(4, 3)))
    assert_same(model, buf, eager)
    assert float(buf.norm()) == pytest.approx(float(torch.tensor([12.0, 4.0, 4.0, 4.0]).norm()))


def test_linears_without_inputs_or_outputs_work() -> None:
    layer = nn.Linear(3, 2)
    layer.weight, layer.bias = nn.Parameter(torch.randn(0, 3)), nn.Parameter(torch.randn(0))
    model, buf, eager = twins(nn.Sequential(layer))
    backward_both(model, eager, lambda m: m(torch.randn(4, 3)).sum())
    assert_same(model, buf, eager)


def test_bare_parameters_are_packed_and_say_why_they_are_copied() -> None:
    model = odd_net()
    buf = takeback.GradBuffer(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    assert all(in_its_slice(buf, p) for p in model.parameters())
    assert buf.copies == 5
    assert list(buf.reasons) == [f"parameter {i}" for i in range(5)]
    assert all("pass the model" in why for why in buf.reasons.values())


def test_bare_parameters_may_have_names_and_come_twice() -> None:
    model = odd_net()
    buf = takeback.GradBuffer([*model.named_parameters(), *model.named_parameters()])
    assert [s.name for s in buf.slots] == [n for n, _ in model.named_parameters()]


def test_a_second_buffer_on_a_parameter_is_refused_and_changes_nothing() -> None:
    model = odd_net()
    buf = takeback.GradBuffer(model)
    for again in (model, model[2], [model[0].bias]):
        with pytest.raises(GradBufferError, match=r"is in another GradBuffer already. detach\(\) that one first"):
            takeback.GradBuffer(again)
    model(torch.randn(4, 5)).sum().backward()
    assert buf.copies == 0
    buf.detach()
    takeback.GradBuffer(model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: torch.ones(3, requires_grad=True), r"this is one tensor. Pass \[tensor\]"),
        (lambda: 3, "takes a model or parameters, got a int"),
        (list, "no parameter that requires a gradient"),
        (lambda: nn.ReLU(), "no parameter that requires a gradient"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (lambda: ["weight"], "parameter 0 is a str and no parameter"),
        (lambda: [{"params": []}], "parameter 0 is a dict and no parameter"),
        (lambda: [torch.ones(3, requires_grad=True) * 2], "only leaves have a .grad"),
        (lambda: [("a", torch.ones(2, requires_grad=True) + 1)], "a is a Tensor and no parameter"),
    ],
)
def test_what_is_not_a_model_or_parameters_is_refused(given: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        takeback.GradBuffer(given())  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32", torch.bool])
def test_a_dtype_that_gradients_cannot_have_is_refused(dtype: object) -> None:
    model = odd_net()
    with pytest.raises(OptionError, match=re.escape(f"dtype must be a floating-point dtype or None, got {dtype!r}")):
        takeback.GradBuffer(model, dtype=dtype)  # type: ignore[arg-type]
    assert not any("forward" in vars(m) for m in model.modules())


def test_an_expanded_parameter_is_refused() -> None:
    with pytest.raises(GradBufferError, match="its elements overlap"):
        takeback.GradBuffer([nn.Parameter(torch.ones(3, 1).expand(3, 4))])


def test_a_sparse_embedding_is_refused_and_the_model_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(4, 3, sparse=True))
    with pytest.raises(GradBufferError, match="sparse=True"):
        takeback.GradBuffer(model)
    assert not any("forward" in vars(m) for m in model.modules())
    assert takeback.GradBuffer(model[0]).slots


def test_a_sparse_gradient_that_is_there_already_is_refused_and_the_model_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].weight.grad = torch.eye(2, 4).to_sparse()
    with pytest.raises(GradBufferError, match="is sparse, and a flat buffer is dense"):
        takeback.GradBuffer(model)
    assert not any("forward" in vars(m) for m in model.modules())
    model.zero_grad()
    buf = takeback.GradBuffer(model)
    model(torch.randn(2, 3)).sum().backward()
    assert buf.copies == 0


def test_a_sparse_gradient_in_a_backward_is_refused() -> None:
    table = nn.Parameter(torch.randn(5, 3))
    buf = takeback.GradBuffer([("table", table)])
    loss = nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum()
    with pytest.raises(GradBufferError, match="the gradient of table is sparse"):
        loss.backward()
    assert buf.attached


def test_repr_says_how_much_is_kept() -> None:
    buf = takeback.GradBuffer(odd_net())
    assert repr(buf) == f"GradBuffer(5 parameters, {buf.flat.numel() * 4:,} bytes, 0 copies)"
