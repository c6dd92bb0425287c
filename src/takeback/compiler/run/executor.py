"""What every executor does alike: a step is one transaction, in which it saves what its program writes of the user's.

Contract: until the update first writes a tensor of the user's nothing has changed for good: what the forward and
backward write into the user's tensors (running statistics, counters), and where its random generators stood, is saved
first and put back if the step does not get that far.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from takeback.compiler.layout import Layout
from takeback.compiler.ownership.resident import grad_bytes
from takeback.compiler.ownership.writes import generators_of, undo_bytes, written_before_update
from takeback.compiler.program import BufferId, Cluster, Op, Phase, Program, Region
from takeback.compiler.run.codegen import over
from takeback.compiler.run.execution import Counters, Execution
from takeback.compiler.run.kernels import ClusterKernel, Kernels
from takeback.compiler.run.transaction import Transaction
from takeback.parallel import Reducer


class Executor:
    """A layout, ready to run on one thread at a time. A subclass says where its values live."""

    def __init__(self, layout: Layout, reducer: Reducer | None = None, kernels: Kernels | None = None) -> None:
        self.layout = layout
        self.kernels = kernels or Kernels(layout.program.device)
        self._used = self.kernels.in_program(layout.program)
        self._reducer = reducer  #: takes the buckets of gradients as they become complete
        self.program: Program = layout.draft.program
        self.counters = Counters()
        borrowed = written_before_update(self.program)
        self._written_leaves = [self.program.leaves[b] for b in borrowed if b in self.program.leaves]
        live = [_whole(self.program.externals[b]) for b in borrowed if b in self.program.externals]
        # One list for each dtype: on CUDA a list is then copied by a few kernels, not by one for each tensor.
        self._live = [[t for t in live if t.dtype is dtype] for dtype in dict.fromkeys(t.dtype for t in live)]
        self._saved = [[torch.empty_like(t) for t in alike] for alike in self._live]
        self._drawn_from = generators_of(self.program)
        updates = (i for i, op in enumerate(self.program.ops) if op.phase is Phase.UPDATE)
        self._first_update = next(updates, len(self.program.ops))
        self.committing = False  #: the last step has begun to write what is updated
        self._undo: Callable[[], None] = _nothing  #: while a step runs
        self._step: Transaction | None = None
        self._autocasts = tuple(dict.fromkeys(("cpu", self.program.device_type)))

    @property
    def written_leaves(self) -> Sequence[int]:
        """Positions of the batch tensors that the user's own code writes."""
        return self._written_leaves

    def describe(self, *, keep_grads: bool, group: str = "", measured: bool = False) -> Execution:
        """For the report. `measured`: the counters of the last replay hold for those to come."""
        return Execution(
            serves_ops=self.serves_ops,
            undo_bytes=undo_bytes(self.program),
            kept_grad_bytes=grad_bytes(self.program) if keep_grads else 0,
            group=group,
            counters=self.counters if measured and not self.kernels.compared else None,
            graph=self.graph,
        )

    @property
    def plain(self) -> bool:
        """Whether clusters run with eager's kernels, for this once."""
        return self.kernels.plain and any(isinstance(op.target, Cluster) for op in self.program.ops)

    def _clusters(self, constants: Mapping[str, object]) -> dict[str, ClusterKernel]:
        """What the names of clusters stand for in generated code."""
        return {name: self.kernels.of(value) for name, value in constants.items() if isinstance(value, Cluster)}

    # -- what a subclass says --------------------------------------------------------------------------------------

    @property
    def serves_ops(self) -> bool:
        """Whether what ops ask for inside is answered where the values lie."""
        return True

    def tensor(self, region: Region, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of a region as they are now."""
        raise NotImplementedError

    def still_has(self, region: Region) -> bool:
        """Whether the bytes are still there before the update: the gradient of a parameter that the optimizer does not
        have, and that nobody keeps, is not read again."""
        life = self.layout.alive.get(region.buffer)
        return life is None or life.end > self._first_update or self._first_update == len(self.program.ops)

    @property
    def knows_loss_before_update(self) -> bool:
        """False where an update that is made early begins before the forward has ended."""
        loss = self.program.loss.buffer
        return all(i < self._first_update for i, op in enumerate(self.program.ops) if _writes(op, loss))

    def found_inf(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the scaler's check of the gradients found, from the end of the backward to the end of the step."""
        assert self.program.found_inf is not None
        return self.tensor(self.program.found_inf, leaves)

    def give(self, region: Region, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor for the caller: nobody writes it afterwards."""
        return self.tensor(region, leaves).clone()

    def release_(self) -> None:
        """The caller has taken what he wants of the last step."""

    def settle_(self) -> None:
        """Called when a comparison is over: what it needed besides is given back."""

    def make_room_(self) -> None:
        """Called before and after eager runs beside the plan: what one leaves in a cache is of no use to the other."""

    def uncapture_(self) -> None:
        """Gives back what a captured graph holds: a comparison with eager is to fit into the plan's memory."""

    @property
    def graph(self) -> str:
        """Whether forward and backward are one CUDA graph, or why not; empty where there are none."""
        return ""

    def count_aside(self) -> Callable[[], int]:
        """Called before something else than the step runs; what it gives, after it: the most bytes that this took, or 0
        where the allocator does not count."""
        return lambda: 0

    def rehearsed(self) -> Layout | None:
        """After a run with `log=True`: a layout by what the kernels really asked for, if that was not as expected."""
        raise NotImplementedError

    def _prepare_(self, *, log: bool) -> None:
        raise NotImplementedError

    def _aside(self) -> contextlib.AbstractContextManager[None]:
        """What is allocated in here is nothing that the step asks for."""
        raise NotImplementedError

    def _enter_(self, *, log: bool) -> None:
        """Called when the step begins."""

    def _leave_(self) -> None:
        """Called when the step is over, once or more."""

    def _compute_(self, batch: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def _update_(self, batch: list[torch.Tensor], scalars: Sequence[float]) -> None:
        """Calls `commits_` before it first writes something of the user's."""
        raise NotImplementedError

    def commits_(self) -> None:
        self.committing = True

    # -- the transaction -------------------------------------------------------------------------------------------

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        scalars: Sequence[float],
        finish: Callable[[], None] | None = None,
        *,
        inspect: Callable[[], None] | None = None,
        reduced: Callable[[], Callable[[], None] | None] | None = None,
        skips: Callable[[], bool] | None = None,
        log: bool = False,
    ) -> bool:
        """Forward, backward and update. `finish` is called inside the commit, after the planned update: an optimizer's
        own step(), a scaler's update(). `inspect` is called before it: what it raises takes the step back. With a
        group, nothing is sent before that, and then `reduced` waits for it; what it returns is run in place of the
        planned update. `skips` is asked whether to leave out the planned update, as a scaler does for gradients that
        are not finite. Gives whether it was run. Raises `HeldValueChanged`, with everything as before, if a held value
        is another one."""
        self._prepare_(log=log)
        if self._reducer is not None:
            self._reducer.begin(hold=inspect is not None)
        self.counters = Counters()
        self.committing = False
        batch = [t.detach() for t in leaves]
        mode = torch.is_grad_enabled()
        with Transaction() as step:
            self._step = step
            self._save_(step, batch)
            step.at_end(self.kernels.rest_)  # they outlive this executor
            self.kernels.aside = self._aside
            step.at_end(self._leave_)
            self._enter_(log=log)
            self.kernels.compared = False
            step.compute()
            self._compute_(batch)
            if inspect is not None:
                inspect()
            instead = reduced() if reduced is not None else None
            updates = instead is None and (skips is None or not skips())
            step.commit()
            if updates:
                self._update_(batch, scalars)
            finish = instead or finish
            if finish is not None:
                self.commits_()
                self._leave_()
                torch._C._set_grad_enabled(mode)
                finish()
        return updates

    def _save_(self, step: Transaction, batch: Sequence[torch.Tensor]) -> None:
        """Everything that an aborted step has to put back."""
        for device in self._autocasts:  # the program holds autocast's casts; made again, they would be too many
            if torch.is_autocast_enabled(device):
                step.at_end(functools.partial(torch.set_autocast_enabled, device, True))
                torch.set_autocast_enabled(device, False)
        states = [(g, g.get_state()) for g in self._drawn_from]
        undo = [(batch[i], batch[i].clone()) for i in self._written_leaves]
        for saved, live in zip(self._saved, self._live, strict=True):
            torch._foreach_copy_(saved, live)

        def put_back() -> None:
            for saved, live in zip(self._saved, self._live, strict=True):
                torch._foreach_copy_(live, saved)
            for leaf, before in undo:
                leaf.copy_(before)
            for generator, state in states:  # the same step, tried again, draws the same numbers
                generator.set_state(state)

        self._undo = put_back
        step.at_end(self._forget_undo)
        step.on_abort(self.release_)
        step.on_abort(put_back)

    def _put_back_(self) -> None:
        """Everything that this step has computed so far is taken back, inside of its transaction."""
        self._undo()

    def _forget_undo(self) -> None:
        self._undo, self._step = _nothing, None

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Ctrl-C waits, in the middle of what is computed."""
        assert self._step is not None
        self._step.commit()
        try:
            yield
        finally:
            self._step.compute()


def _nothing() -> None:
    pass


def _writes(op: Op, buffer: BufferId) -> bool:
    return buffer in op.mutates or any(r.buffer == buffer for r in op.outputs)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Everything in a tensor's storage: a step may write any part of it, through any view."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return over(tensor, tensor.dtype, (count,), (1,), 0)
