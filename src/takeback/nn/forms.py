"""Converts the parts of a model that are recognised by what they compute: norms of rows, gated MLPs, output layers.

In: a model. Out: what became what, and what stayed and why. The modules stay where they are and get another forward
(swap.py); `restore_forms_` gives them their own again.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from takeback.nn import activation_form, gated_form, head_form, norm_form
from takeback.nn.activation_form import KeepsInput
from takeback.nn.compare import Arguments
from takeback.nn.conversion import Changed
from takeback.nn.find_norms import Kept
from takeback.nn.gated_form import KeepsGateAndUp
from takeback.nn.head_form import ChunkedLoss, Head
from takeback.nn.norm_form import KeepsOutput, RowNormKind
from takeback.nn.owner import Copies
from takeback.nn.swap import REMEMBERED, Form, restore_, swap_
from takeback.nn.watch_outputs import written_outputs

NORM, MLP, ACTIVATION, HEAD = "norm", "gated MLP", "activation", "output layer"
FORMS: tuple[tuple[str, type[Form], Callable[[nn.Module], object]], ...] = (
    (NORM, KeepsOutput, norm_form.recognise),
    (MLP, KeepsGateAndUp, gated_form.recognise),
    (ACTIVATION, KeepsInput, activation_form.recognise),
)
BECAUSE = {
    NORM: "keeps its output, which the next layer keeps anyway, in place of its input",
    MLP: "keeps gate and up; backward makes the activation and the product again",
    ACTIVATION: "keeps its input alone; as it is written, each of its operators keeps its own",
    HEAD: "with labels, in training, the loss is computed in chunks of rows; logits are made if they are read",
}


def convert_forms_(
    model: nn.Module, *, head: bool, body: bool = True, example: Arguments | None = None
) -> list[Changed | Kept]:
    """Give every module that is recognised its form: those of the body, and the output layer."""
    done: list[Changed | Kept] = []
    found: list[tuple[str, nn.Module, str, type[Form], object]] = []
    for path, module in model.named_modules() if body else ():
        for what, form, recognise in FORMS if not isinstance(module, Form) else ():
            kind = recognise(module)
            if isinstance(kind, str):
                done.append(Kept(path, f"{kind} ({what})"))
            elif kind is not None:
                found.append((path, module, what, form, kind))
                break
    written = written_outputs(model, [each[1] for each in found if each[2] == NORM], example)
    for path, module, what, form, kind in found:
        because = BECAUSE[what]
        if isinstance(kind, RowNormKind) and (isinstance(written, str) or module in written):
            kind.from_input = written if isinstance(written, str) else "its output is written onto by others"
            because = f"keeps its input alone; not its output: {kind.from_input}"
            if type(module) in (nn.LayerNorm, nn.RMSNorm):
                done.append(Kept(path, f"{kind.from_input} ({what})"))  # torch's own keep no more than the input
                continue
        swap_(module, form, kind)
        done.append(Changed(path, "", f"{form.__name__}: {kind}", because, what))
    for layer in head_form.find_heads(model) if head else []:
        if isinstance(layer, Kept):
            done.append(layer)
        else:
            swap_(layer.head, ChunkedLoss, Head())
            head_form.hook_(layer)
            done.append(Changed(layer.path, "", ChunkedLoss.__name__, BECAUSE[HEAD], HEAD))
    return done


def restore_forms_(model: nn.Module) -> None:
    """Every module's own forward again."""
    for module in model.modules():
        if isinstance(module, Form):
            restore_(module)
        head_form.unhook_(module)


def copies_of(model: nn.Module) -> dict[str, Copies]:
    """By path: what converted modules could not spare, as they counted it."""
    forms = {path: vars(module)[REMEMBERED] for path, module in model.named_modules() if isinstance(module, Form)}
    return {path: remembered.copies for path, remembered in forms.items() if remembered.copies}
