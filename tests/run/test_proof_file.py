"""That a recording is eager's step is shown once for the same ops on one machine; everything else is shown anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

import takeback as tb
from takeback.cache import Cache
from takeback.compiler.run import program_key, proof_file, recorded_step
from takeback.compiler.run.inductor import NotCompiled
from takeback.errors import CaptureError
from takeback.options import open_cache
from takeback.step import CompiledStep

NOTE = "that the recording is eager's step was shown by an earlier process"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    found = open_cache(tmp_path / "cache")
    monkeypatch.setattr(proof_file, "FEWEST_OPS", 1)
    monkeypatch.setattr(proof_file, "LEAST_BYTES", 1)
    monkeypatch.setattr(
        "takeback.compiler.run.plan_maker.ProvedRecordings", lambda cache: proof_file.ProvedRecordings(found)
    )
    return found


@pytest.fixture
def proofs() -> Iterator[mock.Mock]:
    with mock.patch.object(recorded_step, "prove_recording", wraps=recorded_step.prove_recording) as asked:
        yield asked


def made(loss_fn: Any = None, width: int = 16, **options: Any) -> CompiledStep:
    """As another process would: a step of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tb.compile_step(model, loss_fn or loss_of, optimizer, memory="keep", **options)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(seed: int = 0, rows: int = 6) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=drawn), torch.randint(4, (rows,), generator=drawn)


def says_so(step: CompiledStep) -> bool:
    return any(note.startswith(NOTE) for note in step.report().notes)


def test_what_an_earlier_process_has_shown_is_not_shown_again_and_the_report_says_so(
    cache: Cache, proofs: mock.Mock
) -> None:
    first, second = made(), made()
    losses = [first(*batch(i)) for i in range(3)]
    assert proofs.call_count == 1
    assert not says_so(first)
    assert [second(*batch(i)) for i in range(3)] == losses
    assert proofs.call_count == 1
    assert says_so(second)
    for ours, theirs in zip(second._model.parameters(), first._model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_other_sizes_options_or_versions_are_shown_anew(cache: Cache, proofs: mock.Mock) -> None:
    made()(*batch())
    for count, step in enumerate((made(width=17), made(clip_norm=1.0), made(accumulate=2)), start=2):
        step(*batch())
        assert proofs.call_count == count
    made()(*batch(rows=7))
    assert proofs.call_count == 5
    with mock.patch.object(program_key, "_source", return_value="another version"):
        made()(*batch())
    assert proofs.call_count == 6


def test_what_is_near_eager_is_no_proof_of_bits(
    cache: Cache, proofs: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise NotCompiled("there is no compiler here")

    monkeypatch.setattr("takeback.compiler.run.kernels.compile_cluster", missing)
    for count, mode in enumerate(("fast", "exact"), start=1):
        made(mode=mode)(*batch())
        assert proofs.call_count == count
    made(mode="fast")(*batch())
    assert proofs.call_count == 2


def test_step_that_recording_changes_is_never_remembered(cache: Cache) -> None:
    def looking(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Computes another way while somebody looks, as a few of torch's formulas do."""
        return loss_of(model, x, y) * (1.0 + _len_torch_dispatch_stack())

    for _ in range(2):
        with pytest.raises(CaptureError, match="other bits each time it runs, or when it is recorded"):
            made(looking)(*batch())
    assert not list(cache.folder.glob("recording-*"))


@pytest.mark.parametrize("text", [b"", b"no", b"equal and more"])
def test_entry_that_is_not_what_was_written_counts_as_absent(cache: Cache, proofs: mock.Mock, text: bytes) -> None:
    made()(*batch())
    with mock.patch.object(Cache, "read", return_value=text):
        made()(*batch())
    assert proofs.call_count == 2


def test_microbatches_have_proofs_of_their_own(cache: Cache, proofs: mock.Mock) -> None:
    first, second = made(), made()
    first(*batch())
    for step in (first, second):
        step(*batch(1), update=False)
        step.update()
    assert proofs.call_count == 2, "a microbatch is another program than a step; the second finds it"
