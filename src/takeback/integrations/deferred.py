"""What a training step tells others while it runs, `self.log(...)` and torchmetrics, is kept as data and told afterwards.

In: a module whose step runs inside of `deferred`. Out: the calls that it made, as a nesting of tuples and dicts that goes
with the results of a compiled step; `tell_` makes them, in their order, with the tensors of the step that has just run.
Guaranteed: inside of the step nothing is kept by any object, so that a replay leaves out nothing.
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

_OF_METRICS = ("forward", "update", "compute", "reset")


class Later:
    """What a metric will give: known only after the step. It may be logged, and nothing else."""

    def __init__(self, index: int, what: str) -> None:
        self.index, self.what = index, what

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise CaptureError(
            f"the training step computes with what {self.what} gave. Metrics are updated after the compiled step, when "
            f"their values are known, so in the step they can be logged and nothing else. Return what the metric needs "
            f"with the loss, and update it in on_train_batch_end(outputs, ...)."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python and torch ask of any object
            raise AttributeError(name)
        self._refuse()


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "mod"),
    *("neg", "abs", "float", "int", "bool", "lt", "le", "gt", "ge", "getitem", "iter", "len", "format", "round"),
):
    setattr(Later, f"__{_name}__", Later._refuse)


@contextlib.contextmanager
def deferred(module: nn.Module, *, log: str = "log") -> Iterator[list[Told]]:
    """While this is entered, `module.log` and the metrics among its submodules only write down what they are asked."""
    told: list[Told] = []
    changed: list[tuple[nn.Module, str, bool, Any]] = []

    def replace_(owner: nn.Module, name: str, what: Callable[..., Any]) -> None:
        table = vars(owner)
        changed.append((owner, name, name in table, table.get(name)))
        table[name] = what

    replace_(module, log, lambda *args, **kwargs: told.append((module, log, args, kwargs)))
    for path, metric in module.named_modules():
        if metric is not module and is_metric(metric):
            for name in _OF_METRICS:
                if callable(getattr(metric, name, None)):
                    replace_(metric, name, _writing(told, metric, name, f"the metric {path!r}"))
    try:
        yield told
    finally:
        for owner, name, was_there, value in reversed(changed):
            if was_there:
                vars(owner)[name] = value
            else:
                del vars(owner)[name]


def _writing(told: list[Told], metric: nn.Module, name: str, what: str) -> Callable[..., Later]:
    def write(*args: Any, **kwargs: Any) -> Later:
        told.append((metric, name, args, kwargs))
        return Later(len(told) - 1, what)

    return write


def is_metric(module: nn.Module) -> bool:
    """Of torchmetrics, if that is imported at all."""
    metrics = sys.modules.get("torchmetrics")
    return metrics is not None and isinstance(module, metrics.Metric | metrics.MetricCollection)


def tell_(told: list[Told]) -> None:
    """Makes the calls."""
    gave: list[Any] = []

    def known(value: Any) -> Any:
        return gave[value.index] if isinstance(value, Later) else value

    for owner, name, args, kwargs in told:
        method = owner if name == "forward" else getattr(owner, name)
        gave.append(method(*(known(a) for a in args), **{k: known(v) for k, v in kwargs.items()}))
