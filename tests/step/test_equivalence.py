"""Exact mode gives eager's bits: losses, gradients, parameters, buffers and optimizer state, after every step, for
about every layer, loss and optimizer that people train with. What is compared, and how, is in tests/harness.py.

Nothing is rebuilt here where a test does not say so: test_memory_targets.py and test_every_op.py see to that.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import Case, Optimizers, adamw, sgd, train_both
from pairwise import in_turns, quick_ones
from takeback import compile_step, zoo
from takeback.errors import CaptureError
from takeback.zoo.data import byte_batches, shape_batches

pytestmark = pytest.mark.usefixtures("short_search")

Draw = Callable[[int], tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors need one; the tests of threads set their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generator(i: int) -> torch.Generator:
    return torch.Generator().manual_seed(i)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Draw:
    """Batches of one noise tensor."""
    return lambda i: (torch.randn(shape, generator=generator(i)).to(dtype),)


def labelled(*shape: int, classes: int = 4, dtype: torch.dtype = torch.float32) -> Draw:
    """Batches of noise and one label per row."""

    def draw(i: int) -> tuple[Tensor, Tensor]:
        g = generator(i)
        return torch.randn(shape, generator=g).to(dtype), torch.randint(classes, (shape[0],), generator=g)

    return draw


def tokens(rows: int = 4, length: int = 6, vocabulary: int = 11) -> Draw:
    return lambda i: (torch.randint(vocabulary, (rows, length), generator=generator(i)),)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def square(model: nn.Module, *batch: Tensor) -> Tensor:
    """A loss for models with any output."""
    return model(*batch).float().square().mean()


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))


# -- the zoo ------------------------------------------------------------------------------------------------------


def zoo_case(name: str, model: Callable[[], nn.Module] | None = None, loss_fn: Any = None) -> Case:
    size = {"mlp": 16, "resnet": 16, "dit": 8}

    def draw(i: int) -> tuple[Tensor, ...]:
        if name in ("gpt", "gpt_context", "ssm"):
            return next(byte_batches(2, 24, i))
        images, labels = next(shape_batches(4, size[name], i))
        return (images.flatten(1) if name == "mlp" else images), labels

    shipped = zoo.case(name)
    kind, settings = type(shipped.optimizer), shipped.optimizer.defaults
    return Case(
        model or (lambda: zoo.case(name).model),
        loss_fn or shipped.loss_fn,
        draw,
        lambda m: kind(m.parameters(), **{k: v for k, v in settings.items() if k != "decoupled_weight_decay"}),
    )


GPTS = [
    dataclasses.replace(zoo.gpt.SMALL, dropout=dropout, tied=tied) for dropout in (0.0, 0.1) for tied in (True, False)
]
RESNETS = [
    dataclasses.replace(zoo.resnet.SMALL, inplace=inplace, zero_init=zero)
    for inplace, zero in [(False, False), (True, False), (True, True)]
]
CONTEXTS = [
    dataclasses.replace(zoo.gpt.SMALL, width=32, layers=3, dropout=dropout, context_strength=1.0)
    for dropout in (0.0, 0.1)
]
DIT = dataclasses.replace(zoo.dit.SMALL, size=8, width=32, layers=2)
SSM = dataclasses.replace(zoo.ssm.SMALL, width=32, state=8, head_width=16, chunk=16)  # 24 tokens: the last is half full
S4 = {
    **{f"gpt-context-dropout={c.dropout}": zoo_case("gpt_context", lambda c=c: zoo.GPT(c)) for c in CONTEXTS},
    "dit-ddpm": zoo_case("dit", lambda: zoo.DiT(DIT)),
    "dit-flow": zoo_case("dit", lambda: zoo.DiT(DIT), zoo.dit.flow_loss),
    "ssm": zoo_case("ssm", lambda: zoo.SSM(SSM)),
}
ZOO = {
    **S4,
    "mlp": zoo_case("mlp"),
    **{f"gpt-dropout={c.dropout}-tied={c.tied}": zoo_case("gpt", lambda c=c: zoo.GPT(c)) for c in GPTS},
    **{
        f"resnet-inplace={c.inplace}-zero_init={c.zero_init}": zoo_case("resnet", lambda c=c: zoo.ResNet(c))
        for c in RESNETS
    },
}


LONG = ("mlp", "gpt-dropout=0.1-tied=True")
TRAINED = (*LONG, "gpt-context-dropout=0.1", "dit-ddpm", "ssm")
POISONED = (LONG[1], "resnet-inplace=True-zero_init=True")
TRAINED_CONVNETS = ("resnet-inplace=True-zero_init=True",)


@pytest.mark.parametrize("name", quick_ones(ZOO, (*TRAINED, *TRAINED_CONVNETS)))
def test_zoo_model_trains_to_eagers_bits_in_less_memory(name: str) -> None:
    case = dataclasses.replace(ZOO[name], settings={**ZOO[name].settings, "keep_grads": False})
    step = train_both(case, steps=12 if name in LONG else 5, memory="auto", poison=name in POISONED)
    report = step.report()
    assert report.peak_bytes <= report.eager_peak_bytes


@pytest.mark.parametrize("name", quick_ones(ZOO, ("dit-flow",)))
def test_zoo_model_keeps_its_bits_when_dead_bytes_are_poisoned(name: str) -> None:
    train_both(ZOO[name], steps=5, poison=True, memory="auto")


S4_SETTINGS: dict[str, dict[str, Any]] = {
    "accumulate-clip_norm": {"accumulate": 2, "clip_norm": 0.1},
    "early": {"update": "early", "keep_grads": False},
    "min": {"memory": "min"},
    "verify_every": {"verify_every": 2},
}


@pytest.mark.parametrize(
    ("name", "setting"), in_turns(["gpt-context-dropout=0.1", "ssm", "dit-ddpm", "dit-flow"], S4_SETTINGS)
)
def test_context_diffusion_and_state_space_give_eagers_bits_with(name: str, setting: str) -> None:
    settings = {**S4[name].settings, **S4_SETTINGS[setting]}
    train_both(dataclasses.replace(S4[name], settings=settings), steps=5, poison=setting == "min")


def test_context_is_the_same_tensor_before_and_after_compiling() -> None:
    """Whoever reads the context outside of the step reads what the step wrote, and eager goes on from there."""
    kept: list[tuple[Tensor, Tensor]] = []

    def between(i: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        if i:
            kept.append((model.attention_context.context, model.attention_context.context.clone()))

    train_both(dataclasses.replace(S4["gpt-context-dropout=0.0"], between=between), steps=6)
    eager, ours = kept[::2], kept[1::2]
    assert len({id(c) for c, _ in ours}) == 1
    assert all(torch.equal(a[1], b[1]) for a, b in zip(eager, ours, strict=True))
    assert not torch.equal(ours[0][1], ours[1][1]), "the context does not change: this shows nothing"


@pytest.mark.parametrize(
    "name",
    quick_ones(
        ["mlp", "gpt-dropout=0.1-tied=True", "resnet-inplace=True-zero_init=False"], ["gpt-dropout=0.1-tied=True"]
    ),
)
def test_two_threads_give_eagers_bits(name: str) -> None:
    torch.set_num_threads(2)
    train_both(ZOO[name], steps=5)


def test_number_of_threads_may_change_between_steps() -> None:
    def between(i: int, _: nn.Module, __: torch.optim.Optimizer) -> None:
        torch.set_num_threads(1 + i // 3 % 2)

    train_both(dataclasses.replace(ZOO["mlp"], between=between), steps=8, plans=2)


def test_wide_layers_that_use_every_thread_give_eagers_bits() -> None:
    torch.set_num_threads(2)
    model = lambda: nn.Sequential(nn.Linear(300, 1100), nn.GELU(), nn.LayerNorm(1100), nn.Linear(1100, 700))  # noqa: E731
    train_both(Case(model, classify, labelled(160, 300, classes=700)), steps=6)


# -- optimizers ---------------------------------------------------------------------------------------------------


def with_groups(kind: type[torch.optim.Optimizer], **settings: Any) -> Optimizers:
    """Weights decay, biases do not and have another lr; the last layer has a group of its own."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        weights = [p for p in parameters[:-2] if p.dim() > 1]
        biases = [p for p in parameters[:-2] if p.dim() <= 1]
        groups = [
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "weight_decay": 0.0, "lr": 0.03},
            {"params": parameters[-2:], "lr": 0.005},
        ]
        return kind(groups, lr=0.01, **settings)

    return make


