"""What fine-tuning brings along: quantised weights under adapters, packed texts, sharded models. What works has eager's
bits; what does not is refused with the way out, before anything has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import mlp, sgd
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_map
from train_twice import Training, assert_equal_trainings, batch, simple

import takeback as tb
import texts_in_a_row
from takeback.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


# -- quantised weights -------------------------------------------------------------------------------------------------


class Dequantised(torch.autograd.Function):
    """x @ (codes * scales).T, whose backward makes the weight again, as QLoRA's layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return x @ (codes.to(x.dtype) * scales).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        codes, scales = ctx.saved_tensors
        return grad @ (codes.to(grad.dtype) * scales), None, None


class QuantisedLoRA(nn.Module):
    """int8 weights, as a buffer or as a frozen parameter, with an adapter that is trained."""

    def __init__(self, features: int, outputs: int, *, as_parameter: bool) -> None:
        super().__init__()
        weight = torch.randn(outputs, features)
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8)
        if as_parameter:
            self.codes = nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.down, self.up = nn.Linear(features, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Dequantised.apply(x, self.codes, self.scales) + self.up(self.down(x))


@pytest.mark.parametrize("as_parameter", [False, True])
def test_quantised_weights_under_adapters(as_parameter: bool) -> None:
    def make(compiled: bool) -> Training:
        layers = (QuantisedLoRA(6, 16, as_parameter=as_parameter), QuantisedLoRA(16, 4, as_parameter=as_parameter))
        model = nn.Sequential(layers[0], nn.GELU(), layers[1])
        trained = [p for p in model.parameters() if p.requires_grad]
        return simple(model, cross_entropy, torch.optim.AdamW(trained, lr=1e-2), compiled)

    assert_equal_trainings(make)


class Scales:
    def __init__(self, scales: Tensor) -> None:
        self.scales, self.factor = scales, 1.0


class Packed(nn.Parameter):
    """As bitsandbytes packs a weight: a class that says something to Python alone, whose views are of it too."""

    def __new__(cls, codes: Tensor, state: Scales | None = None, *, requires_grad: bool = False) -> Packed:
        self = torch.Tensor._make_subclass(cls, codes, requires_grad)
        self.state = state
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class PackedLoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(4, 6)
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.weight = Packed((weight / scales).round().to(torch.int8).view(-1, 1), Scales(scales))
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.state
        return Dequantised.apply(x, self.weight.view(4, 6), state.scales) * state.factor + self.up(x)


def test_a_frozen_parameter_of_a_class_of_its_own_is_a_parameter() -> None:
    """And what belongs to it is read as it is: other scales, another factor, another weight."""

    def make() -> tuple[PackedLoRA, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = PackedLoRA()
        return model, torch.optim.AdamW(model.up.parameters(), lr=1e-2)

    (eager, theirs), (model, ours) = make(), make()
    step = tb.compile_step(model, cross_entropy, ours, memory="keep")

    def change_(model: PackedLoRA, what: int) -> None:
        state = model.weight.state
        assert state is not None
        if what == 1:
            model.weight.state = Scales(state.scales * 2)
        elif what == 2:
            state.factor = 3.0
        elif what == 3:
            model.weight.data.add_(1)
        elif what == 4:
            model.weight = Packed(model.weight.data + 1, state)

    for what in range(5):
        for each in (eager, model):
            change_(each, what)
        for i in range(2):
            theirs.zero_grad()
            loss = cross_entropy(eager, *batch(i))
            loss.backward()
            theirs.step()
            assert torch.equal(step(*batch(i)), loss), what
    assert torch.equal(eager.up.weight, model.up.weight)
    assert step.counts.plain == 0
    assert step._replays > 4


def test_a_trained_parameter_of_a_class_of_its_own_is_refused() -> None:
    model = mlp()
    model[0].weight = Packed(torch.ones(16, 6), requires_grad=True)
    step = tb.compile_step(model, cross_entropy, sgd(model), memory="keep")
    with pytest.raises(CaptureError, match=r"a tensor subclass \(.*Packed\) takes part in the step"):
        step(*batch(0))


class Int8(torch.Tensor):
    """A weight that is a tensor subclass: codes and scales that say they are float32."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Int8:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Int8(args[0].codes, args[0].scales)
        plain = lambda t: t.codes.float() * t.scales if isinstance(t, Int8) else t  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def test_weights_that_are_a_tensor_subclass_are_refused() -> None:
    model = mlp()
    weight = Int8(torch.ones(16, 6, dtype=torch.int8), torch.ones(16, 1))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = tb.compile_step(model, cross_entropy, optimizer, memory="keep")
    with pytest.raises(CaptureError, match=r"a tensor subclass \(.*Int8\) takes part in the step"):
        step(*batch(0))


# -- packed texts ------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """One attention layer over a row of several texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)

    def split(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(tokens) + places[:, None].float().sin()
        return tuple(t[None, None] for t in self.qkv(x).chunk(3, -1))


def by_mask(model: Reader, tokens: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """position_ids and cumulative lengths as tensors: whatever the lengths, it is one program."""
    rows = torch.arange(len(tokens))
    text = torch.bucketize(rows, ends, right=True)
    mask = (text[:, None] == text) & (rows[:, None] >= rows)
    out = F.scaled_dot_product_attention(*model.split(tokens, places), attn_mask=mask)[0, 0]
    return F.cross_entropy(model.out(out)[:-1], tokens[1:])


def by_loop(model: Reader, tokens: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Each text by itself: lengths are read into Python, and each set of lengths is a program."""
    q, k, v = model.split(tokens, places)
    outs, start = [], 0
    for end in ends.tolist():
        part = (t[:, :, start:end] for t in (q, k, v))
        outs.append(F.scaled_dot_product_attention(*part, is_causal=True)[0, 0])
        start = end
    return F.cross_entropy(model.out(torch.cat(outs))[:-1], tokens[1:])


LENGTHS = ((5, 7, 4), (8, 4, 4), (5, 7, 4), (8, 4, 4))


def packed(i: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(i)
    lengths = LENGTHS[i % len(LENGTHS)]
    places = torch.cat([torch.arange(n) for n in lengths])
    return torch.randint(50, (16,), generator=g), places, torch.tensor(lengths).cumsum(0)


@pytest.mark.parametrize(("loss", "plans"), [(by_mask, 1), (by_loop, 2)])
def test_packed_texts_of_varying_lengths(loss: Callable[..., Tensor], plans: int) -> None:
    def make(compiled: bool) -> Training:
        model = Reader()
        return simple(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), compiled, draw=packed)

    done = assert_equal_trainings(make, steps=8)
    assert len(done.compiled[0]._plans) == plans


NEVER_ALIKE = tuple((16 - n, n) for n in range(1, 5))
WITHOUT_THE_LAST = ((5, 7, 4, 0), (8, 8, 0, 0), (16, 0, 0, 0), (4, 4, 4, 4))


@pytest.mark.parametrize(
    ("lengths", "longest", "plans"),
    [
        pytest.param(texts_in_a_row.LENGTHS, None, 2, id="one for each longest text"),
        pytest.param(texts_in_a_row.LENGTHS, texts_in_a_row.LONGEST, 1, id="one for all"),
        pytest.param(WITHOUT_THE_LAST, 16, 1, id="one for all, and empty texts at the end"),
    ],
)
@pytest.mark.parametrize("memory", ["keep", "min"])
def test_attention_over_texts_in_one_row_has_eagers_bits(
    lengths: tuple[tuple[int, ...], ...], longest: int | None, plans: int, memory: str
) -> None:
    """torch's varlen_attn, with a kernel for the CPU: cumulative lengths are a tensor of the batch, the longest a
    number."""

    def make(compiled: bool) -> Training:
        model = texts_in_a_row.Reader()
        draw = functools.partial(texts_in_a_row.row, lengths=lengths, longest=longest)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return simple(model, texts_in_a_row.loss_of, optimizer, compiled, draw=draw, memory=memory)

    with texts_in_a_row.kernels_for_the_cpu():
        done = assert_equal_trainings(make, steps=8)
        assert len(done.compiled[0]._plans) == plans
        assert "torch_attn." in str(done.compiled[0].report())


def test_a_longest_text_of_another_length_in_each_step_is_told_of() -> None:
    model = texts_in_a_row.Reader()
    with texts_in_a_row.kernels_for_the_cpu():
        step = tb.compile_step(
            model, texts_in_a_row.loss_of, torch.optim.SGD(model.parameters(), lr=1e-2), memory="keep"
        )
        for i in range(3):
            step(*texts_in_a_row.row(i, NEVER_ALIKE))
        with pytest.warns(RuntimeWarning, match=r"4 plans in a row: the argument number 4: 13 is now 12\."):
            step(*texts_in_a_row.row(3, NEVER_ALIKE))


def test_nested_tensors_are_refused_in_the_batch_and_inside() -> None:
    model = Reader()
    rows = [torch.randint(50, (4,)), torch.randint(50, (7,))]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    step = tb.compile_step(model, lambda m, t: m.out(m.embed(t)).values().mean(), sgd(model))
    with pytest.raises(CaptureError, match=r"holds a nested tensor.*t\.values\(\) and t\.offsets\(\).*tb\.bucket"):
        step(nested)

    def inside(model: Reader, values: Tensor, offsets: Tensor) -> Tensor:
        return model.out(torch.nested.nested_tensor_from_jagged(model.embed(values), offsets)).values().mean()

    step = tb.compile_step(model, inside, sgd(model))
    with pytest.raises(CaptureError, match=r"a tensor subclass \(.*NestedTensor\) takes part in the step"):
        step(torch.cat(rows), torch.tensor([0, 4, 11]))


# -- sharded models ----------------------------------------------------------------------------------------------------


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fully_shard", "FullyShardedDataParallel"])
def test_sharded_models_are_refused(kind: str) -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    model: Any = nn.Sequential(mlp())
    if kind == "fully_shard":
        fsdp.fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    else:
        model[0] = fsdp.FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    with pytest.raises(
        CaptureError, match=r"the model is sharded \(.*pass the plain one and the process group as group="
    ):
        tb.compile_step(model, cross_entropy, sgd(model))
