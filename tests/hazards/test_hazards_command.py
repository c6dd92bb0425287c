"""`takeback hazards`: what it prints, what it writes, and its exit code when something is wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from takeback.cli import app
from takeback.hazards import HAZARDS, KINDS

OPS = """
import torch
from torch import nn
from takeback.hazards import OpUnderTest

class Fine(nn.Module):
    def forward(self, x):
        return x.sin()

class _Overwrites(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        torch.mul(dy, x.cos(), out=dy.data)
        return dy

class Overwrites(nn.Module):
    def forward(self, x):
        return _Overwrites.apply(x)

class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("not here")

class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

fine = OpUnderTest("fine", Fine, Fine)

def factory():
    return OpUnderTest("overwrites", Overwrites, Fine)

def both():
    return [fine, factory()]

def plain_raises():
    return OpUnderTest("unknown", Fine, Fails)

def refuses():
    raise ValueError("no op today\\nnor tomorrow")

def wrong_thing():
    return 3

def nothing():
    return []

def other_weights():
    return OpUnderTest("weighted", Weighted, Fine)

def no_module():
    return OpUnderTest("broken", lambda: 1 / 0, Fine)

def needs_more(width):
    return fine
"""
SHARED = "x + y: the other reads the gradient after the op"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_ops.py").write_text(OPS)
    (tmp_path / "users_broken.py").write_text("import no_such_package_of_theirs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("users_ops", "users_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def run(*arguments: str) -> Result:
    env = {"NO_COLOR": "1", "COLUMNS": "80", "TERM": "dumb"}
    return CliRunner().invoke(app, ["hazards", *arguments], env=env)


def test_an_op_without_a_wrong_result_exits_with_0() -> None:
    result = run("users_ops:fine", "--only", "x + y")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "fine on cpu: 6 hazards"
    assert result.stdout.splitlines()[-1] == "6 right, 0 raised, 0 WRONG, 0 skipped"


@pytest.mark.parametrize("target", ["users_ops:factory", "users_ops.py:factory"])
def test_a_wrong_result_is_shown_within_80_columns_and_exits_with_1(target: str) -> None:
    result = run(target, "--only", "x + y")
    assert result.exit_code == 1, result.output
    assert f"  WRONG   {SHARED}" in result.stdout
    assert re.search(r"^ {10}gradient of [vw], off by .*$", result.stdout, re.MULTILINE)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_guard_is_asked_where_it_is_wanted() -> None:
    result = run("users_ops:factory", "--only", SHARED, "--guard")
    assert result.exit_code == 1
    assert "the guard: OverwriteError: " in result.stdout
    assert "_OverwritesBackward" in result.stdout


def test_several_ops_are_shown_one_after_the_other_and_written_as_json(folder: Path) -> None:
    result = run("users_ops:both", "--only", SHARED, "--json", "table.json")
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if " on cpu: " in line] == [
        "fine on cpu: 1 hazards",
        "overwrites on cpu: 1 hazards",
    ]
    written = json.loads((folder / "table.json").read_text())
    assert written["fine"][SHARED] == {"verdict": "right", "detail": "", "error": 0.0, "missed": False}
    assert written["overwrites"][SHARED]["verdict"] == "WRONG"
    assert written["overwrites"][SHARED]["error"] > 0


def test_a_hazard_that_was_missed_exits_with_1() -> None:
    result = run("users_ops:plain_raises", "--only", "plain chain")
    assert result.exit_code == 1
    assert "  missed  plain chain" in result.stdout
    assert "plain torch raises RuntimeError: not here" in result.stdout


def test_list_shows_every_hazard_by_kind_and_runs_none() -> None:
    lines = run("--list").stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [kind.title for kind in KINDS]
    assert [line.strip().removesuffix(" (slow)") for line in lines if line.startswith(" ")] == [
        each.name for each in HAZARDS
    ]
    assert run("--list", "--only", "PLAIN CHAIN").stdout.splitlines() == [KINDS[0].title, "  plain chain"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give package.module:factory or file.py:factory"),
        (("users_ops",), "users_ops names no factory"),
        (("no_such_module:factory",), "there is no module 'no_such_module'"),
        (("no_such_file.py:factory",), "there is no file no_such_file.py"),
        (("users_broken:factory",), "users_broken cannot be imported: ModuleNotFoundError: No module named"),
        (("users_ops:absent",), "users_ops has no 'absent'"),
        (("users_ops:refuses",), r"users_ops:refuses\(\) raised ValueError: no op today \(users_ops\.py:\d+: "),
        (("users_ops:wrong_thing",), "must give a takeback.hazards.OpUnderTest or a list of them, got a int"),
        (("users_ops:nothing",), "got an empty list"),
        (("users_ops:other_weights",), r"make\(\) has parameters of shapes \[\(8,\)\], reference\(\) of \[\]"),
        (("users_ops:no_module",), r"make\(\) of 'broken' raised ZeroDivisionError"),
        (("users_ops:needs_more",), r"cannot be called as factory\(\)"),
        (("users_ops:fine", "--only", "no such hazard"), "no hazard's name contains 'no such hazard'"),
        (("users_ops:fine", "--device", "abacus"), "--device abacus: "),
        (("users_ops:fine", "--json", "absent/table.json"), "there is no folder absent"),
    ],
)
def test_bad_input_is_one_clear_line_and_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert re.search(message, result.stderr.strip()), result.stderr
