"""Modules are recognised by what they compute: look-alikes that compute something else stay, and say why."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.nn import activation_form, conversion, convert, gated_form, norm_form, revert
from takeback.nn.activation_form import ActivationKind
from takeback.nn.gated_form import GatedKind
from takeback.nn.norm_form import RowNormKind

# -- norms of rows -----------------------------------------------------------------------------------------------------


class Rms(nn.Module):
    """One that rounds before it multiplies; others change one thing."""

    def __init__(self, width: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.tiny = eps

    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.gamma * (wide * self.scale(wide)).to(x.dtype)


class PlusOne(Rms):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return ((wide * self.scale(wide)) * (1.0 + self.gamma.float())).type_as(x)


class WideThroughout(Rms):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return (self.gamma.float() * (wide * self.scale(wide))).to(x.dtype)


class Centred(Rms):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() - x.float().mean(-1, keepdim=True)
        return (self.gamma.float() * (wide * self.scale(wide))).to(x.dtype)


class SquaredWeight(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gamma


class Summed(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.tiny)


class EpsOutside(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return 1 / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.tiny)


class OnlyInEval(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if not self.training else super().forward(x) * 2


class OverRows(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True).amax() + self.tiny)


class Narrow(Rms):
    """Computes in the input's dtype: in bfloat16 it is something else."""

    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.bfloat16().pow(2).mean(-1, keepdim=True) + self.tiny)


class WritesItsInput(Rms):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        x.zero_()
        return result


class WithGate(Rms):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x) if gate is None else super().forward(x * F.silu(gate))


class WithoutWeight(nn.Module):
    """As in NanoChat; others change one thing."""

    def __init__(self, width: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.tiny = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)).type_as(x)


