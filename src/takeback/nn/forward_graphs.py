"""The graphs of a model's forwards: each module's own, traced alone, its submodules called but not entered (`Scope`).

A forward is traced in training and in eval, with each optional argument and without; one that cannot be traced is
opaque, and says why. `Graphs` also knows who calls whom. The model is left as it was.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx, nn

Found = TypeVar("Found")

WRITING_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul")

MAX_OPTIONAL = 3  #: optional arguments of one forward, each of which doubles its traces


@dataclass(eq=False)
class Scope:
    """One module's own forward, by its traces. `opaque` says why it could not be traced."""

    path: str
    module: nn.Module
    graphs: list[fx.Graph] = field(default_factory=list)
    lines: dict[fx.Node, str] = field(default_factory=dict)  #: file:line of the user's source that makes each value
    opaque: str | None = None

    def show(self, node: fx.Node) -> str:
        """`layer1.0.relu` or `F.relu at resnet.py:33`, as the report names it."""
        line = self.lines.get(node)
        at = "" if line is None or is_plain_sequential(self.module) else f" at {line}"
        if node.op == "call_module":
            return f"{join(self.path, str(node.target))}{at}"
        if node.op == "output":
            return f"the caller of {self.path or 'the model'}"
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return f"{name}(){at}"


@dataclass(frozen=True, eq=False)
class GraphCall:
    """A call in a scope's graph."""

    scope: Scope
    node: fx.Node


class Graphs:
    """All scopes of a model that its root can reach, and who calls whom."""

    def __init__(self, model: nn.Module) -> None:
        self.root = model
        self.paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self.scopes: dict[nn.Module, Scope] = {}
        self.calls: dict[nn.Module, list[GraphCall]] = {}
        self.strangers: dict[nn.Module, Scope] = {}  #: callees of a forward that could not be traced, and that forward
        waiting = [model]
        while waiting:
            module = waiting.pop(0)
            if module in self.scopes or _is_leaf(module):
                continue
            scope = self.scopes[module] = scope_of(self.paths[module], module)
            if scope.opaque is not None:
                callees = list(_children(module))
                self.strangers.update((callee, scope) for callee in callees)
                waiting += callees
            for graph in scope.graphs:
                for node in graph.nodes:
                    if node.op == "call_module":
                        callee = module.get_submodule(node.target)
                        self.calls.setdefault(callee, []).append(GraphCall(scope, node))
                        waiting.append(callee)

    def border(self, module: nn.Module) -> str | None:
        """Why values must not be followed out of this module to its callers, or into it from them."""
        if module is self.root:
            return "the caller of the model"
        if module in self.strangers:
            stranger = self.strangers[module]
            return f"{stranger.path or 'the model'}, whose forward {stranger.opaque}"
        if why := touched(module):
            return f"{self.paths[module]}, which {why}"
        return None


def scope_of(path: str, module: nn.Module) -> Scope:
    """Trace a module's own forward."""
    scope = Scope(path, module)
    scope.opaque = _untraceable(module)
    if scope.opaque is None and is_plain_sequential(module):
        scope.graphs.append(_sequential_graph(module))
    elif scope.opaque is None:
        try:
            with torch.random.fork_rng(devices=[]):
                _trace_variants(scope)
        except Exception as error:  # whatever the user's forward raises when it is given proxies
            scope.graphs.clear()
            scope.lines.clear()
            first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            scope.opaque = f"cannot be traced ({first})"
    return scope


def _untraceable(module: nn.Module) -> str | None:
    if "forward" in vars(module):
        return "was replaced on the object"
    if type(module).forward is nn.Module.forward:
        return "does not exist"
    if is_torchs_own(module) and not is_plain_sequential(module):
        return "is torch's own and is not traced"
    return None


def _sequential_graph(module: nn.Module) -> fx.Graph:
    """By hand, because a trace would name a module that stands in two slots after the first."""
    graph = fx.Graph()
    value = graph.placeholder("input")
    for name, _ in module.named_modules(remove_duplicate=False):
        if name and "." not in name:
            value = graph.call_module(name, (value,))
    graph.output(value)
    return graph


def _trace_variants(scope: Scope) -> None:
    module = scope.module
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        raise ValueError("it takes *args or **kwargs")
    optional = [each.name for each in parameters if each.default is None]
    if len(optional) > MAX_OPTIONAL:
        raise ValueError(f"it has {len(optional)} optional arguments")
    seen: set[str] = set()
    for training in (True, False):
        for absent in itertools.chain.from_iterable(
            itertools.combinations(optional, count) for count in range(len(optional) + 1)
        ):
            tracer = _Tracer(module)
            with _untouched(module, training):
                graph = tracer.trace(module, dict.fromkeys(absent) or None)
            if (text := str(graph)) not in seen:  # lines are the same where the text is: one forward, one order
                seen.add(text)
                scope.graphs.append(graph)
                scope.lines.update(tracer.lines)


