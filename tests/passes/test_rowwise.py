"""The facts of rowwise.py, each proved on the real kernel: an op on some rows gives these rows of the op on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from takeback.compiler.passes import rowwise
from takeback.compiler.passes.row_cuts import RowPart, Run, collapsed, cut_inside, cut_sizes, cut_whole, run_of
from takeback.compiler.passes.rowwise import Folded, RowCut, cut_of
from takeback.compiler.program import BufferId, Op, Region, map_regions, regions

aten = torch.ops.aten

ROWS, COLUMNS = 12, 5


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(*shape)


X, G = numbers(ROWS, COLUMNS), numbers(ROWS, COLUMNS) + 1
CUBE = numbers(3, 4, COLUMNS)  # 12 rows, seen as 3 × 4
INDEX = torch.arange(ROWS * 2).reshape(ROWS, 2) % COLUMNS
TARGET = torch.arange(ROWS) % COLUMNS
IMAGE, IMAGE_TARGET = numbers(ROWS, COLUMNS, 2, 3), torch.arange(ROWS * 6).reshape(ROWS, 2, 3) % COLUMNS
ROW_LOSS = numbers(ROWS)
WEIGHT, ONE = torch.rand(COLUMNS), torch.ones(())
LOGS = X.log_softmax(1)

#: Of each op: its arguments, and how it must be cut: the rows of the first result, or how it folds.
PROOFS: dict[str, list[tuple[Any, tuple[Any, ...], Run | Folded]]] = {
    "pointwise": [
        (aten.add.Tensor, (X, G), Run(-2, -2)),
        (aten.mul.Tensor, (X, WEIGHT), Run(-2, -2)),
        (aten.tanh_backward.default, (CUBE, CUBE), Run(-3, -2)),
        (aten.masked_fill.Scalar, (X, X > 0, 0.5), Run(-2, -2)),
        (aten.where.self, (X > 0, X, G), Run(-2, -2)),
        (aten.clone.default, (CUBE,), Run(-3, -2)),
        (aten._to_copy.default, (X,), Run(-2, -2)),
    ],
    "_softmax": [
        (aten._softmax.default, (X, 1, False), Run(-2, -2)),
        (aten._softmax.default, (CUBE, -1, False), Run(-3, -2)),
    ],
    "_log_softmax": [(aten._log_softmax.default, (X, -1, False), Run(-2, -2))],
    "_softmax_backward_data": [(aten._softmax_backward_data.default, (G, X.softmax(1), 1, X.dtype), Run(-2, -2))],
    "_log_softmax_backward_data": [(aten._log_softmax_backward_data.default, (G, LOGS, 1, X.dtype), Run(-2, -2))],
    "logsumexp": [
        (aten.logsumexp.default, (X, (-1,)), Run(-1, -1)),
        (aten.logsumexp.default, (X, (1,), True), Run(-2, -2)),
        (aten.logsumexp.default, (CUBE, (2,)), Run(-2, -1)),
    ],
    "amax": [(aten.amax.default, (X, (1,)), Run(-1, -1))],
    "amin": [(aten.amin.default, (X, (1,), True), Run(-2, -2))],
    "max.dim": [(aten.max.dim, (X, 1), Run(-1, -1))],
    "min.dim": [(aten.min.dim, (CUBE, 2, True), Run(-3, -2))],
    "argmax": [(aten.argmax.default, (X, 1), Run(-1, -1))],
    "argmin": [(aten.argmin.default, (CUBE, -1), Run(-2, -1))],
    "any.dim": [(aten.any.dim, (X > 0, 1), Run(-1, -1))],
    "all.dim": [(aten.all.dim, (X > -2, 1, True), Run(-2, -2))],
    "sum": [(aten.sum.default, (X,), Folded.SUM)],
    "mean": [(aten.mean.default, (CUBE,), Folded.MEAN)],
    "sum.dim_IntList": [
        (aten.sum.dim_IntList, (X, (1,)), Run(-1, -1)),
        (aten.sum.dim_IntList, (X, (0,), True), Folded.SUM),
        (aten.sum.dim_IntList, (CUBE, (0, 1)), Folded.SUM),
    ],
    "mean.dim": [(aten.mean.dim, (X, (-1,)), Run(-1, -1)), (aten.mean.dim, (X, (0,)), Folded.MEAN)],
    "cumsum": [(aten.cumsum.default, (X, 1), Run(-2, -2))],
    "topk": [(aten.topk.default, (X, 2), Run(-2, -2))],
    "sort": [(aten.sort.default, (X, 1), Run(-2, -2))],
    "gather": [(aten.gather.default, (X, 1, INDEX), Run(-2, -2))],
    "scatter.src": [(aten.scatter.src, (X, 1, INDEX, G), Run(-2, -2))],
    "scatter.value": [(aten.scatter.value, (X, 1, INDEX, 0.5), Run(-2, -2))],
    "scatter_add": [(aten.scatter_add.default, (X, 1, INDEX, G), Run(-2, -2))],
    "cat": [(aten.cat.default, ((X, G), 1), Run(-2, -2))],
    "constant_pad_nd": [(aten.constant_pad_nd.default, (X, (1, 2), 0.5), Run(-2, -2))],
    "slice_backward": [(aten.slice_backward.default, (X, (ROWS, 9), 1, 1, 6, 1), Run(-2, -2))],
    "select_backward": [
        (aten.select_backward.default, (X, (ROWS, COLUMNS, 3), 2, 1), Run(-3, -3)),
        (aten.select_backward.default, (X, (ROWS, 3, COLUMNS), 1, 1), Run(-3, -3)),
    ],
    "mm": [
        (aten.mm.default, (X, numbers(COLUMNS, 3)), Run(-2, -2)),
        (aten.mm.default, (X.t(), G), Folded.SUM),
    ],
    "addmm": [(aten.addmm.default, (numbers(3), X, numbers(COLUMNS, 3)), Run(-2, -2))],
    "bmm": [
        (aten.bmm.default, (X[None], numbers(1, COLUMNS, 3)), Run(-2, -2)),
        (aten.bmm.default, (X.t()[None], G[None]), Folded.SUM),
    ],
    "nll_loss_forward": [
        (aten.nll_loss_forward.default, (LOGS, TARGET, WEIGHT, 2, 3), Folded.SUM),
        (aten.nll_loss_forward.default, (LOGS, TARGET, None, 0, 3), Run(-1, -1)),
    ],
    "nll_loss_backward": [
        (aten.nll_loss_backward.default, (ONE, LOGS, TARGET, WEIGHT, 1, 3, ONE * 7), Run(-2, -2)),
        (aten.nll_loss_backward.default, (ROW_LOSS, LOGS, TARGET, None, 0, -100, ONE), Run(-2, -2)),
    ],
    "nll_loss2d_forward": [(aten.nll_loss2d_forward.default, (IMAGE, IMAGE_TARGET, None, 2, 3), Folded.SUM)],
    "nll_loss2d_backward": [
        (aten.nll_loss2d_backward.default, (ONE, IMAGE, IMAGE_TARGET, None, 1, 3, ONE * 9), Run(-4, -4))
    ],
}


class TensorPool:
    """Tensors as regions of buffers, and back."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def region(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.region, value))
        if not isinstance(value, Tensor):
            return value
        self.tensors.append(value)
        place = BufferId(len(self.tensors) - 1)
        return Region(place, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())

    def tensor(self, region: Region) -> Tensor:
        return self.tensors[region.buffer].as_strided(region.shape, region.stride, region.offset)

    def run(self, region: Region) -> Run | None:
        return run_of(region, ROWS, self.tensors[region.buffer].untyped_storage().nbytes())


