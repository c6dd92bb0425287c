"""What a TARGET on the command line names: a model of the zoo, or a function of the user's; loaded, called and checked.

Whatever cannot be used raises `BadArgument`, which says what there is instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from takeback.errors import TakebackError
from takeback.zoo import CASES, Case, case

if TYPE_CHECKING:
    from takeback.hazards import OpUnderTest


class BadArgument(TakebackError):
    """A target that names nothing, or a file that cannot be written; says what there is."""


def load_case(target: str) -> Case:
    """The case that TARGET names: of the zoo, or what the user's function returns."""
    named = _zoo_name(target)
    if named is not None:
        return case(named[0], size=named[1])
    function = _function(target)
    _check_call(target, function, "function()")
    return _as_case(target, _called(target, function))


def load_maker(target: str) -> Callable[[int], Case]:
    """TARGET as a function of the batch size."""
    named = _zoo_name(target)
    if named is not None:
        name, size = named
        return lambda n: case(name, size=size, batch=n)
    function = _function(target)
    _check_call(target, function, "function(n)", 1)
    return lambda n: _as_case(target, _called(target, function, n))


def load_subjects(target: str, device: torch.device) -> list[OpUnderTest]:
    """The ops that TARGET names: one, a list, or what a function of the user's returns."""
    from takeback.hazards import OpUnderTest
    from takeback.hazards.trial import problem_of

    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise BadArgument(f"{target} names no factory: give package.module:factory or file.py:factory")
    module = _module(target, where)
    if not hasattr(module, name):
        raise BadArgument(f"unknown target {target!r}: {where} has no {name!r}")
    made = getattr(module, name)
    if callable(made):
        _check_call(target, made, "factory()", returns="a takeback.hazards.OpUnderTest, or a list of them")
        made = _called(target, made)
    found = list(made) if isinstance(made, list | tuple) else [made]
    wrong = [each for each in found if not isinstance(each, OpUnderTest)]
    if wrong or not found:
        got = f"a {type(wrong[0]).__name__}" if wrong else "an empty list"
        raise BadArgument(f"{target} must give a takeback.hazards.OpUnderTest or a list of them, got {got}")
    for subject in found:
        if problem := problem_of(subject, device):
            raise BadArgument(problem)
    return found


def device_named(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadArgument(f"--device {name}: {one_line(error)}") from None
    return device


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _zoo_name(target: str) -> tuple[str, str] | None:
    """(name, size) of a target in the zoo; None if it is a function."""
    if ":" in target and not target.startswith("zoo:"):
        return None
    if target.endswith(".py"):
        raise BadArgument(f"{target} needs a function: {target}:make")
    name, _, size = target.removeprefix("zoo:").partition("/")
    size = size or "small"
    if size not in CASES.get(name, ()):
        known = ", ".join(f"{name}/{size}" for name, sizes in CASES.items() for size in sizes)
        raise BadArgument(
            f"unknown target {target!r}. The zoo has {known}. For a step of yours, give file.py:function or "
            "package.module:function."
        )
    return name, size


def _function(target: str) -> Callable[..., object]:
    where, _, name = target.rpartition(":")
    if not name:
        raise BadArgument(f"{where} needs a function: {where}:make")
    module = _module(target, where)
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(
            k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        )
        has = f"; it has {', '.join(known)}" if known else ""
        raise BadArgument(f"unknown target {target!r}: {where} has no function {name!r}{has}")
    return function  # type: ignore[no-any-return]


def _check_call(
    target: str,
    function: Callable[..., object],
    form: str,
    *arguments: object,
    returns: str = "(model, loss_fn, optimizer, batch)",
) -> None:
    """Raises if the function cannot be called with these arguments, before it is called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin need not say
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise BadArgument(
            f"{target} cannot be called as {form}: {error}. It takes {signature}. Give a function that makes the case: "
            f"{form} must return {returns}."
        ) from None


def _called(target: str, function: Callable[..., object], *arguments: object) -> object:
    """What the user's function returns. What it raises is one line, with the line that raised it."""
    try:
        return function(*arguments)
    except TakebackError:
        raise
    except Exception as error:
        given = ", ".join(map(repr, arguments))
        raise BadArgument(f"{target}({given}) raised {one_line(error)}{_raised_at(error)}") from None


def _raised_at(error: Exception) -> str:
    """The last line of the user's that the error came through: not of a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if f.filename != __file__ and "site-packages" not in f.filename and f.line]
    return f" ({Path(mine[-1].filename).name}:{mine[-1].lineno}: {mine[-1].line})" if mine else ""


def _module(target: str, where: str) -> ModuleType:
    try:
        return _imported(target, where)
    except TakebackError:
        raise
    except Exception as error:
        raise BadArgument(f"{where} cannot be imported: {one_line(error)}{_raised_at(error)}") from None


def _imported(target: str, where: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise BadArgument(f"unknown target {target!r}: there is no file {where}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        found = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise BadArgument(f"unknown target {target!r}: there is no module {where!r}")
    return importlib.import_module(where)


def _as_case(target: str, made: object) -> Case:
    if isinstance(made, Case):
        return made
    if not isinstance(made, tuple) or len(made) != 4:
        raise BadArgument(
            f"{target} must return (model, loss_fn, optimizer, batch) or a takeback.zoo.Case, got {type(made).__name__}"
        )
    model, loss_fn, optimizer, batch = made
    for name, part, kind, right in (
        ("model", model, "torch.nn.Module", isinstance(model, torch.nn.Module)),
        ("loss_fn", loss_fn, "function", callable(loss_fn)),
        ("optimizer", optimizer, "torch.optim.Optimizer", isinstance(optimizer, torch.optim.Optimizer)),
    ):
        if not right:
            raise BadArgument(
                f"{target} must return (model, loss_fn, optimizer, batch); its {name} is a {type(part).__name__} and "
                f"no {kind}"
            )
    return Case(target, model, loss_fn, optimizer, tuple(batch) if isinstance(batch, tuple | list) else (batch,))


def parts_of_case(made: Case) -> tuple[object, ...]:
    return made.model, made.loss_fn, made.optimizer, made.batch