def plain(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Optimizers:
    return lambda model: kind(model.parameters(), lr=0.01, **settings)


PATHS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SETTINGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd-decay": (torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-dampened": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd-nesterov-decay": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.99)}),
    "adam-decay": (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-6}),
    "adam-decoupled": (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw-without-decay": (torch.optim.AdamW, {"weight_decay": 0.0}),
}


@pytest.mark.parametrize(("name", "path"), in_turns(SETTINGS, PATHS))
def test_planned_update_is_the_optimizers_own(name: str, path: str) -> None:
    kind, settings = SETTINGS[name]
    step = train_both(Case(small_mlp, classify, labelled(8, 16), plain(kind, **settings, **PATHS[path])))
    assert not [r for r in step.report().refusals if r.decision == "plan the update"]


@pytest.mark.parametrize(("kind", "path"), in_turns([torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW], PATHS))
def test_parameter_groups_keep_their_own_settings(kind: type[torch.optim.Optimizer], path: str) -> None:
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    train_both(Case(small_mlp, classify, labelled(8, 16), with_groups(kind, **extra, **PATHS[path])))


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, as a user would write it."""

    def __init__(self, parameters: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                first, second = group["betas"]
                p.add_(state["average"].lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                state["average"].lerp_(p.grad, 1 - second)


class GradientKeeper(torch.optim.Optimizer):
    """Steps along the difference to the last gradient, which it keeps by reference, as is legal in eager."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state[p].get("last", torch.zeros_like(p))
                p.sub_(2 * p.grad - last, alpha=group["lr"])
                self.state[p]["last"] = p.grad


OWN_STEP: dict[str, Optimizers] = {
    "rmsprop": plain(torch.optim.RMSprop, momentum=0.5),
    "adagrad": plain(torch.optim.Adagrad),
    "adadelta": plain(torch.optim.Adadelta),
    "nadam": plain(torch.optim.NAdam),
    "radam": plain(torch.optim.RAdam),
    "adamax": plain(torch.optim.Adamax),
    "asgd": plain(torch.optim.ASGD),
    "rprop": plain(torch.optim.Rprop),
    "lion": plain(Lion),
    "sgd-maximize": plain(torch.optim.SGD, maximize=True, momentum=0.9),
    "sgd-fused-maximize": plain(torch.optim.SGD, maximize=True, fused=True),
    "adam-amsgrad": plain(torch.optim.Adam, amsgrad=True),
    "adam-tensor-lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize(
    "name", quick_ones(OWN_STEP, ("rmsprop", "asgd", "lion", "sgd-fused-maximize", "adam-amsgrad", "adam-tensor-lr"))
)
def test_other_optimizer_runs_its_own_step_on_planned_gradients(name: str) -> None:
    step = train_both(Case(small_mlp, classify, labelled(8, 16), OWN_STEP[name]))
    assert [r for r in step.report().refusals if r.decision == "plan the update"]


@pytest.mark.parametrize("keep_grads", [False, True])
def test_optimizer_may_keep_a_gradient_it_was_given(keep_grads: bool) -> None:
    train_both(
        Case(small_mlp, classify, labelled(8, 16), plain(GradientKeeper), settings={"keep_grads": keep_grads}),
        plans=None,
    )


# -- settings of compile_step --------------------------------------------------------------------------------------

STEP_SETTINGS: dict[str, dict[str, Any]] = {
    "keep_grads": {"keep_grads": True},
    "drop_grads": {"keep_grads": False},
    "clip_norm": {"clip_norm": 0.3},
    "clip_norm-without-grads": {"clip_norm": 0.3, "keep_grads": False},
    "clip_norm-too-large-to-clip": {"clip_norm": 1e6},
    "accumulate": {"accumulate": 4},
    "accumulate-clip_norm": {"accumulate": 4, "clip_norm": 0.1},
    "accumulate-without-grads": {"accumulate": 2, "keep_grads": False},
    "verify_every": {"verify_every": 2},
}


@pytest.mark.parametrize(("name", "optimizer"), in_turns(STEP_SETTINGS, ["sgd-nesterov", "adamw"]))
def test_setting_gives_eagers_bits(name: str, optimizer: str) -> None:
    kind, settings = SETTINGS[optimizer]
    train_both(Case(small_mlp, classify, labelled(8, 16), plain(kind, **settings), settings=STEP_SETTINGS[name]))


