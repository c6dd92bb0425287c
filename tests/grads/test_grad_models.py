"""The ways models are copied, saved, compiled and transformed: each keeps working while a GradBuffer is attached."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grad_twins import assert_same, backward_both, in_its_slice, twins
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import takeback
from takeback.errors import TakebackError

X = torch.linspace(-1, 1, 12).view(3, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 2, 1))


def loss(m: nn.Module) -> torch.Tensor:
    return m(X).square().sum()


def _saved(m: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("held", [False, True])
def test_a_copied_model_stands_on_its_own(how: str, held: bool) -> None:
    model, buf, eager = twins(net())
    if held:
        backward_both(model, eager, loss)
    other = COPIES[how](model)
    flat = buf.flat.clone()
    eager.zero_grad()
    other.zero_grad()
    backward_both(other, eager, loss)
    for p, q in zip(other.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert torch.equal(buf.flat, flat)


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_model_may_have_a_buffer_of_its_own_without_copies(how: str) -> None:
    model, buf, eager = twins(net())
    other = COPIES[how](model)
    with_own = takeback.GradBuffer(other)
    backward_both(other, eager, loss)
    assert_same(other, with_own, eager)
    assert (with_own.copies, dict(with_own.reasons)) == (0, {})
    with_own.detach()
    assert not any("forward" in vars(m) for m in other.modules())
    loss(model).backward()
    assert buf.copies == 0


def test_a_buffer_itself_is_neither_copied_nor_pickled() -> None:
    buf = takeback.GradBuffer(net())
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make a new one for the copied or loaded model"):
            attempt(buf)


def test_state_dict_goes_both_ways() -> None:
    model, buf, eager = twins(net())
    state = model.state_dict()
    assert list(state) == list(eager.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), eager.state_dict().values(), strict=True))
    new = {k: torch.randn_like(v) for k, v in state.items()}
    for m in (model, eager):
        m.load_state_dict(new)
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    assert buf.copies == 0


def test_a_replica_computes_with_its_own_weights() -> None:
    """nn.DataParallel copies `__dict__`: a forward bound to the original would compute with the original's weights."""
    layer = nn.Linear(4, 2)
    buf = takeback.GradBuffer(layer)
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(2, 4), torch.ones(2)
    assert torch.equal(replica(X), torch.ones(3, 2))
    assert buf.attached


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled_first", [False, True])
def test_compiled_model_is_right(backend: str, compiled_first: bool) -> None:
    torch._dynamo.reset()
    source = net()
    eager = copy.deepcopy(source)
    if compiled_first:
        compiled = torch.compile(source, backend=backend)
        loss(compiled).backward()
        source.zero_grad()
        buf = takeback.GradBuffer(source)
    else:
        buf = takeback.GradBuffer(source)
        compiled = torch.compile(source, backend=backend)
    for _ in range(3):
        backward_both(compiled, eager, loss)
        assert_same(source, buf, eager)
    buf.detach()
    backward_both(compiled, eager, loss)
    for p, q in zip(source.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_functional_call_computes_with_what_it_was_given() -> None:
    model, buf, eager = twins(net())
    given = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
    got = []
    for m in (model, eager):
        result = torch.func.functional_call(m, given, (X,)).square().sum()
        got.append(torch.autograd.grad(result, list(given.values())))
    for ours, theirs in zip(*got, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not buf.flat.any()
    some = dict(list(given.items())[:1])
    for m in (model, eager):
        torch.func.functional_call(m, some, (X,)).square().sum().backward()
    assert_same(model, buf, eager)


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "vmap": lambda m: torch.vmap(m)(X[:, None]),
    "jacrev": lambda m: torch.func.jacrev(m)(X),
    "jacfwd": lambda m: torch.func.jacfwd(m)(X),
    "grad of input": lambda m: torch.func.grad(lambda x: m(x).square().sum())(X),
    "jvp": lambda m: torch.func.jvp(m, (X,), (torch.ones_like(X),)),
    "hessian": lambda m: torch.func.hessian(lambda x: m(x).square().sum())(X),
    "per sample": lambda m: torch.vmap(
        torch.func.grad(lambda ps, x: torch.func.functional_call(m, ps, (x[None],)).square().sum()), (None, 0)
    )({n: p.detach() for n, p in m.named_parameters()}, X),
    "grad of some": lambda m: torch.func.grad(
        lambda w: torch.func.functional_call(m, {"0.weight": w}, (X,)).square().sum()
    )(m[0].weight.detach()),
    "jacobian": lambda m: torch.autograd.functional.jacobian(m, X),
    "jacobian, vectorized": lambda m: torch.autograd.functional.jacobian(m, X, vectorize=True),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_work_on_an_attached_model(name: str) -> None:
    model, buf, eager = twins(net())
    torch.testing.assert_close(TRANSFORMS[name](model), TRANSFORMS[name](eager))
    assert not buf.flat.any()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_works_on_an_attached_model() -> None:
    model, _, eager = twins(net())
    got = []
    for m in (model, eager):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
            got.append(torch.autograd.forward_ad.unpack_dual(m(dual)).tangent)
    torch.testing.assert_close(*got)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_layers_are_right(when: str, how: Callable[[nn.Module], nn.Module]) -> None:
    """spectral_norm changes its state each time the weight is asked for: twice in a forward is once too often."""
    source = net()
    model, eager = source, copy.deepcopy(source)
    if when == "after":
        buf = takeback.GradBuffer(model)
    for m in (model, eager):
        torch.manual_seed(1)
        how(m[0])
        how(m[4])
    if when == "before":
        buf = takeback.GradBuffer(model)
    for _ in range(2):
        backward_both(model, eager, loss)
        buf.gather_()  # what was registered after attaching may have a new AccumulateGrad, which has no hook of ours
        assert_same(model, buf, eager)
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_parametrization_is_computed_once_a_forward() -> None:
    class Count(nn.Module):
        calls = 0

        def forward(self, w: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return w * 2

    for layer, x in (
        (nn.Linear(4, 2), X),
        (nn.Conv1d(4, 2, 1), X[..., None]),
        (nn.Embedding(4, 2), torch.tensor([1, 2])),
    ):
        count = Count()
        parametrize.register_parametrization(layer, "weight", count)
        buf = takeback.GradBuffer(layer)
        count.calls = 0
        layer(x).sum().backward()
        assert count.calls == 1, layer
        assert in_its_slice(buf, layer.parametrizations.weight.original)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_old_weight_norm_is_right() -> None:
    source = net()
    torch.nn.utils.weight_norm(source[0])
    model, buf = source, takeback.GradBuffer(source)
    eager = net()
    torch.nn.utils.weight_norm(eager[0])
    for _ in range(2):
        backward_both(model, eager, loss)
        assert_same(model, buf, eager)


class Doubled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Renamed(nn.Linear):
    """A Linear that is only called differently."""


def test_subclasses_are_packed_only_where_the_forward_is_torchs() -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Sequential(Doubled(4, 4), Renamed(4, 4)))
    for _ in range(2):
        backward_both(model, eager, loss)
        assert_same(model, buf, eager)
    assert set(buf.reasons) == {"0.weight", "0.bias"}
    assert "Doubled" in buf.reasons["0.weight"]


def test_a_forward_replaced_in_the_instance_stays_and_is_right() -> None:
    source = net()
    eager = net()
    for m in (source, eager):
        m[0].forward = lambda x, layer=m[0]: F.linear(x, layer.weight * 3, layer.bias)
    own = source[0].forward
    buf = takeback.GradBuffer(source)
    assert source[0].forward is own
    for _ in range(2):
        backward_both(source, eager, loss)
        assert_same(source, buf, eager)
    assert "replaced" in buf.reasons["0.weight"]
    buf.detach()
    assert source[0].forward is own


def test_a_forward_replaced_after_attaching_survives_detach() -> None:
    model, buf, eager = twins(net())
    for m in (model, eager):
        old = m[0].forward
        m[0].forward = lambda x, old=old: old(x) * 2
    own = model[0].forward
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
    assert buf.copies == 0
    buf.detach()
    assert model[0].forward is own
    torch.testing.assert_close(model(X), eager(X))


def _attention(m: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 48).view(2, 3, 8)
    return m(x, x, x)[0].square().sum()


BIG: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]] = {
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), _attention),
    "attention, other keys": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        lambda m: (
            m(torch.ones(3, 2, 8), torch.ones(5, 2, 4), X[:, None].expand(3, 2, 4).repeat(2, 1, 1)[:5])[0]
            .square()
            .sum()
        ),
    ),
    "lstm": (lambda: nn.LSTM(4, 5, 2), lambda m: m(X[:, None])[0].square().sum()),
    "gru": (lambda: nn.GRU(4, 5, bidirectional=True), lambda m: m(X[:, None])[0].square().sum()),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda m: m(torch.linspace(-1, 1, 48).view(2, 3, 8)).square().sum(),
    ),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), lambda m: m(X, X).square().sum()),
    "transposed": (lambda: nn.ConvTranspose1d(4, 3, 2), lambda m: m(X[..., None]).square().sum()),
    "bag": (lambda: nn.EmbeddingBag(5, 3), lambda m: m(torch.tensor([[1, 2], [2, 4]])).square().sum()),
}


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("zero", [None, True, False])
def test_torchs_bigger_modules_are_right(name: str, zero: bool | None) -> None:
    torch.manual_seed(0)
    make, run = BIG[name]
    model, buf, eager = twins(make())
    for _ in range(3):
        backward_both(model, eager, run)
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
        if zero is not None:
            model.zero_grad(set_to_none=zero)
            eager.zero_grad(set_to_none=zero)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tiny_gpt2_is_right_and_its_products_are_not_copied() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, n_positions=16, n_embd=12, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)  # noqa: C408
    model, buf, eager = twins(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval())
    tokens = torch.randint(61, (2, 9))
    for _ in range(2):
        backward_both(model, eager, lambda m: m(input_ids=tokens, labels=tokens).loss)
        assert_same(model, buf, eager, rtol=1e-3, atol=1e-5)
    assert not [n for n in buf.reasons if ".ln_" not in n], buf.reasons


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_output_of_transformers_conv1d_may_be_overwritten() -> None:
    layers = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Sequential(layers.Conv1D(5, 4), nn.ReLU(inplace=True)))
    backward_both(model, eager, lambda m: m(X[None]).sum())
    assert_same(model, buf, eager)
    assert buf.copies == 0


def test_two_models_train_in_two_threads() -> None:
    failures: list[str] = []
    barrier = threading.Barrier(2)

    def train(seed: int) -> None:
        try:
            torch.manual_seed(0)
            model, buf, eager = twins(net())
            barrier.wait(timeout=60)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
            for step in range(60):
                for m in (model, eager):
                    m(x).square().sum().backward()
                buf.clip_(1.0)
                torch.nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
                assert_same(model, buf, eager, rtol=1e-4, atol=1e-5)
                if step % 3 == 2:
                    model.zero_grad()
                    eager.zero_grad()
            buf.detach()
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert failures == []


def test_compile_step_on_an_attached_model_is_right_or_refused() -> None:
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))  # noqa: E731
    model, buf, eager = twins(make())
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(eager.parameters(), lr=0.1)
    try:
        step = takeback.compile_step(model, lambda m, x: m(x).square().sum(), ours)
        for _ in range(3):
            result = step(X)
            expected = eager(X).square().sum()
            theirs.zero_grad()
            expected.backward()
            theirs.step()
            torch.testing.assert_close(result, expected.detach())
    except TakebackError as error:
        assert "GradBuffer" in str(error)  # noqa: PT017
        return
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    model.zero_grad()
    eager.zero_grad()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager)
