"""geometry: every path gives what as_strided gives, and there is one wherever a view of torch's leads from one to the
other without windows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from takeback.compiler.geometry import path
from takeback.compiler.program import BufferId, Region

ANY = settings(max_examples=60, deadline=None, derandomize=True)


def region_of(tensor: Tensor) -> Region:
    return Region(BufferId(0), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def packed(shape: tuple[int, ...], order: list[int]) -> Tensor:
    """A tensor whose dimensions lie in any order in memory, with a different number in each place."""
    turned = [shape[dim] for dim in order]
    count = torch.Size(turned).numel()
    back = [order.index(dim) for dim in range(len(order))]
    return torch.arange(count, dtype=torch.float32).reshape(turned).permute(back)


@st.composite
def written(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=0, max_size=4)))
    return packed(shape, list(draw(st.permutations(range(len(shape))))))


@st.composite
def looks(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """Views as users take them, one after another."""
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("permute", "narrow", "select", "unsqueeze", "expand", "split", "flatten")))
        dims = tensor.dim()
        dim = draw(st.integers(0, dims - 1)) if dims else 0
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(dims))))
        elif kind == "unsqueeze":
            tensor = tensor.unsqueeze(dim)
        elif kind == "flatten" and dims > 1 and tensor.is_contiguous():
            tensor = tensor.flatten(min(dim, dims - 2), min(dim, dims - 2) + 1)
        elif dims and kind == "narrow":
            start = draw(st.integers(0, tensor.shape[dim] - 1))
            tensor = tensor.narrow(dim, start, draw(st.integers(1, tensor.shape[dim] - start)))
        elif dims and kind == "select":
            tensor = tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1)))
        elif dims and kind == "expand" and tensor.shape[dim] == 1:
            tensor = tensor.expand(*(3 if d == dim else n for d, n in enumerate(tensor.shape)))
        elif dims and kind == "split" and tensor.shape[dim] % 2 == 0:
            tensor = tensor.unflatten(dim, (2, tensor.shape[dim] // 2))
    return tensor


@ANY
@given(st.data())
def test_view_is_found_by_a_path_that_gives_the_same_numbers(data: st.DataObject) -> None:
    whole = data.draw(written())
    look = data.draw(looks(whole))
    way = path(region_of(whole), region_of(look))
    if way is None:  # a stretch may begin where no grid of the other's steps does
        assert look.storage_offset() or look.numel() < whole.numel() or 0 in look.stride()
        return
    assert torch.equal(way.walk(whole), look)
    assert torch.equal(way.walk(whole.contiguous()), look), "what was made in other strides has the same numbers"


@ANY
@given(
    written(),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4),
    st.integers(0, 12),
)
def test_any_look_gives_what_as_strided_gives_or_has_no_path(
    whole: Tensor, look: list[tuple[int, int]], offset: int
) -> None:
    shape, stride = tuple(n for n, _ in look), tuple(step for _, step in look)
    reach = offset + sum((n - 1) * step for n, step in look)
    way = path(region_of(whole), Region(BufferId(0), torch.float32, shape, stride, offset))
    if reach >= whole.numel():
        assert way is None, "it looks beyond what was written"
    elif way is not None:
        assert torch.equal(way.walk(whole), whole.as_strided(shape, stride, offset))


@ANY
@given(written(), st.permutations(range(4)))
def test_permuted_flattened_and_whole_looks_always_have_a_path(whole: Tensor, order: list[int]) -> None:
    turned = whole.permute([dim for dim in order if dim < whole.dim()])
    flat = whole.as_strided((whole.numel(),), (1,))
    for look in (whole, turned, flat, whole.unsqueeze(0), flat[whole.numel() // 2 :]):
        way = path(region_of(whole), region_of(look))
        assert way is not None
        assert torch.equal(way.walk(whole), look)


def look_at(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, dtype: torch.dtype = torch.float32
) -> Region:
    return Region(BufferId(0), dtype, shape, stride, offset)


@pytest.mark.parametrize(
    "read",
    [
        look_at((3, 3), (2, 1)),  # windows
        look_at((3,), (4,)),  # a diagonal
        look_at((2,), (1,), dtype=torch.int32),
        look_at((0,), (1,)),
        look_at((3, 3), (3, 1), 1),  # beyond its end
    ],
)
def test_what_no_grid_has_is_refused(read: Region) -> None:
    assert path(look_at((3, 3), (3, 1)), read) is None


def test_value_that_was_written_in_part_of_a_buffer_has_no_paths() -> None:
    assert path(look_at((3,), (1,), 2), look_at((3,), (1,), 2)) is None
    assert path(look_at((3, 2), (4, 1)), look_at((3, 2), (4, 1))) is None