class OneWidth(nn.Module):
    """As in Olmo: its epsilon is written into the forward, and it takes no other width."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.shape = (width,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.shape, None, None, eps=2e-5).to(x.dtype)


class LiteralEps(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + 1e-8).sqrt() * (1 + self.gamma.float())).to(x.dtype)


class EpsOfTheArithmetic(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:])


class ChosenEps(WithoutWeight):
    """By a setting that is no small number."""

    def __init__(self, width: int = 16, digits: int = 5) -> None:
        nn.Module.__init__(self)
        self.digits = digits

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 10.0**-self.digits)).type_as(x)


class ToUnitLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class NoEps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


class StaysWide(WithoutWeight):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class WideWithWeight(Rms):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.gamma.float() * (wide * self.scale(wide))


class HalfOfTheRow(WithoutWeight):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        half = wide[..., : wide.shape[-1] // 2]
        return (wide * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.tiny)).type_as(x)


class DropPath(nn.Module):
    """Has a small number, and is no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.1

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], *(1,) * (x.dim() - 1)) > self.rate)


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Softmax(nn.Module):
    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class LayerScale(nn.Module):
    """Has a weight, and is no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (Rms, RowNormKind("gamma", "tiny", as_weight=True)),
        (PlusOne, RowNormKind("gamma", "tiny", plus_one=True)),
        (WideThroughout, RowNormKind("gamma", "tiny")),
        (Centred, RowNormKind("gamma", "tiny", centred=True)),
        (nn.RMSNorm, RowNormKind("weight", "eps")),
        (nn.LayerNorm, RowNormKind("weight", "eps", centred=True, bias="bias")),
        (WithoutWeight, RowNormKind(None, "tiny")),
        (OneWidth, RowNormKind(None, 2e-5, centred=True, width=16, settings={"shape": (16,)})),
        (LiteralEps, RowNormKind("gamma", 1e-8, plus_one=True, settings={})),
        (EpsOfTheArithmetic, RowNormKind(None, None, settings={})),
        (ChosenEps, RowNormKind(None, 1e-5, settings={"digits": 5})),
        (lambda width: nn.RMSNorm(width, elementwise_affine=False), RowNormKind(None, "eps", width=16)),
    ],
)
def test_norms_are_recognised_however_they_are_written(norm: Callable[[int], nn.Module], expected: RowNormKind) -> None:
    module = norm(16)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    assert norm_form.recognise(module) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with torch.device("meta"):
        assert norm_form.recognise(norm(16)) == expected


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (SquaredWeight, "not x / rms"),
        (Summed, "not x / rms"),
        (EpsOutside, "not x / rms"),
        (OnlyInEval, "not x / rms"),
        (OverRows, "not x / rms"),
        (Narrow, "not x / rms"),
        (WritesItsInput, "writes onto its input"),
        (WithGate, "more than one tensor"),
        (WideWithWeight, "not x / rms"),
        (StaysWide, "not x / rms"),
        (HalfOfTheRow, "not x / rms"),
        (ToUnitLength, "not x / rms"),
        (NoEps, "not x / rms"),
    ],
)
def test_look_alikes_of_a_norm_stay_and_say_why(norm: type[nn.Module], why: str) -> None:
    module = norm()
    answer = norm_form.recognise(module)
    assert isinstance(answer, str)
    assert why in answer
    assert module.training


@pytest.mark.parametrize("make", [DropPath, LayerScale, Tanh, Softmax, lambda: nn.Dropout(0.1), nn.ReLU])
def test_what_has_not_the_parts_of_a_norm_is_not_told_of(make: Callable[[], nn.Module]) -> None:
    assert norm_form.recognise(make()) is None


@pytest.mark.parametrize("make", [WithoutWeight, OneWidth, LiteralEps, EpsOfTheArithmetic])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_converted_norm_without_weight_or_with_its_epsilon_in_the_forward(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), make(), nn.Linear(16, 8)).to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    exact = copy.deepcopy(model).double()

    def grads(of: nn.Module, x: Tensor) -> list[Tensor]:
        of.zero_grad()
        of(x).square().sum().backward()
        return [p.grad.double() for p in of.parameters() if p.grad is not None]

    truth, theirs = grads(exact, x.double()), grads(model, x)
    convert(model, example=x)
    assert [each.path for each in conversion(model).changed] == ["1"]
    for ours, before, right in zip(grads(model, x), theirs, truth, strict=True):
        assert (ours - right).norm() <= 2 * (before - right).norm() + 1e-6 * right.norm()


def test_a_norm_whose_settings_change_after_its_epsilon_was_found_runs_as_before() -> None:
    norm, x = ChosenEps(), torch.randn(4, 16) * 1e-2
    model = convert(nn.Sequential(norm), example=x)
    assert [each.path for each in conversion(model).changed] == ["0"]
    norm.digits = 2
    assert torch.equal(model(x), ChosenEps(digits=2)(x))


def test_a_norm_of_one_width_refuses_others_when_it_is_converted() -> None:
    norm = OneWidth()
    convert(nn.Sequential(norm), example=torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(torch.randn(4, 8))


# -- gated MLPs --------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, act: Any = None, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(8, 12, bias=bias), nn.Linear(8, 12, bias=bias)
        self.w2 = nn.Linear(12, 8, bias=bias)
        self.act = nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(self.act(self.w1(x)) * self.w3(x))
        return result


class Doubled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Added(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(self.act(self.w1(x)) + self.w3(x))
        return result


class Dropping(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class SquareMlp(Mlp):
    """As many in the middle, and its children in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("w1", "w2", "w3"):
            delattr(self, name)
        for name in ("w2", "w3", "w1"):
            self.add_module(name, nn.Linear(8, 8))