def test_clip_norm_with_a_gradient_in_another_memory_order() -> None:
    """The gradient of a transposed use comes out transposed; `.grad` in eager has the parameter's own strides, and the
    order in which a norm adds depends on them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(37, 53))
            self.bias = nn.Parameter(torch.randn(53, 37))

        def forward(self, x: Tensor) -> Tensor:
            return (x[:, :, None] * self.weight.t() + self.bias.sin()).square()

    train_both(Case(Model, square, noise(5, 53), settings={"clip_norm": 0.01}))


def test_clip_norm_with_a_single_parameter_and_with_many() -> None:
    class Model(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = (x @ weight).tanh()
            return x

    for count in (1, 12):
        train_both(Case(lambda count=count: Model(count), square, noise(8, 16), sgd, settings={"clip_norm": 1e-3}))


def test_grad_norm_is_what_eager_reports() -> None:
    torch.manual_seed(0)
    model = small_mlp().eval()
    twin = copy.deepcopy(model)
    optimizer, twins = sgd(model), sgd(twin)
    step = compile_step(model, classify, optimizer, clip_norm=0.1)
    for i in range(5):
        step(*labelled(8, 16)(i))
        twin.zero_grad()
        classify(twin, *labelled(8, 16)(i)).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        twins.step()
        assert step.grad_norm is not None
        assert torch.equal(step.grad_norm, norm)


# -- batches -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Example:
    """A batch as a dataclass."""

    x: Tensor
    y: Tensor
    weight: float = 0.5


class Pair(NamedTuple):
    """A batch as a namedtuple."""

    x: Tensor
    y: Tensor


def from_dict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def from_fields(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y) * getattr(batch, "weight", 1.0)


def from_keywords(model: nn.Module, x: Tensor, *, y: Tensor, smoothing: float = 0.0, extra: Any = None) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=smoothing)


BATCHES: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Any]]] = {
    "dict": (from_dict, lambda x, y: (({"x": x, "y": y},), {})),
    "dict-keyword": (from_dict, lambda x, y: ((), {"batch": {"x": x, "y": y}})),
    "ordered dict": (from_dict, lambda x, y: ((collections.OrderedDict(x=x, y=y),), {})),
    "dataclass": (from_fields, lambda x, y: ((Example(x, y, 0.25),), {})),
    "namedtuple": (from_fields, lambda x, y: ((Pair(x, y),), {})),
    "keywords": (from_keywords, lambda x, y: ((x,), {"y": y, "smoothing": 0.1, "extra": [None, "text", (1, 2)]})),
    "list": (lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]), lambda x, y: (([x, y],), {})),
}


@pytest.mark.parametrize(("name", "accumulate"), in_turns(BATCHES, [1, 2]))
def test_batch_of_any_container_gives_eagers_bits(name: str, accumulate: int) -> None:
    loss_fn, wrap = BATCHES[name]
    draw = labelled(8, 16)
    train_both(
        Case(
            small_mlp,
            loss_fn,
            lambda i: wrap(*draw(i)),
            has_kwargs=True,
            settings={"accumulate": accumulate},
        ),
        steps=5,
    )


def with_aux(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    logits = model(x)
    right = (logits.argmax(1) == y).float().mean()
    return F.cross_entropy(logits, y), {"logits": logits, "right": right, "note": "text", "parts": [logits.exp(), 3]}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_aux_is_eagers(accumulate: int) -> None:
    train_both(Case(small_mlp, with_aux, labelled(8, 16), settings={"accumulate": accumulate}))


def test_last_smaller_batch_gets_its_own_plan() -> None:
    draw, last = labelled(8, 16), labelled(3, 16)
    train_both(Case(small_mlp, classify, lambda i: (last if i % 5 == 4 else draw)(i)), steps=10, plans=2)


# -- which parameters ---------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A module that is used twice, one that is never used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.shared = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(self.shared(self.frozen(x)).relu()).tanh())


@pytest.mark.parametrize("path", PATHS)
def test_frozen_unused_and_shared_parameters(path: str) -> None:
    train_both(Case(Branches, classify, labelled(8, 16), plain(torch.optim.AdamW, **PATHS[path])))
    train_both(
        Case(Branches, classify, labelled(8, 16), plain(torch.optim.SGD, **PATHS[path]), settings={"clip_norm": 1})
    )


def test_optimizer_of_a_part_of_the_parameters() -> None:
    train_both(Case(Branches, classify, labelled(8, 16), lambda m: torch.optim.AdamW(m.head.parameters(), lr=0.1)))


class Tied(nn.Module):
    """An embedding with padding whose weight is the output projection too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(ids)).relu())


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adamw"])
def test_tied_embedding_with_padding(optimizer: str) -> None:
    kind, settings = SETTINGS[optimizer]
    train_both(Case(Tied, next_token, tokens(), plain(kind, **settings)))


# -- layers --------------------------------------------------------------------------------------------------------


class Take(nn.Module):
    """The wrapped module's first result, as recurrent modules return a tuple."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over its own input, with the weights or without."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x, need_weights=self.need_weights)
        return mixed if weights is None else mixed * weights.sum()


class ChannelsLast(nn.Module):
    """Convolutions whose weights and input are channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.net.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(memory_format=torch.channels_last))


def sequence(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


IMAGE, LINE, VOLUME, ROWS, SEQUENCE = (4, 3, 8, 8), (4, 3, 12), (2, 3, 4, 6, 6), (8, 16), (4, 5, 16)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: Take(nn.LSTM(16, 8, num_layers=2, batch_first=True)), SEQUENCE),
    "lstm-bidirectional-dropout": (
        lambda: Take(nn.LSTM(16, 8, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)),
        SEQUENCE,
    ),
    "lstm-projected": (lambda: Take(nn.LSTM(16, 8, proj_size=4)), SEQUENCE),
    "gru": (lambda: Take(nn.GRU(16, 8, num_layers=2, dropout=0.2, batch_first=True)), SEQUENCE),
    "rnn": (lambda: Take(nn.RNN(16, 8, nonlinearity="relu")), SEQUENCE),
    "attention": (lambda: SelfAttention(False), SEQUENCE),
    "attention-weights": (lambda: SelfAttention(True), SEQUENCE),
    "encoder-layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True), SEQUENCE),
    "encoder-layer-norm-first": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, activation="gelu", norm_first=True),
        SEQUENCE,
    ),
    "layer-norm": (lambda: sequence(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm((5, 16))), SEQUENCE),
    "rms-norm": (lambda: sequence(nn.RMSNorm(16), nn.Linear(16, 16), nn.RMSNorm(16)), SEQUENCE),
    "group-norm": (lambda: sequence(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU()), IMAGE),
    "batch-norm-1d": (lambda: sequence(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU()), ROWS),
    "batch-norm-1d-sequence": (lambda: sequence(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)), LINE),
    "batch-norm-2d": (lambda: sequence(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)), IMAGE),
    "batch-norm-3d": (lambda: sequence(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4)), VOLUME),
    "batch-norm-without-affine": (lambda: sequence(nn.Linear(16, 8), nn.BatchNorm1d(8, affine=False)), ROWS),
    "batch-norm-without-statistics": (
        lambda: sequence(nn.Linear(16, 8), nn.BatchNorm1d(8, track_running_stats=False)),
        ROWS,
    ),
    "instance-norm": (lambda: sequence(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)), IMAGE),
    "instance-norm-statistics": (
        lambda: sequence(nn.Conv1d(3, 8, 3), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)),
        LINE,
    ),
    "local-response-norm": (lambda: sequence(nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(2)), IMAGE),
    "conv-1d": (lambda: sequence(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 4, 3, stride=2)), LINE),
    "conv-2d": (lambda: sequence(nn.Conv2d(3, 8, 3, padding="same"), nn.ReLU(), nn.Conv2d(8, 4, 3, 2)), IMAGE),
    "conv-2d-circular": (lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv-3d": (lambda: sequence(nn.Conv3d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 2)), VOLUME),
    "conv-transpose-1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), LINE),
    "conv-transpose-2d": (lambda: sequence(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3, 2, 1, 1)), IMAGE),
    "conv-transpose-3d": (lambda: nn.ConvTranspose3d(3, 2, 2), VOLUME),
    "conv-depthwise": (lambda: sequence(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6)), IMAGE),
    "conv-dilated": (lambda: sequence(nn.Conv2d(3, 6, 3, dilation=2, padding=2), nn.Conv2d(6, 4, 1)), IMAGE),
    "channels-last": (ChannelsLast, IMAGE),
    "max-pool": (lambda: sequence(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)), IMAGE),
    "max-pool-overlapping": (lambda: sequence(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 2, 1)), IMAGE),
    "avg-pool": (lambda: sequence(nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(4, 2, 1)), IMAGE),
    "adaptive-avg-pool": (lambda: sequence(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d((2, 3))), IMAGE),
    "adaptive-max-pool": (lambda: sequence(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(2)), IMAGE),
    "pool-1d-3d": (lambda: sequence(nn.Conv3d(3, 4, 1), nn.MaxPool3d(2), nn.AvgPool3d((1, 2, 2))), VOLUME),
    "lp-pool": (lambda: sequence(nn.Conv2d(3, 4, 3), nn.LPPool2d(2, 2)), IMAGE),
    "pixel-shuffle": (lambda: sequence(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2)), IMAGE),
    "upsample-nearest": (lambda: sequence(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2)), IMAGE),
    "upsample-bilinear": (lambda: sequence(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")), IMAGE),
    "pads": (
        lambda: sequence(nn.Conv2d(3, 4, 3), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.ConstantPad2d(1, 0.5)),
        IMAGE,
    ),
    "unfold-fold": (lambda: sequence(nn.Conv2d(3, 4, 1), nn.Unfold(2, stride=2), nn.Fold(8, 2, stride=2)), IMAGE),
    "bilinear": (lambda: _Bilinear(), ROWS),
    "dropouts": (
        lambda: sequence(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.2), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1)),
        IMAGE,
    ),
    "dropout-inplace": (lambda: sequence(nn.Linear(16, 8), nn.Dropout(0.3, inplace=True), nn.Linear(8, 4)), ROWS),
    "weight-norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), ROWS),
    "spectral-norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)), ROWS),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), (4, 8)),
}


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(16, 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.sin())


