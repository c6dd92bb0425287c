"""Plants each fault of the catalogue in a copy of the source, and runs the tests that must catch it.

    python tests/faults/run_faults.py [--only TEXT] [--jobs N] [--json PATH]

Without a fault all of these tests must pass; with its fault each test of `caught_by` must fail. None may be marked
slow. Exits with 1 if a fault is not caught, or its text is not in its file any more.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from faults import FAULTS, ROOT, PlantedFault, problem_of

PASSED, FAILED = 0, 1  #: what pytest exits with; anything else is a usage or collection error
LIMIT_S = 300  #: for the tests of one fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the outcome there")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if given.only in fault.name]
    gone = [f"{fault.name}: {problem}" for fault in faults if (problem := problem_of(fault))]
    if gone:
        print(*gone, sep="\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        tests = sorted({test for fault in faults for test in fault.caught_by})
        code, text = run(tests, ROOT / "src", Path(folder))
        if code != PASSED:
            print(text, "\nThe tests do not pass without a fault.", sep="")
            return 1
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            outcomes = list(pool.map(lambda fault: plant(fault, Path(folder)), faults))
    caught = sum(not missed for missed, _ in outcomes)
    print(f"{caught} of {len(faults)} faults are caught (torch {torch.__version__})")
    if given.json is not None:
        rows = [
            {"fault": fault.name, "file": fault.file, "caught_by": fault.caught_by, "caught": not missed, "seconds": s}
            for fault, (missed, s) in zip(faults, outcomes, strict=True)
        ]
        about = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "caught": caught}
        before = json.loads(given.json.read_text()) if given.json.exists() else {}
        # What the suite before the cuts caught was tried by hand, for its code reads otherwise here and there.
        kept = {"old_suite": before["old_suite"]} if "old_suite" in before else {}
        given.json.write_text(json.dumps({**about, "of": len(faults), "faults": rows, **kept}, indent=1) + "\n")
    return 0 if caught == len(faults) else 1


def plant(fault: PlantedFault, folder: Path) -> tuple[list[str], float]:
    """The tests that did not fail although the fault is there, and how long that took."""
    began = time.monotonic()
    place = Path(tempfile.mkdtemp(dir=folder))
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    target = place / "src" / "takeback" / fault.file
    target.write_text(target.read_text().replace(fault.old, fault.new))
    missed = []
    for test in fault.caught_by:
        code, text = run([test], place / "src", place)
        if code != FAILED:
            missed.append(test)
            print(text)
    shutil.rmtree(place)
    seconds = round(time.monotonic() - began, 1)
    print(
        f"{'NOT CAUGHT' if missed else 'caught':<11}{seconds:>6.1f} s  {fault.name}", *missed, sep="\n    ", flush=True
    )
    return missed, seconds


def run(tests: list[str], source: Path, folder: Path) -> tuple[int, str]:
    """What pytest says of these tests, with takeback imported from `source`. A slow one is not there: an error."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow",
        "--tb=line",
        f"--basetemp={folder}/t",
    ]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S + 10 * len(tests)
        )
    except subprocess.TimeoutExpired:
        return FAILED, "it hangs"  # which is one way of failing
    return done.returncode, done.stdout[-3000:] + done.stderr[-1000:]


if __name__ == "__main__":
    sys.exit(main())
