"""Imports point one way, and private torch APIs and the environment are used only where they may be.

A rule is a function of (path below src/takeback, source) to its violations; each is shown to catch one.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1] / "src" / "takeback"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

# A part is a folder or a file directly below src/takeback or src/takeback/compiler. "__init__" is the package itself,
# which exports the compiler: to import it from a part is to import everything.
STAGES = (
    "program",
    "schema",
    "geometry",
    "cluster",
    "capture",
    "ownership",
    "form",
    "passes",
    "plan",
    "effects",
    "layout",
    "planning",
    "run",
    "explain",
)
TOP = (
    "entry",
    "step",
    "tracing",
    "predict",
    "cli",
    "demo",
    "comparison",
    "targets",
    "backend",
    "integrations",
    "__init__",
)
COMPILER = (*STAGES, *TOP)
EAGER = ("bucket", "nn", "grads", "optim", "workspace", "norm_cache", "guard", "hazards", "zoo")
GROUND = ("errors", "options", "cache", "native", "engine", "flat", "parallel", "progress")
PARTS = (*COMPILER, *EAGER, *GROUND)

# Of COMPILER, what each part may import besides itself: planning never knows executors or reports.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "program": frozenset(),
    "schema": frozenset({"program"}),
    "geometry": frozenset({"program"}),
    "cluster": frozenset({"program", "schema"}),
    "capture": frozenset({"program", "schema"}),
    "ownership": frozenset({"program", "schema", "geometry", "cluster", "capture"}),
    "form": frozenset({"program", "schema", "geometry", "cluster", "ownership"}),
    "passes": frozenset({"program", "schema", "geometry", "cluster", "capture", "ownership", "form", "plan"}),
    "plan": frozenset(),
    "effects": frozenset(
        {"program", "schema", "geometry", "cluster", "capture", "ownership", "passes", "plan", "layout"}
    ),
    "layout": frozenset(
        {"program", "schema", "geometry", "cluster", "capture", "ownership", "passes", "plan", "effects"}
    ),
    "planning": frozenset(
        {"program", "schema", "geometry", "cluster", "capture", "ownership", "passes", "plan", "layout"}
    ),
    "run": frozenset(
        {"program", "schema", "geometry", "cluster", "capture", "ownership", "passes", "plan", "layout", "planning"}
    ),
    "explain": frozenset(STAGES),
    "entry": frozenset({"capture", "step"}),
    "step": frozenset(STAGES),
    "tracing": frozenset(STAGES),
    "predict": frozenset((*STAGES, "tracing")),
    **dict.fromkeys((*EAGER, *GROUND), frozenset()),
}
# Of all parts, the only ones that these may import besides themselves.
IMPORTS_ONLY: dict[str, frozenset[str]] = {
    "plan": frozenset({"errors"}),
    "zoo": frozenset(),
    "cache": frozenset({"options", "errors"}),
}

FRAMEWORKS = frozenset({"transformers", "accelerate", "peft", "lightning", "pytorch_lightning"})
MAY_USE_PRIVATE_TORCH = ("program", "schema", "capture", "run", "backend")
# What eager code must ask of torch, and torch has no public name for.
PRIVATE_TORCH_FILES = ("engine.py", "guard/engine.py", "workspace/internals.py")
MAY_READ_ENVIRONMENT = ("options",)
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
# Private attributes of what torch hands out: reached without naming torch, and private all the same.
PRIVATE_ATTRIBUTES = frozenset(
    name
    for kind in (
        torch.Tensor,
        torch.UntypedStorage,
        torch.Generator,
        torch.autograd.graph.Node,
        type(torch.ops.aten.add.Tensor),
        type(torch.ops.aten.add.Tensor._schema),
    )
    for name in (*dir(kind), "_schema", "_overloadname", "_op", "_sequence_nr")
    if name.startswith("_") and not name.endswith("__")
)


def part_of(path: str) -> str:
    return path.removeprefix("compiler/").split("/")[0].removesuffix(".py")


@functools.lru_cache(maxsize=512)  # every rule asks for the nodes of every file
def nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported, in functions too: `a.b.c` for `from a.b import c`."""
    package = ["takeback", *path.split("/")[:-1]]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{name.name}") for name in node.names)