# What test_every_op.py trains as well, with rebuilding, is for `make test-all`.
QUICK_LAYERS = (
    *("lstm-projected", "lstm-bidirectional-dropout", "attention-weights", "encoder-layer-norm-first", "layer-norm"),
    *("batch-norm-2d", "batch-norm-3d", "batch-norm-without-affine", "instance-norm", "conv-2d", "conv-2d-circular"),
    *("conv-transpose-1d", "conv-transpose-3d", "conv-depthwise", "channels-last", "max-pool-overlapping"),
    *("pool-1d-3d", "pads", "unfold-fold", "dropouts", "dropout-inplace"),
)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own, and eager's too
@pytest.mark.parametrize("name", quick_ones(LAYERS, QUICK_LAYERS))
def test_layer_gives_eagers_bits(name: str) -> None:
    build, shape = LAYERS[name]
    train_both(Case(build, square, noise(*shape)))


def test_batch_norm_with_a_cumulative_average_is_right_until_it_is_refused() -> None:
    """momentum=None reads its own counter into Python in every step, so no plan ever fits: each step records anew with
    eager's bits, and after a few the step is refused with the line that reads."""
    build = lambda: sequence(nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=None))  # noqa: E731
    train_both(Case(build, square, noise(8, 16)), steps=3, plans=None)
    with (
        pytest.warns(RuntimeWarning, match="plans in a row"),
        pytest.raises(CaptureError, match=r"reads a tensor into Python at .*records anew when it changes"),
    ):
        train_both(Case(build, square, noise(8, 16)), steps=20, plans=None)


