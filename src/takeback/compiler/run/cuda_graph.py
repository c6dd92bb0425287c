"""Forward and backward of a plan as one CUDA graph, where the host takes longer to launch kernels than the device to
run them.

`compute(batch)` in, the same out, with one launch. A plan is captured once it is steady: its kernels are compiled and
compared, and shapes are static anyway. The batch is copied into tensors of the graph's; what it gives lies in the
graph's own pool, and is the same bytes in each step. The update is not captured: it is a few launches, and its numbers
are Python's. In the step in which a plan is captured it is computed both ways from the same state, and compared.

A pool is not given back between steps, so what is captured holds its memory until the plan is dropped, or compared
with eager again. That is why device-bound steps are not captured: they would gain nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from takeback.compiler.program import Number, Op, Phase, Program, Special
from takeback.compiler.run.kernels import NOT_USED_YET, Kernels
from takeback.compiler.run.proof import Kept, Measure, differing, in_words, keep
from takeback.compiler.run.room import is_out_of_memory, what_it_said

Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Named = Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]

HOST_BOUND = 0.8  #: of the device's time, that the host takes for it: with less, the device hardly waits
_SEEDS = 2  #: numbers
_TIMED = 4  #: steps that are timed; the first of them is not counted

CAPTURED = "forward and backward are one CUDA graph"
_WAITED = "synchronizing CUDA operation"  #: in torch's warning of it
WAITS = "it has not been decided yet"
DEVICE_BOUND = "the device takes longer to run its kernels than the host to launch them"


@dataclass
class GraphSettings:
    """Of one compiled step: which of its plans are captured, how they are compared, and the pool they share."""

    ask: str  #: "auto", "always" or "never"
    measure: Measure
    captured: weakref.WeakSet[GraphedCompute] = field(default_factory=weakref.WeakSet)

    def pool(self) -> tuple[int, int]:
        """Replays of a step follow one another, so its graphs may use the same bytes. With the last graph in it, a pool
        is gone."""
        return next((pool for each in self.captured if (pool := each.pool) is not None), None) or (
            torch.cuda.graph_pool_handle()
        )


def why_not_captured(program: Program, computed: Sequence[Op]) -> str | None:
    """Why the ops before the update cannot be a graph; None if that can be tried."""
    for op in computed:
        if isinstance(op.target, Special):
            return "the random state is saved and restored inside, as torch.utils.checkpoint does"
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


class GraphedCompute:
    """Called like the `compute` it stands for. `named`: what is compared, of what it gives. `put_back_` takes back what
    it has written of the user's."""

    def __init__(
        self,
        compute: Compute,
        settings: GraphSettings,
        kernels: Kernels,
        *,
        program: Program,
        refused: str | None,
        generators: Sequence[torch.Generator],
        named: Named,
        put_back_: Callable[[], None],
    ) -> None:
        self.note: str | None = refused or WAITS  #: why it is not captured
        self._compute, self._settings, self._kernels = compute, settings, kernels
        self._own = kernels.in_program(program)
        self._generators, self._named, self._put_back_ = generators, named, put_back_
        self._decided = refused is not None
        self._wanted = False
        self._timings: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._given: list[torch.Tensor] = []
        self._changes = -1
        self._proved_at = -1  #: the change of the step's kernels that was compared
        self._rests = False

    @property
    def captured(self) -> bool:
        return self._graph is not None

    @property
    def pool(self) -> tuple[int, int] | None:
        return self._graph.pool() if self._graph is not None else None

    def rest_(self) -> None:
        """Gives the graph's memory back, and computes as before once; the call after that captures again."""
        self._rests = self.captured
        self._release_()

    def _release_(self) -> None:
        self._graph, self._inputs, self._given = None, [], []

    def __call__(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._graph is not None and self._changes == self._kernels.changes:
            return self._replayed(self._graph, batch)
        self._release_()
        if self._rests:
            self._rests = False
            return self._compute(batch)
        if not self._decided:
            self._decide_()
        if self._wanted and not any(kernel.note == NOT_USED_YET for kernel in self._own):
            return self._capturing(batch)
        return self._compute(batch) if self._decided else self._timed(batch)

    def _replayed(self, graph: torch.cuda.CUDAGraph, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for mine, given in zip(self._inputs, batch, strict=True):
            mine.copy_(given, non_blocking=True)
        graph.replay()
        return list(self._given)

    # -- whether ---------------------------------------------------------------------------------------------------

    def _timed(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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
            return
        if len(self._timings) < _TIMED or not self._timings[-1][2].query():
            return
        shares = [host_s / max(begin.elapsed_time(end) / 1e3, 1e-9) for host_s, begin, end in self._timings[1:]]
        self._decided, self._timings = True, []
        self._wanted = statistics.median(shares) >= HOST_BOUND
        self.note = self.note if self._wanted else DEVICE_BOUND

    # -- capturing -------------------------------------------------------------------------------------------------

    def _capturing(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """The step, computed as before and by the graph, from the same state; by the graph alone, where these kernels
        have been compared before."""
        expected: dict[str, Kept] | None = None
        if self._proved_at != self._kernels.changes:
            held = self._watched(batch)
            if held is None:
                return self._given_up(batch, "it waits for the device")
            expected = keep(self._settings.measure, self._named(held))
            del held
            self._put_back_()
        with torch.cuda.device(self._kernels.device):
            why = self._try(batch)
        if why is None:
            assert self._graph is not None
            given = self._replayed(self._graph, batch)
            wrong = differing(self._settings.measure, expected, self._named(given)) if expected is not None else ()
            if not wrong:
                self.note, self._changes = None, self._kernels.changes
                self._proved_at = self._changes
                del expected
                torch.cuda.empty_cache()  # what was computed besides: the graph has its own
                return given
            why = f"{wrong[0]} {in_words(self._settings.measure)} in its first replay"
        return self._given_up(batch, why)

    def _given_up(self, batch: list[torch.Tensor], why: str) -> list[torch.Tensor]:
        self.note, self._wanted = why, False
        self._release_()
        self._put_back_()
        return self._compute(batch)

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
        return held if not any(_WAITED in str(each.message) for each in said) else None

    def _try(self, batch: Sequence[torch.Tensor]) -> str | None:
        """None if it is captured; else why it cannot be, and all is as before."""
        inputs = [t.clone() for t in batch]
        if any(mine.stride() != given.stride() for mine, given in zip(inputs, batch, strict=True)):
            return "a batch tensor has strides that a copy of it has not"
        if any(t.device.type != "cuda" for t in batch):
            return "a batch tensor is not on the GPU"
        graph, pool = torch.cuda.CUDAGraph(), self._settings.pool()
        drawn = [generator for generator in self._generators if generator.device.type == "cuda"]
        for generator in drawn:
            graph.register_generator_state(generator)
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        clean = [(generator, generator.clone_state()) for generator in {id(g): g for g in (default, *drawn)}.values()]
        torch.cuda.synchronize()
        # A workspace of cuBLAS that lies in the pool must not be used from outside of it, nor another one inside.
        torch._C._cuda_clearCublasWorkspaces()  # checked on 2.11 and 2.13
        torch.cuda.empty_cache()
        try:
            held = self._captured_on_a_stream(graph, pool, inputs)
        except BaseException as error:
            # It leaves the generators and the allocator in the middle of it.
            for generator, state in clean:
                generator.graphsafe_set_state(state.graphsafe_get_state())
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            if not isinstance(error, RuntimeError):
                raise
            no_room = "there is no memory for its pool"
            return no_room if is_out_of_memory(error) else f"it cannot be captured ({what_it_said(error)})"
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        self._graph, self._inputs, self._given = graph, inputs, held
        self._settings.captured.add(self)
        return None

    def _captured_on_a_stream(
        self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Not torch.cuda.graph(), which stays on its stream when a capture fails."""
        with torch.cuda.stream(torch.cuda.Stream()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a graph is empty, where its first kernel fails
            graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may load data meanwhile
            try:
                return self._compute(list(inputs))
            finally:
                graph.capture_end()
