"""A model's batch norms and the activations after them become activated norms, and torch's modules again.

In: a model. Out: what became what. Where an activation module stood, there is a `Fused`. Nobody's forward is touched:
an activation that is a function there, or a module that other places need too, stays, and so does the norm before it,
with that reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from takeback.nn.compare import Arguments
from takeback.nn.conversion import Changed
from takeback.nn.find_norms import LAZY_NORMS, NORMS, Candidate, Follower, Kept, find_norms
from takeback.nn.forward_graphs import GraphCall, Graphs, first, is_plain_sequential, touched

STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
DIMENSIONS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
LEAKY = Follower("leaky_relu", 0.01)  #: what relu="leaky_relu" puts in place of a relu
ORIGIN = "takeback_origin"  #: the attribute of an activated norm that is its `Origin`


@dataclass(frozen=True)
class Normed:
    """The model, its report's rows, and whether some norm computes something else than before."""

    model: nn.Module
    report: tuple[Changed | Kept, ...]
    renamed: bool


def convert_batch_norms_(model: nn.Module, relu: str, group: Any) -> Normed:
    """Put activated norms in."""
    report: list[Changed | Kept] = []
    replaced: dict[nn.Module, nn.Module] = {}
    plan: list[Decision | Kept] = []
    if any(isinstance(module, (*NORMS, *LAZY_NORMS)) for module in model.modules()):  # tracing a model takes a while
        graphs, found = find_norms(model)
        held = _held_modules(model)
        found = [_unless_held(each, held) if isinstance(each, Candidate) else each for each in found]
        decided = [
            _decide(each, relu, sync=group is not None) if isinstance(each, Candidate) else each for each in found
        ]
        plan = _with_removals(graphs, decided)
    for each in plan:
        if isinstance(each, Kept):
            report.append(_synchronised_(model.get_submodule(each.path), each, group, replaced))
        else:
            replaced[each.of.norm] = _activated(each, group)
            report.append(each.changed)
    report += _from_inplace_abn_(model, group, replaced)
    _remove_activations_([each for each in plan if isinstance(each, Decision)], replaced)
    renamed = any(isinstance(each, Decision) and each.renamed for each in plan)
    return Normed(_replace_(model, replaced), tuple(report), renamed)


def revert_batch_norms_(model: nn.Module, example: Arguments | None) -> nn.Module:
    """Put torch's own modules in."""
    from takeback.nn.abn import ABN

    dims = _dimensions(model, example) if example is not None else {}
    replaced: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, Fused):
            replaced[module] = module.released()
        elif isinstance(module, ABN) or ORIGIN in vars(module):
            replaced[module] = _plain(module, dims.get(module))
    return _replace_(model, replaced)


# -- which form each norm takes ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Decision:
    """A candidate, what it becomes, and the activation of that."""

    of: Candidate
    form: Literal["ABN", "InPlaceABN", "InPlaceABNSync"]
    activation: Follower
    reason: str
    removals: tuple[Removal, ...] = ()

    @property
    def renamed(self) -> bool:
        """Whether it computes something else than before."""
        return self.activation != self.of.activation

    @property
    def changed(self) -> Changed:
        reason = self.reason + ("; its relu became a leaky_relu, another function" if self.renamed else "")
        return Changed(self.of.path, self.of.label, f"{self.form}({self.activation})", reason)


def _decide(of: Candidate, relu: str, *, sync: bool) -> Decision | Kept:
    from takeback.nn.functional import inverse_of

    activation = LEAKY if of.activation.name == "relu" and relu == "leaky_relu" else of.activation
    sync = sync or isinstance(of.norm, nn.SyncBatchNorm)
    form: Literal["InPlaceABN", "InPlaceABNSync"] = "InPlaceABNSync" if sync else "InPlaceABN"
    if why := inverse_of(activation.name, activation.param, torch.float32):
        return Decision(of, form, activation, f"leaves its input as it is and keeps it: {why}")
    if of.writer is not None:
        return Kept(of.path, f"{of.writer} overwrites the output, which an activated norm keeps for backward")
    if of.not_overwritable is None:
        return Decision(of, form, activation, "overwrites its input, which nobody else reads")
    if sync:
        return Kept(of.path, f"InPlaceABNSync would overwrite its input, but {of.not_overwritable}")
    return Decision(of, "ABN", activation, f"does not overwrite its input: {of.not_overwritable}")


def _unless_held(of: Candidate, held: Mapping[nn.Module, str]) -> Candidate | Kept:
    """Kept, if an attribute that is no submodule holds the norm or its activation: that one would not be replaced."""
    called = [call for call in of.calls if call.node.op == "call_module"]
    involved = [of.norm, *(call.scope.module.get_submodule(str(call.node.target)) for call in called)]
    holder = first(held.get(module) for module in involved)
    return of if holder is None else Kept(of.path, f"{holder} holds it or its activation as a plain attribute")