def has_rows(value: Any) -> bool:
    tensors = value if isinstance(value, tuple) else (value,)
    return any(
        isinstance(t, Tensor) and any(t is each or t._base is each for each in (X, G, CUBE, LOGS, IMAGE))
        for t in tensors
    )


def cut_case(target: Any, args: tuple[Any, ...]) -> tuple[TensorPool, Op, RowCut]:
    pool = TensorPool()
    made = target(*args)
    op = Op(target, pool.region(args), {}, pool.region(made if isinstance(made, tuple) else (made,)))
    runs = {}
    for place, value in enumerate(args):
        if has_rows(value) or (isinstance(value, Tensor) and value.shape[:1] == (ROWS,) and value.dtype == torch.bool):
            [run] = {pool.run(r) for r in regions(op.args[place])}
            assert run is not None
            runs[place] = run
    cut = cut_of(op, runs)
    assert isinstance(cut, RowCut), cut
    return pool, op, cut


def parts() -> list[RowPart]:
    return [RowPart(0, 5, ROWS), RowPart(5, 5, ROWS), RowPart(10, 2, ROWS)]


def on_part(pool: TensorPool, op: Op, cut: RowCut, part: RowPart) -> tuple[Tensor, ...]:
    """The op on some rows of its operands."""

    def tensor(region: Region, run: Run | None) -> Tensor:
        cut_region = region if run is None else cut_whole(region, run, part)
        assert cut_region is not None
        return pool.tensor(cut_region)

    given = [map_regions(a, lambda r, run=run: tensor(r, run)) for a, run in zip(op.args, cut.operands, strict=True)]
    if cut.sizes is not None:
        run = cut.results[0]
        assert isinstance(run, Run)
        given[cut.sizes] = cut_sizes(given[cut.sizes], run, part)
    made = op.target(*given)
    return made if isinstance(made, tuple) else (made,)


