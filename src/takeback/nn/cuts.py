"""A call cut out of a method's source: a subclass of its class, without that call, that pickles and deep-copies.

A call of one argument is replaced by that argument; everything else runs as written, and lines keep their numbers. It
is refused where the source is not what runs, and a pickle is refused where the source is another than it was.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
import zlib
from typing import Any, NamedTuple

from torch import nn

from takeback.errors import ConvertError
from takeback.nn.scopes import Scope


class Cut(NamedTuple):
    """A call in a method's source, by where it ends; lines count from the method's first."""

    method: str
    line: int
    column: int


CUTS = "_takeback_cuts"  #: on a class made by `cut_class`: the class it is made from, and its cuts


class CutError(Exception):
    """Why a call cannot be cut out."""


def base_of(module: nn.Module) -> Any:
    return vars(type(module)).get(CUTS, (type(module),))[0]


def cut_of(scope: Scope, node: Any) -> Cut:
    """Where in its class a call stands."""
    site = scope.sites.get(node)
    if site is None or site.owner is not scope.module:
        raise CutError("it is not called in a method of its module")
    cls = type(scope.module)
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if isinstance(function, types.FunctionType) and function.__code__ is site.code:
            return Cut(name, site.line - site.code.co_firstlineno, site.column)
    raise CutError(f"it is called at {site}, in a function that is decorated or no method")


@functools.cache
def cut_class(base: Any, cuts: frozenset[Cut]) -> Any:
    """A subclass of `base` without some calls of functions of one argument: their argument stands there instead."""
    own_ways = ("__reduce_ex__", "__reduce__", "__deepcopy__")
    if any(getattr(base, name, None) is not getattr(object, name, None) for name in own_ways):
        raise CutError(f"{base.__name__} pickles itself in its own way")
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce_cut,
        CUTS: (base, cuts),
    }
    for method in sorted({cut.method for cut in cuts}):
        namespace[method] = _without(
            inspect.getattr_static(base, method), {cut for cut in cuts if cut.method == method}
        )
    return type(base.__name__, (base,), namespace)


def _reduce_cut(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """A pickle names the class and the cuts, and a digest of the source they were made in."""
    base, cuts = vars(type(module))[CUTS]
    rest = object.__reduce_ex__(module, max(protocol, 2))[2:]
    return _rebuild, (base, cuts, _digest(base, cuts)), *rest


def _rebuild(base: Any, cuts: frozenset[Cut], digest: int) -> nn.Module:
    if _digest(base, cuts) != digest:
        raise ConvertError(
            f"{base.__qualname__} was converted with another source: calls were cut out of its forward. "
            "Build the model, convert it, and load its state_dict."
        )
    cls = cut_class(base, cuts)
    return cls.__new__(cls)


def _digest(base: type[nn.Module], cuts: frozenset[Cut]) -> int:
    methods = sorted({cut.method for cut in cuts})
    return zlib.crc32("".join(inspect.getsource(inspect.getattr_static(base, name)) for name in methods).encode())


def _without(function: types.FunctionType, cuts: set[Cut]) -> types.FunctionType:
    """A copy of a function with calls cut out of its source; its lines keep their numbers."""
    code = function.__code__
    _check_source(function)
    tree = _parsed(function)
    cutter = _Cutter({(code.co_firstlineno + cut.line, cut.column) for cut in cuts})
    edited = _compiled(function, cutter.visit(tree))
    if cutter.places:
        raise CutError(f"no call of one argument ends at {sorted(cutter.places)} in {function.__qualname__}")
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in edited.co_freevars)
    made = types.FunctionType(edited, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    return made


class _Cutter(ast.NodeTransformer):
    """Puts a call's one argument, or the object whose method it is, in the call's place."""

    def __init__(self, places: set[tuple[int, int]]) -> None:
        self.places = places

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        place = (node.end_lineno or 0, node.end_col_offset or 0)
        if place not in self.places:
            return node
        named = [each.value for each in node.keywords if each.arg == "input"]
        taken = [*node.args[:1], *named]
        if not taken and isinstance(node.func, ast.Attribute):
            taken = [node.func.value]
        if not taken or isinstance(taken[0], ast.Starred):
            return node
        self.places.remove(place)
        return taken[0]


def _parsed(function: types.FunctionType) -> ast.Module:
    """The file a function stands in."""
    try:
        lines, _ = inspect.findsource(function)
        return ast.parse("".join(lines))
    except (OSError, SyntaxError):
        raise CutError(f"the source of {function.__qualname__} is not available") from None


def _compiled(function: types.FunctionType, tree: ast.Module) -> types.CodeType:
    """The function's code from its file: only all of it compiles to the same code, with imports and closures known."""
    wanted = function.__code__
    waiting = [compile(ast.fix_missing_locations(tree), wanted.co_filename, "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        if (code.co_qualname, code.co_firstlineno) == (wanted.co_qualname, wanted.co_firstlineno):
            return code
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    raise CutError(f"the source of {function.__qualname__} is not where it was")


@functools.lru_cache(maxsize=256)
def _check_source(function: types.FunctionType) -> None:
    """Raise if a file no longer says what was imported from it, or something else rewrote the function."""
    if not _same_code(_compiled(function, _parsed(function)), function.__code__):
        raise CutError(f"the source of {function.__qualname__} is not what runs")


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    def facts(code: types.CodeType) -> tuple[object, ...]:
        constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants

    return facts(one) == facts(other)