@pytest.mark.parametrize(("mode", "max_norm"), in_turns(["sum", "mean", "max"], [None, 0.5]))
def test_embedding_bag_and_renormalised_embedding(mode: str, max_norm: float | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(11, 8, mode=mode)
            self.embedding = nn.Embedding(11, 8, padding_idx=2, max_norm=max_norm, scale_grad_by_freq=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.bag(ids) + self.embedding(ids).sum(1)

    train_both(Case(Model, square, tokens()))


# -- ops -----------------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """A linear layer, some function of its output, and a parameter for the function to mix in."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.other = nn.Parameter(torch.randn(4, 5, 6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), self.other)


INDEX = torch.tensor([[2, 0, 1, 1, 3]]).expand(4, 5).unsqueeze(2).expand(4, 5, 6).contiguous()
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax-last": lambda x, p: x.softmax(-1) * p,
    "softmax-middle": lambda x, p: x.softmax(1) * p,
    "softmax-first": lambda x, p: (x * p).softmax(0).softmax(0),
    "log_softmax-middle": lambda x, p: F.log_softmax(F.log_softmax(x * p, 1), 0),
    "log_softmax-last": lambda x, p: F.log_softmax(F.log_softmax(x * p, -1), -1) * p,
    "softmin-gumbel": lambda x, p: F.softmin(x, 2) + F.gumbel_softmax(p, tau=0.5),
    "gumbel-hard": lambda x, p: F.gumbel_softmax(x * p, hard=True) * x,
    "masked_fill": lambda x, p: x.masked_fill(p > 0, -1.5).masked_fill(x < 0, torch.tensor(0.5)) * p,
    "masked-attention": lambda x, p: (
        (x @ p.transpose(1, 2)).masked_fill(torch.ones(5, 5).triu(1).bool(), -9.0).softmax(2)
    ),
    "where": lambda x, p: torch.where(x > 0, x * p, p.exp()) + torch.where(p > 0, x, 0.0),
    "cat-stack": lambda x, p: torch.cat([x, p, x.sin()], 1).sum(1) + torch.stack([x, p], 3).square().sum(3).mean(1),
    "split-chunk": lambda x, p: x.split([1, 3, 1], 1)[1] * p.chunk(2, 1)[0] + x.unbind(1)[4].unsqueeze(1),
    "einsum": lambda x, p: torch.einsum("bij,bkj->bik", x, p) + torch.einsum("bij->bi", x).unsqueeze(2),
    "gather-scatter": lambda x, p: (
        x.gather(1, INDEX) + torch.zeros_like(p).scatter(1, INDEX, p) * x.scatter_add(1, INDEX, p)
    ),
    "scatter-reduce": lambda x, p: x.scatter_reduce(1, INDEX, p, "amax") + x.scatter_reduce(1, INDEX, p, "mean"),
    "index_add": lambda x, p: (
        x.index_add(1, torch.tensor([0, 0, 4, 2, 1]), p) * p.index_select(1, torch.arange(5).flip(0))
    ),
    "index_fill-copy": lambda x, p: (
        x.index_fill(1, torch.tensor([1, 3]), 2.0) * x.index_copy(1, torch.tensor([0]), p[:, :1])
    ),
    "advanced-index": lambda x, p: x[:, [0, 0, 2]] * p[torch.arange(4), :3] + x[1:2, :3],
    "take": lambda x, p: x.take(INDEX[..., 0]) * p.take_along_dim(INDEX, 1).sum(-1),
    "cumulative": lambda x, p: x.cumsum(1) * p + (x * p).logcumsumexp(0) + x.cummax(1)[0],
    "sort": lambda x, p: x.sort(1)[0] * p.sort(2, descending=True)[0] + p.argsort(1) * x,
    "topk": lambda x, p: x.topk(3, 1)[0] * p.topk(3, 1, largest=False)[0] + x.kthvalue(2, 1, keepdim=True)[0],
    "max-min": lambda x, p: x.max(1, keepdim=True)[0] * p.min(2, keepdim=True)[0] + x.amax((0, 1)) + p.amin(0),
    "max-of-all": lambda x, p: x.max() * p + p.min() * x + x.median() + p.median(1, keepdim=True)[0],
    "reductions": lambda x, p: x.var(1, keepdim=True) + p.std() + x.var() + x.logsumexp(2, keepdim=True),
    "means": lambda x, p: (
        x.mean((0, 2), keepdim=True) * p.sum(0) + x.nanmean() + p.norm(dim=1, keepdim=True) + x.norm(1)
    ),
    "pairwise": lambda x, p: (
        torch.cdist(x, p) + F.cosine_similarity(x, p, 2).unsqueeze(2) + F.pairwise_distance(x, p)[..., None]
    ),
    "normalize": lambda x, p: F.normalize(x, dim=1) * F.normalize(p, p=1, dim=2),
    "clamp": lambda x, p: (
        x.clamp(-0.5, 0.5) * p.clamp_min(0.1) + torch.maximum(x, p) * torch.minimum(x, p).clamp_max(0.2)
    ),
    "powers": lambda x, p: (
        x.pow(2) + x.abs().add(0.1).pow(p.abs()) + p.pow(3) + x.abs().add(1).rsqrt() + x.square().sqrt()
    ),
    "divisions": lambda x, p: (
        x / (p.abs() + 1)
        + 1 / (x.abs() + 1)
        + x.remainder(0.7)
        + p.fmod(0.3)
        + p.div(x.abs() + 1, rounding_mode="floor")
    ),
    "trigonometry": lambda x, p: (
        x.sin() * p.cos() + x.tanh().atan() + x.sinh() + p.atan2(x) + x.clamp(-0.9, 0.9).asin()
    ),
    "exponentials": lambda x, p: (
        x.exp().log1p() + p.expm1() + x.abs().add(1).log2() + torch.logaddexp(x, p) + torch.xlogy(p, x.exp())
    ),
    "special": lambda x, p: (
        x.erf() + p.abs().lgamma() + x.sigmoid().logit() + torch.special.i0(x) + x.sinc() + p.erfc()
    ),
    "rounding": lambda x, p: x.round() * p + x.floor() * p.ceil() + x.frac() + p.trunc() * x.sign() + x.nan_to_num(),
    "lerp-addc": lambda x, p: (
        torch.lerp(x, p, 0.3) + torch.addcmul(x, p, x, value=0.5) + torch.addcdiv(p, x, p.exp()) + x.lerp(p, x)
    ),
    "matmuls": lambda x, p: x @ p.transpose(1, 2) @ p + torch.baddbmm(x, x @ x.mT, p) + (x @ p[0, 0]).unsqueeze(2),
    "addmms": lambda x, p: torch.addmm(x[0], p[1][:, :5], x[1], beta=0.5, alpha=2.0) + torch.outer(x[0, :, 0], p[0, 0]),
    "tensordot-kron": lambda x, p: (
        torch.tensordot(x, p, dims=([2], [2])).sum((1, 2)) + torch.kron(x[0, :1], p[0, 0, :1]).sum()
    ),
    "shapes": lambda x, p: (
        x.permute(2, 0, 1).reshape(5, 24).t().reshape(4, 5, 6) * p.flip(1).roll(2, 2)
        + x.transpose(0, 1).contiguous().view(4, 5, 6)
    ),
    "repeat": lambda x, p: (
        x.repeat(1, 2, 1) * p.repeat_interleave(2, 1) + x[:, :1].expand(4, 10, 6) + p.tile(2, 1)[..., :1]
    ),
    "triangles": lambda x, p: (
        x.tril() + p.triu(1) + torch.diag_embed(x.diagonal(dim1=1, dim2=2))[:, :, :1] + x[0].trace()
    ),
    "padding": lambda x, p: (
        F.pad(x, (1, 2, 0, 1)).sum(1, keepdim=True)[..., :6] * F.pad(p, (1, 1), mode="circular")[..., :6]
    ),
    "linear-algebra": lambda x, p: (
        torch.linalg.solve(x.mT @ x + 3 * torch.eye(6), p.mT).mT + torch.linalg.det(p @ p.mT)[:, None, None]
    ),
    "cholesky-inverse": lambda x, p: (
        p @ torch.linalg.cholesky(x.mT @ x + torch.eye(6)) + x @ torch.linalg.inv(p.mT @ p + torch.eye(6))
    ),
    "random-noise": lambda x, p: (
        x + torch.randn_like(x) * p + torch.rand(6) + torch.bernoulli(torch.full_like(x, 0.5)) * p
    ),
    "random-index": lambda x, p: x[:, torch.randperm(5)] * p + torch.randint(3, (5, 1)) + torch.normal(x.detach(), 0.1),
    "made-inside": lambda x, p: (
        x * torch.arange(6) + p * torch.linspace(0, 1, 6) + torch.eye(6)[:5] + torch.tensor([1.0] * 6)
    ),
    "constants": lambda x, p: (
        x * torch.full((6,), 0.3) + torch.zeros(5, 1) + p * torch.ones_like(p) + p.new_full((1,), 2.0)
    ),
    "negative-zero": lambda x, p: (
        x * p + (1 / torch.full((6,), -0.0)).clamp(-1, 1) + (1 / torch.full_like(x, -0.0)).clamp(-2, 2)
    ),
    "dtypes": lambda x, p: (
        x.double() * p.bfloat16() + x.half().float() + (x > 0).float() * p + x.long() + p.int().to(torch.uint8)
    ),
    "comparisons": lambda x, p: (
        x * (p > x) + p * (x == x.round()) + x * torch.isclose(x, p) + p * torch.logical_and(x > 0, p > 0)
    ),
    "fourier": lambda x, p: torch.fft.rfft(x, dim=1).abs() * torch.fft.fft(p, dim=1).real[:, :3],
    "detach": lambda x, p: x * p.detach() + x.detach() * p + (x - x.detach()) * 2,
    "straight-through": lambda x, p: x + (x.round() - x).detach() + p * x.data,
    "interpolate": lambda x, p: (
        F.interpolate(x[None], scale_factor=2, mode="bicubic")[0] * F.interpolate(p[None], (10, 12))[0]
    ),
    "grid_sample": lambda x, p: (
        F.grid_sample(x[None], p[None, 0, :, :2].reshape(1, 1, 5, 2), align_corners=False) * p[0, 0, 0]
    ),
    "attention": lambda x, p: F.scaled_dot_product_attention(x[None], p[None], x[None], dropout_p=0.2)[0] * p,
    "attention-mask": lambda x, p: F.scaled_dot_product_attention(
        x[:, None], p[:, None], p[:, None], torch.ones(5, 5).tril().bool()
    )[:, 0],
    "attention-causal": lambda x, p: F.scaled_dot_product_attention(x[:, None], p[:, None], p[:, None], is_causal=True)[
        :, 0
    ],
    "histogram-like": lambda x, p: (
        x * torch.bucketize(p, torch.tensor([-1.0, 0.0, 1.0])) + torch.searchsorted(torch.arange(3.0), x.detach())
    ),
    "renorm-trapezoid": lambda x, p: (
        x.renorm(2, 1, 1.0) * p + torch.trapezoid(x, dim=1).unsqueeze(1) + p.diff(dim=1).sum(1, keepdim=True)
    ),
    "unfold": lambda x, p: x.unfold(1, 3, 1).sum(-1) * p.as_strided((4, 3, 6), (30, 6, 1), 6),
    "complex": lambda x, p: (
        torch.view_as_real(torch.view_as_complex(x.reshape(4, 5, 3, 2).contiguous())).sum(-1) * p[..., :3]
    ),
    "item": lambda x, p: x * float(x.shape[0]) * torch.tensor(2).item() + p,
}


@pytest.mark.parametrize("name", OPS)
def test_op_gives_eagers_bits(name: str) -> None:
    train_both(Case(lambda: Apply(OPS[name]), square, noise(4, 5, 6)), steps=6, poison=True)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(F, name)
        for name in [
            "relu",
            "relu6",
            "elu",
            "selu",
            "celu",
            "leaky_relu",
            "gelu",
            "silu",
            "mish",
            "softplus",
            "softsign",
            "tanh",
            "sigmoid",
            "hardtanh",
            "hardswish",
            "hardsigmoid",
            "logsigmoid",
            "tanhshrink",
            "softshrink",
            "hardshrink",
            "rrelu",
            "glu",
        ]
    },
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "rrelu-training": lambda x: F.rrelu(x, training=True),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    **{
        f"{name}-inplace": lambda x, name=name: getattr(F, name)(x, inplace=True)
        for name in [
            "relu",
            "relu6",
            "elu",
            "selu",
            "celu",
            "leaky_relu",
            "silu",
            "mish",
            "hardtanh",
            "hardswish",
            "hardsigmoid",
        ]
    },
    "rrelu-training-inplace": lambda x: F.rrelu(x, training=True, inplace=True),
    "threshold-inplace": lambda x: F.threshold(x, 0.1, 20.0, inplace=True),
    "dropout-inplace": lambda x: F.dropout(x, 0.3, inplace=True),
    "sigmoid_": torch.sigmoid_,
    "tanh_": torch.tanh_,
}


