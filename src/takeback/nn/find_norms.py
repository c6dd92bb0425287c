"""A model in; for each of its batch norms out: the activation that follows, and whether its input may be overwritten.

A fact counts only if it holds in every trace of forward_graphs.py. What crosses a module's border is followed
through its callers; a forward that cannot be traced is one that may do anything with its own children, and says why.
"""

from __future__ import annotations

import operator
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from takeback.nn.forward_graphs import WRITING_OPERATORS, GraphCall, Graphs, Scope, first, is_torchs_own, join, touched

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LAZY_NORMS = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)

# What gives a new tensor that its own backward does not read, so that a norm may overwrite it.
FRESH_MODULES = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Bilinear, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
)
FRESH_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear),
        *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.matmul, torch.bmm, torch.mm, torch.cat, torch.stack),
        *(torch.add, torch.sub, torch.mul, operator.add, operator.sub, operator.mul, operator.matmul),
    }
)
FRESH_METHODS = frozenset({"matmul", "bmm", "mm", "add", "sub", "mul"})

# What keeps its input for backward: before one of these a norm without activation saves a buffer by keeping its output.
KEEPS_MODULES = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear),
    *(nn.GELU, nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.ReLU6, nn.Hardtanh, nn.PReLU, nn.Softplus),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
)
KEEPS_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(F.conv1d, F.conv2d, F.conv3d, F.linear, torch.matmul, torch.bmm, operator.matmul, operator.mul, torch.mul),
        *(F.gelu, F.hardswish, F.mish, F.relu6, F.hardtanh, F.prelu, F.softplus, F.max_pool2d),
    }
)

VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
VIEW_METHODS = frozenset(
    {
        *("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "t"),
        *("expand", "expand_as", "chunk", "split", "unbind", "narrow", "select", "swapaxes", "movedim", "detach"),
        *("contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
    }
)
VIEW_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(operator.getitem, getattr, torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.transpose),
        *(torch.permute, torch.chunk, torch.split, torch.unbind, torch.narrow, torch.movedim, F.dropout, F.dropout2d),
    }
)

DEPTH = 64  #: of calls followed across borders: beyond it, modules that call each other


@dataclass(frozen=True)
class Follower:
    """What follows a norm: the name and parameter an `ABN` takes."""

    name: str
    param: float = 0.01

    def __str__(self) -> str:
        return f"{self.name}[{self.param:g}]" if self.name in ("leaky_relu", "elu") else self.name


IDENTITY = Follower("identity")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A norm that can be converted as far as the graphs tell: its activation's calls and the two safety answers."""

    path: str
    norm: nn.Module
    activation: Follower
    calls: tuple[GraphCall, ...]  #: of the activation, all to be removed
    label: str  #: the activation, as the report names it
    not_overwritable: str | None  #: why its input must stay as it is
    writer: str | None  #: who overwrites its output


@dataclass(frozen=True)
class Kept:
    """A module that stays as it is."""

    path: str
    reason: str


def find_norms(model: nn.Module) -> tuple[Graphs, list[Candidate | Kept]]:
    """Every batch norm of the model, in the order of `named_modules`, and the graphs the answers come from."""
    graphs = Graphs(model)
    norms = [(path, module) for path, module in model.named_modules() if isinstance(module, (*NORMS, *LAZY_NORMS))]
    return graphs, [_about(graphs, path, norm) for path, norm in norms]


# -- what the graphs say about one norm ---------------------------------------------------------------------------


def _about(graphs: Graphs, path: str, norm: nn.Module) -> Candidate | Kept:
    calls = graphs.calls.get(norm, [])
    if reason := _unusual(norm) or _called_unseen(graphs, path, norm):
        return Kept(path, reason)
    if not calls:
        return Kept(path, "no forward calls it")
    if any(len(call.node.args) != 1 or call.node.kwargs for call in calls):
        return Kept(path, "it is not called with one positional argument")
    not_overwritable = first(_shared(graphs, call.scope, call.node.args[0], call.node) for call in calls)
    found = [_followers(graphs, call.scope, call.node) for call in calls]
    followers = [each for each in found if not isinstance(each, str)]
    if not followers:
        return _alone(graphs, path, norm, str(found[0]), not_overwritable)
    activations = [each for several in followers for each in several]
    kinds = {activation for activation, _ in activations}
    if len(followers) < len(found) or len(kinds) > 1:
        return Kept(path, f"different things follow it at its {len(calls)} calls")
    readers = {call.node: call for _, call in activations}
    writer = first(_writer(graphs, call.scope, call.node) for call in readers.values())
    return Candidate(
        path,
        norm,
        activations[0][0],
        calls=tuple(readers.values()),
        label=", ".join(dict.fromkeys(call.scope.show(call.node) for call in readers.values())),
        not_overwritable=not_overwritable,
        writer=writer.who if writer is not None and writer.certain else None,
    )


