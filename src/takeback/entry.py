"""compile_step(), as users import it: arguments in, a `CompiledStep` out.

The compiler is a hundred and fifty modules, which take longer to import than a line at the top of a script should: the
first call brings them, and that goes on to record a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from takeback.options import Options

if TYPE_CHECKING:
    from takeback.step import CompiledStep


def compile_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    mode: str = "auto",
    memory: str = "auto",
    update: str = "end",
    accumulate: int = 1,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    group: object | None = None,
    keep_grads: bool = False,
    verify_every: int | None = None,
    max_plans: int | None = None,
    poison: bool = False,
    solve_s: float = 120.0,
    unplanned: str = "raise",
    graphs: str = "never",
) -> CompiledStep:
    """Compiles `loss_fn(model, *batch, **kw) -> loss or (loss, aux)` and the optimizer's update into one planned step.

    Call the result like a function: `loss = step(*batch)`. The first call with a batch of new shapes runs in eager and
    is recorded; every later one replays the plan. `optimizer` may be a list of optimizers with
    disjoint parameters, which update in that order.

    mode          "exact": the same kernels as eager, bit-identical results. "fast": what moves memory runs in generated
                  kernels, each compared with double precision when it is first used; random numbers are eager's.
                  "auto": exact on the CPU, fast on CUDA; see docs/modes.md
    memory        "auto": as low as rebuilding goes without the step becoming slower than eager; "min": as low as it
                  goes; "0.6x" of eager's peak above resident memory, or "12GiB" in all, with the least added time;
                  "keep": nothing is computed twice
    update        "end": the optimizer runs after the backward; "early": each parameter is updated as soon as its
                  gradient is complete, so that gradients hardly exist at the same time
    accumulate    splits the batch along dimension 0 into this many microbatches, as torch.chunk does, and averages
                  their losses, weighted by their rows; see also `step(*batch, update=False)`
    clip_norm     clips gradients by their global norm, as torch.nn.utils.clip_grad_norm_ does; see step.grad_norm
    scaler        a torch.amp.GradScaler: scales the loss for the backward, unscales the gradients, skips the update if
                  one is not finite, and updates the scale. The returned loss and step.grad_norm are unscaled
    group         a torch.distributed process group, each of whose ranks calls the step with its own part of the batch:
                  gradients are averaged as DistributedDataParallel averages them; see docs/parallel.md
    keep_grads    leaves a copy of the gradients in `.grad` after each step; otherwise `.grad` is None
    verify_every  None: from time to time, ever more rarely, the loss of a replay is compared with that of eager's
                  forward, within the plan's memory; a difference raises StalePlanError. n: every n-th replay is
                  repeated in eager on the same state, and a difference raises VerifyError. 0: neither
    max_plans     how many plans (shapes, train/eval, ...) are kept. None: as many as memory allows; from the third on
                  plans for new shapes are made as steps earn them, and batches without one run plainly in eager; see
                  docs/lengths.md and step.counts
    poison        a debugging aid: bytes are filled with NaN as soon as their value is dead
    solve_s       a last guard on the choice of what to rebuild, in seconds: the search is limited by work, so that a
                  step gets the same plan every time; if this strikes, the report says so
    unplanned     what becomes of a step that cannot be recorded: "raise" a CaptureError, or run it plainly in "eager",
                  with a warning that names the reason; see step.counts
    graphs        "auto": on CUDA, forward and backward of a plan become one CUDA graph where the host takes longer to
                  launch kernels than the device to run them; such a plan keeps its memory between steps. "always":
                  every plan that can be. "never". The report says which were captured, and why others were not
    """
    options = Options(
        mode=mode,
        memory=memory,
        update=update,
        accumulate=accumulate,
        clip_norm=clip_norm,
        scaler=scaler,
        group=group,
        keep_grads=keep_grads,
        verify_every=verify_every,
        max_plans=max_plans,
        poison=poison,
        solve_s=solve_s,
        unplanned=unplanned,
        graphs=graphs,
    )
    from takeback.compiler.capture.subject import check
    from takeback.step import CompiledStep

    optimizers = check(model, loss_fn, optimizer, scaler if options.scales else None)
    return CompiledStep(model, loss_fn, optimizers, options)
