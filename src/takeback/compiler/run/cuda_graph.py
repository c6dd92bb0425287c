"""Forward and backward of a plan as one CUDA graph, where the host takes longer to launch kernels than the device to
run them.

`compute(batch)` in, the same out, with one launch. A plan is captured once it is steady: its kernels are compiled and
compared, and shapes are static anyway. The batch is copied into tensors of the graph's; what it gives lies in the
graph's own pool, and is the same bytes in each step. The update is not captured: it is a few launches, and its numbers
are Python's. In the step in which a plan is captured, and in the next one, it is computed both ways from the same
state, and compared.

A pool is not given back between steps, so what is captured holds its memory until the plan is dropped, compared with
eager again, or somebody runs out of memory. That is why device-bound steps are not captured: they would gain nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from takeback.compiler.capture.drawn import DRAWN
from takeback.compiler.capture.eager_forms import PICKED_SUMS
from takeback.compiler.capture.enclose import SUM_OF_INDEXED
from takeback.compiler.program import Cluster, Number, Op, Phase, Program, Special
from takeback.compiler.run.allocator_code import Compute
from takeback.compiler.run.kernels import NOT_USED_YET, Kernels
from takeback.compiler.run.proof import Kept, Measure, differing, in_words, keep
from takeback.compiler.run.room import is_out_of_memory, what_it_said

Named = Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]

HOST_BOUND = 0.8  #: of the device's time, that the host takes for it: with less, the device hardly waits
_SEEDS = 2  #: numbers
_TIMED = 4  #: steps that are timed; the first of them is not counted
_COMPARED = 2  #: steps: with one batch alone, what is baked into a graph would not be seen
_OURS = ("aten", "prims", "takeback")  #: operators whose host code depends on nothing but their operands

CAPTURED = "forward and backward are one CUDA graph"
_WAITED = "synchronizing CUDA operation"  #: in torch's warning of it
_PROTOTYPE = "Synchronization debug mode is a prototype"
WAITS = "it has not been decided yet"
DEVICE_BOUND = "the device takes longer to run its kernels than the host to launch them"
NO_ROOM = "there is no memory for it"


@dataclass
class GraphSettings:
    """Of one compiled step: which of its plans are captured, how they are compared, and which are."""

    ask: str  #: "auto", "always" or "never"
    measure: Measure
    captured: weakref.WeakSet[GraphedCompute] = field(default_factory=weakref.WeakSet)

    def pool(self) -> tuple[int, int]:
        """Replays of a step follow one another, so its graphs may use the same bytes. With the last graph in it, a pool
        is gone."""
        known = next((pool for each in self.captured if (pool := each.pool) is not None), None)
        return known if known is not None else torch.cuda.graph_pool_handle()

    def give_up_(self) -> bool:
        """Somebody ran out of memory: no plan is a graph any more. Whether there was one."""
        held = [each for each in self.captured if each.captured]
        for each in held:
            each.give_up_(NO_ROOM)
        return bool(held)


def why_not_captured(program: Program, computed: Sequence[Op]) -> str | None:
    """Why the ops before the update cannot be a graph; None if that can be tried."""
    for op in computed:
        if isinstance(op.target, Special):
            return "the random state is saved and restored inside, as torch.utils.checkpoint does"
        if not isinstance(op.target, Cluster) and op.target.namespace not in _OURS:
            return f"{op.name} is an operator of somebody else's, which may do more than launch kernels"
        if op.target is DRAWN:
            return f"{op.args[1]} is called in each step, to draw from numpy.random"
        if op.target in (SUM_OF_INDEXED, *PICKED_SUMS):
            return "the host counts the rows that a mask picks"
        if op.expected is not None:
            return f"{op.name} reads a value into Python"
        if op.has_data_in_shape:
            return f"the shape of what {op.name} gives depends on the data"
        if any(isinstance(a, Number) for a in (*op.args, *op.kwargs.values())):
            return f"{op.name} is given a number that is read anew in each step"
        elsewhere = [r for r in (*op.inputs, *op.outputs) if program.buffers[r.buffer].device]
        # Attention says on the host where its dropout begins; while it is captured, on the device.
        if elsewhere and not ("_scaled_dot_product" in op.name and all(r.numel <= _SEEDS for r in elsewhere)):
            return f"{op.name} works on tensors that are not on the GPU"
    if any(op.phase is not Phase.UPDATE for op in program.ops[len(computed) :]):
        return "the update is made early, in between"
    return None


@dataclass(frozen=True)
class GraphedStep:
    """What a graph has to know of its executor."""

    generators: Sequence[torch.Generator]  #: that are drawn from
    read: frozenset[int]  #: positions of the batch's tensors that are read before the update
    named: Named  #: what is compared, of what it gives
    put_back_: Callable[[], None]  #: takes back what has been computed so far
    uninterrupted: Callable[[], AbstractContextManager[None]]  #: Ctrl-C waits in there


class GraphedCompute:
    """Called like the `compute` it stands for."""

    def __init__(
        self,
        compute: Compute,
        settings: GraphSettings,
        kernels: Kernels,
        step: GraphedStep,
        *,
        program: Program,
        measure: Measure,
        refused: str | None,
    ) -> None:
        self.note: str | None = refused or WAITS  #: why it is not captured
        self._compute, self._settings, self._kernels, self._step = compute, settings, kernels, step
        self._own = kernels.in_program(program)
        self._measure = measure
        self._decided = refused is not None
        self._wanted = False
        self._timings: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._given: list[torch.Tensor] = []
        self._changes = -1  #: the change of the step's kernels that is captured, or was last
        self._compared = 0  #: how often these were
        self._rests = False

    @property
    def captured(self) -> bool:
        return self._graph is not None

    @property
    def pool(self) -> tuple[int, int] | None:
        return self._graph.pool() if self._graph is not None else None

    def rest_(self) -> None:
        """Gives the graph's memory back, and computes as before once; the call after that captures again."""
        self._rests = True
        self._release_()

    def give_up_(self, why: str) -> None:
        self.note, self._decided, self._wanted = why, True, False
        self._release_()

    def _release_(self) -> None:
        self._graph, self._inputs, self._given = None, [], []

    def __call__(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._rests:
            self._rests = False
            return self._compute(batch)
        if self._graph is not None and self._changes == self._kernels.changes:
            return self._replayed(self._graph, batch) if self._compared >= _COMPARED else self._checked(batch)
        self._release_()
        if not self._decided:
            self._decide_()
        if self._wanted and not any(kernel.note == NOT_USED_YET for kernel in self._own):
            return self._checked(batch)
        return self._compute(batch) if self._decided else self._timed(batch)

    def _replayed(self, graph: torch.cuda.CUDAGraph, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for position in self._step.read:
            self._inputs[position].copy_(batch[position], non_blocking=True)
        graph.replay()
        return list(self._given)

    # -- whether ---------------------------------------------------------------------------------------------------

    def _timed(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """From an idle device: once its queue is full, launching takes as long as running."""
        with torch.cuda.device(self._kernels.device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start = time.perf_counter()
            begin.record()
            held = self._compute(batch)
            end.record()
            self._timings.append((time.perf_counter() - start, begin, end))
        return held

    def _decide_(self) -> None:
        """Nobody waits for the device: what has not ended yet is asked again in the next step."""
        if self._settings.ask == "always":
            self._decided = self._wanted = len(self._timings) > 0
        elif len(self._timings) >= _TIMED and self._timings[-1][2].query():
            shares = [host_s / max(begin.elapsed_time(end) / 1e3, 1e-9) for host_s, begin, end in self._timings[1:]]
            self._decided, self._wanted = True, statistics.median(shares) >= HOST_BOUND
            self.note = self.note if self._wanted else DEVICE_BOUND
        if self._decided:
            self._timings = []

    # -- capturing -------------------------------------------------------------------------------------------------

    def _checked(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """By the graph, and as before where it has to be compared; as before alone where it turns out to be none."""
        try:
            given, why = self._both_ways(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            given, why = None, NO_ROOM
        if given is not None:  # out of that block: the error's traceback holds what was computed
            return given
        self.give_up_(why)
        self._step.put_back_()
        return self._compute(batch)

    def _both_ways(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor] | None, str]:
        """From the same state; None and a reason, where it cannot be a graph."""
        new = self._graph is None
        self._compared = self._compared if self._changes == self._kernels.changes else 0
        expected: dict[str, Kept] | None = None
        if self._compared < _COMPARED:
            held = self._watched(batch) if new else self._compute(batch)
            if held is None:
                return None, "it waits for the device"
            expected = keep(self._measure, self._step.named(held))
            del held
            self._step.put_back_()
        if new:
            with torch.cuda.device(self._kernels.device), self._step.uninterrupted():
                why = self._capture(batch)
            if why is not None:
                return None, why
        assert self._graph is not None
        given = self._replayed(self._graph, batch)
        if expected is not None:
            wrong = differing(self._measure, expected, self._step.named(given))
            if wrong:
                return None, f"{wrong[0]} {in_words(self._measure)} when it is replayed"
            self._compared += 1
            del expected
            torch.cuda.empty_cache()  # what was computed besides: the graph has its own
        self.note, self._changes = None, self._kernels.changes
        return given, ""

    def _watched(self, batch: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Computes as before; None where something waits for the device, which cannot be captured."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")  # not "error": other threads may wait, too
                held = self._compute(batch)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waited = [each for each in said if _WAITED in str(each.message)]
        for each in said:
            if each not in waited and _PROTOTYPE not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return held if not waited else None

    def _capture(self, batch: Sequence[torch.Tensor]) -> str | None:
        """None if it is captured; else why it cannot be, and all is as before."""
        read = self._step.read
        inputs = [t.clone() if position in read else t for position, t in enumerate(batch)]
        if any(mine.stride() != given.stride() for mine, given in zip(inputs, batch, strict=True)):
            return "a batch tensor has strides that a copy of it has not"
        if any(batch[position].device.type != "cuda" for position in read):
            return "a batch tensor is not on the GPU"
        graph, pool = torch.cuda.CUDAGraph(), self._settings.pool()
        drawn = [generator for generator in self._step.generators if generator.device.type == "cuda"]
        for generator in drawn:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        # A workspace of cuBLAS that lies in the pool must not be used from outside of it, nor another one inside.
        torch._C._cuda_clearCublasWorkspaces()  # checked on 2.11 and 2.13
        torch.cuda.empty_cache()
        attempt = _CaptureAttempt(graph, pool, drawn)
        try:
            held = attempt.run(self._compute, inputs)
        except RuntimeError as error:
            return NO_ROOM if is_out_of_memory(error) else f"it cannot be captured ({what_it_said(error)})"
        finally:
            attempt.clean_up_()
            torch._C._cuda_clearCublasWorkspaces()
        self._graph, self._inputs, self._given = graph, inputs, held
        self._settings.captured.add(self)
        return None


class _CaptureAttempt:
    """One capture, on a stream of its own. Not torch.cuda.graph(), which stays on its stream when a capture fails."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int], generators: Sequence[torch.Generator]
    ) -> None:
        self._graph, self._pool, self._generators = graph, pool, generators
        self._begun = self._ended = False

    def run(self, compute: Compute, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()), _silent():
            self._begun = True
            self._graph.capture_begin(self._pool, capture_error_mode="thread_local")  # other threads may load data
            try:
                return compute(list(inputs))
            finally:
                self._graph.capture_end()
                self._ended = True

    def clean_up_(self) -> None:
        """What a capture that could not be ended leaves behind: an allocator and generators in the middle of it."""
        if not self._begun or self._ended:
            return
        with contextlib.suppress(AttributeError, RuntimeError):  # checked on 2.11 and 2.13
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
        # An empty capture ends where this one did not. Other graphs draw from the same state of a generator, so it is
        # not replaced.
        again = torch.cuda.CUDAGraph()
        with contextlib.suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream()), _silent():
            for generator in self._generators:
                again.register_generator_state(generator)
            again.capture_begin(capture_error_mode="thread_local")
            again.capture_end()


def _silent() -> warnings.catch_warnings[None]:
    """That a graph is empty, where its first kernel fails, is no news."""
    return warnings.catch_warnings(action="ignore")
