"""On a GPU a compiled step has eager's bits, and what it refuses is refused plainly, with nothing changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from gpu_twins import (
    DEVICE,
    Case,
    adamw,
    assert_same,
    bf16,
    channels_last,
    convnet,
    everything,
    exact_step,
    gpt,
    images,
    labelled,
    mlp,
    momentum,
    rows,
    same,
    tokens,
    tokens_loss,
    train_both,
)
from torch import Tensor, nn

import takeback as tb
from takeback.errors import CaptureError, OptionError
from takeback.zoo.gpt import GPT, GPTConfig

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def steady_kernels() -> Iterator[None]:
    """Eager's own convolutions repeat their bits."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 10))


MODELS = {
    "mlp, dropout": Case(mlp, labelled, rows),
    "convnet": Case(convnet, labelled, images, momentum),
    "convnet, in place": Case(partial(convnet, inplace=True), labelled, images, momentum),
    "convnet, channels_last": Case(convnet, labelled, channels_last, momentum),
    "convnet, channels_last, bf16": Case(convnet, labelled, channels_last, momentum, around=bf16),
    "batch norm on rows": Case(normed, labelled, rows),
    "gpt": Case(gpt, tokens_loss, tokens),
    "gpt, untied": Case(partial(gpt, tied=False), tokens_loss, tokens),
    "gpt, bf16": Case(gpt, tokens_loss, tokens, around=bf16),
    "gpt, dropout, bf16": Case(partial(gpt, 0.1), tokens_loss, tokens, around=bf16),
    "gpt, dropout": Case(partial(gpt, 0.1), tokens_loss, tokens),
}


@pytest.mark.parametrize("memory", ["auto", "keep", "min"])
@pytest.mark.parametrize("name", MODELS)
def test_step_has_eagers_bits(name: str, memory: str) -> None:
    case = MODELS[name]
    train_both(Case(case.build, case.loss_fn, case.draw, case.optimizer, {"memory": memory}, case.around))


@pytest.mark.parametrize("name", MODELS)
def test_early_update_has_eagers_bits(name: str) -> None:
    case = MODELS[name]
    settings = {"memory": "min", "update": "early", "keep_grads": False}
    train_both(Case(case.build, case.loss_fn, case.draw, case.optimizer, settings, case.around))


@pytest.mark.parametrize("name", ["convnet", "convnet, channels_last, bf16"])
def test_batch_norm_is_rebuilt_and_updates_its_statistics_once(name: str) -> None:
    case = MODELS[name]
    step = train_both(Case(case.build, case.loss_fn, case.draw, case.optimizer, {"memory": "min"}, case.around))
    ops = [op for op in step._plans[0].executor.program.ops if "batch_norm" in op.name and "backward" not in op.name]
    assert any(op.args[3] is None for op in ops), "no batch norm was rebuilt: this test shows nothing"


@pytest.mark.parametrize("name", ["mlp, dropout", "convnet", "gpt, bf16"])
def test_poison_changes_nothing(name: str) -> None:
    train_both(MODELS[name], poison=True)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd nesterov decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "adam loop": lambda p: torch.optim.Adam(p, foreach=False),
    "adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}
OWN_STEP = ("adamw capturable", "adagrad")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_has_eagers_bits(name: str) -> None:
    step = train_both(Case(mlp, labelled, rows, lambda m: OPTIMIZERS[name](m.parameters())))
    own = any(r.decision == "plan the update" for r in step.report().refusals)
    assert own == (name in OWN_STEP)


