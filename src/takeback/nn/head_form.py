"""The output layer of a language model: while it trains it returns `LazyLogits`, so that the loss comes in chunks.

In: a model. Out: its output layer, if it has one to convert, or why not. `OnlyWithLabels` is the hook that makes the
logits whole where the model was called without labels: only a loss that the model computes itself goes without them.
"""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from takeback import engine
from takeback.nn.find_norms import Kept
from takeback.nn.forward_graphs import touched
from takeback.nn.lazy_logits import FLOATS, LazyLogits, lazy_logits
from takeback.nn.owner import Copies
from takeback.nn.swap import REMEMBERED, Form, argument

LABELS = "labels"  #: the argument with which a model is asked for its loss


@dataclass
class Head:
    """What a converted output layer remembers."""

    copies: Copies = field(default_factory=Copies)


class ChunkedLoss(Form):
    """`nn.Linear` that says what its result would be."""

    def converted(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        x = argument(args, kwargs)
        if not isinstance(x, Tensor) or _runs_plainly(module, x):
            return self.plain(*args, **kwargs)
        remembered: Head = vars(module)[REMEMBERED]
        return lazy_logits(x, module.weight, module.bias, remembered.copies)


def _runs_plainly(module: Any, x: Tensor) -> bool:
    """Whether nothing is to be gained, or the weight may not be there any more when the loss is computed."""
    if not (module.training and torch.is_grad_enabled()) or x.dim() < 2 or x.dtype not in FLOATS:
        return True
    if torch.compiler.is_compiling() or engine.transformed() or torch.jit.is_tracing():
        return True
    if type(x) is not Tensor or any(type(each) is not nn.Parameter for each in module.parameters(recurse=False)):
        return True  # sharded, quantised or gathered for this call alone
    autocast = torch.is_autocast_enabled(x.device.type)
    if not autocast and x.dtype != module.weight.dtype:
        return True  # for torch to refuse
    return touched(module) is not None or not (x.requires_grad or module.weight.requires_grad)


@dataclass
class OnlyWithLabels:
    """A forward hook: without labels, the logits are made as ever."""

    position: int | None  #: of the labels among positional arguments

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = kwargs.get(LABELS)
        if given is None and self.position is not None and len(args) > self.position:
            given = args[self.position]
        return _made(output) if given is None else output


def _made(output: Any) -> Any:
    if isinstance(output, LazyLogits):
        return output.made()
    if type(output) is tuple:
        return tuple(_made(each) for each in output)
    if isinstance(output, MutableMapping):
        for key in list(output):
            if isinstance(output[key], LazyLogits):
                output[key] = output[key].made()
    return output


@dataclass(frozen=True, eq=False)
class FoundHead:
    """An output layer to convert, and the model whose hook it takes."""

    path: str
    head: nn.Module
    model: nn.Module
    hook: OnlyWithLabels


def find_heads(model: nn.Module) -> list[FoundHead | Kept]:
    """Output layers, and why some stay."""
    paths = {module: path for path, module in model.named_modules()}
    found: dict[nn.Module, FoundHead | Kept] = {}
    for module in model.modules():
        head = _output_layer(module)
        if head is None or head not in paths or head in found or isinstance(head, Form):
            continue
        path = paths[head]
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        if LABELS not in names:
            found[head] = Kept(path, f"{paths[module] or 'the model'} takes no {LABELS}: it computes no loss")
        elif type(head) is not nn.Linear or type(head).forward is not nn.Linear.forward:
            found[head] = Kept(path, f"it is a {type(head).__name__}, not a plain Linear (output layer)")
        elif why := touched(head):
            found[head] = Kept(path, f"it {why} (output layer)")
        else:
            position = names.index(LABELS) if _is_positional(module) else None
            found[head] = FoundHead(path, head, module, OnlyWithLabels(position))
    return list(found.values())


def _output_layer(module: nn.Module) -> nn.Module | None:
    ask = getattr(type(module), "get_output_embeddings", None)
    if ask is None:
        return None
    try:
        head = ask(module)
    except (AttributeError, NotImplementedError):  # of a model that has none
        return None
    return head if isinstance(head, nn.Module) else None


def _is_positional(module: nn.Module) -> bool:
    parameter = inspect.signature(type(module).forward).parameters[LABELS]
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def hook_(found: FoundHead) -> None:
    """Let the model make logits where it was given no labels."""
    found.model.register_forward_hook(found.hook, with_kwargs=True)


def unhook_(model: nn.Module) -> None:
    """Take such hooks away."""
    hooks: dict[int, Any] = vars(model)["_forward_hooks"]
    for key in [key for key, hook in hooks.items() if isinstance(hook, OnlyWithLabels)]:
        del hooks[key]
        vars(model)["_forward_hooks_with_kwargs"].pop(key, None)
