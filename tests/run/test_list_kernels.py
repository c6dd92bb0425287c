"""torch's kernels for lists of tensors give what eager's kernels give one by one, bit for bit, and are told apart."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from takeback.compiler.cluster import clustered
from takeback.compiler.program import Buffer, BufferId, Cluster, Op, Region, Role
from takeback.compiler.run import kernels
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.kernels import Kernels
from takeback.compiler.run.list_kernels import launches, list_kernel

aten = torch.ops.aten
HALF, SINGLE = torch.bfloat16, torch.float32


def region(number: int, like: Tensor, dtype: torch.dtype) -> Region:
    return Region(BufferId(number), dtype, tuple(like.shape), tuple(like.stride()), 0)


def cluster_of(ops: list[Op]) -> Cluster:
    named = {r.buffer: r for op in ops for r in (*op.inputs, *op.outputs)}
    made = {r.buffer for op in ops for r in op.outputs if r.buffer not in op.mutates}
    buffers = {
        b: Buffer(b, r.numel * r.dtype.itemsize, Role.INTERNAL if b in made else Role.PARAMETER)
        for b, r in named.items()
    }
    found = clustered(tuple(ops), buffers, lambda _: True).target
    assert isinstance(found, Cluster)
    return found


def casts(tensors: list[Tensor], dtype: torch.dtype) -> Cluster:
    """Equal tensors are one operand."""
    first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    ops = [
        Op(
            aten._to_copy.default,
            (region(first[id(t)], t, t.dtype),),
            {"dtype": dtype},
            (region(100 + i, t, dtype),),
        )
        for i, t in enumerate(tensors)
    ]
    return cluster_of(ops)


def sums(tensors: list[Tensor], number: object = 1) -> Cluster:
    looks = [region(i, t, t.dtype) for i, t in enumerate(tensors)]
    return cluster_of([Op(aten.add_.Tensor, (r, number), {}, (r,), (r.buffer,)) for r in looks])


def odd_numbers() -> list[Tensor]:
    """Of several geometries, with what rounding may get wrong."""
    torch.manual_seed(0)
    hard = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-40, 1.00390625, 65520.0])
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return [hard, torch.randn(5, 7), torch.randn(7, 5).t(), image, torch.randn(()), torch.randn(1, 9)]


@pytest.mark.parametrize(("given", "made"), [(SINGLE, HALF), (HALF, SINGLE), (SINGLE, torch.float16)])
def test_casts_have_eagers_bits_and_strides(given: torch.dtype, made: torch.dtype) -> None:
    tensors = [t.to(given) for t in odd_numbers()]
    cluster = casts(tensors, made)
    kernel = list_kernel(cluster)
    assert kernel is not None
    for ours, plain in zip(kernel(list(tensors)), eagerly(cluster)(list(tensors)), strict=True):
        assert (ours.dtype, ours.stride()) == (plain.dtype, plain.stride())
        whole = torch.int32 if made.itemsize == 4 else torch.int16
        assert torch.equal(ours.view(whole), plain.view(whole))


def test_a_tensor_that_is_cast_twice_has_two_results() -> None:
    a, b = torch.randn(4), torch.randn(4)
    cluster = casts([a, b, a], HALF)
    assert len(cluster.inputs) == 2
    kernel = list_kernel(cluster)
    assert kernel is not None
    found = kernel([a, b])
    assert all(torch.equal(t, s.to(HALF)) for t, s in zip(found, (a, b, a), strict=True))
    assert found[0].data_ptr() != found[2].data_ptr()


def test_counters_are_counted_in_place() -> None:
    counters = [torch.tensor(i) for i in range(3)]
    kernel = list_kernel(sums(counters))
    assert kernel is not None
    assert kernel(counters) == []
    assert [int(t) for t in counters] == [1, 2, 3]


def test_other_clusters_are_not_taken_for_lists() -> None:
    tensors = odd_numbers()
    cluster = casts(tensors, HALF)
    other = casts([t.to(torch.float16) for t in tensors], HALF).ops[1]
    assert list_kernel(replace(cluster, ops=(cluster.ops[0], other))) is None  # two kinds of casts
    assert list_kernel(replace(cluster, ops=cluster.ops[:1])) is None
    assert list_kernel(replace(cluster, results=cluster.results[:-1])) is None  # one that nobody reads
    chain = replace(cluster.ops[1], args=(cluster.ops[0].outputs[0],))
    assert list_kernel(replace(cluster, ops=(cluster.ops[0], chain))) is None
    assert list_kernel(sums([torch.tensor(1), torch.tensor(2)], 1.0)) is None
    assert list_kernel(sums([torch.tensor(1.0), torch.tensor(2.0)])) is None


def test_nothing_is_compiled_for_it_and_eagers_kernels_run_where_asked_for() -> None:
    tensors = odd_numbers()
    cluster = casts(tensors, HALF)
    own = Kernels(torch.device("cpu"))
    kernel = own.of(cluster)
    assert (kernel.is_for_lists, kernel.tried, kernel.note, kernel.waits) == (True, True, None, False)
    kernel.prove_again_()
    kernel.compare_beforehand_()
    assert kernel.note is None
    with mock.patch.object(torch, "_foreach_copy_", side_effect=AssertionError):
        own.plain = True  # op by op, as eager does it
        found = kernel(list(tensors))
    assert all(torch.equal(t.isnan(), s.isnan()) for t, s in zip(found, tensors, strict=True))
    assert kernels.eagerly is eagerly


def test_long_lists_and_large_tensors_take_more_launches() -> None:
    assert launches(casts([torch.zeros(4) for _ in range(64)], HALF)) == 1
    assert launches(casts([torch.zeros(4) for _ in range(65)], HALF)) == 2
    assert launches(casts([torch.zeros(1).expand(65536 * 200).contiguous() for _ in range(2)], HALF)) == 2
    assert launches(sums([torch.tensor(0) for _ in range(53)])) == 1
