"""The package as it is installed: what importing it brings, its version, its files, and the wheel built of it."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import takeback as tb

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "takeback"
HERE = Path(tb.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(code: str, *, path: Path = HERE, cwd: Path | None = None, **environment: str) -> str:
    """What a fresh interpreter prints, with takeback from the given folder."""
    env = {**os.environ, "PYTHONPATH": str(path), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- importing ---------------------------------------------------------------------------------------------------


def test_importing_takeback_imports_nothing_else_and_compiles_nothing(tmp_path: Path) -> None:
    code = "import sys; import takeback; print(sorted(m for m in sys.modules if m.split('.')[0] in {others}))"
    others = {"takeback", "torch", "numpy", "highspy", "rich", "typer", "transformers", "accelerate", "triton"}
    assert run(code.format(others=others), TAKEBACK_CACHE=str(tmp_path)) == "['takeback']"
    assert list(tmp_path.iterdir()) == []


FRESH = """
import runpy, sys
import takeback
from takeback import compile_step
print(sorted({others} & set(sys.modules)))
print([name for name in sys.modules if name.startswith(("takeback.compiler", "takeback.step"))])
import takeback.predict, takeback.guard.context
print(callable(takeback.predict), callable(takeback.guard))
sys.argv = ["takeback", "--version"]
runpy.run_module("takeback", run_name="__main__")
"""


def test_a_fresh_process_has_the_compiler_without_frameworks_and_the_command_by_python_m(tmp_path: Path) -> None:
    """One process for four claims: to import torch takes seconds. What users import at the top of a script brings
    nothing but its signature; functions named as their modules stay functions, whoever imports those."""
    others = {"highspy", "rich", "typer", "transformers", "accelerate", "pytorch_lightning", "lightning", "peft"}
    printed = run(FRESH.format(others=others), TAKEBACK_CACHE=str(tmp_path))
    assert printed.splitlines() == ["[]", "[]", "True True", f"takeback {tb.__version__}"]
    assert list(tmp_path.iterdir()) == []  # nothing was compiled


def test_every_public_name_is_there_and_in_dir() -> None:
    assert {name for name in tb.__all__ if not hasattr(tb, name)} == set()
    assert set(tb.__all__) <= set(dir(tb))
    with pytest.raises(AttributeError, match="no attribute 'compile'"):
        tb.compile  # noqa: B018


def test_names_for_readers_of_the_source_are_those_that_are_fetched() -> None:
    source = (PACKAGE / "__init__.py").read_text()
    namespace: dict[str, object] = {}
    block = source.partition("if TYPE_CHECKING:")[2].partition("\n__version__")[0].partition("\n")[2]
    exec("if True:\n" + block, namespace)
    assert {name: namespace[name] for name in tb.__all__} == {name: getattr(tb, name) for name in tb.__all__}


# -- what is in the package ----------------------------------------------------------------------------------------


def test_version_is_written_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "takeback.__version__"}


def test_every_extra_is_there_and_its_packages_are_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"transformers", "peft", "trl", "lightning", "accelerate", "dev", "docs"}
    pinned = {name.lower() for name in re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)}
    wanted = {re.split(r"[\[<>=]", package)[0].lower() for packages in extras.values() for package in packages}
    assert wanted - pinned - {"pre-commit"} == set()  # that one is each developer's own


def test_every_file_of_the_package_is_installed() -> None:
    """Python files by setuptools' search for packages, which needs an __init__.py; the rest by the patterns here."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["takeback"]
    matched = {name for pattern in patterns for name in glob.glob(pattern, root_dir=PACKAGE, recursive=True)}
    assert {name for name in data_files() if name not in matched} == set()
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    folders = {folder for path in modules for folder in path.parents}
    assert {str(folder) for folder in folders if not (PACKAGE / folder / "__init__.py").exists()} == set()


def data_files() -> set[str]:
    found = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(PACKAGE).as_posix() for path in found if path.suffix != ".py"}


# -- the wheel -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tree = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):  # a copy: what an older build left behind is not in it
        shutil.copy(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(folder), str(tree)]
    subprocess.run(pip, check=True, capture_output=True)
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files alone, which comes before everything that is installed here."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_wheel_has_the_version_and_every_file(wheel: Path) -> None:
    assert wheel.name == f"takeback-{tb.__version__}-py3-none-any.whl"
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("takeback/")}
    python = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert inside == {f"takeback/{name}" for name in data_files() | python}


@pytest.mark.slow
def test_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed), "TAKEBACK_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "takeback", "demo", "--tiny", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert run("import takeback; print(takeback.__file__)", path=installed, cwd=tmp_path).startswith(str(installed))
