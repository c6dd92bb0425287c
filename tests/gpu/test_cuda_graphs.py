"""A plan whose forward and backward are one CUDA graph has eager's bits, and says why where it is none."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from gpu_twins import (
    DEVICE,
    Case,
    adamw,
    bf16,
    channels_last,
    convnet,
    exact_step,
    gpt,
    images,
    labelled,
    mlp,
    momentum,
    rows,
    tokens,
    tokens_loss,
    train_both,
)
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.run import allocator_executor
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.cuda_graph import CAPTURED, DEVICE_BOUND

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ALWAYS = {"graphs": "always"}
STEPS = 14  #: so that the sampled replay, the tenth, lets go of a graph, and another is captured


@pytest.fixture(autouse=True)
def steady_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's own convolutions repeat their bits."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def state(step: tb.CompiledStep) -> str:
    return step._plans[0].executor.graph


def trained(case: Case, **settings: Any) -> tb.CompiledStep:
    step = train_both(
        Case(case.build, case.loss_fn, case.draw, case.optimizer, {**ALWAYS, **case.settings, **settings}, case.around),
        steps=STEPS,
    )
    assert state(step) == CAPTURED
    return step


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(mlp, labelled, rows), id="mlp, dropout"),
        pytest.param(Case(convnet, labelled, images, momentum), id="convnet"),
        pytest.param(Case(convnet, labelled, channels_last, momentum, around=bf16), id="convnet, channels_last, bf16"),
        pytest.param(Case(gpt, tokens_loss, tokens), id="gpt"),
        pytest.param(Case(partial(gpt, 0.1), tokens_loss, tokens, around=bf16), id="gpt, dropout, bf16"),
    ],
)
@pytest.mark.parametrize("memory", ["auto", "min"])
def test_has_eagers_bits(case: Case, memory: str) -> None:
    step = trained(case, memory=memory)
    assert f"CUDA graphs: {CAPTURED}" in step.report().notes


@pytest.mark.parametrize(
    "settings",
    [{"clip_norm": 0.1}, {"accumulate": 2}, {"keep_grads": False}],
    ids=["clip", "accumulate", "no gradients"],
)
def test_options_have_eagers_bits(settings: dict[str, Any]) -> None:
    trained(Case(mlp, labelled, rows), **settings)


def test_a_schedule_is_followed() -> None:
    ours, eager = (Case(mlp, labelled, rows).model() for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (ours, eager)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    step = exact_step(ours, labelled, optimizers[0], graphs="always")
    for i in range(STEPS):
        batch = Case(mlp, labelled, rows).batch(i)
        torch.manual_seed(i)
        step(*batch)
        torch.manual_seed(i)
        optimizers[1].zero_grad()
        labelled(eager, *batch).backward()
        optimizers[1].step()
        for schedule in schedules:
            schedule.step()
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.equal(a, b), f"step {i}"
    assert state(step) == CAPTURED


def test_other_shapes_and_evaluation_between_steps() -> None:
    """Two graphs share a pool, and the rest of the process has a normal allocator."""
    case = Case(partial(gpt, 0.1), tokens_loss, tokens)
    ours, eager = case.model(), case.model()
    mine, theirs = adamw(ours), adamw(eager)
    step = exact_step(ours, tokens_loss, mine, graphs="always")
    for i in range(30):
        batch = tuple(t[: 4 - i % 2] for t in case.batch(i))
        torch.manual_seed(i)
        loss = step(*batch)
        torch.manual_seed(i)
        theirs.zero_grad()
        expected = tokens_loss(eager, *batch)
        expected.backward()
        theirs.step()
        assert torch.equal(loss, expected), f"step {i}"
        with torch.no_grad():
            torch.randn(1 << 20, device=DEVICE).sum()
            assert torch.equal(ours.eval()(batch[0]), eager.eval()(batch[0])), f"step {i}"
        ours.train(), eager.train()
    assert [plan.executor.graph for plan in step._plans].count(CAPTURED) == 2


def test_fast_mode_learns_as_eager_does() -> None:
    case = Case(partial(gpt, 0.1), tokens_loss, tokens, around=bf16)
    losses = {}
    for how in ("always", "never"):
        model = case.model()
        step = tb.compile_step(model, tokens_loss, adamw(model), mode="fast", graphs=how)
        with bf16():
            losses[how] = []
            for i in range(30):
                torch.manual_seed(i)
                losses[how].append(float(step(*case.batch(i % 3))))
        assert (state(step) == CAPTURED) is (how == "always"), state(step)
    assert losses["always"] == pytest.approx(losses["never"], rel=2e-3)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if float((x.detach() * 0).sum()) >= 0 else 1.0)


def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(Reads, labelled, rows), "reads a value into Python"),
        (Case(mlp, checkpointed, rows), "the random state is saved and restored"),
        (Case(mlp, labelled, rows, settings={"update": "early", "keep_grads": False}), "the update is made early"),
    ],
    ids=["item", "checkpoint", "early"],
)
def test_what_cannot_be_captured_says_why_and_runs(case: Case, why: str) -> None:
    step = train_both(Case(case.build, case.loss_fn, case.draw, case.optimizer, {**ALWAYS, **case.settings}))
    assert why in state(step)
    assert any(why in note for note in step.report().notes)


def test_a_graph_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first replay is compared: a graph of other kernels would be found."""
    begun = torch.cuda.CUDAGraph.replay

    def replay(self: torch.cuda.CUDAGraph) -> None:
        torch.manual_seed(99)  # other dropout than the step's
        begun(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    step = train_both(Case(mlp, labelled, rows, settings=ALWAYS))
    assert "has other bits when it is replayed" in state(step)


class Waits(nn.Module):
    """Which rows are positive is known on the device alone, and how many there are has to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.nonzero(torch.ones_like(x[:, 0]))[:, 0]
        return self.inner(x[chosen])


def test_what_waits_for_the_device_is_found_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    step = train_both(Case(Waits, labelled, rows, settings=ALWAYS), plans=None)
    assert "depends on the data" in state(step)
    monkeypatch.setattr(allocator_executor, "why_not_captured", lambda program, computed: None)
    step = train_both(Case(Waits, labelled, rows, settings=ALWAYS), plans=None)
    assert state(step) == "it waits for the device"


def test_a_small_step_is_captured_and_a_large_one_is_not() -> None:
    """By what host and device take: nobody has to ask."""
    small = Case(gpt, tokens_loss, tokens).model()
    step = exact_step(small, tokens_loss, adamw(small), graphs="auto")
    for i in range(STEPS + 6):
        step(*Case(gpt, tokens_loss, tokens).batch(i))
        torch.cuda.synchronize()
    assert state(step) == CAPTURED
    large = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).to(DEVICE)
    step = exact_step(large, lambda m, x: m(x).square().mean(), adamw(large), graphs="auto")
    for _ in range(STEPS + 6):
        step(torch.ones(8192, 4096, device=DEVICE))
    torch.cuda.synchronize()
    step(torch.ones(8192, 4096, device=DEVICE))
    assert state(step) == DEVICE_BOUND


def test_its_memory_goes_with_the_step() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = Case(gpt, tokens_loss, tokens).model()
    optimizer = adamw(model)
    step = exact_step(model, tokens_loss, optimizer, graphs="always")
    for i in range(8):
        step(*Case(gpt, tokens_loss, tokens).batch(i))
    assert state(step) == CAPTURED
    assert isinstance(step._plans[0].executor, AllocatorExecutor)
    del step, model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


_SPOILT = """
import warnings; warnings.simplefilter("error")
import torch
from gpu_twins import Case, labelled, mlp, rows, train_both
from takeback.compiler.run import cuda_graph
whole = cuda_graph._CaptureAttempt.run
def spoilt(self, compute, inputs):
    def waiting(batch):
        held = compute(batch)
        FAILS
        return held
    return whole(self, waiting, inputs)
case = Case(mlp, labelled, rows, settings={"graphs": "always"})
other = train_both(case, steps=8)  # a graph that draws from the same generator
cuda_graph._CaptureAttempt.run = spoilt
step = train_both(case)
assert WHY in step._plans[0].executor.graph, step._plans[0].executor.graph
assert torch.cuda.current_stream() == torch.cuda.default_stream()
cuda_graph._CaptureAttempt.run = whole
drawn = []
for _ in range(2):
    torch.manual_seed(5)
    other(*case.batch(0))
    drawn.append(torch.rand(3, device="cuda"))
assert other._plans[0].executor.graph == cuda_graph.CAPTURED
assert torch.equal(*drawn)
step = train_both(case, steps=14)
assert step._plans[0].executor.graph == cuda_graph.CAPTURED, step._plans[0].executor.graph
torch.cuda.empty_cache()
"""


_FAILURES = {
    "not permitted": ("torch.cuda.current_stream().synchronize()", '"it cannot be captured"'),
    "out of memory": ("torch.empty(1 << 50, dtype=torch.uint8, device='cuda')", "cuda_graph.NO_ROOM"),
}


@pytest.mark.parametrize("failure", _FAILURES)
def test_a_capture_that_fails_leaves_the_process_as_it_was(failure: str) -> None:
    """In a process of its own: random numbers, streams and the allocator go on as before, and so do captures."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}
    fails, why = _FAILURES[failure]
    code = _SPOILT.replace("FAILS", fails).replace("WHY", why)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
