"""Hooks of the user's on modules and parameters. A forward hook runs while the step is recorded, so what it computes is
part of the program; the backward's run outside of it, and a replay, which runs no Python, would not call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: Tables of a module's hooks that a replay would not call. Its other tables are assumptions like any dict: a hook that
#: comes, goes or is another one makes it record anew. And the tables of hooks that torch calls for every module;
#: checked on 2.11 and 2.13.
MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in (*MODULE_HOOKS, "_forward_hooks", "_forward_pre_hooks"))

_TALKING = ("torch.distributed", "deepspeed")  #: their hooks talk to other processes


def hooks_on(modules: Mapping[str, torch.nn.Module]) -> str | None:
    """The first hook that a replay would not call, in words, or None. `modules` and all inside of them."""
    for kind in GLOBAL_HOOKS:
        table = getattr(torch.nn.modules.module, kind)
        if table:
            return f"a global module hook: {_hook_name(table)} in {kind[1:]}"
    for root, outer in modules.items():
        for name, module in outer.named_modules(prefix=root):
            for kind in MODULE_HOOKS:
                table = module.__dict__.get(kind)
                if table:
                    return f"{_hook_name(table)} in {kind[1:]} of module {name or type(module).__name__!r}"
            for kind in ("_forward_hooks", "_forward_pre_hooks"):
                table = module.__dict__.get(kind, {})
                talking = {k: h for k, h in table.items() if str(getattr(h, "__module__", "")).startswith(_TALKING)}
                if talking:
                    return f"{_hook_name(talking)} in {kind[1:]} of module {name or type(module).__name__!r}"
        for name, parameter in outer.named_parameters(prefix=root):
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                table = getattr(parameter, kind, None)
                if table:
                    return f"{_hook_name(table)} in {kind[1:]} of parameter {name!r}"
    return None


def _hook_name(table: Mapping[int, Any]) -> str:
    """With the line where it was defined."""
    hook: Any = next(iter(table.values()))
    function = getattr(hook, "func", hook)  # of a partial
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__", function)
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"hook {getattr(hook, '__qualname__', type(hook).__qualname__)}{where}"
