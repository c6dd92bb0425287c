"""What may be rebuilt: pure and deterministic ATen kernels, a training batch norm in a form of its own; no others."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import takeback as tb
from takeback.compiler.passes.rebuildable import (
    draws_random_numbers,
    may_rebuild,
    rebuild,
    rebuild_gives,
    rebuild_reads,
    stand_in,
)
from takeback.compiler.program import Buffer, BufferId, Op, Phase, Region, Role, Special

aten = torch.ops.aten


def region(tensor: torch.Tensor, buffer: int) -> Region:
    return Region(BufferId(buffer), tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)


def op(target: Any, *args: Any, results: int = 1, **kwargs: Any) -> Op:
    found = tuple(region(torch.empty(4, 4), 90 + i) for i in range(results))
    return Op(target, args, kwargs, found)


X = region(torch.empty(4, 4), 0)
Q = region(torch.empty(2, 2, 4, 4), 0)


@pytest.mark.parametrize(
    "pure",
    [
        op(aten.gelu.default, X),
        op(aten.mm.default, X, X),
        op(aten.native_layer_norm.default, X, (4,), None, None, 1e-5, results=3),
        op(aten.max_pool2d_with_indices.default, Q, (2, 2), results=2),
        op(aten._scaled_dot_product_flash_attention_for_cpu.default, Q, Q, Q, 0.0, True, results=2),
        op(aten._scaled_dot_product_flash_attention_for_cpu.default, Q, Q, Q, results=2),
        op(aten._scaled_dot_product_efficient_attention.default, Q, Q, Q, None, True, 0.0, results=4),
    ],
    ids=lambda o: o.name,
)
def test_pure_op_may_rebuild(pure: Op) -> None:
    assert may_rebuild(pure, "cpu")
    assert not may_rebuild(replace(pure, phase=Phase.BACKWARD), "cpu")
    assert not may_rebuild(replace(pure, phase=Phase.UPDATE), "cpu")
    assert not may_rebuild(replace(pure, expected=3.0), "cpu")
    assert not may_rebuild(replace(pure, mutates=(BufferId(0),)), "cpu")


@pytest.mark.parametrize(
    "impure",
    [
        op(aten.native_dropout.default, X, 0.5, True, results=2),
        op(aten.rand_like.default, X),
        op(aten.randn.default, (4, 4)),
        op(aten.bernoulli.default, X),
        op(aten.bernoulli.p, X, 0.5),
        op(aten.multinomial.default, X, 2),
        op(aten.rrelu_with_noise_functional.default, X, X, 0.1, 0.3, True, results=2),
        op(aten.empty_like.default, X),
        op(aten.empty.memory_format, (4, 4)),
        op(aten.relu_.default, X),
        op(aten.copy_.default, X, X),
        op(aten._scaled_dot_product_flash_attention_for_cpu.default, Q, Q, Q, 0.1, True, results=2),
        op(aten._scaled_dot_product_flash_attention_for_cpu.default, Q, Q, Q, results=2, dropout_p=0.1),
        op(aten._scaled_dot_product_efficient_attention.default, Q, Q, Q, None, True, 0.1, results=4),
        op(aten.mm.out, X, X, out=X),
        op(Special.SAVE_RANDOM),
    ],
    ids=lambda o: o.name,
)
def test_random_writing_or_empty_op_may_not(impure: Op) -> None:
    assert not may_rebuild(impure, "cpu")


def test_every_op_that_takes_a_generator_counts_as_random() -> None:
    """So that no list of ours can forget one."""
    forgotten = []
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            target = getattr(packet, overload)
            takes = any("Generator" in str(a.type) for a in target._schema.arguments)
            if takes and not target._schema.is_mutable and not draws_random_numbers(op(target, X)):
                forgotten.append(str(target))
    assert forgotten == []


def test_every_op_that_leaves_its_bytes_as_they_were_may_not_be_rebuilt() -> None:
    names = [n for n in dir(aten) if n.startswith(("empty", "new_empty", "_empty"))]
    for name in names:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            target = getattr(packet, overload)
            assert target._schema.is_mutable or not may_rebuild(op(target, X), "cpu"), str(target)


def test_custom_op_may_not() -> None:
    @torch.library.custom_op("takeback_tests::pure_or_so_it_says", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    assert not may_rebuild(op(torch.ops.takeback_tests.pure_or_so_it_says.default, X), "cpu")


# -- batch norm ----------------------------------------------------------------------------------------------------


def norm_op(x: torch.Tensor, *, weight: bool = True, bias: bool = True, training: bool = True) -> Op:
    channel = torch.empty(x.shape[1], dtype=x.dtype)
    args = (
        region(x, 0),
        region(channel, 1) if weight else None,
        region(channel, 2) if bias else None,
        *(region(channel, 3), region(channel, 4), training, 0.1, 1e-5),
    )
    results = (region(x, 5), region(channel, 6), region(channel, 7))
    return Op(aten.native_batch_norm.default, args, {}, results, mutates=(BufferId(3), BufferId(4)) if training else ())


SHAPES = [
    *[(8, 64, 7, 7), (4, 7, 5, 5), (32, 10), (2, 3, 4, 5, 6), (16, 257), (1, 5, 3, 3), (5, 1, 4, 4), (3, 4, 1, 1)],
    *[(6, 5, 9), (6, 5, 1), (6, 1, 9), (2, 3, 1, 5, 1), (2, 1, 3, 3, 3), (40, 3, 1, 7), (64, 33, 3, 1), (200, 1)],
]


def formats(x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"contiguous": x, "transposed": x.transpose(0, 1).contiguous().transpose(0, 1)}
    if x.dim() == 3:
        found["channels together"] = x.transpose(1, 2).contiguous().transpose(1, 2)
    if x.dim() >= 4:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        found["channels last"] = x.contiguous(memory_format=last)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_that_may_rebuild_has_the_bits_of_training(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Runs the very ops that `rebuild` gives, on large and small numbers, in every memory format."""
    generator = torch.Generator().manual_seed(0)
    checked = 0
    for size, (weight, bias) in itertools.product((1.0, 1e4), itertools.product((True, False), repeat=2)):
        for name, x in formats((torch.randn(shape, generator=generator, dtype=dtype) * 3 + 1) * size).items():
            norm = norm_op(x, weight=weight, bias=bias)
            if not may_rebuild(norm, "cpu"):
                continue
            checked += 1
            channel = [torch.randn(shape[1], generator=generator, dtype=dtype) for _ in range(2)]
            given: list[Any] = [x, channel[0] if weight else None, channel[1] if bias else None]
            running = [torch.zeros(shape[1], dtype=dtype), torch.ones(shape[1], dtype=dtype)]
            y, mean, invstd = aten.native_batch_norm.default(*given, *running, True, 0.1, 1e-5)
            held = {r.buffer: t for r, t in zip(norm.results[1:], (mean, invstd), strict=True)}  # type: ignore[union-attr]
            held |= {r.buffer: t for r, t in zip(norm.args[:3], given, strict=True) if isinstance(r, Region)}
            before = [t.clone() for t in running]
            again = carried_out(norm, held)
            assert torch.equal(again, y), (name, weight, bias, size)
            assert again.stride() == y.stride()
            assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))
    assert checked >= 4