def _alone(graphs: Graphs, path: str, norm: nn.Module, why: str, not_overwritable: str | None) -> Candidate | Kept:
    """A norm without activation is worth converting only before something that keeps its input."""
    calls = graphs.calls[norm]
    if not all(_kept(graphs, call.scope, call.node) for call in calls):
        return Kept(path, f"{why}, and no reader is seen to keep its output: there is nothing to save")
    if not_overwritable:
        return Kept(path, f"{why}, and {not_overwritable}")
    if writer := first(_writer(graphs, call.scope, call.node) for call in calls):
        may = "overwrites" if writer.certain else "may overwrite"
        return Kept(path, f"{why}, and {writer.who} {may} its output")
    return Candidate(path, norm, IDENTITY, calls=(), label="", not_overwritable=None, writer=None)


def _unusual(norm: nn.Module) -> str | None:
    """Why a module is no plain torch batch norm."""
    if type(norm) not in NORMS:
        return f"it is a {type(norm).__name__}, not a plain BatchNorm"
    if why := touched(norm):
        return f"it {why}"
    names = {name for name, _ in norm.named_parameters()} | {name for name, _ in norm.named_children()}
    if names not in ({"weight", "bias"}, set()):
        return f"its parameters are {', '.join(sorted(names))}, not weight and bias"
    return None


def _called_unseen(graphs: Graphs, path: str, norm: nn.Module) -> str | None:
    """Who may call the norm besides the calls in the graphs: a forward without graph, on its child or by its name."""
    if norm is graphs.root:
        return "it is the model itself: nothing is known of what comes before and after"
    if stranger := graphs.strangers.get(norm):
        return f"{stranger.path or 'the model'} calls it, whose forward {stranger.opaque}"
    name = path.rpartition(".")[2]
    for scope in graphs.scopes.values():
        unseen = scope.opaque and path.startswith(join(scope.path, "")) and not is_torchs_own(scope.module)
        if unseen and not hasattr(scope.module, name) and name in _names_in(type(scope.module)):
            return f"{scope.path or 'the model'} reads .{name}, and its forward {scope.opaque}"
    return None


def _names_in(cls: type) -> set[str]:
    """All names that the methods of a user's class mention, but its constructor."""
    functions = (
        function
        for each in cls.__mro__
        if each.__module__.partition(".")[0] not in ("torch", "builtins")
        for name, function in vars(each).items()
        if isinstance(function, types.FunctionType) and name != "__init__"
    )
    return {name for function in functions for name in function.__code__.co_names}


def _followers(graphs: Graphs, scope: Scope, node: fx.Node, depth: int = 0) -> list[tuple[Follower, GraphCall]] | str:
    """The activation calls that alone read a value, across the borders it leaves by; or why there is none."""
    users = _readers(node)
    if len(users) != 1 or depth > DEPTH:
        return f"its output is read {len(users)} times"
    (user,) = users
    if activation := _activation(scope, user, node):
        return [(activation, GraphCall(scope, user))]
    if user.op != "output" or user.args[0] is not node:
        return f"{scope.show(user)} follows it, which is not an activation to convert"
    if border := graphs.border(scope.module):
        return f"its output goes to {border}"
    found: list[tuple[Follower, GraphCall]] = []
    for call in graphs.calls.get(scope.module, []):
        beyond = _followers(graphs, call.scope, call.node, depth + 1)
        if isinstance(beyond, str):
            return beyond
        found += beyond
    return found or "its output goes nowhere"


def _activation(scope: Scope, node: fx.Node, value: fx.Node) -> Follower | None:
    """The activation of `value` that a call is, if it is one."""
    if node.op == "call_module":
        module = scope.module.get_submodule(str(node.target))
        if node.args != (value,) or node.kwargs or touched(module):
            return None
        parameters = {nn.LeakyReLU: "negative_slope", nn.ELU: "alpha"}
        names = {nn.ReLU: "relu", nn.SiLU: "silu", nn.LeakyReLU: "leaky_relu", nn.ELU: "elu"}
        if type(module) not in names:
            return None
        param = getattr(module, parameters[type(module)]) if type(module) in parameters else 0.01
        return Follower(names[type(module)], float(param))
    target = f"method {node.target}" if node.op == "call_method" else node.target
    if target not in _FUNCTIONS or _argument(node, 0, "input") is not value:
        return None
    name, keyword, default = _FUNCTIONS[target]
    param = default if keyword is None else _argument(node, 1, keyword, default)
    return Follower(name, float(param)) if isinstance(param, (int, float)) else None


_FUNCTIONS: dict[Any, tuple[str, str | None, float]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, "method relu", "method relu_"), ("relu", None, 0.01)),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), ("leaky_relu", "negative_slope", 0.01)),
    **dict.fromkeys((F.elu, F.elu_), ("elu", "alpha", 1.0)),
    F.silu: ("silu", None, 0.01),
}


