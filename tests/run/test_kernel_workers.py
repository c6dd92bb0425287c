"""Compilers of many kernels work at the same time: who starts one inside of `at_once` waits afterwards, and nobody else
does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import async_compile, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import LambdaFuture

import takeback as tb
from takeback.compiler.program import Cluster
from takeback.compiler.run import kernel_workers, kernels
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.inductor import NotCompiled
from takeback.compiler.run.kernel_workers import at_once, compilers_go_on, warm_up_

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _workers() -> Iterator[None]:
    with config.patch(compile_threads=2):
        yield


def scope_of(*values: object) -> dict[str, Any]:
    """What a generated module has in its globals."""
    return {f"kernel_{i}": LambdaFuture(lambda value=value: value) for i, value in enumerate(values)}


def test_compilers_are_waited_for_afterwards_and_together_with_what_they_belong_to() -> None:
    first, second = scope_of(1, 2), scope_of(3)
    with at_once() as afterwards:
        with compilers_go_on():
            AsyncCompile().wait(first)
        wait_first = afterwards.taken_()
        with compilers_go_on():
            AsyncCompile().wait(second)
        wait_second = afterwards.taken_()
    assert all(isinstance(v, LambdaFuture) for v in (*first.values(), *second.values()))
    wait_second()
    assert list(second.values()) == [3]
    assert all(isinstance(v, LambdaFuture) for v in first.values())
    wait_first()
    assert list(first.values()) == [1, 2]


def test_elsewhere_and_on_other_threads_inductor_waits_as_ever() -> None:
    outside, beside = scope_of(1), scope_of(2)
    with compilers_go_on():
        AsyncCompile().wait(outside)
    with at_once(), compilers_go_on():
        thread = threading.Thread(target=lambda: AsyncCompile().wait(beside))
        thread.start()
        thread.join()
    assert (outside["kernel_0"], beside["kernel_0"]) == (1, 2)


def test_interrupt_leaves_inductor_as_it_was() -> None:
    before = dict(vars(AsyncCompile))

    def interrupted() -> None:
        with at_once(), compilers_go_on():
            assert dict(vars(AsyncCompile)) != before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert dict(vars(AsyncCompile)) == before
    late = scope_of(1)
    AsyncCompile().wait(late)
    assert late["kernel_0"] == 1


def test_kernels_queue_for_workers_that_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Inductor would compile them one after the other."""

    class OnTheWay:
        def done(self) -> bool:
            return False

    monkeypatch.setattr(AsyncCompile, "_ready_future", OnTheWay())
    assert not AsyncCompile.use_process_pool()
    with at_once(), compilers_go_on():
        assert AsyncCompile.use_process_pool()
    assert not AsyncCompile.use_process_pool()
    monkeypatch.setattr(AsyncCompile, "_ready_future", None)
    with config.patch(compile_threads=1), at_once(), compilers_go_on():
        assert not AsyncCompile.use_process_pool()


def test_workers_are_started_for_a_gpu_alone_and_need_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start() -> None:
        started.append("pool")
        raise OSError("no more processes")

    monkeypatch.setattr(async_compile, "maybe_warm_pool", start)
    warm_up_(CPU)
    assert not started
    warm_up_(CUDA)
    assert started == ["pool"]


def test_all_kernels_are_written_before_one_is_waited_for_and_one_that_fails_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    happened: list[str] = []

    def compile_cluster(cluster: Cluster, device: torch.device) -> Callable[[list[torch.Tensor]], Any]:
        number = sum(h.startswith("written") for h in happened)
        happened.append(f"written {number}")
        if number == 0:
            raise NotCompiled("it has no source")
        afterwards = kernel_workers._current.get()
        assert afterwards is not None

        def wait() -> None:
            happened.append(f"waited {number}")
            if number == 1:
                raise RuntimeError("its compiler failed")

        afterwards.put_off_(wait)
        return eagerly(cluster)

    monkeypatch.setattr(kernels, "compile_cluster", compile_cluster)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    step = tb.compile_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1), mode="fast", memory="keep"
    )
    step(torch.randn(32, 8))
    count = sum(h.startswith("written") for h in happened)
    assert count > 3
    assert happened == [f"written {i}" for i in range(count)] + [f"waited {i}" for i in range(1, count)]
    assert step._last is not None
    notes = [k.note for k in step._last.executor.kernels.in_program(step._last.executor.program)]
    assert notes[0] == "it could not be compiled (it has no source)"
    assert notes[1] == "it could not be compiled (RuntimeError: its compiler failed)"
    assert {*notes[2:]} == {kernels.NOT_USED_YET}
