"""Results of one call that share memory in eager: whoever writes one of them sees it in the others, in every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_twins import mlp, sgd
from torch import Tensor, nn
from train_twice import batch

import takeback as tb
from harness import same_bits
from pairwise import pairwise
from takeback.compiler.capture.batch import map_tensors, results_of
from takeback.compiler.passes import Home
from takeback.compiler.program import BufferId, Program, Region
from takeback.compiler.run.together import together

pytestmark = pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels", "whole_head")


def view_of_another(out: Tensor, loss: Tensor) -> Any:
    return out.detach(), out.detach()[0], out[:, 1], out.t()


def same_tensor_twice(out: Tensor, loss: Tensor) -> Any:
    return {"out": out, "again": out, "loss": loss, "one": loss.view(1)}


def windows_without_their_base(out: Tensor, loss: Tensor) -> Any:
    squares = out * out
    return squares[1:4], squares[2:6], squares[:, :1], squares[0, 1:]


def with_other_dtypes(out: Tensor, loss: Tensor) -> Any:
    found = out.detach().exp()
    return found.view(torch.int32)[1:], found[1:, 1:], found[1:, :2].view(torch.uint8)


def expanded(out: Tensor, loss: Tensor) -> Any:
    sums, more = out.sum(1, keepdim=True)[1:].expand(-1, 5), out.exp().view(-1)
    return sums, sums[:2], more[1:].unfold(0, 3, 1), more[:6]


def nothing_shared(out: Tensor, loss: Tensor) -> Any:
    """Though some have the same values."""
    return out * 2, out * 2, out.clone(), out, out.detach().clone(), *(out * 3).chunk(2, 1), *out.exp().unbind(1)


def written_in_place(out: Tensor, loss: Tensor) -> Any:
    first = out.detach().clone()
    row = first[1]
    return row, first.relu_(), torch.relu(row)


def loss_fn_of(shape: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        return loss, shape(out, loss)

    return loss_fn


def loss_of_parts(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
    out = model(x)
    parts = torch.stack([nn.functional.cross_entropy(out, y), out.square().mean(), out.mean()])
    return parts[0], (parts, parts[1:])


SHAPES = (
    view_of_another,
    same_tensor_twice,
    windows_without_their_base,
    with_other_dtypes,
    expanded,
    nothing_shared,
    written_in_place,
)
LOSS_FNS = {shape.__name__: loss_fn_of(shape) for shape in SHAPES} | {"loss_of_parts": loss_of_parts}


def write_(loss: Tensor, aux: Any, which: int) -> None:
    """Into one of the results that can be written."""
    found = [t for t in (loss, *results_of(aux)) if t.is_floating_point() and 0 not in t.stride() and t.dim() < 3]
    found = [t for t in found if len(set(t.stride())) == t.dim()]
    found[which % len(found)].mul_(3).add_(1)


@pytest.mark.parametrize(
    ("name", "mode", "memory"), pairwise(list(LOSS_FNS), ["exact", "fast"], ["keep", "min"]), ids=str
)
@pytest.mark.parametrize("micro", [False, True], ids=["step", "microbatches"])
def test_results_share_the_memory_that_they_share_in_eager(name: str, mode: str, memory: str, micro: bool) -> None:
    ours, eager = mlp(), mlp()
    step = tb.compile_step(ours, LOSS_FNS[name], sgd(ours), mode=mode, memory=memory)
    optimizer, kept = sgd(eager), []
    for i in range(8):
        updates = not micro or i % 2 == 1
        gave = step(*batch(i), update=updates)
        loss, aux = LOSS_FNS[name](eager, *batch(i))
        loss.backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
        kept.append((gave, map_tensors((loss, aux), lambda t: t.detach())))
        for mine_or_theirs in kept[-1]:
            write_(*mine_or_theirs, i)
    assert step._replays >= 4
    for i, (mine, theirs) in enumerate(kept):
        assert all(map(same_bits, results_of(mine), results_of(theirs))), i


def test_results_that_share_nothing_hold_no_more_than_their_own_bytes() -> None:
    """Though their spans meet."""
    ours = mlp()
    step = tb.compile_step(ours, loss_fn_of(lambda out, _: (out[:, 0], out[:, -1])), sgd(ours))
    for i in range(4):
        _, aux = step(*batch(i))
    assert step._replays == 3
    assert [t.untyped_storage().nbytes() for t in aux] == [t.nbytes for t in aux]


@pytest.mark.parametrize("home", list(Home))
def test_results_that_look_into_another_are_copied_with_it_alone(home: Home) -> None:
    """Where an allocator places, not even that is: its bytes are handed on."""
    ours = mlp()
    step = tb.compile_step(ours, loss_fn_of(lambda out, loss: (out[1:], out, out.view(-1), loss)), sgd(ours))
    step._maker.home = home
    for i in range(4):
        loss, aux = step(*batch(i))
        assert len({t.untyped_storage().data_ptr() for t in aux[:3]}) == 1
        assert aux[3].data_ptr() == loss.data_ptr()
        assert aux[1].untyped_storage().nbytes() == aux[1].nbytes
    assert step._replays == 3


def recorded() -> Program:
    ours = mlp()
    step = tb.compile_step(ours, loss_fn_of(lambda out, loss: out), sgd(ours))
    step(*batch(0))
    assert step._last is not None
    return step._last.original


def drawn_region(drawn: random.Random, buffer: BufferId) -> Region:
    dtype = drawn.choice([torch.uint8, torch.float16, torch.float32, torch.complex64])
    shape = tuple(drawn.randint(1, 4) for _ in range(drawn.randint(0, 3)))
    return Region(buffer, dtype, shape, tuple(drawn.randint(0, 6) for _ in shape), drawn.randint(0, 12))


def bytes_of(region: Region) -> set[int]:
    item = region.dtype.itemsize
    places = itertools.product(
        *(range(0, n * s, s) if s else [0] for n, s in zip(region.shape, region.stride, strict=True))
    )
    return {(region.offset + sum(place)) * item + byte for place in places for byte in range(item)}


def components(results: Sequence[Region]) -> list[tuple[int, ...]]:
    """Of those that have bytes in common, each with its positions in order."""
    groups: list[tuple[set[int], list[int]]] = []
    for i, region in enumerate(results):
        mine = bytes_of(region)
        meet = [group for group in groups if group[0] & mine]
        members = sorted([i, *(j for _, members in meet for j in members)])
        groups = [group for group in groups if group not in meet] + [(mine.union(*(g[0] for g in meet)), members)]
    return sorted(tuple(members) for _, members in groups if len(members) > 1)


def test_memory_is_shared_by_what_has_a_byte_in_common_with_another() -> None:
    """By way of others as well; compared with a mark on each byte."""
    drawn = random.Random(0)
    program = recorded()
    seen = []
    for _ in range(300):
        results = [drawn_region(drawn, program.loss.buffer) for _ in range(drawn.randint(2, 5))]
        found = together(replace(program, loss=results[0], aux=tuple(results[1:])))
        assert sorted(each.members for each in found) == components(results)
        seen.append(len(found))
    assert {0, 1, 2} <= set(seen)