def _held_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Modules in plain attributes, or in lists and dicts there, and the attribute's name."""
    held: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, Fused):
            continue
        for name, value in vars(module).items():
            if name in ("_modules", "_parameters", "_buffers") or isinstance(value, (str, Tensor)):
                continue
            values = value.values() if isinstance(value, Mapping) else value
            for each in values if isinstance(values, Collection) else [value]:
                if isinstance(each, nn.Module):
                    held.setdefault(each, f"{path or 'the model'}.{name}")
    return held


# -- how each activation is taken out ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """An activation module whose every call goes."""

    module: nn.Module


@dataclass(frozen=True)
class SequentialPlace:
    """One place in a Sequential; the module stands in others too."""

    sequential: nn.Module
    name: str
    module: nn.Module


Removal = Whole | SequentialPlace


def _with_removals(graphs: Graphs, decided: list[Decision | Kept]) -> list[Decision | Kept]:
    """Add to each decision how its activation goes; keep the norms whose activation cannot go. Each one that is kept
    may need an activation module that others wanted to remove, so this is repeated until nothing changes.
    """
    while True:
        gone = {call.node for each in decided if isinstance(each, Decision) for call in each.of.calls}
        planned: list[Decision | Kept] = []
        for each in decided:
            if isinstance(each, Decision):
                removals = [_removal(graphs, call, gone) for call in each.of.calls]
                why = first(removal for removal in removals if isinstance(removal, str))
                if why is not None:
                    planned.append(Kept(each.of.path, f"{each.of.label} follows it, but {why}"))
                    continue
                found = tuple(dict.fromkeys(removal for removal in removals if not isinstance(removal, str)))
                each = Decision(each.of, each.form, each.activation, each.reason, found)
            planned.append(each)
        if [type(each) for each in planned] == [type(each) for each in decided]:
            return planned
        decided = planned


def _removal(graphs: Graphs, call: GraphCall, gone: set[Any]) -> Removal | str:
    """How one activation call goes, given all that go; or why it cannot."""
    scope, node = call.scope, call.node
    if node.op != "call_module":
        return "it is a function of the forward: as a module of its own it could be taken out"
    module = scope.module.get_submodule(node.target)
    staying = [use for use in graphs.calls[module] if use.node not in gone]
    if not staying and module not in graphs.strangers:
        return Whole(module)
    others = [use for use in staying if not is_plain_sequential(use.scope.module)]
    if is_plain_sequential(scope.module) and not others:
        return SequentialPlace(scope.module, str(node.target), module)
    if stranger := graphs.strangers.get(module):
        return f"{stranger.path or 'the model'} may call it too, whose forward {stranger.opaque}"
    elsewhere = next((use for use in others if use.node is not node), call)
    return (
        f"it is also called elsewhere ({elsewhere.scope.show(elsewhere.node)}): the norm needs an activation module of "
        f"its own"
    )


def _remove_activations_(decisions: list[Decision], replaced: dict[nn.Module, nn.Module]) -> None:
    """Take the activations out: a `Fused` stands in the place of each, and holds what `revert` puts back there."""
    for each in decisions:
        _remember_(replaced[each.of.norm], each.of.norm)
        for way in each.removals:
            activation = way.module
            if each.renamed:
                activation = nn.LeakyReLU(LEAKY.param, inplace=getattr(way.module, "inplace", False))
            if isinstance(way, SequentialPlace):
                setattr(way.sequential, way.name, Fused(activation))
            else:
                replaced[way.module] = Fused(activation)


