"""Ops that look at their operands' storages give eager's bits, and ask for what eager asks for: in the arena all values
share one storage, and a storage of its own is what these are shown.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from step_twins import Setup, assert_right, sgd
from torch import Tensor, nn

import takeback as tb

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

N = 12


class Deep(nn.Module):
    """Layers whose values stay alive, so that what the op gets lies somewhere in the middle of the arena."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(N, N) for _ in range(4))
        self.after = nn.Linear(N, N)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.before:
            h = layer(h).tanh()
        return self.after(self.op(h, x) + h).square().mean()


def batches(step: int) -> tuple[Tensor]:
    return (torch.randn(N, N, generator=torch.Generator().manual_seed(step)),)


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as_strided_scatter": lambda h, x: torch.as_strided_scatter(h, x[:2, :2], (2, 2), (3, 1), 5),
    "as_strided_scatter of a view": lambda h, x: torch.as_strided_scatter(h[4:], x[:2, :2], (2, 2), (3, 1), 60).sum(),
    "as_strided_scatter of the batch": lambda h, x: torch.as_strided_scatter(x, h[:2, :2], (2, 2), (3, 1), 5),
    "as_strided_scatter, no offset": lambda h, x: torch.as_strided_scatter(h, x[:2, :2], (2, 2), (3, 1)),
    "as_strided_copy": lambda h, x: torch.as_strided_copy(h, (6, N), (N, 1), 7).sum(0),
    "as_strided_copy of a view": lambda h, x: torch.as_strided_copy(h[2:], (6, N), (N, 1), 7).sum(0),
    "as_strided_copy of the batch": lambda h, x: torch.as_strided_copy(x, (6, N), (N, 1), 7).sum(0),
    "as_strided": lambda h, x: h.as_strided((6, N), (N, 1), 7).sum(0),
    "as_strided of a view": lambda h, x: h[3:].as_strided((6, N), (N, 1), 7).sum(0),
    "as_strided that overlaps": lambda h, x: h.as_strided((N, N), (1, 1), 7),
    "slice_scatter": lambda h, x: torch.slice_scatter(h, x[:4], 0, 2, 6),
    "slice_scatter of a view": lambda h, x: torch.slice_scatter(h.t(), x[:4], 0, 2, 6),
    "slice_scatter of a parameter's view": lambda h, x: torch.slice_scatter(h, h[:4] * 2, 0, 2, 6),
    "select_scatter": lambda h, x: torch.select_scatter(h, x[0], 0, 2),
    "diagonal_scatter": lambda h, x: torch.diagonal_scatter(h, x[0]),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_that_look_at_storages_are_eagers_and_clone_no_arena(name: str) -> None:
    def make() -> Setup:
        model = Deep(OPS[name])
        return Setup(model, lambda m, x: m(x), sgd(model), batches)

    step = assert_right(make, steps=3)
    counters = step._plans[0].executor.counters
    assert counters.missed_bytes == 0
    assert counters.landed_bytes == 0


LISTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "split_with_sizes_copy": lambda h, x: torch.cat(torch.split_with_sizes_copy(h, [2, 4, 6], 1)[::-1], 1),
    "split_copy": lambda h, x: torch.cat(torch.split_copy(h, 5, 1)[::-1], 1),
    "unbind_copy": lambda h, x: torch.stack(torch.unbind_copy(h, 0)[::-1]),
    "unbind_copy of the batch": lambda h, x: torch.stack(torch.unbind_copy(x, 0)[::-1]) * h,
}


@pytest.mark.parametrize("name", LISTS)
def test_ops_that_write_a_list_of_results_are_eagers(name: str) -> None:
    def make() -> Setup:
        model = Deep(LISTS[name])
        return Setup(model, lambda m, x: m(x), sgd(model), batches)

    assert_right(make, steps=3)


DECOMPOSITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "qr, tall": lambda h, x: torch.linalg.qr(h[:, :5] + x[:, :5])[0].sum() + h,
    "qr, wide": lambda h, x: torch.linalg.qr(h[:5] + x[:5])[1].sum() + h,
    "qr, complete": lambda h, x: torch.linalg.qr(x[:, :5], mode="complete")[0] @ h,
    "qr, r": lambda h, x: torch.linalg.qr(x[:, :5], mode="r")[1].sum() + h,
    "svd_lowrank": lambda h, x: torch.svd_lowrank(h + x, q=3, niter=1)[1].sum() + h,
    "pca_lowrank": lambda h, x: torch.pca_lowrank(h + x, q=3, niter=1)[1].sum() + h,
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions_are_eagers(name: str) -> None:
    def make() -> Setup:
        model = Deep(DECOMPOSITIONS[name])
        return Setup(model, lambda m, x: m(x), sgd(model), batches)

    assert_right(make, steps=3)


def dropped_rows(h: Tensor, x: Tensor) -> Tensor:
    """As AWD-LSTM drops words."""
    return h * (h.data.new().resize_((N, 1)).bernoulli_(0.7).expand_as(h) / 0.7)


def as_another(h: Tensor, x: Tensor) -> Tensor:
    return h * torch.empty(0).resize_as_(x).copy_(x)


def larger_again(h: Tensor, x: Tensor) -> Tensor:
    """The second time there is room."""
    scratch = torch.empty(0).resize_(N, 2 * N).fill_(2.0)
    part = scratch.resize_(N, N).mul_(x)
    return h * part.resize_(2, N, N)[1:].squeeze(0)


def channels_last(h: Tensor, x: Tensor) -> Tensor:
    made = torch.empty(0).resize_((1, 2, N, N), memory_format=torch.channels_last)
    return (made.copy_(torch.stack((h.detach(), x))[None]) * h).sum((0, 1))


def whole_numbers(h: Tensor, x: Tensor) -> Tensor:
    rows = torch.empty(0, dtype=torch.long).resize_(N)
    return h[rows.copy_(x[0].argsort())]


RESIZED = (dropped_rows, as_another, larger_again, channels_last, whole_numbers)


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("op", RESIZED, ids=lambda f: f.__name__)
def test_empty_tensor_that_the_step_makes_larger_is_a_new_one(
    op: Callable[[Tensor, Tensor], Tensor], memory: str
) -> None:
    def make() -> Setup:
        model = Deep(op)
        return Setup(model, lambda m, x: m(x), sgd(model), batches)

    assert len(assert_right(make, memory=memory, poison=True)._plans) == 1


def test_prediction_knows_a_tensor_that_is_made_larger() -> None:
    model = Deep(dropped_rows)
    assert tb.predict(model, lambda m, x: m(x), sgd(model), *batches(0)).peak_bytes > 0


def test_tensor_with_values_that_is_made_larger_is_refused_with_the_way_out() -> None:
    model = Deep(lambda h, x: h * h.detach().clone().resize_(2 * N, N).fill_(0.5)[:N])
    with pytest.raises(tb.CaptureError, match=r"resize_.*test_storage_ops.* from 576 to 1152 bytes.*new_empty"):
        tb.compile_step(model, lambda m, x: m(x), sgd(model))(*batches(0))
