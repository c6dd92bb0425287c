"""Hooks of the user's on modules and parameters: a replay runs no Python, and would not call them."""

from __future__ import annotations

import torch

#: Tables of hooks that a module has, and those that torch calls for every module; checked on 2.11 and 2.13.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in MODULE_HOOKS)


def hooks_on(model: torch.nn.Module) -> str | None:
    """The first hook that a replay would not call, in words, or None."""
    for kind in GLOBAL_HOOKS:
        if getattr(torch.nn.modules.module, kind):
            return f"a global module hook ({kind[1:]})"
    for name, module in model.named_modules():
        for kind in MODULE_HOOKS:
            table = module.__dict__.get(kind)
            if table:
                return f"{_hook_name(table)} in {kind[1:]} of module {name or type(model).__name__!r}"
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            table = getattr(parameter, kind, None)
            if table:
                return f"{_hook_name(table)} in {kind[1:]} of parameter {name!r}"
    return None


def _hook_name(table: dict[int, object]) -> str:
    hook = next(iter(table.values()))
    return f"hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"