def imported_parts(path: str, source: str) -> Iterator[tuple[int, str]]:
    for line, name in imports(path, source):
        first, *rest = name.split(".")
        if first == "takeback":
            rest = rest[1:] if rest[:1] == ["compiler"] else rest
            yield line, rest[0] if rest and rest[0] in PARTS else "__init__"


def check_docstring(path: str, source: str) -> list[str]:
    return [] if ast.get_docstring(nodes(source)[0]) else [f"{path}:1 has no docstring"]


def check_direction(path: str, source: str) -> list[str]:
    part = part_of(path)
    if part not in MAY_IMPORT:
        return []
    violations = []
    for line, imported in imported_parts(path, source):
        allowed = imported in MAY_IMPORT[part] or imported not in COMPILER
        if part in IMPORTS_ONLY:
            allowed = imported in IMPORTS_ONLY[part]
        if not allowed and imported != part:
            violations.append(f"{path}:{line} {part} must not import {imported}")
    return violations


def check_frameworks(path: str, source: str) -> list[str]:
    """Frameworks are imported by integrations/ alone, and that by nobody: `import takeback` needs none of them."""
    if part_of(path) == "integrations":
        return []
    found = [(line, name.split(".")[0]) for line, name in imports(path, source) if name.split(".")[0] in FRAMEWORKS]
    found += [(line, part) for line, part in imported_parts(path, source) if part == "integrations"]
    return [f"{path}:{line} must not import {name}" for line, name in found]


def check_plan_without_torch(path: str, source: str) -> list[str]:
    if part_of(path) != "plan":
        return []
    found = ((line, name) for line, name in imports(path, source) if name.split(".")[0] == "torch")
    return [f"{path}:{line} plan must not import torch" for line, _ in found]


def check_private_torch(path: str, source: str) -> list[str]:
    if part_of(path) in MAY_USE_PRIVATE_TORCH or path in PRIVATE_TORCH_FILES:
        return []
    names = [*imports(path, source), *_attributes(source, "torch")]
    found = sorted({(line, private) for line, name in names if (private := _private_torch(name))})
    return [f"{path}:{line} private torch API {private}" for line, private in found]


def check_private_attributes(path: str, source: str) -> list[str]:
    if part_of(path) in MAY_USE_PRIVATE_TORCH or path in PRIVATE_TORCH_FILES:
        return []
    found = sorted(
        {
            (node.lineno, node.attr)
            for node in nodes(source)
            if isinstance(node, ast.Attribute)
            and node.attr in PRIVATE_ATTRIBUTES
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        }
    )
    return [f"{path}:{line} private torch attribute {name}" for line, name in found]


def check_private_names(path: str, source: str) -> list[str]:
    """No part imports what another keeps to itself."""
    violations = []
    for line, name in imports(path, source):
        first, *rest = name.split(".")
        private = [part for part in rest if part.startswith("_") and not part.endswith("__")]
        home = next((p for p in rest if p != "compiler"), "")
        if first == "takeback" and private and home != part_of(path):
            violations.append(f"{path}:{line} {private[0]} is private to {home}")
    return violations


def check_class_names(path: str, source: str) -> list[str]:
    """One word per idea: no two classes of takeback have one name, with or without an underscore."""
    violations = []
    for node in nodes(source):
        if isinstance(node, ast.ClassDef):
            others = [p for p in _class_names().get(node.name.lstrip("_"), []) if p != path]
            violations += [f"{path}:{node.lineno} {other} has a class {node.name} too" for other in others[:1]]
    return violations


@functools.cache  # not when tests are collected, which every worker does
def _class_names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes((ROOT / path).read_text()):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(path)
    return found


def check_environment(path: str, source: str) -> list[str]:
    if part_of(path) in MAY_READ_ENVIRONMENT:
        return []
    names = [*imports(path, source), *_attributes(source, "os")]
    found = sorted({(line, ".".join(name.split(".")[:2])) for line, name in names if _is_environment(name)})
    return [f"{path}:{line} {name} outside options.py" for line, name in found]


