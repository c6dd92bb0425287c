"""The end of a replayed step: what lies between its backward and the moment when the user's objects are changed.

The planned update is run unless a scaler skips it; the optimizer's own step() is called where the update is not in the
plan, or where the ranks of a group have gradients for other parameters than the plan's update assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.program import Region
from takeback.compiler.run.group import Group
from takeback.compiler.run.replay import Replay


@dataclass
class Ending:
    """One replay's end. After `run`, `grads` are the gradients that were used, and `replaced` says whether the planned
    update was left for the optimizer's own."""

    executor: Replay
    optimizer: torch.optim.Optimizer
    parameters: Sequence[torch.nn.Parameter]
    leaves: Sequence[torch.Tensor]
    planned: bool  #: the update is part of the plan
    group: Group | None
    scaling: Scaling | None
    clip_norm: float | None
    grads: dict[int, Region] = field(init=False)
    replaced: bool = field(init=False, default=False)
    grad_norm: torch.Tensor | None = field(init=False, default=None)  #: where it was clipped here

    def __post_init__(self) -> None:
        self.grads = dict(self.executor.program.grads)

    def run(self, scalars: Sequence[float], *, inspect: Callable[[], None] | None, log: bool) -> bool:
        """The whole step. Gives whether the planned update was run."""
        scaled = self.planned and self.scaling is not None
        skips = self._skips if scaled and self.scaling is not None and not self.scaling.in_kernel else None
        updated = self.executor.run(
            self.leaves,
            scalars,
            self._finish if not self.planned or self.group is not None or scaled else None,
            inspect=inspect,
            reduced=self._reduced if self.group is not None else None,
            skips=skips,
            log=log,
        )
        # A replay calls kernels below the level that counts writes, and autograd goes by that count.
        torch.autograd.graph.increment_version([self.parameters[i] for i in self.grads])
        return updated

    def _skips(self) -> bool:
        """Whether a scaler leaves the update out; kernels that take found_inf see to that themselves."""
        return bool(self.executor.found_inf(self.leaves).item())

    def _reduced(self) -> Callable[[], None] | None:
        """Waits for the group. What is returned is run in place of the planned update."""
        program = self.executor.program
        assert self.group is not None
        assert program.flags is not None
        mine = self.group.mine(self.grads)
        used = self.group.finish(self.executor.tensor(program.flags, self.leaves), mine)
        if used == mine:
            return None
        self.replaced = True
        self.grads = {i: program.slices[i] for i in sorted(used)}
        return self._finish

    def _finish(self) -> None:
        if not self.planned or self.replaced:
            self._own_step()
        elif self.scaling is not None:
            self.scaling.update_(self.executor.found_inf(self.leaves))
        if self.group is not None:
            self.group.commit_()

    def _own_step(self) -> None:
        """The optimizer's own step on the planned gradients. One that is not torch's might keep them, and gets copies.
        What is not held any more is no gradient of the optimizer's."""
        keeps = not type(self.optimizer).__module__.startswith("torch.optim")
        for i, p in enumerate(self.parameters):
            held = i in self.grads and self.executor.holds(self.grads[i])
            grad = self.executor.tensor(self.grads[i], self.leaves) if held else None
            p.grad = grad.clone() if keeps and grad is not None else grad
        try:
            if self.replaced:
                self.grad_norm = clip_(self.parameters, self.clip_norm)
            if self.scaling is None:
                self.optimizer.step()
            else:
                self.scaling.step_(self.executor.found_inf(self.leaves))
        except BaseException:
            for p in self.parameters:
                p.grad = None  # they look into the arena
            raise


def clip_(parameters: Sequence[torch.nn.Parameter], clip_norm: float | None) -> torch.Tensor | None:
    """Clips what is in `.grad`, if that was asked for, and returns the norm before."""
    if clip_norm is None:
        return None
    return torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], clip_norm)
