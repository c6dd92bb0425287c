"""What a training step tells others while it runs, `self.log(...)` and torchmetrics, is kept as data and told
afterwards.

In: a module whose step runs inside of `deferred`. Out: the calls that it made, as a nesting of tuples and dicts that
goes with the results of a compiled step; `tell_` makes them, in their order, with the tensors of the step that has just
run. Guaranteed: inside of the step nothing is kept by any object, so that a replay leaves out nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn

from takeback.errors import CaptureError

#: (what is called: the module or a metric; the name of its method; args; kwargs)
Told = tuple[Any, str, tuple[Any, ...], dict[str, Any]]

#: The last one is what a MetricCollection does to the states of its members whenever it is asked for one of them
#: (checked on torchmetrics 1.9).
_OF_METRICS = ("forward", "update", "compute", "reset", "_compute_groups_create_state_ref")


class Unknown:
    """Stands for a value that is not known while a step is recorded. It may be handed on; any use of it raises."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise CaptureError(self._reason(_user_line()))

    def _reason(self, line: str) -> str:
        raise NotImplementedError

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python and torch ask of any object
            raise AttributeError(name)
        self._refuse()


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "matmul", "rmatmul", "divmod", "rdivmod", "and", "rand", "or", "ror", "xor", "rxor", "lshift"),
    *("rlshift", "rshift", "rrshift", "neg", "pos", "abs", "invert", "float", "int", "index", "bool", "round", "eq"),
    *("ne", "lt", "le", "gt", "ge", "hash", "getitem", "iter", "len", "contains", "format", "str", "repr", "array"),
):
    setattr(Unknown, f"__{_name}__", Unknown._refuse)


def _user_line() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class NoIndex(Unknown):
    """In the place of batch_idx, which is another number in each step."""

    def _reason(self, line: str) -> str:
        return (
            f"training_step uses batch_idx at {line}, another number in each step, so that each would need a plan of "
            f"its own. Do what depends on it in on_train_batch_start or on_train_batch_end, which run as ever; or keep "
            f"a count in a buffer of the module."
        )


class Later(Unknown):
    """What a metric will give: known only after the step. It may be logged, and nothing else."""

    def __init__(self, index: int, what: str) -> None:
        self.index, self.what = index, what

    def _reason(self, line: str) -> str:
        return (
            f"the training step computes at {line} with what {self.what} gave. Metrics are updated after the compiled "
            f"step, when their values are known, so in the step they can be logged and nothing else. Return what the "
            f"metric needs with the loss, and update it in on_train_batch_end(outputs, ...)."
        )


@contextlib.contextmanager
def deferred(module: nn.Module, *, log: str = "log") -> Iterator[list[Told]]:
    """While this is entered, `module.log` and the metrics among its submodules only write down what they are asked."""
    told: list[Told] = []
    changed: list[tuple[nn.Module, str, bool, Any]] = []

    def replace_(owner: nn.Module, name: str, what: Callable[..., Any]) -> None:
        table = _table(owner)
        changed.append((owner, name, name in table, table.get(name)))
        table[name] = what

    replace_(module, log, lambda *args, **kwargs: told.append((module, log, args, kwargs)))
    for path, metric in metrics_of(module).items():
        for name in _OF_METRICS:
            if callable(getattr(metric, name, None)):
                replace_(metric, name, _writing(told, metric, name, f"the metric {path!r}"))
    try:
        yield told
    finally:
        for owner, name, was_there, value in reversed(changed):
            if was_there:
                _table(owner)[name] = value
            else:
                del _table(owner)[name]


def _table(owner: nn.Module) -> dict[str, Any]:
    """Its `__dict__`, past those who look on: to a recording this is no read of all that is in there."""
    found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    return found


def _writing(told: list[Told], metric: nn.Module, name: str, what: str) -> Callable[..., Later]:
    def write(*args: Any, **kwargs: Any) -> Later:
        told.append((metric, name, args, kwargs))
        return Later(len(told) - 1, what)

    return write


def metrics_of(module: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """By path, those of torchmetrics among the submodules, if that is imported at all. Not by `named_modules`: it asks
    for the hash of each, which a metric computes from its state, and to a recording that is a read."""
    metrics: Any = sys.modules.get("torchmetrics")
    found: dict[str, nn.Module] = {}
    for name, child in _table(module)["_modules"].items() if metrics is not None else ():
        if child is not None:
            if isinstance(child, metrics.Metric | metrics.MetricCollection):
                found[f"{path}{name}"] = child
            found |= metrics_of(child, f"{path}{name}.")
    return found


def tell_(told: list[Told]) -> None:
    """Makes the calls."""
    gave: list[Any] = []

    def known(value: Any) -> Any:
        return gave[value.index] if isinstance(value, Later) else value

    for owner, name, args, kwargs in told:
        method = owner if name == "forward" else getattr(owner, name)
        gave.append(method(*(known(a) for a in args), **{k: known(v) for k, v in kwargs.items()}))
