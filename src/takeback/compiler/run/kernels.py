"""The kernels of a step's clusters: equal clusters have one, compiled once, and eager's until then.

A kernel that was handed out stays where it is put into code: what it calls is replaced when it is compiled, or when it
turns out not to be right.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from takeback.compiler.program import Cluster, Program
from takeback.compiler.run.cluster_family import outline_of
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.cluster_proof import drawn, shaped, what_is_wrong
from takeback.compiler.run.inductor import NotCompiled, compile_cluster, in_a_line, straight, wait_for
from takeback.compiler.run.kernel_families import KernelFamilies
from takeback.compiler.run.kernel_workers import at_once
from takeback.compiler.run.list_kernels import list_kernel
from takeback.compiler.run.room import is_out_of_memory

Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
Told = Callable[[str], None]
Aside = Callable[[], AbstractContextManager[None]]

_MOST_WITHOUT_ROOM = 50  #: comparisons

TOO_MANY_SIZES = "as many sizes of it have kernels as may have, and no kernel serves them all"
NOT_COMPILED_YET, NOT_USED_YET = "it has not been compiled yet", "it has not been used yet"


class ClusterKernel:
    """What generated code calls for every cluster of one key."""

    __slots__ = (
        "__weakref__",
        "_beforehand",
        "_call",
        "_compiled",
        "_kernels",
        "_no_room",
        "changed_at",
        "cluster",
        "is_for_lists",
        "note",
        "tried",
    )

    def __init__(self, cluster: Cluster, kernels: Kernels) -> None:
        self.cluster = cluster
        self.note: str | None = NOT_COMPILED_YET  #: why eager's kernels run; None if others do
        self.tried = False  #: to compile it
        self.changed_at = 0  #: the change of the step's kernels that brought this one
        self._kernels = kernels
        self._beforehand: Call | None = None  #: it was right on operands that were drawn
        self._no_room = 0  #: how often it could not be compared for want of memory
        self._compiled: Call | None = None
        for_lists = list_kernel(cluster)
        self._call: Call = for_lists or eagerly(cluster)
        self.is_for_lists = for_lists is not None  #: torch's own kernel runs, with eager's arithmetic
        if self.is_for_lists:  # there is nothing to compile, and nothing to compare
            self.tried, self.note = True, None

    def __call__(self, operands: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self._kernels.plain:
            return self._call(operands)
        with self._kernels.aside():  # it asks for other bytes than the plan expects of it
            return eagerly(self.cluster)(operands)

    def use_(self, compiled: Call) -> None:
        """From now on this one runs, if it is right where it is used first."""

        def first(operands: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            self._kernels.compared = True
            fitting: Call | None = compiled
            with self._kernels.aside():
                try:
                    fitting = shaped(self.cluster, compiled, operands)
                    wrong = what_is_wrong(self.cluster, fitting, operands)
                except Exception as error:  # a kernel that does not start, a comparison that finds no room
                    self._no_room += is_out_of_memory(error)
                    wrong = f"it failed where it was compared ({in_a_line(error)})"
                    if is_out_of_memory(error) and self._beforehand is not None:
                        fitting, wrong = self._beforehand, None
                    elif is_out_of_memory(error) and self._no_room < _MOST_WITHOUT_ROOM:
                        fitting = None  # elsewhere in the step there may be more
            if fitting is None:
                with self._kernels.aside():
                    return eagerly(self.cluster)(operands)
            right: Call = straight(fitting) if wrong is None else eagerly(self.cluster)
            self._call, self.note = right, wrong
            if wrong is None:
                return right(operands)
            self._change_()
            with self._kernels.aside():  # the plan may know what the other one asked for
                return right(operands)

        if compiled is not self._compiled:
            self._change_()
        self.tried, self._call, self.note, self._compiled = True, first, NOT_USED_YET, compiled

    def compare_beforehand_(self) -> None:
        """On operands that are drawn, while the step is not running: there may be no room to compare it on its own."""
        compiled = self._compiled
        if compiled is None or self.note is not NOT_USED_YET:
            return
        with contextlib.suppress(Exception):  # then it is for its first use to say what is wrong
            operands = drawn(self.cluster, self._kernels.device)
            fitting = shaped(self.cluster, compiled, operands)
            if what_is_wrong(self.cluster, fitting, operands) is None:
                self._beforehand = fitting

    def _change_(self) -> None:
        """Another kernel runs from now on: what the one before asked for is not what this one does."""
        self._kernels.changes += 1
        self.changed_at = self._kernels.changes

    def prove_again_(self) -> None:
        """Where it is used next it is compared once more."""
        if self.note is None and self._compiled is not None:
            self.use_(self._compiled)

    @property
    def waits(self) -> bool:
        """Whether eager's kernels run for now only."""
        return self.note in (NOT_COMPILED_YET, NOT_USED_YET)

    def refuse_(self, why: str) -> None:
        self.tried, self.note = True, why


