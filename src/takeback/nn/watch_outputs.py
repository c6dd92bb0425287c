"""Whether anybody writes onto what some modules return, which a form that keeps its output must know.

In: a model, modules of it, and an example of its input, or nothing: then a few tokens are tried, in training mode. Out:
the modules whose results had been written onto when the model returned; or why that is not known. The model, its
buffers, its attributes and the random state are left as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from takeback import engine
from takeback.nn.compare import Arguments
from takeback.nn.forward_graphs import _restore_, _snapshot

ROWS, TOKENS = 2, 6


def written_outputs(
    model: nn.Module, modules: Collection[nn.Module], example: Arguments | None
) -> set[nn.Module] | str:
    """Those of `modules` whose result is written onto; or why nobody knows."""
    if not modules:
        return set()
    if any(each.is_meta for each in model.parameters()):
        return "its parameters have no values yet"
    tried = [example] if example is not None else list(_tokens(model))
    error: Exception | None = None
    for arguments in tried:
        try:
            return _watched(model, modules, arguments)
        except Exception as raised:  # whatever the model raises on an input that is not for it
            error = raised
    if error is None:
        return "without an example nobody can see whether its output is written onto: convert(model, example=...)"
    said = (str(error).strip().splitlines() or [type(error).__name__])[0][:80]
    return f"nobody could see whether its output is written onto ({said}): convert(model, example=...)"


def _tokens(model: nn.Module) -> Iterator[Arguments]:
    """Inputs for a model of tokens."""
    ask = getattr(model, "get_input_embeddings", None)
    table: Any = ask() if callable(ask) and hasattr(model, "get_output_embeddings") else None
    names = inspect.signature(model.forward).parameters
    if not isinstance(table, nn.Embedding) or "input_ids" not in names:
        return
    ids = (torch.arange(ROWS * TOKENS, device=table.weight.device) % table.num_embeddings).view(ROWS, TOKENS)
    if "labels" in names:
        yield Arguments((), {"input_ids": ids, "labels": ids.clone()})
    yield Arguments((), {"input_ids": ids})


def _watched(model: nn.Module, modules: Collection[nn.Module], arguments: Arguments) -> set[nn.Module]:
    seen: list[tuple[nn.Module, Tensor, int]] = []

    def note(module: nn.Module, args: Any, result: Any) -> None:
        seen.append((module, result, engine.version_of(result)))

    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        with _undone(model), torch.no_grad():
            model(*arguments.positional, **arguments.keywords)
            return {module for module, result, version in seen if engine.version_of(result) != version}
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Runs a model in training mode; puts everything back."""
    modules = list(model.modules())
    attributes = [_snapshot(module) for module in modules]
    flags = [module.training for module in modules]
    buffers = [(each, engine.version_of(each), each.detach().clone()) for each in model.buffers()]
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for module in modules:
                module.training = True
            yield
    finally:
        for module, flag, before in zip(modules, flags, attributes, strict=True):
            module.training = flag
            _restore_(module, before)
        with torch.no_grad():
            for buffer, version, value in buffers:
                if engine.version_of(buffer) != version:
                    buffer.copy_(value)
