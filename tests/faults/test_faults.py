"""The catalogue of planted faults is sound: each can still be planted, and the tests that catch it run in `make test`.

That they do catch it is what `make faults` shows, in several minutes.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from faults import FAULTS, ROOT, PlantedFault, problem_of

PARTS = ("capture", "passes", "plan", "borrow check", "executor", "grads", "optim", "nn", "guard", "parallel")


def test_there_are_at_least_forty_faults_of_different_names_in_every_part() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 40
    few = [part for part in PARTS if sum(name.startswith(f"{part}:") for name in names) < 3]
    assert not few


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted(fault: PlantedFault) -> None:
    problem = problem_of(fault)
    assert problem is None, problem
    source = (ROOT / "src" / "takeback" / fault.file).read_text()
    if fault.file.endswith(".py"):
        ast.parse(source.replace(fault.old, fault.new))  # a bug, not a slip that no import would survive
    assert fault.caught_by


def test_text_that_is_gone_or_comes_twice_is_named(tmp_path: Path) -> None:
    fault = PlantedFault("a name", "errors.py", "no such text in the file", "", ("tests/x.py::test_x",))
    problem = problem_of(fault)
    assert problem is not None
    assert "errors.py" in problem
    assert "0 times" in problem
    often = problem_of(PlantedFault("a name", "errors.py", "class ", "", ("tests/x.py::test_x",)))
    assert often is not None
    assert "times" in often


def test_tests_that_catch_the_faults_exist_and_are_not_slow(request: pytest.FixtureRequest) -> None:
    config, items = request.config, request.session.items
    wanted = {test for fault in FAULTS for test in fault.caught_by}
    missing = {test for test in wanted if not (ROOT / test.partition("::")[0]).is_file()}
    assert not missing, missing
    whole = {Path(arg).name for arg in config.args} == {"tests"} and not config.option.keyword
    if not whole:
        pytest.skip("only a run of the whole suite has collected all tests")
    quick = {item.nodeid for item in items if item.get_closest_marker("slow") is None}
    quick |= {nodeid.partition("[")[0] for nodeid in quick}
    assert wanted <= quick, wanted - quick