IN_PLACE = [name for name in ACTIVATIONS if name.endswith(("inplace", "_"))]  # the others are in test_every_op.py


@pytest.mark.parametrize("name", quick_ones(ACTIVATIONS, IN_PLACE))
def test_activation_gives_eagers_bits(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.LazyLinear(4)
            self(torch.zeros(1, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(ACTIVATIONS[name](self.first(x)))

    train_both(Case(Model, square, noise(7, 6)), steps=6, poison=True)


def test_prelu_gives_eagers_bits() -> None:
    train_both(Case(lambda: sequence(nn.Linear(6, 8), nn.PReLU(8), nn.PReLU(), nn.Linear(8, 4)), square, noise(7, 6)))


# -- losses --------------------------------------------------------------------------------------------------------


def targets_of(y: Tensor) -> Tensor:
    """Labels as positive rows that sum to one."""
    return (y[:, None] == torch.arange(4)).float() * 0.7 + 0.075


CLASS_WEIGHT = torch.tensor([0.1, 2.0, 0.5, 1.0])
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": lambda z, y: F.mse_loss(z, targets_of(y)),
    "l1": lambda z, y: F.l1_loss(z, targets_of(y)),
    "huber": lambda z, y: F.huber_loss(z, targets_of(y), delta=0.3),
    "smooth_l1": lambda z, y: F.smooth_l1_loss(z, targets_of(y), beta=0.3),
    "mse-sum": lambda z, y: F.mse_loss(z, targets_of(y), reduction="sum"),
    "mse-none": lambda z, y: F.mse_loss(z, targets_of(y), reduction="none").amax(1).mean(),
    "cross_entropy": lambda z, y: F.cross_entropy(z, y),
    "cross_entropy-weight": lambda z, y: F.cross_entropy(z, y, CLASS_WEIGHT),
    "cross_entropy-ignore_index": lambda z, y: F.cross_entropy(z, y, ignore_index=2),
    "cross_entropy-weight-ignore_index": lambda z, y: F.cross_entropy(z, y, CLASS_WEIGHT, ignore_index=0),
    "cross_entropy-label_smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "cross_entropy-sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "cross_entropy-none": lambda z, y: F.cross_entropy(z, y, reduction="none").square().mean(),
    "cross_entropy-none-ignored": lambda z, y: F.cross_entropy(
        z, y, CLASS_WEIGHT, ignore_index=2, reduction="none"
    ).sum(),
    "cross_entropy-probabilities": lambda z, y: F.cross_entropy(z, targets_of(y)),
    "cross_entropy-2d": lambda z, y: F.cross_entropy(
        (z[:, :, None, None] * torch.ones(3, 2)), y[:, None, None].expand(-1, 3, 2), CLASS_WEIGHT, ignore_index=3
    ),
    "cross_entropy-twice": lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z, y.flip(0), reduction="sum"),
    "cross_entropy-and-entropy": lambda z, y: F.cross_entropy(z, y) - (z.softmax(1) * z.log_softmax(1)).sum(1).mean(),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, 1), y),
    "nll-read-again": lambda z, y: (lambda logp: F.nll_loss(logp, y) - 0.1 * logp.mean())(F.log_softmax(z, 1)),
    "bce_with_logits": lambda z, y: F.binary_cross_entropy_with_logits(
        z, targets_of(y), CLASS_WEIGHT, pos_weight=CLASS_WEIGHT
    ),
    "bce": lambda z, y: F.binary_cross_entropy(z.sigmoid(), targets_of(y)),
    "kl_div": lambda z, y: F.kl_div(F.log_softmax(z, 1), targets_of(y), reduction="batchmean"),
    "kl_div-log": lambda z, y: F.kl_div(F.log_softmax(z, 1), targets_of(y).log(), reduction="sum", log_target=True),
    "soft_margin": lambda z, y: F.soft_margin_loss(z, targets_of(y) * 2 - 1),
    "multi_margin": lambda z, y: F.multi_margin_loss(z, y, margin=0.5),
    "multilabel_margin": lambda z, y: F.multilabel_margin_loss(z, torch.stack([y, (y + 1) % 4, y - y - 1, y], 1)),
    "multilabel_soft_margin": lambda z, y: F.multilabel_soft_margin_loss(z, targets_of(y)),
    "hinge_embedding": lambda z, y: F.hinge_embedding_loss(z, (y % 2 * 2 - 1).float()[:, None].expand_as(z)),
    "margin_ranking": lambda z, y: F.margin_ranking_loss(z[:, 0], z[:, 1], (y % 2 * 2 - 1).float()),
    "cosine_embedding": lambda z, y: F.cosine_embedding_loss(z, targets_of(y), y % 2 * 2 - 1),
    "triplet_margin": lambda z, y: F.triplet_margin_loss(z, targets_of(y), z.flip(0)),
    "poisson_nll": lambda z, y: F.poisson_nll_loss(z, targets_of(y)),
    "gaussian_nll": lambda z, y: F.gaussian_nll_loss(z, targets_of(y), z.exp()),
}


