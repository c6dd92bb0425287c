"""What SGD, Adam and AdamW over a GradBuffer have in common: which parameters have a gradient, flat state, the update.

In: the slots of a GradBuffer and torch.optim's groups. Out: parameters and states updated in place, by our kernel or by
torch's fused operators, with the same bits. A gradient outside the buffer is refused before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from takeback.errors import GradBufferError, OptionError
from takeback.grads import GradBuffer, Slot, clip_factor
from takeback.optim import fused, launch, proof
from takeback.optim.fused import AdamSettings, Lists, ScalerTensors, SGDSettings
from takeback.optim.state import FlatState, Part

aten = torch.ops.aten

Group = dict[str, Any]


@dataclass
class Batch:
    """Parameters of one group and one part that are updated together."""

    group: int
    part: Part
    indices: tuple[int, ...]  #: in the part
    first: bool
    lists: Lists
    table: launch.Chunks | None = None


@dataclass
class Common:
    """The step that most are: all parameters hold a gradient."""

    params: list[list[Tensor]]  #: of each group
    slots: list[Slot]  #: of those that are not frozen
    names: list[tuple[str, ...]]
    batches: list[Batch]


class FlatOptimizer:
    """What the three have in common, before torch.optim's class in the order of their bases.

    clip_norm     clips the buffer's gradients by their global norm first, as `buf.clip_`. Our kernel scales them as it
                  reads them, which costs no pass and leaves them as they are; elsewhere they are scaled in place
    grad_norm     with clip_norm: the norm that the gradients had in the last step
    reasons       for each group that our own kernel did not update in the last step, why
    """

    param_groups: list[Group]
    state: Any
    clip_norm: float | None = None
    grad_norm: Tensor | None = None

    # -- for the three -----------------------------------------------------------------------------------------------

    def _attach(self, buffer: GradBuffer, groups: Any, kernel: str, clip_norm: float | None) -> Any:
        """Before torch's __init__; gives what it takes as parameters."""
        if not isinstance(buffer, GradBuffer):
            raise OptionError(
                f"takeback.optim.{type(self).__name__} takes a takeback.GradBuffer first, got a "
                f"{type(buffer).__name__}. Give parameters or groups as the second argument."
            )
        if kernel not in ("auto", "torch"):
            raise OptionError(f'kernel must be "auto" or "torch", got {kernel!r}')
        if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
            raise OptionError(f"clip_norm must be a positive number or None, got {clip_norm!r}")
        self._buffer, self._kernel, self.clip_norm = buffer, kernel, clip_norm
        self._slots: dict[int, Slot] = {id(slot.param): slot for slot in buffer.slots}
        self._flat: FlatState | None = None
        self._batches: dict[object, list[Batch]] = {}
        self._common: Common | None = None
        #: What was in `state` when the batches were made: entries, names and values, and of how many parameters.
        self._bound: tuple[list[dict[str, Any]], list[str], list[Tensor]] = ([], [], [])
        self._bound_params = 0
        self.reasons: Mapping[int, str] = {}
        return [slot.param for slot in buffer.slots] if groups is None else groups

    def _names(self, group: Group) -> tuple[str, ...]:
        """Of the state that a parameter of the group has."""
        raise NotImplementedError

    def _settings(self, group: Group) -> AdamSettings | SGDSettings:
        raise NotImplementedError

    # -- torch.optim's interface -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        group = self.param_groups[-1]
        for p in group["params"]:
            if id(p) not in self._slots and p.requires_grad:
                self.param_groups.pop()
                raise OptionError(
                    f"a parameter of shape {tuple(p.shape)} is not in the GradBuffer: make the buffer of all that is "
                    f"optimised, or give this parameter to an optimizer of torch.optim."
                )
        group["fused"], group["foreach"] = True, None
        self._flat = self._common = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # type: ignore[misc]
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None
        with torch.no_grad():
            self._bind()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """To None: no pass over memory, and what is None is overwritten by the next backward. To zero: one pass, where
        all parameters of the buffer are optimised."""
        if set_to_none or not self._is_whole():
            super().zero_grad(set_to_none)  # type: ignore[misc]
        else:
            self._buffer.check_averaged()
            for flat in self._buffer.flats:
                flat.zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Parameters without a gradient are skipped, as torch does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a takeback.optim.{type(self).__name__} cannot be copied or pickled: it belongs to its GradBuffer. Make a "
            f"new one for the copied model, and load_state_dict() this one's state_dict()."
        )

    # -- the step ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._buffer.check_averaged()
        scales = (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        self.grad_norm = self._norm(scaled=scales[0] is not None)  # first, so that a GPU has something to do meanwhile
        names = [self._names(group) for group in self.param_groups]
        batches = self._as_usual(names) or self._prepared(self._active(), names)
        work = []
        reasons = {}
        for batch in batches:
            device = batch.part.device
            scaling = ScalerTensors(*(None if s is None else s.to(device, non_blocking=True) for s in scales))
            settings = self._settings(self.param_groups[batch.group])
            reason = self._refusal(batch, settings, scaling)
            if reason:
                reasons[batch.group] = fused.avoids(device, batch.part.dtype, settings) or reason
            work.append((batch, settings, scaling, not reason))
        factor = None
        if self.grad_norm is not None:
            assert self.clip_norm is not None
            factor = clip_factor(self.clip_norm, self.grad_norm)
            if reasons:
                self._buffer.scale_(factor)
                factor = None
        _count_(batches, None)
        for batch, settings, scaling, ours in work:
            if ours:
                _update_flat_(batch, settings, None if factor is None else factor.to(batch.part.device))
            else:
                _update_lists_(batch, settings, scaling)
        if scales[1] is not None:
            _count_(batches, scales[1])
        self.reasons = reasons

    def _norm(self, *, scaled: bool) -> Tensor | None:
        """What is to be clipped; None without clip_norm."""
        if self.clip_norm is None:
            return None
        if scaled:
            raise OptionError(
                "clip_norm needs gradients without GradScaler's scale: call scaler.unscale_(optimizer) before "
                "scaler.step(optimizer). Nothing was updated."
            )
        return self._buffer.norm()

    def _active(self) -> list[list[Slot]]:
        """The slots that hold a gradient, by group. Raises for a gradient that is anywhere else."""
        active = []
        for group in self.param_groups:
            holding = []
            for p in group["params"]:
                slot = self._slots.get(id(p))
                if slot is not None and slot.has_gradient_in_place():
                    holding.append(slot)
                elif p.grad is not None:
                    raise self._foreign(slot, p)
            active.append(holding)
        return active

    def _is_whole(self) -> bool:
        """Whether all of the buffer is this optimizer's, and no gradient of it is anywhere else."""
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        return all(
            id(slot.param) in mine and (slot.has_gradient_in_place() or slot.param.grad is None)
            for slot in self._buffer.slots
        )

    def _foreign(self, slot: Slot | None, param: Tensor) -> GradBufferError:
        if slot is None:
            return GradBufferError(
                f"a parameter of shape {tuple(param.shape)} has a gradient but no place in the GradBuffer: it did not "
                f"require one when the buffer was made. Make a new GradBuffer and a new optimizer after unfreezing; "
                f"load_state_dict() carries the state over."
            )
        return GradBufferError(
            f"the gradient of {slot.name} is not in the GradBuffer: .grad was assigned from outside, or the buffer was "
            f"detached. Call buf.gather_() before step() to copy it in, or write into .grad in place. Nothing was "
            f"updated."
        )

    def _as_usual(self, names: list[tuple[str, ...]]) -> list[Batch] | None:
        """The batches of the common step, if this is one and nothing has changed since they were made."""
        common = self._common
        usual = (
            common is not None
            and common.names == names
            and len(common.params) == len(self.param_groups)
            and all(map(_same_tensors, common.params, (group["params"] for group in self.param_groups)))
            and all(slot.has_gradient_in_place() for slot in common.slots)
            and self._is_bound()
        )
        return common.batches if common is not None and usual else None

    def _is_bound(self) -> bool:
        """Whether `state` holds what it held when the batches were made."""
        entries, names, values = self._bound
        return (
            self._flat is not None
            and len(self.state) == self._bound_params
            and all(map(is_, map(dict.get, entries, names), values))
        )

    def _prepared(self, active: list[list[Slot]], names: list[tuple[str, ...]]) -> list[Batch]:
        """The batches for these slots; made once for each set of them."""
        if not self._is_bound():
            self._bind()
        key = (tuple(names), tuple(tuple(map(id, slots)) for slots in active))
        batches = self._batches.get(key)
        if batches is None or any(batch.first for batch in batches):
            batches = list(self._make(active, names))
            if len(self._batches) > 16:  # a new set of parameters each time is not worth keeping
                self._batches.clear()
            self._batches[key] = batches
        params = [list(group["params"]) for group in self.param_groups]
        slots = [self._slots[id(p)] for group in params for p in group if id(p) in self._slots]
        if sum(map(len, active)) == len(slots) and not any(b.first for b in batches):
            self._common = Common(params, slots, names, batches)
        return batches

    def _bind(self) -> None:
        """Puts all state there is into the flat tensors."""
        if self._flat is None:
            mine = {id(p) for group in self.param_groups for p in group["params"]}
            self._flat = FlatState(self._buffer, [slot for slot in self._buffer.slots if id(slot.param) in mine])
        self._flat.adopt_(self.state)
        self._batches.clear()
        self._common = None
        self._bound, self._bound_params = ([], [], []), len(self.state)
        for param, entries in self.state.items():
            if id(param) in self._flat.places:
                self._bound_to(entries, {name: v for name, v in entries.items() if isinstance(v, Tensor)})

    def _bound_to(self, entries: dict[str, Any], values: dict[str, Tensor]) -> None:
        self._bound[0].extend([entries] * len(values))
        self._bound[1].extend(values)
        self._bound[2].extend(values.values())
        self._bound_params = len(self.state)

    def _make(self, active: list[list[Slot]], names: list[tuple[str, ...]]) -> Iterator[Batch]:
        flat = self._flat
        assert flat is not None
        for g, slots in enumerate(active):
            members: dict[tuple[int, bool], list[int]] = {}
            for slot in slots:
                part, i = flat.places[id(slot.param)]
                entries = self.state[slot.param] if names[g] else {}
                missing = [name for name in names[g] if not isinstance(entries.get(name), Tensor)]
                if missing:
                    started = flat.start_(slot.param, missing)
                    entries.update(started)
                    self._bound_to(entries, started)
                members.setdefault((flat.parts.index(part), bool(missing)), []).append(i)
            for (where, first), indices in sorted(members.items()):
                yield self._batch(g, flat.parts[where], tuple(indices), first, names[g])

    def _batch(self, group: int, part: Part, indices: tuple[int, ...], first: bool, names: tuple[str, ...]) -> Batch:
        slots = [part.slots[i] for i in indices]
        entries = [self.state[slot.param] for slot in slots] if names else []
        lists = Lists(
            params=[slot.param for slot in slots],
            grads=[slot.view for slot in slots],
            states={name: [e[name] for e in entries] for name in names if name != "step"},
            steps=[e["step"] for e in entries] if "step" in names else (),
        )
        return Batch(group, part, indices, first, lists)

    def _refusal(self, batch: Batch, settings: AdamSettings | SGDSettings, scaling: ScalerTensors) -> str:
        if self._kernel == "torch":
            return 'kernel="torch"'
        part = batch.part
        return launch.refuses(part.device, part.dtype, settings, scaling) or proof.differs(
            part.device, part.dtype, part.flat_grad.dtype, settings, clips=self.clip_norm is not None
        )


def _same_tensors(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(is_, ours, theirs))


def _count_(batches: list[Batch], found_inf: Tensor | None) -> None:
    """Counts a step of all that is updated; or takes it back where an update was skipped for an infinite gradient. One
    operation for a part that is updated as a whole."""
    parts = {id(batch.part): batch.part for batch in batches if batch.lists.steps}
    for part in parts.values():
        steps = [step for batch in batches if batch.part is part for step in batch.lists.steps]
        whole = len(steps) == len(part.slots)
        by = 1 if found_inf is None else -found_inf.to(part.device)
        if whole:
            part.steps.add_(by)
        elif found_inf is None:
            aten._foreach_add_.Scalar(steps, by)
        else:
            aten._foreach_add_.Tensor(steps, by)


def _update_lists_(batch: Batch, settings: AdamSettings | SGDSettings, scaling: ScalerTensors) -> None:
    if isinstance(settings, AdamSettings):
        fused.adam_(batch.lists, settings, scaling)
    else:
        fused.sgd_(batch.lists, settings, batch.first, scaling)
    torch.autograd.graph.increment_version(batch.lists.params)  # torch's fused kernels leave them as they were


def _update_flat_(batch: Batch, settings: AdamSettings | SGDSettings, factor: Tensor | None) -> None:
    part, params = batch.part, batch.lists.params
    table = batch.table
    if table is None or table.addresses != launch.addresses(params):
        slots = [part.slots[i] for i in batch.indices]
        table = batch.table = launch.Chunks(
            params,
            [slot.offset for slot in slots],
            [part.offsets[i] for i in batch.indices],
            batch.indices,
            [slot.name for slot in slots],
            part.dtype,
            part.device,
        )
    if isinstance(settings, AdamSettings):
        launch.adam_(table, part.flat_grad, part.flats, part.steps, settings, factor)
    else:
        launch.sgd_(table, part.flat_grad, part.flats, settings, batch.first, factor)
