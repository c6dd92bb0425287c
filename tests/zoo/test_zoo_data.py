"""The batches are real text and recognisable shapes, the same for the same seed."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from takeback.zoo import byte_batches, data, shape_batches
from takeback.zoo.data import CORPUS_MODULES, SHAPES, corpus

Stream = Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]


def test_corpus_is_python_source_in_sorted_order() -> None:
    assert list(CORPUS_MODULES) == sorted(set(CORPUS_MODULES))
    assert len(corpus()) > 500_000
    assert corpus().startswith(Path(argparse.__file__).read_bytes())
    assert corpus().endswith(Path(zipfile.__file__).read_bytes())


def test_byte_batches_are_windows_of_the_corpus() -> None:
    for tokens, targets in islice(byte_batches(4, 50, 0), 3):
        assert tokens.shape == targets.shape == (4, 50)
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.is_contiguous()
        assert targets.is_contiguous()
        for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
            assert bytes([*row, target[-1]]) in corpus()
            assert row[1:] == target[:-1]


def test_windows_reach_both_ends_of_the_corpus_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "corpus", lambda: b"abcdefgh")
    tokens, targets = next(byte_batches(200, 6, 0))
    assert {bytes(row) for row in tokens.tolist()} == {b"abcdef", b"bcdefg"}
    assert {bytes(row) for row in targets.tolist()} == {b"bcdefg", b"cdefgh"}


def test_shape_batches_have_balanced_labels_and_visible_shapes() -> None:
    images, labels = next(shape_batches(1000, 32, 0))
    assert images.shape == (1000, 3, 32, 32)
    assert images.dtype == torch.float32
    counts = torch.bincount(labels, minlength=len(SHAPES))
    assert counts.min() > 50
    assert len(counts) == len(SHAPES)
    # Colours differ by at least 0.4 between shape and ground, noise is 0.1.
    assert images.std((2, 3)).min() > 0.12
    assert images.mean().abs() < 0.2


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_differs_from_every_other_at_the_same_place(shape: str) -> None:
    masks = data._masks(8, 32, torch.Generator().manual_seed(0))
    one = SHAPES.index(shape)
    for other in range(len(SHAPES)):
        differing = (masks[:, one] ^ masks[:, other]).sum((1, 2))
        assert (differing.min() > 15) if other != one else (differing.max() == 0)


@pytest.mark.parametrize("stream", [byte_batches, shape_batches])
def test_streams_repeat_with_the_seed_and_leave_the_global_random_state(stream: Stream) -> None:
    before = torch.get_rng_state()
    one, same, other = (list(islice(stream(3, 16, seed), 3)) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    for (a, b), (c, d) in zip(one, same, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    assert not torch.equal(one[0][0], other[0][0])
    assert not torch.equal(one[0][0], one[1][0])


def test_bad_sizes_are_refused_before_the_first_batch() -> None:
    with pytest.raises(ValueError, match=r"1 <= context < \d+, got batch=2, context=0"):
        byte_batches(2, 0, 0)
    with pytest.raises(ValueError, match=r"got batch=2, context=1000000000"):
        byte_batches(2, 10**9, 0)
    with pytest.raises(ValueError, match=r"size >= 8 .* got batch=2, size=4"):
        shape_batches(2, 4, 0)


def test_a_python_without_sources_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "find_spec", lambda name: ModuleSpec(name, loader=None))
    corpus.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"no source text for its module 'argparse'"):
        corpus()
    corpus.cache_clear()