class Halves(nn.Module):
    def __init__(self, gate_first: bool = True) -> None:
        super().__init__()
        self.both, self.out, self.act = nn.Linear(8, 24), nn.Linear(12, 8), nn.GELU(approximate="tanh")
        self.gate_first = gate_first

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(x).split(12 if x.shape[-1] == 8 else 6, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        result: Tensor = self.out(up * self.act(gate))
        return result


class CallsIt(nn.Module):
    """Its forward calls the activation; its children stand in any order, and may be square."""

    def __init__(self, order: str = "w1 w3 w2", inner: int = 12, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        for name in order.split():
            self.add_module(name, nn.Linear(inner, 8) if name == "w2" else nn.Linear(8, inner))
        self.functions = (act,)  # no attribute that can be called

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(self.functions[0](self.w1(x)) * self.w3(x))
        return result


class Clamps(CallsIt):
    """What is small passes through."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(F.silu(self.w1(x)).clamp(max=30.0) * self.w3(x))
        return result


class ClampsWithAct(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(self.act(self.w1(x).clamp(max=30.0)) * self.w3(x))
        return result


class OnlyInTraining(CallsIt):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        result: Tensor = self.w2((F.silu(gate) if self.training else F.gelu(gate)) * self.w3(x))
        return result


class Chooses(CallsIt):
    """By a setting."""

    name = "silu"

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(getattr(F, self.name)(self.w1(x)) * self.w3(x))
        return result


class Perceptron(nn.Module):
    """Two layers, of which the first makes what a gated MLP's would."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, inner), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.up(x).chunk(2, -1)[0]))
        return result


class Projections(nn.Module):
    """Takes more than one tensor, as an attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.v(F.silu(self.q(x)) * self.k(y))
        return result


class NotGated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.act(self.up(x)))
        return result


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Mlp(), "w2(silu(w1) * w3)"),
        (Mlp(F.gelu, bias=True), "w2(gelu(w1) * w3)"),
        (Mlp(torch.tanh), "w2(act(w1) * w3)"),
        (CallsIt(), "w2(silu(w1) * w3)"),
        (CallsIt("w3 w2 w1", act=F.gelu), "w2(gelu(w1) * w3)"),
        (CallsIt("w2 w3 w1", 8, act=torch.relu), "w2(relu(w1) * w3)"),  # square
        (SquareMlp(), "w2(silu(w1) * w3)"),
        (Halves(), "out(gelu_tanh(first half) * second half) of both"),
        (Halves(False), "out(gelu_tanh(second half) * first half) of both"),
    ],
)
def test_gated_mlps_are_recognised_by_their_parts_and_what_they_compute(module: nn.Module, expected: str) -> None:
    kind = gated_form.recognise(module)
    assert isinstance(kind, GatedKind)
    assert str(kind) == expected


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Doubled(), "is not down(act(gate(x)) * up(x))"),
        (Added(), "is not down(act(gate(x)) * up(x))"),
        (Dropping(), "is not down(act(gate(x)) * up(x))"),
        (NotGated(), "it is not gated"),
        pytest.param(Clamps(), "is not down(act(gate(x)) * up(x)), act one of silu, gelu", id="clamped"),
        (Clamps("w2 w1 w3", 8), "is not down(act(gate(x)) * up(x)), act one of silu, gelu"),
        (ClampsWithAct(), "is not down(act(gate(x)) * up(x))"),
        (OnlyInTraining(), "is not down(act(gate(x)) * up(x)), act one of silu, gelu"),
        (CallsIt(act=torch.tanh), "is not down(act(gate(x)) * up(x)), act one of silu, gelu"),
        (Perceptron(24), "is not down(act(gate(x)) * up(x)), act one of silu, gelu"),
    ],
)
def test_look_alikes_of_a_gated_mlp_stay_and_say_why(module: nn.Module, why: str) -> None:
    answer = gated_form.recognise(module)
    assert isinstance(answer, str)
    assert why in answer


@pytest.mark.parametrize(
    "module", [Perceptron(12), Projections(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))]
)
def test_what_has_not_the_parts_of_a_gated_mlp_is_not_told_of(module: nn.Module) -> None:
    assert gated_form.recognise(module) is None


def test_an_activation_that_a_forward_chooses_by_a_setting_is_the_one_it_chooses() -> None:
    mlp, x = Chooses(), torch.randn(3, 8)
    assert conversion(convert(mlp)).changed[0].became == "KeepsGateAndUp: w2(silu(w1) * w3)"
    mlp.name = "relu"
    torch.testing.assert_close(mlp(x), mlp.w2(F.relu(mlp.w1(x)) * mlp.w3(x)))


def test_a_compiled_step_sees_settings_of_converted_modules_change() -> None:
    model = convert(nn.Sequential(nn.Linear(8, 8), ChosenEps(), Chooses()), example=torch.randn(3, 8))
    assert len(conversion(model).changed) == 2
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin)]
    step = tb.compile_step(model, lambda m, x: m(x).square().sum(), optimizers[0], memory="keep")
    for i in range(6):
        for each in (model, twin):
            if i == 2:
                each[2].name = "relu"  # which was its class's
            if i == 4:
                each[1].digits = 2
        x = torch.randn(3, 8) * 1e-2
        expected = twin(x).square().sum()
        expected.backward()
        optimizers[1].step(), optimizers[1].zero_grad()
        assert torch.equal(step(x), expected.detach())


def test_an_activation_that_is_replaced_later_is_used() -> None:
    mlp = Mlp()
    convert(mlp)
    mlp.act = nn.ReLU()
    x = torch.randn(3, 8)
    torch.testing.assert_close(mlp(x), mlp.w2(F.relu(mlp.w1(x)) * mlp.w3(x)))


# -- activations -------------------------------------------------------------------------------------------------------


class Written(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (gelu_by_hand, ActivationKind("gelu_tanh")),
        (lambda x: x * torch.sigmoid(x), ActivationKind("silu")),
        (lambda x: x * torch.sigmoid(1.702 * x), ActivationKind(None)),
        (F.gelu, None),  # keeps its input alone already
        (lambda x: x.softmax(-1) * x, None),  # not of single elements
        (lambda x: torch.tanh(x) * torch.rand_like(x), None),
        (lambda x: x.sum() * torch.tanh(x), None),
    ],
)
def test_written_out_activations_are_recognised(function: Any, expected: ActivationKind | None) -> None:
    assert activation_form.recognise(Written(function)) == expected


@pytest.mark.parametrize(
    "function", [gelu_by_hand, lambda x: x * torch.sigmoid(x), lambda x: x * torch.sigmoid(1.702 * x)]
)
def test_a_converted_activation_has_its_gradients_and_keeps_its_input_alone(function: Any) -> None:
    act, leaf = Written(function), torch.randn(7, 9, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    (expected,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
    model = convert(nn.Sequential(act))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(leaf)
    (ours,) = torch.autograd.grad(result.square().sum(), leaf)
    torch.testing.assert_close(ours, expected)
    assert sum(kept.values()) == leaf.numel() * 4


# -- whose output is written onto --------------------------------------------------------------------------------------


class Scribbler(nn.Module):
    """Writes onto the output of its first norm, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.inner = Rms(8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.first(x)
        if self.training:
            y *= 2
        result: Tensor = self.inner(self.second(y))
        return result


def test_a_norm_whose_output_is_written_onto_keeps_its_input() -> None:
    model, x = Scribbler(), torch.randn(3, 8)
    expected = model(x)
    convert(model, example=x)
    report = conversion(model)
    assert {
        changed.path: "not its output: its output is written onto" in changed.reason for changed in report.changed
    } == {
        "first": True,
        "second": False,
    }
    assert float(model.calls) == 1
    result = model(x)
    result.sum().backward()
    torch.testing.assert_close(result, expected)


def test_without_an_example_a_norm_keeps_its_input_and_torchs_own_stay() -> None:
    model = convert(Scribbler())
    report = conversion(model)
    assert [changed.path for changed in report.changed] == ["first"]
    assert [kept.path for kept in report.kept] == ["second"]
    assert "convert(model, example=...)" in report.kept[0].reason
    revert(model)
    assert type(model.first) is Rms
    assert "takeback_form" not in vars(model.first)
