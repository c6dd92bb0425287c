"""Converts the parts of a model that are recognised by what they compute: norms of rows, gated MLPs, output layers.

In: a model. Out: what became what, and what stayed and why. The modules stay where they are and get another forward
(swap.py); `restore_forms_` gives them their own again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from takeback.nn import gated_form, head_form, norm_form
from takeback.nn.gated_form import GatedKind, KeepsGateAndUp
from takeback.nn.head_form import ChunkedLoss, FoundHead, Head
from takeback.nn.norm_form import KeepsOutput, RMSNormKind
from takeback.nn.swap import Form, restore_, swap_

NORM, MLP, HEAD = "norm", "gated MLP", "output layer"
BECAUSE = {
    NORM: "keeps its output, which the next layer keeps anyway, in place of its input",
    MLP: "keeps gate and up; backward makes the activation and the product again",
    HEAD: "with labels, in training, the loss is computed in chunks of rows; logits are made if they are read",
}


@dataclass(frozen=True)
class FormChange:
    """One module: what it is, what it became, and why; `became` is None where it stayed."""

    path: str
    what: str
    became: str | None
    reason: str


def convert_forms_(model: nn.Module, *, head: bool) -> list[FormChange]:
    """Give every module that is recognised its form."""
    done: list[FormChange] = []
    for path, module in list(model.named_modules()):
        if isinstance(module, Form):
            continue
        norm, mlp = norm_form.recognise(module), gated_form.recognise(module)
        if isinstance(norm, RMSNormKind):
            swap_(module, KeepsOutput, norm)
            done.append(FormChange(path, NORM, f"KeepsOutput: {norm}", BECAUSE[NORM]))
        elif isinstance(mlp, GatedKind):
            swap_(module, KeepsGateAndUp, mlp)
            done.append(FormChange(path, MLP, f"KeepsGateAndUp: {mlp}", BECAUSE[MLP]))
        else:
            done += [FormChange(path, NORM, None, norm)] if norm else []
            done += [FormChange(path, MLP, None, mlp)] if mlp else []
    for found in head_form.find_heads(model) if head else []:
        done.append(_convert_head_(found) if isinstance(found, FoundHead) else FormChange(found[0], HEAD, None, found[1]))
    return done


def _convert_head_(found: FoundHead) -> FormChange:
    swap_(found.head, ChunkedLoss, Head())
    head_form.hook_(found)
    return FormChange(found.path, HEAD, "ChunkedLoss", BECAUSE[HEAD])


def restore_forms_(model: nn.Module) -> None:
    """Every module's own forward again."""
    for module in model.modules():
        if isinstance(module, Form):
            restore_(module)
        head_form.unhook_(module)


def copies_of(model: nn.Module) -> dict[str, Any]:
    """By path: what converted modules could not spare, as they counted it."""
    found = {}
    for path, module in model.named_modules():
        counted = vars(vars(module)["takeback_form"]).get("copies") if isinstance(module, Form) else None
        if counted:
            found[path] = counted
    return found