class _Tracer(fx.Tracer):
    """Calls every submodule without entering it, and notes where in the user's source each value is made."""

    proxy_buffer_attributes = True  # else `self.steps.add_(1)` would really run

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = set(module.modules())
        self.lines: dict[fx.Node, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if m not in self.inside:  # `self.layers[:2](x)` makes a new Sequential: its children are called from here
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TracedValue(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame = inspect.currentframe()
        user = None
        while frame is not None and frame.f_code is not scope_of.__code__:
            name = frame.f_globals.get("__name__", "")
            if name == "torch.utils.checkpoint":
                raise fx.proxy.TraceError("it runs a part again in backward, by torch.utils.checkpoint")
            if user is None and not _is_machinery(name):
                user = frame
            frame = frame.f_back
        if user is not None:
            self.lines[node] = f"{Path(user.f_code.co_filename).name}:{user.f_lineno}"
        return node


class _TracedValue(fx.Proxy):
    """A proxy that is not silently taken for something else: asking its type fails, `+=` is seen as a write."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is not None and not _is_machinery(caller.f_globals.get("__name__", "")):
            raise fx.proxy.TraceError("it asks for the type of a value")
        return _TracedValue


def _writing_operator(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    target = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", target, (self, other), {})


for _name in WRITING_OPERATORS:
    setattr(_TracedValue, f"__{_name}__", _writing_operator(_name))


def _is_machinery(module_name: str) -> bool:
    return module_name.partition(".")[0] == "torch" or module_name == __name__


class _untouched:
    """Sets `training` on all of a module's modules; puts everything back, and raises if the forward kept something."""

    def __init__(self, module: nn.Module, training: bool) -> None:
        self.modules = list(module.modules())
        self.training = training

    def __enter__(self) -> None:
        self.before = [_snapshot(module) for module in self.modules]
        self.flags = [module.training for module in self.modules]
        for module in self.modules:
            module.training = self.training

    def __exit__(self, kind: Any, *rest: Any) -> None:
        for module, flag in zip(self.modules, self.flags, strict=True):
            module.training = flag
        changed: set[str] = set()
        for module, before in zip(self.modules, self.before, strict=True):
            changed |= _restore_(module, before)
        if changed and kind is None:
            if all(name.startswith("_tensor_constant") for name in changed):  # put there by fx
                raise ValueError("it makes a tensor that does not depend on its inputs")
            raise ValueError(f"it sets {', '.join(f'self.{name}' for name in sorted(changed))}")


def _snapshot(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, value.copy() if isinstance(value, (list, dict, set)) else None)
        for name, value in vars(module).items()
    }


def _restore_(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> set[str]:
    """Put a module's attributes back; the names of those that had changed."""
    now = vars(module)
    changed = {name for name in now if name not in before}
    for name, (value, content) in before.items():
        if name not in now or now[name] is not value:
            changed.add(name)
        if content is not None and not _same(value, content):
            changed.add(name)
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
    for name in changed:
        now.pop(name, None)
        if name in before:
            now[name] = before[name][0]
    return changed


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(map(id, one.values())) == list(map(id, other.values())) and list(one) == list(other)
    return list(map(id, one)) == list(map(id, other))


# -- small questions about modules ------------------------------------------------------------------------------------


def touched(module: nn.Module) -> str | None:
    """What runs besides the forward of the module's class when it is called."""
    if any(name.endswith("_hooks") and value for name, value in vars(module).items()):
        return "has hooks"
    if "forward" in vars(module):
        return "has a forward of its own"
    if type(module).__call__ is not nn.Module.__call__:
        return "overrides __call__"
    return None


def is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch" and not isinstance(module, fx.GraphModule)


def _is_leaf(module: nn.Module) -> bool:
    return is_torchs_own(module) and not is_plain_sequential(module) and not list(module.children())


def is_plain_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """What a forward calls if nothing else is known: the children, also those in lists and dicts of modules."""
    for child in module.children():
        yield from _children(child) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else (child,)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def first(found: Iterable[Found | None]) -> Found | None:
    """The first answer that is not None."""
    return next((each for each in found if each is not None), None)