def carried_out(norm: Op, held: dict[BufferId, torch.Tensor]) -> torch.Tensor:
    buffers = {BufferId(i): Buffer(BufferId(i), 1 << 20, Role.INTERNAL) for i in range(8)}
    ops, copies = rebuild(norm, "cpu", buffers)
    for one in ops:
        args = [held[a.buffer] if isinstance(a, Region) else a for a in one.args]
        results = one.target(*args)  # type: ignore[operator]
        results = results if isinstance(results, tuple) else (results,)
        assert len(results) == len(one.results)
        held |= {r.buffer: t for r, t in zip(one.results, results, strict=True)}  # type: ignore[union-attr]
        assert one.mutates == ()
    assert all(b.id == i for i, b in buffers.items())
    return held[copies[norm.results[0].buffer]]  # type: ignore[union-attr]


def test_batch_norm_in_half_precision_or_in_odd_strides_may_not_be_rebuilt() -> None:
    x = torch.empty(4, 6, 8, 8)
    assert may_rebuild(norm_op(x), "cpu")
    assert not may_rebuild(norm_op(x.bfloat16()), "cpu")
    assert not may_rebuild(norm_op(x.half()), "cpu")
    assert not may_rebuild(norm_op(torch.empty(4, 8, 6, 8).transpose(1, 2)), "cpu")
    assert not may_rebuild(norm_op(torch.empty(4, 6, 8, 16)[..., ::2]), "cpu")
    assert not may_rebuild(norm_op(x, training=False), "cpu")


def test_batch_norm_reads_its_saved_statistics_and_gives_its_result_alone() -> None:
    norm = norm_op(torch.empty(4, 6, 8, 8))
    assert {int(r.buffer) for r in rebuild_reads(norm, "cpu")} == {0, 1, 2, 6, 7}
    assert [int(r.buffer) for r in rebuild_gives(norm, "cpu")] == [5]
    assert stand_in(norm, "cpu").args[5] is False
    other = op(aten.gelu.default, X)
    assert stand_in(other, "cpu") is other
    assert list(rebuild_reads(other, "cpu")) == [X]


def test_several_results_get_new_buffers_of_the_same_sizes() -> None:
    pool = op(aten.max_pool2d_with_indices.default, Q, (2, 2), results=2)
    buffers = {BufferId(i): Buffer(BufferId(i), 8 * i, Role.INTERNAL, f"name {i}") for i in range(92)}
    [again], copies = rebuild(pool, "cpu", buffers)
    assert copies == {90: 92, 91: 93}
    assert again.args == pool.args
    assert [r.buffer for r in again.outputs] == [92, 93]
    assert [buffers[BufferId(b)].size_bytes for b in (92, 93)] == [720, 728]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_large_inputs_far_from_zero_keep_their_bits_in_a_step(kind: Any) -> None:
    """Where the variance is tiny beside the mean, the last bits are where another formula would show."""
    shape = {nn.BatchNorm1d: (32, 4, 33), nn.BatchNorm2d: (8, 4, 9, 9), nn.BatchNorm3d: (4, 4, 5, 5, 5)}[kind]
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (kind(4, eps=1e-3), nn.SiLU())))
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), ours, memory="min")
    for i in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 1e-3 + 1e3
        loss = twin(x).square().mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert torch.equal(step(x), loss)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