# Of the others test_every_op.py has their like, with every reduction.
QUICK_LOSSES = (
    *("smooth_l1", "mse-none", "cross_entropy-weight-ignore_index", "cross_entropy-none-ignored", "cross_entropy-2d"),
    *("cross_entropy-twice", "cross_entropy-and-entropy", "nll-read-again", "bce_with_logits", "kl_div-log"),
    *("margin_ranking", "triplet_margin", "gaussian_nll"),
)


@pytest.mark.parametrize("name", quick_ones(LOSSES, QUICK_LOSSES))
def test_loss_gives_eagers_bits(name: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[name](model(x), y)

    train_both(Case(lambda: nn.Linear(16, 4), loss_fn, labelled(8, 16)), steps=8, poison=True)


WIDE = 700  #: classes: with 450 rows the log-probabilities are larger than one chunk of passes/chunk_loss.py
WIDE_WEIGHT = torch.rand(WIDE, generator=generator(5))
WIDE_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda z, y: F.cross_entropy(z, y),
    "weight": lambda z, y: F.cross_entropy(z, y, WIDE_WEIGHT),
    "ignore_index": lambda z, y: F.cross_entropy(z, y.masked_fill(y < 200, -100)),
    "all-ignored": lambda z, y: F.cross_entropy(z, y.masked_fill(y >= 0, -100)),
    "weight-ignore_index-sum": lambda z, y: F.cross_entropy(z, y % 9, WIDE_WEIGHT, ignore_index=3, reduction="sum"),
    "label_smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "none": lambda z, y: F.cross_entropy(z, y, reduction="none").square().mean(),
    "none-summed": lambda z, y: F.cross_entropy(z, y, reduction="none").sum(),
    "scaled": lambda z, y: 3 * F.cross_entropy(z / 2, y),
    "z-loss": lambda z, y: F.cross_entropy(z, y) + 1e-4 * z.logsumexp(1).square().mean(),
    "twice": lambda z, y: F.cross_entropy(z, y) + F.cross_entropy(z, y.flip(0)),
    "three-dimensional": lambda z, y: F.cross_entropy(z.view(9, 50, WIDE).transpose(1, 2), y.view(9, 50)),
    "shifted": lambda z, y: F.cross_entropy(z[:-1], y[1:]),
    "read-again": lambda z, y: (lambda logp: F.nll_loss(logp, y) - 0.1 * logp.mean())(F.log_softmax(z, 1)),
}


@pytest.mark.parametrize("name", WIDE_LOSSES)
def test_chunked_cross_entropy_gives_eagers_bits(name: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return WIDE_LOSSES[name](model(x), y)

    train_both(Case(lambda: nn.Linear(8, WIDE), loss_fn, labelled(450, 8, classes=WIDE)), steps=4, poison=True)


OTHER_PATHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prod": lambda z, y: z.prod(1).mean(),
    "cumprod": lambda z, y: z.cumprod(1).mean(),  # on 2.11 only
    "weight-ignore_index-label_smoothing": lambda z, y: F.cross_entropy(
        z, y, CLASS_WEIGHT, ignore_index=1, label_smoothing=0.2
    ),
}