def _shared(graphs: Graphs, scope: Scope, node: Any, reader: fx.Node, depth: int = 0) -> str | None:
    """Why a value must not be overwritten by `reader`; None if nobody else can read its bytes, nor its own backward."""
    if not isinstance(node, fx.Node) or depth > DEPTH:
        return "its input is not the result of one op"
    others = [user for user in _readers(node) if user is not reader]
    if others:
        return f"its input is read again by {scope.show(others[0])}"
    if node.op == "placeholder":
        if border := graphs.border(scope.module):
            return f"its input comes from {border}"
        return first(
            _shared(graphs, call.scope, _bound(call.node, node), call.node, depth + 1)
            for call in graphs.calls.get(scope.module, [])
        )
    if node.op == "call_module":
        module = scope.module.get_submodule(str(node.target))
        if why := touched(module):
            return f"its input is made by {scope.show(node)}, which {why}"
        if isinstance(module, FRESH_MODULES) and type(module).forward in [each.forward for each in FRESH_MODULES]:
            return None
        inner = graphs.scopes.get(module)
        if inner is not None and inner.graphs:
            outputs = (_output(graph) for graph in inner.graphs)
            return first(_shared(graphs, inner, output.args[0], output, depth + 1) for output in outputs)
    if node.op == "call_function" and node.target in FRESH_FUNCTIONS and "out" not in node.kwargs:
        return None
    if node.op == "call_method" and node.target in FRESH_METHODS:
        return None
    if node.op == "get_attr":
        return f"its input is {join(scope.path, str(node.target))}"
    return f"its input is made by {scope.show(node)}, which may keep it or share its bytes"


@dataclass(frozen=True)
class _Writer:
    """Who overwrites a value; not `certain`: code that could not be traced."""

    who: str
    certain: bool


def _writer(graphs: Graphs, scope: Scope, node: fx.Node, depth: int = 0) -> _Writer | None:
    """Who writes onto a value or a view of it, if anybody; a certain one before others."""
    if depth > DEPTH:
        return _Writer("a chain of calls without end", certain=False)
    found: list[_Writer | None] = []
    for user in node.users:
        if _writes(scope, user, node):
            found.append(_Writer(scope.show(user), certain=True))
        elif user.op == "output" and (border := graphs.border(scope.module)):
            found.append(_Writer(border, certain=False))
        elif user.op == "output":
            calls = graphs.calls.get(scope.module, [])
            found += [_writer(graphs, call.scope, call.node, depth + 1) for call in calls]
        elif user.op == "call_module" and (inner := graphs.scopes.get(scope.module.get_submodule(str(user.target)))):
            if inner.opaque and not is_torchs_own(inner.module):
                found.append(_Writer(f"{inner.path}, whose forward {inner.opaque},", certain=False))
            for graph in inner.graphs:
                inputs = [each for each in graph.nodes if each.op == "placeholder" and _bound(user, each) is node]
                found += [_writer(graphs, inner, each, depth + 1) for each in inputs]
        elif _views(scope, user):
            found.append(_writer(graphs, scope, user, depth + 1))
    return min((each for each in found if each is not None), key=lambda writer: not writer.certain, default=None)


def _writes(scope: Scope, user: fx.Node, node: fx.Node) -> bool:
    if user.op == "call_module":
        return bool(getattr(scope.module.get_submodule(str(user.target)), "inplace", False))
    if user.kwargs.get("out") is node or (user.kwargs.get("inplace") is True and node in user.args[:1]):
        return True
    name = str(user.target if user.op == "call_method" else getattr(user.target, "__name__", ""))
    writes = name in WRITING_OPERATORS or name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    return user.op in ("call_method", "call_function") and writes and _argument(user, 0, "input") is node


def _views(scope: Scope, user: fx.Node) -> bool:
    if user.op == "call_module":
        return isinstance(scope.module.get_submodule(str(user.target)), VIEW_MODULES)
    return user.target in (VIEW_METHODS if user.op == "call_method" else VIEW_FUNCTIONS)


def _kept(graphs: Graphs, scope: Scope, node: fx.Node, depth: int = 0) -> bool:
    """Whether some reader keeps a value for its backward, so that to keep it too costs nothing."""
    for user in node.users:
        if user.op == "output" and depth < DEPTH and graphs.border(scope.module) is None:
            if any(_kept(graphs, call.scope, call.node, depth + 1) for call in graphs.calls.get(scope.module, [])):
                return True
        elif user.op == "call_module":
            if isinstance(scope.module.get_submodule(str(user.target)), KEEPS_MODULES):
                return True
        elif user.op == "call_function" and user.target in KEEPS_FUNCTIONS:
            return True
    return False


# -- small questions about nodes ----------------------------------------------------------------------


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value's bytes: not who asks for its shape."""
    questions = ("size", "dim", "numel", "ndimension", "nelement", "is_contiguous", "is_floating_point")
    attributes = ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda")

    def asks(user: fx.Node) -> bool:
        if user.op == "call_method":
            return user.target in questions
        return user.target is getattr and user.args[1] in attributes

    return [user for user in node.users if not asks(user)]


def _argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def _bound(call: fx.Node, placeholder: fx.Node) -> Any:
    """The argument of a call that a placeholder of the called graph stands for."""
    inputs = [node for node in placeholder.graph.nodes if node.op == "placeholder"]
    return _argument(call, inputs.index(placeholder), str(placeholder.target))


def _output(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")