def test_scheduler_changes_the_next_step() -> None:
    ours, eager = mlp().to(DEVICE), mlp().to(DEVICE)
    eager.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, eager)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    step = exact_step(ours, labelled, optimizers[0])
    for i in range(5):
        batch = Case(mlp, labelled, rows).batch(i)
        torch.manual_seed(i)
        step(*batch)
        torch.manual_seed(i)
        labelled(eager, *batch).backward()
        optimizers[1].step()
        eager.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert_same(everything(ours, optimizers[0]), everything(eager, optimizers[1]), "at the end")
    assert len(step._plans) == 1


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 3},
    "clip": {"clip_norm": 0.1},
    "accumulate and clip": {"accumulate": 2, "clip_norm": 0.5},
    "no gradients kept": {"keep_grads": False},
    "verified": {"verify_every": 2},
    "verified and clipped": {"verify_every": 2, "clip_norm": 0.1, "keep_grads": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_has_eagers_bits(name: str) -> None:
    train_both(Case(mlp, labelled, rows, settings=SETTINGS[name]))


def with_aux(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(x)
    return F.cross_entropy(logits, y), {"logits": logits, "hit": (logits.argmax(1) == y).float().mean()}


def test_aux_is_returned_fresh() -> None:
    train_both(Case(mlp, with_aux, rows))


def checkpointed(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.utils.checkpoint.checkpoint(model[:4], x, use_reentrant=False)
    return F.cross_entropy(model[4:](hidden), y)


def test_checkpoint_with_dropout_draws_eagers_numbers() -> None:
    train_both(Case(mlp, checkpointed, rows))


def noisy(generator: torch.Generator, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    return F.cross_entropy(model(x + noise + torch.randn_like(x)), y)


def test_generator_of_the_users_is_drawn_from_as_in_eager() -> None:
    generators = [torch.Generator(DEVICE).manual_seed(3) for _ in range(2)]
    models = [Case(mlp, labelled, rows).model() for _ in range(2)]
    optimizers = [adamw(m) for m in models]
    step = exact_step(models[0], partial(noisy, generators[0]), optimizers[0])
    for i in range(5):
        batch = Case(mlp, labelled, rows).batch(i)
        torch.manual_seed(i)
        ours = step(*batch)
        torch.manual_seed(i)
        loss = noisy(generators[1], models[1], *batch)
        loss.backward()
        optimizers[1].step()
        models[1].zero_grad()
        assert same(ours, loss)
        assert torch.equal(generators[0].get_state(), generators[1].get_state())
    assert_same(everything(models[0], optimizers[0]), everything(models[1], optimizers[1]), "at the end")


def branching(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    scale = 2.0 if logits.isnan().any().item() else 1.0
    return F.cross_entropy(logits * scale, y)


def test_value_read_into_python_is_held() -> None:
    train_both(Case(mlp, branching, rows))


def moved_inside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE)
    return F.cross_entropy(model(x * torch.tensor(0.5)), y)


def test_batch_on_the_cpu_may_be_moved_inside_the_step() -> None:
    case = Case(mlp, moved_inside, rows)
    models = [case.model() for _ in range(2)]
    optimizers = [adamw(m) for m in models]
    step = exact_step(models[0], moved_inside, optimizers[0])
    for i in range(5):
        batch = rows(torch.Generator().manual_seed(i))
        torch.manual_seed(i)
        ours = step(*batch)
        torch.manual_seed(i)
        loss = moved_inside(models[1], *batch)
        loss.backward()
        optimizers[1].step()
        models[1].zero_grad()
        assert same(ours, loss)
    assert_same(everything(models[0], optimizers[0]), everything(models[1], optimizers[1]), "at the end")


def test_shapes_and_modes_have_plans_of_their_own() -> None:
    case = Case(convnet, labelled, images, momentum)
    models = [case.model() for _ in range(2)]
    optimizers = [momentum(m) for m in models]
    step = exact_step(models[0], labelled, optimizers[0])
    for i in range(9):
        x, y = case.batch(i)
        x, y = (x[:4], y[:4]) if i % 3 == 1 else (x, y)
        for m in models:
            m.train(i % 3 != 2)
        ours = step(x, y)
        loss = labelled(models[1], x, y)
        loss.backward()
        optimizers[1].step()
        models[1].zero_grad()
        assert same(ours, loss), i
        assert_same(everything(models[0], optimizers[0]), everything(models[1], optimizers[1]), f"step {i}")
    assert len(step._plans) == 3


def test_step_that_fails_is_taken_back() -> None:
    case = Case(convnet, labelled, images, momentum)
    model = case.model()
    optimizer = momentum(model)
    step = exact_step(model, labelled, optimizer)
    for i in range(4):
        step(*case.batch(i))
    before = {k: v.clone() for k, v in everything(model, optimizer).items()}

    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        step._replayer.replay(step._plans[0], list(case.batch(9)), fail)
    assert_same(everything(model, optimizer), before, "after the failure")
    assert torch.is_grad_enabled()
    step(*case.batch(10))


def test_step_runs_on_another_stream_than_it_was_recorded_on() -> None:
    if DEVICE != "cuda":
        pytest.skip("streams")
    case = MODELS["gpt"]
    models = [case.model() for _ in range(2)]
    optimizers = [adamw(m) for m in models]
    step = exact_step(models[0], tokens_loss, optimizers[0])
    side = torch.cuda.Stream()
    for i in range(6):
        batch = case.batch(i)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if i % 2 else torch.cuda.current_stream()):
            ours = step(*batch)
        torch.cuda.current_stream().wait_stream(side)
        loss = tokens_loss(models[1], *batch)
        loss.backward()
        optimizers[1].step()
        models[1].zero_grad()
        assert same(ours, loss), i
    assert_same(everything(models[0], optimizers[0]), everything(models[1], optimizers[1]), "at the end")


def test_gpu_setting_is_part_of_the_plans_key() -> None:
    model = nn.Linear(64, 64).to(DEVICE)
    step = exact_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        step(torch.randn(8, 64, device=DEVICE))
        step(torch.randn(8, 64, device=DEVICE))
        torch.backends.cuda.matmul.fp32_precision = "tf32" if before != "tf32" else "ieee"
        step(torch.randn(8, 64, device=DEVICE))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(step._plans) == 2


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(64, 32, num_layers=2, batch_first=True)
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.view(-1, 3, 64))[0][:, -1])


def thirds(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y[:32])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_net_has_eagers_bits(kind: type[nn.RNNBase]) -> None:
    train_both(Case(partial(Recurrent, kind), thirds, rows))


def language(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def few_tokens(g: torch.Generator) -> tuple[Tensor]:
    return (torch.randint(3, 61, (3, 12), generator=g),)


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "n_positions": 12, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 12}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


@pytest.mark.parametrize("around", [contextlib.nullcontext, bf16])
@pytest.mark.parametrize("build", [_gpt2, _llama])
def test_transformers_model_has_eagers_bits(build: Any, around: Any) -> None:
    train_both(Case(build, language, few_tokens, around=around))


def long_gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=64, width=128, layers=1, heads=2, context=1024))


