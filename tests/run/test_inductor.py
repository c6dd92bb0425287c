"""The handoff to Inductor, with the real one: kernels that are right, in recorded strides, found again in its cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

import takeback as tb
from harness import eager_step
from takeback import zoo
from takeback.compiler.program import Cluster
from takeback.compiler.run import inductor, kernels
from takeback.compiler.run.inductor import Compiled, NotCompiled, compile_cluster, in_a_line
from takeback.compiler.run.kernels import ClusterKernel
from takeback.options import cache_dir

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for the CPU"),
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tests' own cache, beside takeback's: C++ is compiled once."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_dir().with_name("inductor")))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


def kernels_of(step: tb.CompiledStep) -> list[ClusterKernel]:
    assert step._last is not None
    return step._last.executor.kernels.in_program(step._last.executor.program)


def one(cluster: Cluster, device: torch.device) -> Compiled:
    """A compiler takes its time: these tests wait for one kernel only, that of a batch norm, which writes its
    statistics."""
    if not cluster.writes:
        raise NotCompiled("it is not waited for")
    return compile_cluster(cluster, device)


def trained_on_it() -> ClusterKernel:
    """Beside eager; the kernel that was compiled is used in the end."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        return (F.gelu(m(x)) @ m[0].weight).square().mean()

    (model, optimizer), (twin, plain) = build(), build()
    with mock.patch.object(kernels, "compile_cluster", one):
        step = tb.compile_step(model, loss_fn, optimizer, mode="fast", memory="keep")
        batch = (torch.randn(32, 8),)
        for _ in range(4):
            torch.testing.assert_close(step(*batch), eager_step(twin, loss_fn, plain, batch, {}))
            twin.zero_grad()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    [kernel] = [k for k in kernels_of(step) if k.cluster.writes]
    assert kernel.note is None, kernel.note
    return kernel


def found_again() -> None:
    """In a process that has compiled nothing."""
    torch.set_num_threads(1)
    with mock.patch.object(inductor, "trace_cluster", side_effect=AssertionError("it is traced")):
        trained_on_it()
    assert "torch._inductor.lowering" not in sys.modules, "nothing was compiled, so that need not be imported"


def test_step_runs_on_a_generated_kernel_near_eager_and_another_finds_it_again_as_long_as_settings_are_the_same() -> (
    None
):
    kernel = trained_on_it()
    traced = mock.patch.object(inductor, "trace_cluster", side_effect=AssertionError("it is traced"))
    with traced:
        assert trained_on_it() is not kernel
    with traced, config.patch(epilogue_fusion=False), pytest.raises(NotCompiled, match="it is traced"):
        compile_cluster(kernel.cluster, torch.device("cpu"))  # under other settings it is another kernel


@pytest.mark.slow
def test_another_process_does_not_compile_what_this_one_has() -> None:
    trained_on_it()
    child = f"import sys; sys.path[:0] = {[*map(str, (Path(__file__).parent, *Path(__file__).parents[1:2]))]}; "
    child += "import test_inductor; test_inductor.found_again()"
    out = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_failure_of_the_compiler_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cluster: object, device: object) -> None:
        raise RuntimeError("\n  C++ compile error\nand a thousand lines")

    monkeypatch.setattr(inductor, "_compile", fails)
    with pytest.raises(NotCompiled, match=r"^RuntimeError: C\+\+ compile error$"):
        compile_cluster(Cluster((), {}, (), ()), torch.device("cpu"))


def test_failure_of_a_worker_is_said_with_what_it_failed_of() -> None:
    error = RuntimeError("An exception occurred in a subprocess:\n\nTraceback ...\nOSError: no ptxas\n")
    assert in_a_line(error) == "RuntimeError: An exception occurred in a subprocess: OSError: no ptxas"
    assert in_a_line(RuntimeError()) == "RuntimeError: no message"


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["keep", "min"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "mlp"])
def test_model_of_the_zoo_trains_on_generated_kernels(name: str, memory: str) -> None:
    ours, eager = zoo.case(name), zoo.case(name)
    step = tb.compile_step(ours.model, ours.loss_fn, ours.optimizer, mode="fast", memory=memory, verify_every=2)
    for i in range(6):
        torch.manual_seed(i)
        loss = step(*ours.batch)
        torch.manual_seed(i)
        expected = eager_step(eager.model, eager.loss_fn, eager.optimizer, eager.batch, {})
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
        eager.model.zero_grad()
    assert [k.note for k in kernels_of(step) if k.note] == []


@pytest.mark.slow
def test_results_of_one_cluster_have_bytes_of_their_own() -> None:
    """Two equal results, and one that is its operand again: nobody may hand out the same bytes twice."""

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        y = m(x)
        a, b, c = y.tanh(), y.tanh(), y.clone()
        return (a @ x.t()).mean() + (b @ x).mean() + (c.mul(1) @ x).mean()

    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), mode="fast", memory="keep")
    x = torch.randn(16, 16)
    for _ in range(4):
        expected = loss_fn(model, x).detach()
        torch.testing.assert_close(step(x), expected)
    assert all(k.note is None or "shares its bytes" in k.note for k in kernels_of(step))