class Fused(nn.Identity):
    """Stands where an activation stood that the norm before it now applies; passes its input on."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.held = (activation,)  # in a tuple, so that it is no submodule
        self.training = activation.training

    def released(self) -> nn.Module:
        """The activation, to stand here again."""
        (activation,) = self.held
        activation.training = self.training
        return activation

    def extra_repr(self) -> str:
        return str(self.held[0])


# -- replacing modules ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """What a converted norm was."""

    norm: type[nn.Module]
    attributes: tuple[str, ...]  #: names of what others had set on it, and which it still has


def _remember_(made: nn.Module, norm: nn.Module) -> None:
    names = tuple(name for name in vars(norm) if name not in vars(made) and name != "process_group")
    vars(made).update({name: vars(norm)[name] for name in names})
    vars(made)[ORIGIN] = Origin(type(norm), names)


def _activated(decision: Decision, group: Any) -> nn.Module:
    from takeback.nn import abn

    norm: Any = decision.of.norm
    extra = {"group": _group(group, norm)} if decision.form == "InPlaceABNSync" else {}
    settings = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    activation = decision.activation
    made = getattr(abn, decision.form)(*settings, activation.name, activation.param, device="meta", **extra)
    return _take_state_(made, norm)


def _take_state_(made: nn.Module, norm: nn.Module) -> nn.Module:
    """Give it the very parameters and buffers of `norm`, so that an optimizer goes on, and its hooks."""
    for name in STATE:
        if hasattr(norm, name):
            setattr(made, name, getattr(norm, name))
    vars(made).update({name: value for name, value in vars(norm).items() if name.endswith("_hooks")})
    made.training = norm.training
    return made


def _group(group: Any, norm: Any) -> Any:
    """The group to synchronise over; None is all processes."""
    if group is None:
        return getattr(norm, "process_group", None)
    return None if group == "world" else group


def _synchronised_(norm: Any, kept: Kept, group: Any, replaced: dict[nn.Module, nn.Module]) -> Changed | Kept:
    """With a group, a norm that is kept is at least synchronised, by torch's own SyncBatchNorm."""
    if group is None or isinstance(norm, nn.SyncBatchNorm):
        return kept
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or touched(norm):
        warnings.warn(f"takeback.nn.convert: {kept.path} stays without synchronisation: {kept.reason}", stacklevel=3)
        return kept
    settings = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    made = _take_state_(nn.SyncBatchNorm(*settings, _group(group, norm), device="meta"), norm)
    _remember_(made, norm)
    replaced[norm] = made
    return Changed(kept.path, "", "SyncBatchNorm", f"synchronised as it is: {kept.reason}")


def _from_inplace_abn_(model: nn.Module, group: Any, replaced: dict[nn.Module, nn.Module]) -> Iterator[Changed]:
    """The modules of the package inplace_abn, which overwrite their inputs already."""
    from takeback.nn import abn

    for path, module in model.named_modules():
        name = type(module).__name__
        package = type(module).__module__.partition(".")[0]
        if package != "inplace_abn" or name not in ("ABN", "InPlaceABN", "InPlaceABNSync") or touched(module):
            continue
        old: Any = module
        sync = name == "InPlaceABNSync" or (group is not None and name == "InPlaceABN")
        form = "InPlaceABNSync" if sync else name
        extra: dict[str, Any] = {} if form == "ABN" else {"scale": "absolute"}
        if sync:
            extra["group"] = getattr(old, "group", None) if group is None else _group(group, old)
        activation = Follower(str(getattr(old.activation, "value", old.activation)), float(old.activation_param))
        settings = (old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        device = next(iter(old.state_dict().values())).device
        made = getattr(abn, form)(*settings, activation.name, activation.param, device=device, **extra)
        replaced[module] = _take_state_(made, module)
        yield Changed(path, "", f"{form}({activation})", f"was {package}'s {name}")


def _plain(module: Any, dims: int | None) -> nn.Module:
    """An activated norm as a batch norm of torch; as an ABN where its activation or dimensions have no other place."""
    from takeback.nn.abn import ABN

    origin: Origin | None = vars(module).get(ORIGIN)
    settings = (module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    if origin is not None:
        extra = {"process_group": module.group} if origin.norm is nn.SyncBatchNorm else {}
        made: nn.Module = origin.norm(*settings, device="meta", **extra)
    elif dims in DIMENSIONS and module.activation == "identity":
        made = DIMENSIONS[dims](*settings, device="meta")
    elif type(module) is ABN and origin is None:
        return module
    else:
        made = ABN(*settings, module.activation, module.activation_param, device="meta")
    _take_state_(made, module)
    vars(made).update({name: vars(module)[name] for name in (origin.attributes if origin else ())})
    if getattr(getattr(module, "scale", None), "value", None) == "absolute" and module.weight is not None:
        weight = module.weight.detach().abs() + module.eps
        made.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    return made


def _replace_(model: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """Put modules in the places of others, under every path they have."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and module in replaced:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, replaced[module])
    return replaced.get(model, model)


def _dimensions(model: nn.Module, example: Arguments) -> dict[nn.Module, int]:
    """How many dimensions the inputs of the model's activated norms have, by running it."""
    from takeback.nn.abn import ABN

    dims: dict[nn.Module, int] = {}
    norms = [module for module in model.modules() if isinstance(module, ABN)]
    hooks = [norm.register_forward_pre_hook(lambda norm, args: dims.update({norm: args[0].dim()})) for norm in norms]
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            model(*example.positional, **example.keywords)
    finally:
        for hook in hooks:
            hook.remove()
        for module, flag in flags:
            module.training = flag
    return dims