def check_unpickling(path: str, source: str) -> list[str]:
    """What is unpickled runs as code. Processes of one's own may talk so (hazards/); files and groups may not.
    Inductor's cache is pickles: one function looks there, and asks first whose the folder is."""
    names = [*imports(path, source)]
    for package in ("torch", "pickle", "numpy", "marshal", "shelve"):
        names += _attributes(source, package)
    found = [f"{path}:{line} {name} unpickles" for line, name in sorted(set(names)) if _unpickles(name)]
    if path != INDUCTORS_CACHE:
        return found + [f"{path}:{line} {name} unpickles" for line, name in sorted(set(_pickles_of_inductor(source)))]
    asking = [each for each in nodes(source) if isinstance(each, ast.FunctionDef)]
    for function in asking:
        called = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        used = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr in PICKLES_OF_INDUCTOR]
        if used and "check_folder_" not in called:
            found.append(f"{path}:{used[0].lineno} {function.name} unpickles without check_folder_")
    return found


INDUCTORS_CACHE = "compiler/run/kernel_file.py"
PICKLES_OF_INDUCTOR = (
    "FxGraphCache",
    "AOTAutogradCache",
    "GuardedCache",
    "iterate_over_candidates",
    "find_guarded_entry",
    "_lookup_graph",
)


def _pickles_of_inductor(source: str) -> Iterator[tuple[int, str]]:
    """In whatever way they are named: as an import, a name, an attribute or a string."""
    for node in nodes(source):
        if isinstance(node, ast.alias | ast.FunctionDef | ast.ClassDef):
            said: object = node.name.split(".")[-1]
        elif isinstance(node, ast.Name | ast.Attribute):
            said = node.id if isinstance(node, ast.Name) else node.attr
        else:
            said = node.value if isinstance(node, ast.Constant) else None
        if said in PICKLES_OF_INDUCTOR:
            yield getattr(node, "lineno", 0), str(said)


def _unpickles(name: str) -> bool:
    first, *rest = name.split(".")
    last = rest[-1] if rest else ""
    if first in ("marshal", "shelve", "dill", "cloudpickle", "joblib"):
        return True
    if first == "pickle":
        return last.startswith("load") or last == "Unpickler"
    objects = first == "torch" and last.endswith(("_object", "_object_list"))
    return objects or name in ("torch.load", "torch.jit.load", "numpy.load")


def _private_torch(name: str) -> str | None:
    """`torch.a._b` of `torch.a._b.c`. After `torch.ops` come operators, which may start with _."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return None
    private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.endswith("__")]
    return ".".join(parts[: private[0] + 1]) if private else None


def _is_environment(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "os" and bool(rest) and rest[0] in ENVIRONMENT


def _attributes(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every `x.y.z` whose x was imported from `package`, under whatever alias."""
    bound: dict[str, str] = {}
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for name in node.names:
                target = name.name if name.asname else name.name.split(".")[0]
                bound[name.asname or target] = target
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound.update({name.asname or name.name: f"{node.module}.{name.name}" for name in node.names})
    for node in nodes(source):
        parts: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            parts.insert(0, value.attr)
            value = value.value
        if parts and isinstance(value, ast.Name) and bound.get(value.id, "").split(".")[0] == package:
            yield value.lineno, ".".join([bound[value.id], *parts])


RULES = [
    check_docstring,
    check_direction,
    check_frameworks,
    check_plan_without_torch,
    check_private_torch,
    check_private_attributes,
    check_private_names,
    check_class_names,
    check_environment,
    check_unpickling,
]
Rule = Callable[[str, str], list[str]]


def test_the_source_tree_is_found() -> None:
    assert "errors.py" in FILES
    assert "zoo/__init__.py" in FILES


@pytest.mark.parametrize("path", FILES)
def test_file_keeps_every_rule(path: str) -> None:
    source = (ROOT / path).read_text()
    assert [violation for rule in RULES for violation in rule(path, source)] == []


