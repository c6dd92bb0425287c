"""What all tests share: a cache of their own beside the repository, a machine whose rates are known, and a small heap.

To measure this machine would take seconds for each dtype (a half-precision product has no kernel on some CPUs), and the
plans would differ from one machine to the next. tests/run/test_calibrate.py measures.

A recording asks the collector who refers to a function, and many tests call `gc.collect()`: each walks all objects
there are, thousands of collected tests and what they import. So what exists before a test is set aside.
"""

from __future__ import annotations

import collections
import concurrent.futures
import gc
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Before takeback is asked for it; processes that tests start inherit it. `make clean` removes it.
os.environ.setdefault("TAKEBACK_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "takeback"))
# A test must not depend on those that ran before it; tests/run/test_plan_file.py asks for plans that are kept.
os.environ.setdefault("TAKEBACK_PLANS", "0")
# One for all: what the CPU can do is found out by compiling, once in each.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "inductor"))

import takeback
from takeback.compiler.passes import pipeline, recompute
from takeback.compiler.passes.cost import Rates
from takeback.compiler.plan import greedy
from takeback.compiler.run import allocator, calibrate, kernel_families, kernels, plan_maker
from takeback.compiler.run.inductor import NotCompiled
from takeback.guard import threads, watch
from takeback.nn.kernels import activated_cpu, norms_cpu, row_steps_cpu
from takeback.options import open_cache

#: Of one thread of an AMD EPYC on which nothing else ran, as run/calibrate.py measured it with torch 2.13; but products
#: in half precision, for which that CPU has no instructions, as fast as single ones.
RATES = Rates(
    bytes_per_s=2.05e10,
    maths_per_s=2.8e8,
    op_s=3.9e-6,
    flops_per_s={"float32": 9e10, "float64": 2.5e10, "bfloat16": 9e10, "float16": 9e10},
    convolution=0.94,
    attention=0.37,
    source="measured",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the rates where takeback finds them, in this process and in those that tests start. What starts workers
    compiles the native code first, if `make warm` did not: each of them would do so for itself, at the same time."""
    if (wheel := os.environ.get("TAKEBACK_WHEEL")) and not Path(takeback.__file__).is_relative_to(wheel):
        raise pytest.UsageError(f"the tests are to run from the wheel in {wheel}, and takeback is {takeback.__file__}")
    _seed_the_cpu_alone()
    for count in {1, 2, torch.get_num_threads()}:
        calibrate.keep_(open_cache(), "cpu", count, RATES)
    if getattr(config.option, "numprocesses", None) or config.option.collectonly:
        libraries = (activated_cpu._library, norms_cpu._library, row_steps_cpu._library, allocator.load)
        with concurrent.futures.ThreadPoolExecutor() as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without a compiler the tests say what they miss
            list(pool.map(lambda library: library(), libraries))


def _seed_the_cpu_alone() -> None:
    """torch.manual_seed() keeps a formatted stack for each kind of device that may be started later, which takes longer
    than a tiny step. Where there is none nobody will ask."""
    if not torch.accelerator.is_available():
        for module in (torch.cuda, torch.cuda.random, torch.xpu, torch.xpu.random, torch.mtia):
            module._lazy_call = lambda *args, **kwargs: None


@pytest.fixture(autouse=True)
def _small_heap() -> None:
    gc.collect()  # which walks only what is new since the last test
    gc.freeze()


@pytest.fixture(autouse=True)
def _runners_threads_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another thread ran meanwhile the guard does not say whose doing a change is. A worker of pytest-xdist has a
    thread that wakes up now and then; it knows no tensors."""
    there = set(sys._current_frames())
    monkeypatch.setattr(watch, "clocks", lambda but: threads.clocks(there.union(but)))


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a step computes: any choice of what to rebuild, and of where it lies, has eager's bits, so a
    fair one will do."""
    for name in ("_ALIKE_VISITS", "_LOWEST_VISITS", "_LEVEL_VISITS"):
        monkeypatch.setattr(recompute, name, 4)
    monkeypatch.setattr(greedy, "MOST_PLACEMENTS", 4_000)


#: Tables of many cases of one kind: of each test in these files every n-th case is quick, the others are slow. Cases
#: that catch a planted fault stay quick. (A number that shares no divisor with those of the values leaves none out.)
THINNED = {
    "nn/test_activated_kernels.py": 11,
    "nn/test_abn.py": 6,
    "nn/test_norm_kernels.py": 4,
    "nn/test_row_step_kernels.py": 3,
    "nn/test_nn_rows.py": 4,
    "grads/test_grad_models.py": 3,
    "nn/test_convert.py": 2,
    "plan/test_greedy.py": 3,
    "step/test_changes.py": 4,
    "step/test_equivalence.py": 5,
    "step/test_every_op.py": 4,
    "step/test_unfit.py": 8,
    "step/test_hazard_graphs.py": 2,
    "step/test_memory_targets.py": 3,
    "step/test_refusals.py": 3,
    "step/test_scaler.py": 3,
    "step/test_steady.py": 2,
    "guard/test_guard_finds.py": 2,
    "guard/test_guard_silent.py": 2,
    "hazards/test_hazard_suite.py": 2,
    "run/test_allocator_executor.py": 2,
    "step/test_guards.py": 3,
    "hazards/test_ours.py": 6,
    "step/test_lengths.py": 3,
    "test_planning.py": 3,
    "passes/test_recompute.py": 2,
    "step/test_transformers_models.py": 2,
    "run/test_plan_file.py": 2,
    "run/test_cache_faults.py": 2,
    "step/test_fast.py": 2,
    "explain/test_kernels.py": 2,
    "explain/test_advice_on_code.py": 2,
    "passes/test_chunk_head.py": 2,
    "passes/test_pack.py": 2,
    "nn/test_abn_sync.py": 2,
    "step/test_trouble.py": 3,
    "step/test_other_paths.py": 5,
    "explain/test_frontier.py": 2,
    "step/test_accumulation_calls.py": 2,
    "test_predict.py": 2,
    "test_predict_cuda.py": 3,
    "passes/test_candidates.py": 2,
    "guard/test_guard_aliases.py": 2,
    "gpu/test_cuda_out_of_memory.py": 8,
    "step/test_data_in_shapes.py": 11,
    "step/test_one_kernel.py": 3,
    "passes/test_passes.py": 5,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    catching = set(re.findall(r'"(tests/[^"]+)"', (Path(__file__).parent / "faults" / "faults.py").read_text()))
    seen: collections.Counter[str] = collections.Counter()
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        every = THINNED.get(file, 1)
        function = item.nodeid.split("[")[0]
        if seen[function] % every and item.nodeid not in catching:
            item.add_marker(pytest.mark.slow)
        seen[function] += 1


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models: waking worker threads would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_kernels_for_all_lengths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes its time: but for tests of these."""

    def missing(family: object, members: object, base: object, device: object) -> None:
        raise NotCompiled("there is no compiler here")

    if "kernels_for_all_lengths" not in request.fixturenames:
        monkeypatch.setattr(kernel_families, "compile_family", missing)


@pytest.fixture
def kernels_for_all_lengths() -> None:
    """They are compiled."""


@pytest.fixture
def eagers_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode "fast" without a compiler: every cluster runs with eager's kernels, and gives eager's bits. So does the
    update, on eager's path."""

    def missing(cluster: object, device: object) -> None:
        raise NotCompiled("there is no compiler here")

    monkeypatch.setattr(kernels, "compile_cluster", missing)
    monkeypatch.setattr(plan_maker, "in_one_kernel", lambda optimizers: False)


@pytest.fixture
def whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode "fast" without the pass that adds rows up in another order, so that eager's kernels have eager's bits."""
    stages = tuple(stage for stage in pipeline.PIPELINE if stage.name != "chunk_head")
    monkeypatch.setitem(pipeline.run_passes.__kwdefaults__, "stages", stages)