CASES = [(name, i) for name, cases in PROOFS.items() for i in range(len(cases))]


@pytest.mark.parametrize(("name", "i"), CASES)
def test_rows_of_the_result_are_the_result_on_rows(name: str, i: int) -> None:
    target, args, where = PROOFS[name][i]
    pool, op, cut = cut_case(target, args)
    assert cut.results[0] == where
    for place, (result, how) in enumerate(zip(op.results, cut.results, strict=True)):
        assert isinstance(result, Region)
        whole = pool.tensor(result)
        found = [on_part(pool, op, cut, part)[place] for part in parts()]
        if isinstance(how, Run):
            for part, rows in zip(parts(), found, strict=True):
                mine = cut_whole(result, how, part)
                assert mine is not None
                assert torch.equal(pool.tensor(mine), rows)
        elif how is Folded.SUM:
            torch.testing.assert_close(sum(found[1:], found[0]), whole)
        elif how is Folded.MEAN:
            counts = [part.count / ROWS for part in parts()]
            torch.testing.assert_close(sum(f * c for f, c in zip(found, counts, strict=True)), whole)


def test_every_fact_is_proved_above() -> None:
    facts = {
        *rowwise._ALONG,
        *rowwise._NLL,
        *rowwise.PRODUCTS,
        "cat",
        "constant_pad_nd",
        "slice_backward",
        "select_backward",
    }
    assert facts == PROOFS.keys() - {"pointwise"}


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        (aten._softmax.default, (X, 0, False), "it mixes rows"),
        (aten.amax.default, (X, (0,)), "it mixes rows"),
        (aten.cumsum.default, (X, 0), "it mixes rows"),
        (aten.sum.dim_IntList, (CUBE, (0,)), "it mixes rows"),
        (aten.cat.default, ((X, G), 0), "it mixes rows"),
        (aten.constant_pad_nd.default, (X, (0, 0, 1, 0), 0.0), "it adds rows"),
        (aten.mm.default, (X, G.t()), "it multiplies rows with rows"),
        (aten.flip.default, (X, (0,)), "it is not known to treat each row by itself"),
        (aten.bernoulli.p, (X, 0.5), "it draws random numbers"),
        (aten.nll_loss_backward.default, (ONE, X.t(), TARGET[:5], None, 1, 3, ONE), "its classes are not rows"),
    ],
)
def test_op_that_mixes_rows_has_no_cut(target: Any, args: tuple[Any, ...], reason: str) -> None:
    pool = TensorPool()
    op = Op(target, pool.region(args), {}, ())
    runs = {i: pool.run(next(regions(op.args[i]))) for i, value in enumerate(args) if has_rows(value)}
    assert cut_of(op, runs) == reason


def test_a_run_is_found_in_any_order_of_dimensions_and_only_where_groups_stay_apart() -> None:
    size = ROWS * COLUMNS * 4
    pool = TensorPool()
    look = {
        "rows": (X, Run(-2, -2)),
        "columns": (X.t(), Run(-1, -1)),
        "three by four": (CUBE, Run(-3, -2)),
        "some columns": (X[:, 1:3], Run(-2, -2)),
        "with a dimension of one": (X[:, None], Run(-3, -3)),
        "shifted rows": (X[1:], None),
        "every second row": (X[::2], None),
        "over the end of a row": (X.as_strided((ROWS - 1, COLUMNS), (COLUMNS, 1), 2), None),
    }
    for name, (tensor, run) in look.items():
        assert run_of(pool.region(tensor), ROWS, size) == run, name
    # By three groups of four rows: the shift inside of a group is none of the groups' business.
    assert run_of(pool.region(CUBE[:, 1:]), 3, size) == Run(-3, -3)
    assert run_of(pool.region(X), 3, size) == Run(-2, -2)


def test_parts_of_a_buffer_of_their_own_hold_the_same_elements() -> None:
    pool = TensorPool()
    for tensor in (X, X.t(), CUBE, X[:, 1:3], X[:, None]):
        region = pool.region(tensor)
        run = pool.run(region)
        assert run is not None
        for part in parts():
            whole, own = cut_whole(region, run, part), cut_inside(region, run, part)
            assert whole is not None
            group = X.numel() // ROWS
            bytes_of_part = pool.tensors[region.buffer].as_strided((part.count * group,), (1,), part.start * group)
            assert torch.equal(pool.tensor(whole), bytes_of_part.clone().as_strided(own.shape, own.stride, own.offset))
            assert collapsed(own, run) == collapsed(whole, run)