@pytest.mark.parametrize("name", OTHER_PATHS)
def test_op_that_takes_another_path_while_recorded_is_right_or_refused(name: str) -> None:
    """Some of torch's formulas ask whether a dispatch mode is on (at::isTensorSubclassLike) and then compute in another
    order, an ulp away. Recording uses such a mode, so these are eager's bits or a refusal, but never other bits."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return OTHER_PATHS[name](model(x), y)

    with contextlib.suppress(CaptureError):
        train_both(Case(lambda: nn.Linear(16, 4), loss_fn, labelled(8, 16)), steps=4)


def ctc(model: nn.Module, x: Tensor, lengths: Any) -> Tensor:
    logp, targets = model(x).log_softmax(2), torch.tensor([[1, 2, 3], [2, 2, 1]])
    return F.ctc_loss(logp, targets, lengths, (3, 2) if isinstance(lengths, tuple) else lengths - 6)


def test_ctc_loss_is_right_whatever_its_lengths() -> None:
    """They decide a shape, which is held."""
    lengths = ((9, 8), (9, 8), (8, 8), (8, 7), (9, 8), (8, 8), (8, 7))
    case = Case(lambda: nn.Linear(6, 5), ctc, lambda i: (*noise(9, 2, 6)(i), torch.tensor(lengths[i])))
    train_both(case, steps=7, plans=2)


def test_ctc_loss_with_lists_of_lengths_is_refused() -> None:
    """torch makes a tensor of them that the dispatcher does not see."""
    model = nn.Linear(6, 5)
    step = compile_step(model, ctc, adamw(model))
    with pytest.raises(CaptureError, match="shape depends on the data"):
        step(*noise(9, 2, 6)(0), (9, 8))


def test_loss_of_shape_one_gives_eagers_bits() -> None:
    train_both(Case(lambda: nn.Linear(6, 5), lambda m, x: m(x).sum().reshape(1), noise(4, 6)))


# -- settings that change between steps ----------------------------------------------------------------------------


def test_lr_scheduler_changes_every_step() -> None:
    torch.manual_seed(0)
    model = small_mlp().eval()
    twin = copy.deepcopy(model)
    optimizer, twins = adamw(model), adamw(twin)
    make = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=25)  # noqa: E731
    schedule, twin_schedule = make(optimizer), make(twins)  # OneCycleLR turns betas as well
    step = compile_step(model, classify, optimizer)
    for i in range(20):
        loss = step(*labelled(8, 16)(i))
        schedule.step()
        twins.zero_grad()
        expected = classify(twin, *labelled(8, 16)(i))
        expected.backward()
        twins.step()
        twin_schedule.step()
        assert torch.equal(loss, expected.detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert len(step._plans) == 1


def _change_settings(i: int, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    group["lr"] = 0.01 / (1 + i)
    group["weight_decay"] = 0.01 * (i % 3)
    if "betas" in group:
        group["betas"] = (0.9 - 0.01 * i, 0.99)
        group["eps"] = 1e-8 * (1 + i)
    else:
        group["momentum"] = 0.9 - 0.02 * i


def _reload_optimizer(i: int, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i in (4, 9):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.5 / i
        for state in saved["state"].values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim() > 0:
                    value.mul_(0.5)
        optimizer.load_state_dict(saved)


def _forget_optimizer_state(i: int, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i == 6:
        optimizer.state.clear()


def _reload_model(i: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
    if i in (4, 9):
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def _reinitialise_data(i: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
    if i in (4, 9):
        for p in model.parameters():
            p.data = p.data * 0.5


def _evaluate_mode(i: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.train(i % 7 < 4)


def _toggle_gradients(i: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
    next(model.parameters()).requires_grad_(i % 7 < 4)


def _dropout_rate(i: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1 if i < 10 else 0.5


def _replace_groups(i: int, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if i == 5:
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.3}


CHANGES: dict[str, tuple[Any, int | None]] = {
    "settings": (_change_settings, None),
    "optimizer.load_state_dict": (_reload_optimizer, None),
    "optimizer.state.clear": (_forget_optimizer_state, None),
    "optimizer.param_groups": (_replace_groups, None),
    "model.load_state_dict": (_reload_model, 1),
    "parameter.data": (_reinitialise_data, None),
    "model.eval": (_evaluate_mode, 2),
    "requires_grad_": (_toggle_gradients, 2),
    "dropout.p": (_dropout_rate, 2),
}


@pytest.mark.parametrize(("name", "optimizer"), in_turns(CHANGES, ["sgd", "sgd-momentum", "adamw", "adamw-fused"]))
def test_change_between_steps_is_honoured(name: str, optimizer: str) -> None:
    between, plans = CHANGES[name]
    kind, settings = SETTINGS[optimizer.removesuffix("-fused")]
    extra = PATHS["fused"] if optimizer.endswith("-fused") else {}
    train_both(
        Case(small_mlp, classify, labelled(8, 16), plain(kind, **settings, **extra), between=between),
        steps=13,
        plans=plans,
    )


def test_parameter_turned_in_its_own_memory_is_noticed() -> None:
    """Same address, same size, other strides: only the geometry tells."""

    def between(i: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        if i == 5:
            model.weight.data = model.weight.data.t()  # type: ignore[operator, union-attr]

    train_both(
        Case(lambda: nn.Linear(6, 6), square, noise(4, 6), plain(torch.optim.SGD), between=between), steps=10, plans=2
    )


def test_parameter_added_to_the_optimizer_is_trained() -> None:
    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if i == 5:
            optimizer.add_param_group({"params": list(model.parameters())[:2], "lr": 0.05})

    def last_layer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(model.parameters())[2:], lr=0.01)

    train_both(Case(small_mlp, classify, labelled(8, 16), last_layer, between=between), steps=10, plans=2)


# -- precision -----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A little of everything, in the dtype it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.norm(self.conv(x))).mean(1))


@pytest.mark.parametrize(("dtype", "path"), in_turns([torch.bfloat16, torch.float64, torch.float16], PATHS), ids=str)
def test_model_in_another_dtype_gives_eagers_bits(dtype: torch.dtype, path: str) -> None:
    train_both(
        Case(lambda: Mixed(dtype), classify, labelled(4, 3, 16, dtype=dtype), plain(torch.optim.AdamW, **PATHS[path])),
        steps=5,
    )


def test_parameters_of_two_dtypes_give_eagers_bits() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(16, 16).bfloat16(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.low(x.bfloat16()).float())

    for path in PATHS.values():
        train_both(
            Case(Model, classify, labelled(8, 16), plain(torch.optim.AdamW, **path), settings={"clip_norm": 0.5})
        )


def autocast(dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


class Regions(nn.Module):
    """A convolution, a linear layer and an attention in fp32 inside, between layers in the surrounding precision."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.inner = inner
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.middle = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        with autocast(enabled=self.inner):
            x = self.middle(F.gelu(self.conv(x.float())))
            x = self.attention(x, x, x)[0]
        return self.last(x.float().mean(1))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_autocast_around_and_inside_the_step(outer: bool, inner: bool) -> None:
    around = autocast if outer else contextlib.nullcontext
    train_both(Case(lambda: Regions(inner), classify, labelled(4, 3, 16), around=around), steps=5)


@pytest.mark.parametrize(
    "name",
    quick_ones(
        ["mlp", "gpt-dropout=0.1-tied=True", "resnet-inplace=True-zero_init=False", *(n for n in S4 if n[-1] != "1")],
        ["gpt-dropout=0.1-tied=True", "resnet-inplace=True-zero_init=False"],
    ),
)
def test_zoo_model_under_autocast(name: str) -> None:
    train_both(dataclasses.replace(ZOO[name], around=autocast), steps=5)


def test_autocast_that_comes_and_goes_has_two_plans() -> None:
    turn = iter(range(1000))

    def around() -> contextlib.AbstractContextManager[Any]:
        return autocast(enabled=next(turn) % 2 == 0)

    train_both(Case(small_mlp, classify, labelled(8, 16), around=around), steps=8, plans=2)


# -- recomputation and second derivatives --------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two transformer layers with dropout, recomputed in the backward."""

    def __init__(self, use_reentrant: bool, preserve: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.use_reentrant, self.preserve = use_reentrant, preserve

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant, preserve_rng_state=self.preserve)
        return F.dropout(x, 0.1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_block_with_dropout_gives_eagers_bits(use_reentrant: bool) -> None:
    train_both(Case(lambda: Checkpointed(use_reentrant), square, noise(4, 5, 16)), steps=5, poison=True)


def test_checkpoint_under_autocast_gives_eagers_bits() -> None:
    train_both(Case(lambda: Checkpointed(False), square, noise(4, 5, 16), around=autocast), steps=5)


class Gate(nn.Module):
    """A comparison inside of a checkpoint: whether it reads bytes is found by a trial, of which the checkpoint's hooks
    must not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        def gate(x: Tensor) -> Tensor:
            z: Tensor = self.layer(x)
            return z * (z > 0)

        return checkpoint(gate, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_comparison_in_a_checkpoint_gives_eagers_bits() -> None:
    train_both(Case(Gate, square, noise(4, 16)), steps=3)


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """As in WGAN-GP: the loss holds a gradient with respect to the input."""
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()


def test_gradient_penalty_gives_eagers_bits() -> None:
    model = lambda: sequence(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))  # noqa: E731
    train_both(Case(model, gradient_penalty, noise(8, 16)), poison=True)


class ScaleGradient(torch.autograd.Function):
    """A user's own autograd function, with a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight.sigmoid() * 0.5, (grad * x).sum(0)


def test_autograd_function_of_the_users_gives_eagers_bits() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate = nn.Linear(16, 8), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return ScaleGradient.apply(self.linear(x), self.gate)

    train_both(Case(Model, square, noise(8, 16)), poison=True)


def test_inner_optimisation_step_gives_eagers_bits() -> None:
    """One step of MAML: gradients with create_graph, then a functional call with the stepped parameters."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        names, values = zip(*model.named_parameters(), strict=True)
        inner = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(inner, values, create_graph=True)
        stepped = {n: p - 0.1 * g for n, p, g in zip(names, values, grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, stepped, (x.flip(0),)), y.flip(0))

    train_both(Case(lambda: sequence(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)), loss_fn, labelled(8, 16)))