def long_tokens(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 64, (8, 1024), generator=g), torch.randint(0, 64, (8, 1024), generator=g)


@pytest.mark.skipif(not os.environ.get("CUBLAS_WORKSPACE_CONFIG"), reason="needs CUBLAS_WORKSPACE_CONFIG=:4096:8")
def test_long_attention_repeats_with_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        train_both(Case(long_gpt, tokens_loss, long_tokens, around=bf16))
    finally:
        torch.use_deterministic_algorithms(False)


# -- refused -----------------------------------------------------------------------------------------------------


def test_model_on_cpu_and_gpu_is_refused_by_name_of_the_devices() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).cuda())
    with pytest.raises(CaptureError, match=r"more than one device \(cpu, cuda:0\)"):
        exact_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters()))


def test_batch_on_the_gpu_is_refused_and_the_model_is_unchanged() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    step = exact_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match="tensor 0 of the batch is on cuda:0, the model on cpu"):
        step(torch.randn(2, 4, device="cuda"))
    assert torch.equal(model.weight, before)


class _Unsteady(torch.autograd.Function):
    """A gradient that adds in the order in which threads come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        where = torch.zeros(1 << 20, dtype=torch.int64, device=g.device)
        noise = torch.linspace(0.1, 7.7, 1 << 20, device=g.device)
        return g + torch.zeros(1, device=g.device).scatter_add(0, where, noise)


def test_eager_that_does_not_repeat_is_refused_with_what_to_set() -> None:
    model = nn.Linear(4, 4).to(DEVICE)
    before = model.weight.detach().clone()
    step = exact_step(model, lambda m, x: _Unsteady.apply(m(x)).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match=r"eager itself does not repeat.*scatter_add.*cudnn.deterministic = True"):
        step(torch.randn(2, 4, device=DEVICE))
    assert torch.equal(model.weight, before)


def read_in_backward() -> type[torch.autograd.Function]:
    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * float(g.cpu().numpy().sum())

    return Read


def test_numpy_in_the_backward_is_refused_on_autograds_own_thread() -> None:
    model = nn.Linear(4, 4).to(DEVICE)
    read = read_in_backward()
    step = exact_step(model, lambda m, x: read.apply(m(x)).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match=r"numpy\(\).*takes the data out of torch"):
        step(torch.randn(2, 4, device=DEVICE))


def test_predict_is_refused_for_a_model_on_the_gpu() -> None:
    model = nn.Linear(4, 4).to(DEVICE)
    with pytest.raises(OptionError, match="the model is on cuda:0, and the prediction would be for the CPU"):
        tb.predict(model, lambda m, x: m(x).sum(), adamw(model), torch.randn(2, 4, device=DEVICE))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_step_inside_a_captured_graph_is_refused() -> None:
    case = MODELS["gpt"]
    model = case.model()
    step = exact_step(model, tokens_loss, adamw(model))
    batch = case.batch(0)
    for _ in range(3):
        step(*batch)
    before = [p.detach().clone() for p in model.parameters()]
    with (
        pytest.raises(CaptureError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        step(*batch)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    step(*batch)
