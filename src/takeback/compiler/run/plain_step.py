"""A step as eager makes it, for a batch that cannot be planned: forward, backward, clip, update, and the same results
as a planned one gives. What it raises is what eager raises, and leaves what eager leaves, except gradients."""

from __future__ import annotations

import torch

from takeback.compiler.capture.batch import map_tensors
from takeback.compiler.run.eager import Batch, Recipe
from takeback.compiler.run.replayed_step import Results


def plain_step(recipe: Recipe, batch: Batch, *, keep_grads: bool) -> Results:
    """Makes the step."""
    torch.clear_autocast_cache()  # as before a recording: what is cast is the weights as they are now
    try:
        with torch.enable_grad():
            made = recipe.forward_backward_(batch, recipe.scaler)
            norm = recipe.update_()
    except BaseException:
        recipe.drop_grads_()
        raise
    if not keep_grads:
        recipe.drop_grads_()
    return Results(made.loss, map_tensors(made.aux, lambda t: t.detach()), made.has_aux, norm)
