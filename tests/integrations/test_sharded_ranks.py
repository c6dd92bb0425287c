"""Two processes with a model that FSDP has sharded over them: refused at every door, with nothing changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
from ranks import FINE, run_ranks


@pytest.mark.slow
def test_models_that_are_sharded_over_two_processes_are_refused(tmp_path: Path) -> None:
    for name, said in run_ranks(2, "sharded_ranks", ["plain", "trainer", "accelerated"], tmp_path).items():
        assert said == [FINE, FINE], f"{name}: {said}"
