"""What is known of ops that treat each row by itself, or add rows up: where the rows are among operands and results.

In: an op, and the runs (row_cuts.py) along which the rows of its operands lie. Out: a `RowCut`, or why there is none.
Each fact is about what torch's operator computes; an op without a fact here is not cut.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from takeback.compiler.ownership.facts import COPY, EMPTY, FILL
from takeback.compiler.passes.row_cuts import Run
from takeback.compiler.program import Op, OpOverload, Region, Special
from takeback.compiler.schema import once_for_each, schema_of

aten = torch.ops.aten

PRODUCTS = frozenset(("mm", "addmm", "bmm"))


class Folded(enum.Enum):
    """Results that have no rows."""

    SUM = "what the parts give, added up, is the result"
    MEAN = "the same, divided by how many there were"
    WEIGHT = "depends on the targets alone, not on the rows that are computed"
    LOCAL = "each part has its own"


@dataclass(frozen=True)
class RowCut:
    """Where the rows of an op lie: of each positional argument (None: it has none) and of each result. `sizes` is the
    position of an argument that is the shape of the result."""

    operands: tuple[Run | None, ...]
    results: tuple[Run | Folded, ...]
    sizes: int | None = None


#: Ops along dimensions: (the positions of operands that have rows, of the dimensions, of keepdim). Without keepdim the
#: result has the operand's dimensions.
_ALONG: Mapping[str, tuple[tuple[int, ...], int, int | None]] = {
    "_softmax": ((0,), 1, None),
    "_log_softmax": ((0,), 1, None),
    "_softmax_backward_data": ((0, 1), 2, None),
    "_log_softmax_backward_data": ((0, 1), 2, None),
    "logsumexp": ((0,), 1, 2),
    "amax": ((0,), 1, 2),
    "amin": ((0,), 1, 2),
    "max.dim": ((0,), 1, 2),
    "min.dim": ((0,), 1, 2),
    "argmax": ((0,), 1, 2),
    "argmin": ((0,), 1, 2),
    "any.dim": ((0,), 1, 2),
    "all.dim": ((0,), 1, 2),
    "sum": ((0,), 99, 99),
    "mean": ((0,), 99, 99),
    "sum.dim_IntList": ((0,), 1, 2),
    "mean.dim": ((0,), 1, 2),
    "cumsum": ((0,), 1, None),
    "topk": ((0,), 2, None),
    "sort": ((0,), 1, None),
    "gather": ((0, 2), 1, None),
    "scatter.src": ((0, 2, 3), 1, None),
    "scatter.value": ((0, 2), 1, None),
    "scatter_add": ((0, 2, 3), 1, None),
}
_ADDS = {"sum": Folded.SUM, "sum.dim_IntList": Folded.SUM, "mean": Folded.MEAN, "mean.dim": Folded.MEAN}
#: Pointwise in what they compute, without torch's tag.
_POINTWISE = frozenset(("masked_fill", "where", "copy", "fill"))
#: How many dimensions the log-probabilities have; the first one are the rows.
_NLL = {"nll_loss_forward": 2, "nll_loss_backward": 2, "nll_loss2d_forward": 4, "nll_loss2d_backward": 4}


def cut_of(op: Op, runs: Mapping[int, Run], result: Run | None = None) -> RowCut | str:
    """`runs`: by position of an argument, where the rows of the operands that have any lie. `result`: where those of
    the first result lie, if no operand says."""
    target = op.target
    if isinstance(target, Special):
        return "it is no kernel"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "it draws random numbers"
    name = _plain_name(target)
    if name in PRODUCTS:
        return _product(op, runs)
    if name in _NLL:
        return _nll(op, runs, _NLL[name], backward=name.endswith("backward"))
    if name in ("slice_backward", "select_backward"):
        return _view_backward(op, runs, drops=name == "select_backward")
    if target in FILL or target in EMPTY:
        return _fill(op, result)
    long_name = _long_name(target)
    along = _ALONG.get(long_name, _ALONG.get(name) if "." not in long_name else None)
    if name == "cat":
        along = ((0,), 1, None)
    if along is not None:
        return _along(op, runs, result, long_name, *along)
    if name == "constant_pad_nd":
        return _pad(op, runs)
    if _is_pointwise(target):
        return _pointwise(op, runs, result)
    return "it is not known to treat each row by itself"


@once_for_each
def _plain_name(target: OpOverload) -> str:
    """Without overload, and without the mark of the in-place form."""
    schema = schema_of(target)
    in_place = schema.name.endswith("_") and schema.parameters[0].is_written
    return schema.name[:-1] if in_place else schema.name


@once_for_each
def _long_name(target: OpOverload) -> str:
    overload = schema_of(target).overload
    return f"{_plain_name(target)}.{overload}" if overload not in ("", "default") else _plain_name(target)


@once_for_each
def _is_pointwise(target: OpOverload) -> bool:
    if target.namespace != "aten":
        return False
    functional = getattr(getattr(aten, _plain_name(target), None), schema_of(target).overload or "default", target)
    tagged = torch.Tag.pointwise in target.tags or torch.Tag.pointwise in functional.tags
    return tagged or target in COPY or _plain_name(target) in _POINTWISE


def _one(runs: Mapping[int, Run], result: Run | None) -> Run | None:
    found: set[Run | None] = set(runs.values()) or {result}
    return found.pop() if len(found) == 1 else None


_APART = "the rows of its operands lie in different dimensions"


def _pointwise(op: Op, runs: Mapping[int, Run], result: Run | None) -> RowCut | str:
    run = _one(runs, result)
    if run is None:
        return _APART
    return RowCut(tuple(run if _is_tensor(a) else None for a in op.args), (run,) * len(op.results))


def _fill(op: Op, result: Run | None) -> RowCut | str:
    if result is None:
        return "it is not known to treat each row by itself"
    return RowCut((None,) * len(op.args), (result,))


def _along(
    op: Op,
    runs: Mapping[int, Run],
    result: Run | None,
    name: str,
    operands: tuple[int, ...],
    dims_at: int,
    keep_at: int | None,
) -> RowCut | str:
    run = _one(runs, result if keep_at is None else None)
    if run is None or any(position not in operands for position in runs):
        return _APART
    shape = _shape(op.args[0])
    if name == "cat":
        dims = {_negative(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0), len(shape))}
    else:
        dims = _dims(op, dims_at, len(shape))
    long = {d for d in range(run.first, run.last + 1) if shape[d] > 1}
    given = tuple(run if i in operands else None for i in range(len(op.args)))
    if long & dims:
        fold = _ADDS.get(name)
        if fold is None or not long <= dims:
            return "it mixes rows"
        return RowCut(given, (fold,) * len(op.results))
    kept = keep_at is None or bool(op.args[keep_at] if len(op.args) > keep_at else op.kwargs.get("keepdim", False))
    if not kept:
        run = Run(*(dim + sum(other > dim for other in dims) for dim in (run.first, run.last)))
    return RowCut(given, (run,) * len(op.results))


def _dims(op: Op, at: int, rank: int) -> set[int]:
    """Counted from the end. No dimensions are all of them, except for ops whose default is the last one."""
    given = op.args[at] if len(op.args) > at else op.kwargs.get("dim")
    if given is None and name_of(op) in ("topk", "sort"):
        given = -1
    if given is None or given == ():
        return set(range(-rank, 0))
    return {_negative(d, rank) for d in (given if isinstance(given, tuple) else (given,))}


def name_of(op: Op) -> str:
    """Of its operator, without overload, and without the mark of the in-place form."""
    return "" if isinstance(op.target, Special) else _plain_name(op.target)


def _negative(dim: object, rank: int) -> int:
    assert isinstance(dim, int)
    return dim - rank if dim >= 0 else dim


def _product(op: Op, runs: Mapping[int, Run]) -> RowCut | str:
    """[rows, inner] times [inner, columns] treats each row by itself; [columns, rows] times [rows, inner] adds up."""
    shift = 1 if name_of(op) == "addmm" else 0
    left, right = shift, shift + 1
    rows, columns = Run(-2, -2), Run(-1, -1)
    if len(_shape(op.args[left])) == 3 and _shape(op.args[left])[0] != 1:
        return "it is a batch of products"
    if runs.get(left) == rows and right not in runs:
        return RowCut((rows,) * shift + (rows, None), (rows,))
    if shift == 0 and runs.get(left, columns) == columns and runs.get(right, rows) == rows and runs:
        return RowCut((columns, rows), (Folded.SUM,))
    return "it multiplies rows with rows" if shift == 0 else "it adds to a sum over rows"


def _nll(op: Op, runs: Mapping[int, Run], rank: int, *, backward: bool) -> RowCut | str:
    at = 1 if backward else 0
    reduction = op.args[at + 3]
    rows, targets = Run(-rank, -rank), Run(1 - rank, 1 - rank)
    if len(_shape(op.args[at])) != rank or runs.get(at) != rows:
        return "its classes are not rows"
    if runs.get(at + 1, targets) != targets:
        return _APART
    given: list[Run | None] = [None] * len(op.args)
    given[at], given[at + 1] = rows, targets
    if backward:
        if reduction == 0:
            given[0] = targets
        return RowCut(tuple(given), (rows,)) if runs.get(0, targets) == targets else _APART
    if reduction == 0:
        return RowCut(tuple(given), (targets, Folded.LOCAL))
    return RowCut(tuple(given), (Folded.SUM if reduction == 2 else Folded.MEAN, Folded.WEIGHT))


def _view_backward(op: Op, runs: Mapping[int, Run], *, drops: bool) -> RowCut | str:
    run, sizes = runs.get(0), op.args[1]
    assert isinstance(sizes, tuple)
    dim = _negative(op.args[2], len(sizes))
    if run is None:
        return _APART
    if drops:
        if run.first <= dim < run.last:
            return "it mixes rows"
        run = Run(*(d - 1 if d <= dim else d for d in (run.first, run.last)))
    if dim in run:
        return "it mixes rows"
    return RowCut((run if not drops else runs[0],) + (None,) * (len(op.args) - 1), (run,), sizes=1)


def _pad(op: Op, runs: Mapping[int, Run]) -> RowCut | str:
    run, pad = runs.get(0), op.args[1]
    assert isinstance(pad, tuple)
    if run is None:
        return _APART
    if any(pad[2 * (-d - 1) : 2 * -d] not in ((), (0, 0)) for d in range(run.first, run.last + 1)):
        return "it adds rows"
    return RowCut((run,) + (None,) * (len(op.args) - 1), (run,))


def _is_tensor(argument: object) -> bool:
    return isinstance(argument, Region) or (
        isinstance(argument, tuple) and any(isinstance(each, Region) for each in argument)
    )


def _shape(argument: object) -> tuple[int, ...]:
    if isinstance(argument, tuple):
        argument = next(each for each in argument if isinstance(each, Region) and each.shape != (0,))
    assert isinstance(argument, Region)
    return argument.shape