@pytest.mark.parametrize(
    ("rule", "path", "source", "violation"),
    [
        (check_docstring, "compiler/plan/x.py", "# only a comment\nx = 1", "compiler/plan/x.py:1 has no docstring"),
        (check_docstring, "compiler/plan/__init__.py", "", "compiler/plan/__init__.py:1 has no docstring"),
        (check_direction, "compiler/capture/x.py", "from takeback.compiler.ownership import y", "import ownership"),
        (check_direction, "compiler/capture/x.py", "\nimport takeback.step", "compiler/capture/x.py:2 .* import step"),
        (check_direction, "compiler/ownership/x.py", "from ..passes.move import y", "import passes"),
        (check_direction, "compiler/ownership/a/x.py", "from ... import plan", "import plan"),
        (
            check_direction,
            "compiler/passes/x.py",
            "def f():\n    from takeback.compiler import run",
            ":2 .* import run",
        ),
        (check_direction, "compiler/plan/x.py", "from takeback.compiler.passes import y", "import passes"),
        (check_direction, "compiler/plan/x.py", "from takeback.options import y", "import options"),
        (
            check_direction,
            "compiler/run/x.py",
            "if True:\n    import takeback.compiler.explain.text as t",
            "import explain",
        ),
        (check_direction, "compiler/run/x.py", "from takeback.step import compile_step", "import step"),
        (check_direction, "compiler/explain/x.py", "from takeback.step import Plan", "import step"),
        (check_direction, "compiler/planning.py", "from takeback.compiler.run import y", "planning must not .* run"),
        (check_direction, "compiler/passes/x.py", "from takeback.compiler.explain.text import y", "import explain"),
        (check_direction, "compiler/explain/x.py", "from takeback import cli", "import cli"),
        (check_direction, "step.py", "from takeback.cli import main", "step must not import cli"),
        (check_direction, "compiler/passes/x.py", "from takeback import compile_step", "import __init__"),
        (check_direction, "compiler/passes/x.py", "import takeback", "import __init__"),
        (check_direction, "grads.py", "from .compiler.capture import y", "grads must not import capture"),
        (check_direction, "guard.py", "import takeback.compiler.ownership", "guard must not import ownership"),
        (
            check_direction,
            "parallel.py",
            "from takeback.compiler.run.executor import y",
            "parallel must not import run",
        ),
        (check_direction, "workspace.py", "from takeback.compiler.run import y", "import run"),
        (check_direction, "nn/abn.py", "from takeback.compiler.explain import y", "nn must not import explain"),
        (check_direction, "native.py", "from takeback.compiler.run import allocator", "native must not import run"),
        (check_direction, "optim/flat.py", "from takeback import GradBuffer", "optim must not import __init__"),
        (check_direction, "zoo/gpt.py", "from takeback.errors import y", "zoo must not import errors"),
        (check_frameworks, "cli.py", "def f():\n    from transformers import Trainer", "cli.py:2 .* transformers"),
        (check_frameworks, "demo.py", "import takeback.integrations.transformers", "must not import integrations"),
        (check_direction, "nn/x.py", "from takeback.integrations import y", "nn must not import integrations"),
        (check_plan_without_torch, "compiler/plan/x.py", "import torch", "plan must not import torch"),
        (check_plan_without_torch, "compiler/plan/x.py", "def f():\n    from torch.nn import y", ":2 plan must not"),
        (check_private_torch, "compiler/passes/x.py", "from torch._inductor import config", "API torch._inductor$"),
        (check_private_torch, "compiler/passes/x.py", "import torch.utils._pytree as t", "torch.utils._pytree"),
        (check_private_torch, "compiler/passes/x.py", "from torch import _C", "torch._C"),
        (
            check_private_torch,
            "grads.py",
            "import torch\n\ntorch._foreach_add_([], 1)",
            "grads.py:3 .*_foreach_",
        ),
        (check_private_torch, "grads.py", "import torch as t\nt.fx._x.y", "torch.fx._x"),
        (check_private_torch, "nn/x.py", "from torch import nn as n\nn._x", "torch.nn._x"),
        (check_private_attributes, "compiler/passes/x.py", "def f(op):\n    op.target._schema", ":2 .* _schema"),
        (check_private_attributes, "grads/x.py", "t.untyped_storage()._cdata", "attribute _cdata"),
        (check_private_names, "compiler/run/x.py", "from takeback.compiler.passes.pack import _y", "private to passes"),
        (check_private_names, "nn/x.py", "from takeback.grads.slots import _y as y", "private to grads"),
        (check_class_names, "compiler/passes/x.py", "class Region: ...", "program.py has a class Region too"),
        (check_class_names, "optim/x.py", "class _Draft: ...", "passes/draft.py has a class _Draft too"),
        (
            check_environment,
            "compiler/run/x.py",
            "import os\nos.environ['A']",
            "compiler/run/x.py:2 os.environ outside",
        ),
        (check_environment, "compiler/run/x.py", "import os as o\no.getenv('A')", "os.getenv outside"),
        (check_environment, "cli.py", "from os import environ as e", "cli.py:1 os.environ outside"),
        (check_environment, "cli.py", "from os import getenv", "cli.py:1 os.getenv outside"),
        (check_unpickling, "cache.py", "import pickle as p\np.loads(b'')", "cache.py:2 pickle.loads unpickles"),
        (check_unpickling, "cache.py", "from pickle import load", "pickle.load unpickles"),
        (check_unpickling, "nn/x.py", "import torch\ntorch.load('x')", "torch.load unpickles"),
        (
            check_unpickling,
            "parallel.py",
            "from torch import distributed as d\nd.all_gather_object([], 1)",
            "all_gather_object unpickles",
        ),
        (check_unpickling, "cli.py", "import shelve", "shelve unpickles"),
        (
            check_unpickling,
            "compiler/run/symbolic.py",
            "from torch._inductor.codecache import FxGraphCache as f",
            "symbolic.py:1 FxGraphCache unpickles",
        ),
        (check_unpickling, "compiler/run/x.py", "import torch\ncache.FxGraphCache", "x.py:2 FxGraphCache unpickles"),
        (check_unpickling, "compiler/run/x.py", "getattr(a, 'find_guarded_entry')", "find_guarded_entry unpickles"),
        (
            check_unpickling,
            "compiler/run/kernel_file.py",
            "def is_kept(key):\n    return next(cache.iterate_over_candidates(True, None, key))",
            "kernel_file.py:2 is_kept unpickles without check_folder_",
        ),
    ],
)
def test_rule_catches_a_planted_violation(rule: Rule, path: str, source: str, violation: str) -> None:
    [found] = rule(path, source)
    assert re.search(violation, found), found


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (check_docstring, "compiler/plan/x.py", '"""Offsets."""'),
        (
            check_direction,
            "compiler/capture/x.py",
            "from takeback.compiler.capture import y\nfrom takeback import errors",
        ),
        (check_direction, "compiler/capture/x.py", "from . import roles\nfrom .roles import y\nimport torch"),
        (check_direction, "compiler/ownership/x.py", "from takeback.compiler.capture import y"),
        (check_direction, "compiler/passes/x.py", "from takeback.compiler.ownership import y\nfrom ..capture import z"),
        (
            check_direction,
            "compiler/plan/x.py",
            "from takeback.errors import PlanError\nfrom .problem import y",
        ),
        (check_direction, "compiler/run/x.py", "from takeback.compiler.plan import y\nfrom takeback.options import z"),
        (check_direction, "step.py", "from takeback.compiler.explain import y\nfrom takeback.compiler.run import z"),
        (check_direction, "__init__.py", "from takeback.step import compile_step"),
        (check_direction, "cli.py", "import takeback"),
        (check_direction, "nn/x.py", "from takeback.workspace import Workspace"),
        (check_direction, "grads.py", "from takeback.parallel import Reducer"),
        (check_direction, "zoo/x.py", "from takeback.zoo.gpt import GPT"),
        (check_plan_without_torch, "compiler/run/x.py", "import torch"),
        (check_plan_without_torch, "compiler/plan/x.py", "import torchlike"),
        (check_private_torch, "compiler/capture/x.py", "from torch._subclasses import FakeTensorMode"),
        (check_private_torch, "compiler/run/x.py", "import torch\ntorch._C"),
        (check_private_torch, "backend.py", "import torch._inductor"),
        (check_private_torch, "compiler/ownership/x.py", "import torch\ntorch.ops.aten._softmax.default"),
        (check_private_torch, "compiler/ownership/x.py", "import torch\ntorch.__version__\nself._torch._x"),
        (check_private_attributes, "compiler/capture/x.py", "op._schema"),
        (check_private_attributes, "compiler/passes/x.py", "self._op\nop._mine"),
        (check_private_names, "compiler/run/x.py", "from takeback.compiler.run.arena import _y"),
        (check_class_names, "compiler/program.py", "class Region: ..."),
        (
            check_unpickling,
            "compiler/run/kernel_file.py",
            "def f(key):\n    check_folder_()\n    return FxGraphCache.iterate_over_candidates(True, None, key)",
        ),
        (check_environment, "options.py", "import os\nos.environ['A']"),
        (check_environment, "compiler/run/x.py", "import os\nos.path.join('environ')\nself.environ"),
    ],
)
def test_rule_allows_what_is_allowed(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source) == []


def test_every_rule_has_a_planted_violation() -> None:
    marks = test_rule_catches_a_planted_violation.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in marks[0].args[1]} == set(RULES)
