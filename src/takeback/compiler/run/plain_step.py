"""A step as eager makes it, for a batch without a plan: forward, backward, clip, update, and the same results as a
planned one gives. What it raises is what eager raises. Where there is a plan for other shapes, what that one's forward
and backward write, and where its generators stood, is put back then; else it leaves what eager leaves, except
gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from takeback.compiler.capture.batch import map_tensors
from takeback.compiler.ownership.writes import written_before_update
from takeback.compiler.program import Program
from takeback.compiler.run.eager import Batch, Recipe
from takeback.compiler.run.replayed_step import Results
from takeback.compiler.run.transaction import Transaction
from takeback.compiler.run.verify import saved


def plain_step(
    recipe: Recipe,
    batch: Batch,
    *,
    keep_grads: bool,
    like: Program | None = None,
    begins: Callable[[], None] = lambda: None,
) -> Results:
    """Makes the step. `like`: the program of a plan for other shapes. `begins` is called before the update."""
    torch.clear_autocast_cache()  # as before a recording: what is cast is the weights as they are now
    with Transaction() as step:
        if like is not None:
            written = [like.externals[b] for b in written_before_update(like) if b in like.externals]
            step.on_abort(saved(written, like))
        step.on_abort(recipe.drop_grads_)
        step.compute()
        with torch.enable_grad():
            made = recipe.forward_backward_(batch, recipe.scaler)
            step.commit()
            begins()
            norm = recipe.update_()
        if not keep_grads:
            recipe.drop_grads_()
    return Results(made.loss, map_tensors(made.aux, lambda t: t.detach()), made.has_aux, norm)
