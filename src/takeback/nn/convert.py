"""`convert` puts layers that keep less for backward into a model, `conversion` says which, `revert` takes them out.

Both change the model in place and keep its parameters, buffers, state_dict keys and module paths: an optimizer made
before goes on. Batch norms and the activations after them are found in the graphs of forwards (batch_norms.py); norms
of rows, gated MLPs, activations and output layers by what they compute (forms.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from takeback.errors import ConvertError, OptionError
from takeback.nn.batch_norms import Fused, Normed, convert_batch_norms_, revert_batch_norms_
from takeback.nn.compare import Arguments, compare
from takeback.nn.conversion import Changed, Conversion
from takeback.nn.find_norms import Kept
from takeback.nn.forms import convert_forms_, restore_forms_

__all__ = ["Changed", "Conversion", "Fused", "Kept", "conversion", "convert", "revert"]

REPORT = "takeback_conversion"  #: the attribute of the model that is its `Conversion`

Example: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]


def convert(
    model: nn.Module,
    *,
    relu: Literal["relu", "leaky_relu"] = "relu",
    group: Any = None,
    head: bool = True,
    body: bool = True,
    example: Example | None = None,
) -> nn.Module:
    """Give a model's layers forms that keep less for backward, in place; `conversion` says which and why.

    Args:
        relu: what becomes of a relu after a batch norm. "relu" keeps the function, and saves memory only where silu,
            leaky_relu or elu follow a norm; "leaky_relu" puts leaky_relu with slope 0.01 in its place, as inplace_abn's
            models do: another function, to train anew.
        group: synchronise every batch norm over this process group; "world" for all processes.
        head: whether the output layer of a language model may leave logits unmade when it is trained with labels.
        body: whether anything but that output layer may be changed.
        example: an input, a tuple of them, or keywords. Copies of the model run forward and backward on it, before and
            after; if outputs or gradients differ, the model is given back as it was and `ConvertError` raised.

    Returns:
        The model; the new module where the model itself is a norm that is replaced.
    """
    if relu not in ("relu", "leaky_relu"):
        raise OptionError(f"relu is 'relu' or 'leaky_relu', got {relu!r}")
    before = copy.deepcopy(model) if example is not None else None
    arguments = None if example is None else _arguments(example)
    normed = convert_batch_norms_(model, relu, group) if body else Normed(model, (), renamed=False)
    model = normed.model
    report = (*normed.report, *convert_forms_(model, head=head, body=body, example=arguments))
    changed = tuple(each for each in report if isinstance(each, Changed))
    setattr(model, REPORT, Conversion(changed, tuple(each for each in report if isinstance(each, Kept))))
    if before is not None and arguments is not None:
        try:
            compare(before, model, arguments, values=not normed.renamed)
        except ConvertError:
            revert(model)
            raise
    return model


def conversion(model: nn.Module) -> Conversion:
    """What the last `convert` of this model changed and kept, and why."""
    if REPORT not in vars(model):
        raise ValueError(f"this {type(model).__name__} was not converted: takeback.nn.convert(model) comes first")
    report: Conversion = vars(model)[REPORT]
    return report


def revert(model: nn.Module, *, example: Example | None = None) -> nn.Module:
    """Take out what `convert` put in, in place, for export: the same outputs by the model's own modules.

    What `convert` made becomes what it was, each activation where it stood. A batch norm that was written by hand
    becomes an `ABN`, which runs torch's ops under the same state_dict keys. With an `example` input, which tells the
    dimensions, those without activation become BatchNorm1d, 2d or 3d. The scale |weight| + eps is written into the
    weight.
    """
    restore_forms_(model)
    vars(model).pop(REPORT, None)
    return revert_batch_norms_(model, None if example is None else _arguments(example))


def _arguments(example: Example) -> Arguments:
    if isinstance(example, Mapping):
        return Arguments((), dict(example))
    return Arguments(example if isinstance(example, tuple) else (example,), {})
