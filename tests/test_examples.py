"""The examples run from beginning to end, and write what they say."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--steps", "4", "--batch", "2", "--memory", "keep", *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("loss", ["flow", pytest.param("ddpm", marks=pytest.mark.slow)])
def test_dit_writes_a_grid_of_samples(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "samples.png"
    run("train_dit.py", monkeypatch, "--loss", loss, "--out", str(out), "--sample-steps", "1")
    data = out.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20]) == 4 * (2 + 8 * 18)
    assert int.from_bytes(data[20:24]) == 4 * (2 + 10 * 18)
    assert "of eager's" in capsys.readouterr().out


def test_ssm_goes_on_from_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train_ssm.py", monkeypatch, "--letters", "5")
    assert "\ndef " in capsys.readouterr().out


def test_gpt_with_context_trains_beside_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train_gpt_context.py", monkeypatch)
    printed = capsys.readouterr().out
    assert "mean loss: plain" in printed
    assert "strength" in printed


@pytest.mark.filterwarnings("ignore")  # Lightning's, of small machines
@pytest.mark.timeout(method="thread")  # see tests/integrations/test_lightning.py
def test_lightning_classifier_trains_and_validates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pytorch_lightning")
    run("lightning_classifier.py", monkeypatch, "--cpu")
    printed = capsys.readouterr().out
    assert "accuracy after 4 steps: 0." in printed
    assert "of eager's" in printed


@pytest.mark.filterwarnings("ignore")
def test_accelerate_loop_makes_as_many_updates_as_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerate = pytest.importorskip("accelerate")
    run("accelerate_loop.py", monkeypatch, "--accumulate", "2", "--cpu")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    printed = capsys.readouterr().out
    assert "update    4  mean loss" in printed
    assert "update    5" not in printed
    assert "of eager's" in printed


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lora_trains_adapters_on_a_base_that_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("transformers", "accelerate", "peft"):
        pytest.importorskip(package)
    run("finetune_lora.py", monkeypatch, "--steps", "2", "--length", "16", "--width", "16", "--letters", "3")
    printed = capsys.readouterr().out
    assert "base: peak above resident" in printed
    assert "adapters: peak above resident" in printed
    assert "    def __init__(self" in printed


def test_every_example_is_tested() -> None:
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert {p.name for p in EXAMPLES.glob("*.py")} == tested