class Kernels:
    """Those of one compiled step, by the key of their cluster."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: Executors hold theirs: with the last plan that uses it, a kernel goes.
        self._known: weakref.WeakValueDictionary[str, ClusterKernel] = weakref.WeakValueDictionary()
        self.changes = 0  #: how often a cluster has got another kernel
        self.compared = False  #: one was used for the first time in this replay, and compared: that takes memory
        self.plain = False  #: eager's kernels run, whatever there is
        self.families = KernelFamilies(device)
        self.aside: Aside = contextlib.nullcontext  #: around what is no part of the step, in the executor that runs

    def rest_(self) -> None:
        """No executor runs."""
        self.aside = contextlib.nullcontext

    def of(self, cluster: Cluster) -> ClusterKernel:
        found = self._known.get(cluster.key)
        if found is None:
            found = self._known[cluster.key] = ClusterKernel(cluster, self)
            if not found.is_for_lists:
                self.families.add_(cluster)
        return found

    def compile_(self, program: Program, tell: Told) -> None:
        """Compiles what has not been tried yet of a program's clusters. What fails runs with eager's kernels. The
        source of all is written first, so that their compilers work at the same time."""
        waiting = self._to_compile_(program)
        written: list[tuple[ClusterKernel, Call, Callable[[], None]]] = []
        with at_once() as afterwards:
            for number, kernel in enumerate(waiting):
                tell(f"writing kernel {number + 1} of {len(waiting)}")
                with _refusing(kernel):
                    written.append((kernel, compile_cluster(kernel.cluster, self.device), afterwards.taken_()))
        for number, (kernel, compiled, wait) in enumerate(written):
            tell(f"compiling kernel {number + 1} of {len(written)}")
            with _refusing(kernel):
                wait_for(wait, self.device)
                kernel.use_(compiled)

    def _to_compile_(self, program: Program) -> list[ClusterKernel]:
        """Of those that nobody has tried; the others are refused."""
        found = []
        outlines = Counter(outline_of(kernel.cluster.key) for kernel in self.in_program(program))
        for kernel in self.waiting(program):
            if self.families.may_have_its_own_(kernel.cluster, outlines[outline_of(kernel.cluster.key)]):
                found.append(kernel)
            else:
                kernel.refuse_(TOO_MANY_SIZES)
        return found

    def take_over_(self, program: Program) -> bool:
        """Kernels of families, for clusters of a program that have none yet; whether there were some."""
        took = False
        for kernel in self.waiting(program):
            compiled = self.families.kernel_for(kernel.cluster)
            if compiled is not None:
                kernel.use_(compiled)
                took = True
        return took

    def waiting(self, program: Program) -> list[ClusterKernel]:
        """Those that nobody has tried to compile."""
        return [kernel for kernel in self.in_program(program) if not kernel.tried]

    def compare_beforehand_(self, program: Program) -> None:
        """Those that have not been used, where that may not be possible later."""
        for kernel in self.in_program(program):
            kernel.compare_beforehand_()

    def in_program(self, program: Program) -> list[ClusterKernel]:
        """The distinct kernels of a program, in order."""
        clusters = [op.target for op in program.ops if isinstance(op.target, Cluster)]
        return list(dict.fromkeys(self.of(cluster) for cluster in clusters))


@contextlib.contextmanager
def _refusing(kernel: ClusterKernel) -> Iterator[None]:
    try:
        yield
    except NotCompiled as error:
        kernel.refuse_(f"it could not be compiled ({error})")
