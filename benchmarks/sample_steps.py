"""One of PyTorch's own samples as a few training steps: takeback's beside eager's, and what becomes of it in a word.

A `Subject` makes a model, a loss and a batch; `outcome` trains it `STEPS` steps of SGD on values that change. Outcomes:
equal in bits, near (in mode fast), refused with a reason (a sample of which eager itself can make no step is counted
here, too, and one of which fewer than `LEAST_REPLAYS` steps were replays: it shows nothing), wrong, foreign exception.

Near is what float64 says where the same steps run in it: losses and tensors no further off than twice what eager's are,
plus `NEAR` of themselves or of their change. Where they do not run, or draw other random numbers, eager is the measure.
"""

from __future__ import annotations

import collections
import copy
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import takeback as tb
from takeback.compiler.program import Cluster
from takeback.compiler.run import kernels, plan_maker
from takeback.compiler.run.inductor import Compiled, NotCompiled, interpret_cluster
from takeback.errors import TakebackError

STEPS = 4
LEAST_REPLAYS = 2
OUTCOMES = ("equal", "near", "refused", "wrong", "foreign exception")
NEAR = 1e-4
RATE = 1e-2
FEW_REPLAYS = f"fewer than {LEAST_REPLAYS} of the steps were replays"


class Unusable(Exception):
    """Eager itself cannot make a step of this sample; says why."""


@dataclass(frozen=True)
class Subject:
    """What is trained: `loss(model, *tensors)`, on values of the same kind in every step. `turned`: of tensors of whole
    numbers or of bool, the dimension along which their values move on in each step."""

    name: str
    sample: int
    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    tensors: Sequence[Tensor]
    turned: Mapping[int, int] = field(default_factory=dict)

    def batch(self, step: int) -> list[Tensor]:
        """Other values of the same kind: floating-point numbers a little smaller in each step, so that they stay where
        the op is defined, whole numbers in other places."""
        return [
            t * (1 - 0.01 * step) if is_float(t) else t.roll(step, self.turned[i]) if i in self.turned else t.clone()
            for i, t in enumerate(self.tensors)
        ]


@dataclass(frozen=True)
class How:
    """How takeback is asked for it."""

    mode: str = "exact"
    memory: str = "auto"
    update: str = "end"
    poison: bool = False
    kernels: str = "eager"  #: of clusters, in mode fast: or "generated", by Inductor, or "traced", as it is given them

    def use_kernels_(self) -> None:
        """From now on, in this process."""
        if self.kernels != "generated":
            kernels.compile_cluster = {"eager": not_compiled, "traced": interpret_cluster}[self.kernels]
        if self.kernels == "eager":
            plan_maker.in_one_kernel = lambda optimizers: False


@dataclass(frozen=True)
class Row:
    """What became of one sample."""

    op: str
    sample: int
    outcome: str
    reason: str = ""
    generated: int = 0  #: kernels of clusters that Inductor made and that were found right
    given_up: tuple[str, ...] = field(default=())  #: why others run with eager's
    replays: int = 0  #: of the steps


@dataclass
class Trained:
    """What some steps leave behind."""

    losses: list[Tensor]
    tensors: dict[str, Tensor]

    def same(self, other: Trained) -> bool:
        """In bits, but a NaN is a NaN."""
        pairs = [
            *zip(self.losses, other.losses, strict=True),
            *((t, other.tensors[k]) for k, t in self.tensors.items()),
        ]
        return all(a.dtype == b.dtype and repr(a.tolist()) == repr(b.tolist()) for a, b in pairs)


def not_compiled(cluster: Cluster, device: torch.device) -> Compiled:
    raise NotCompiled("eager's kernels were asked for")


def is_float(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def total(out: Any) -> Tensor:
    """A real number that depends on all that an op gives, each number between -1 and 1."""
    found = []
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.is_complex():
            leaf = torch.view_as_real(leaf.resolve_conj())
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            found.append(nn.functional.softsign(leaf).sum())
    if not found:
        raise Unusable("it gives no numbers that could be differentiated")
    return sum(found[1:], found[0])


def _everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def eager(subject: Subject, widen: Callable[[Any], Any] = lambda given: given) -> Trained:
    """`widen`: of the model, and of each tensor of the batch."""
    model = widen(subject.build())
    optimizer = _optimizer(model)
    losses = []
    for i in range(STEPS):
        torch.manual_seed(i)
        try:
            loss = subject.loss(model, *(widen(t) for t in subject.batch(i)))
        except Unusable:
            raise
        except Exception as error:
            raise Unusable(f"eager raises {_in_a_line(error)}") from error
        if not loss.requires_grad:
            raise Unusable("what it gives does not depend on its first operand's gradient")
        try:
            loss.backward()
        except Exception as error:
            raise Unusable(f"eager's backward raises {_in_a_line(error)}") from error
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return Trained(losses, _everything(model))


def compiled(subject: Subject, how: How) -> tuple[Trained, tb.CompiledStep]:
    model = subject.build()
    step = tb.compile_step(
        model,
        subject.loss,
        _optimizer(model),
        mode=how.mode,
        memory=how.memory,
        update=how.update,
        poison=how.poison,
        solve_s=2.0,
    )
    losses = []
    for i in range(STEPS):
        torch.manual_seed(i)
        losses.append(step(*subject.batch(i)).detach().clone())
    return Trained(losses, _everything(model)), step


def double(given: Any) -> Any:
    """A model or a tensor in double precision, whole numbers as they are."""
    if isinstance(given, nn.Module):
        return copy.deepcopy(given).double()
    if given.is_complex():
        return given.to(torch.complex128)
    return given.double() if given.is_floating_point() else given


def in_float64(subject: Subject, reference: Trained) -> Trained | None:
    """The same steps in float64; None where there are none, or where they are other steps (other random numbers)."""
    try:
        found = eager(subject, double)
    except Exception:  # an op without a kernel for it, a sample that insists on its dtype
        return None
    alike = all(_off(a, b) <= 1e-2 * _norm(b) + 1e-3 for a, b in zip(reference.losses, found.losses, strict=True))
    return found if alike else None


def apart(ours: Trained, reference: Trained, truth: Trained | None, start: dict[str, Tensor]) -> list[str]:
    """What is not near. `truth`: in float64, if there is one. `start`: the tensors before the first step."""
    true = truth or reference
    near = max(NEAR, *(4 * torch.finfo(loss.dtype).eps for loss in reference.losses))  # some ops give half precision
    found = []
    for i, (mine, theirs, right) in enumerate(zip(ours.losses, reference.losses, true.losses, strict=True)):
        if not _near(mine, theirs, right, near * _norm(right)):
            found.append(f"loss {i} is {mine.item()!r}, eager's {theirs.item()!r}, float64's {right.item()!r}")
    for name, mine in ours.tensors.items():
        theirs, right = reference.tensors[name], true.tensors[name]
        moved = _off(right, start[name])
        if not _near(mine, theirs, right, near * (moved + 1e-2 * _norm(right))):
            found.append(f"{name} is {_off(mine, right):.3g} off, eager's {_off(theirs, right):.3g}, moved {moved:.3g}")
    return found


def _near(mine: Tensor, theirs: Tensor, right: Tensor, most: float) -> bool:
    finite = right.isfinite() & theirs.isfinite()
    if not torch.equal(mine.isnan() & ~finite, theirs.isnan() & ~finite) or bool((~mine.isfinite() & finite).any()):
        return False
    mine, theirs, right = (t.where(finite, torch.zeros((), dtype=t.dtype)) for t in (mine, theirs, right))
    most = most if math.isfinite(most) else NEAR * _norm(right)
    return _off(mine, right) <= 2 * _off(theirs, right) + max(most, 1e-10)


def _off(a: Tensor, b: Tensor) -> float:
    return _norm(double(a) - double(b))


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(double(t) if t.is_floating_point() or t.is_complex() else t.double()))


def outcome(subject: Subject, how: How) -> Row:
    row: dict[str, Any] = {"op": subject.name, "sample": subject.sample}
    try:
        reference = eager(subject)
    except Unusable as error:
        return Row(**row, outcome="refused", reason=f"skipped: {' '.join(str(error).split())}")
    if not eager(subject).same(reference):
        return Row(**row, outcome="refused", reason="skipped: eager differs from eager")
    try:
        ours, step = compiled(subject, how)
    except TakebackError as error:
        return Row(**row, outcome="refused", reason=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    except Exception:
        return Row(**row, outcome="foreign exception", reason=traceback.format_exc()[-1500:])
    row["replays"] = step._replays
    if how.kernels != "eager":
        row |= _kernels(step)
    same, wrong = ours.same(reference), []
    if not same and how.mode == "exact":
        wrong = [f"losses {ours.losses}, eager's {reference.losses}"]
    elif not same:
        wrong = apart(ours, reference, in_float64(subject, reference), _everything(subject.build()))
    if wrong:
        return Row(**row, outcome="wrong", reason="; ".join(wrong[:4]))
    if step._replays < LEAST_REPLAYS:
        return Row(**row, outcome="refused", reason=FEW_REPLAYS)
    return Row(**row, outcome="equal" if same else "near")


def _kernels(step: tb.CompiledStep) -> dict[str, Any]:
    if step._last is None:
        return {}
    executor = step._last.executor
    found = executor.kernels.in_program(executor.program)
    notes = tuple(f"{kernel.cluster}: {kernel.note}" for kernel in found if kernel.note is not None)
    return {"generated": sum(kernel.note is None for kernel in found), "given_up": notes}


def counts(rows: Sequence[Row]) -> dict[str, int]:
    found = collections.Counter(r.outcome for r in rows)
    return {o: found[o] for o in OUTCOMES}


def as_data(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Those that are not equal, or of which a kernel was given up; without what says nothing."""
    for row in (row for row in rows if row.outcome != "equal" or row.given_up):
        said = {k: v for k, v in asdict(row).items() if k != "replays" or row.reason == FEW_REPLAYS}
        yield {k: v for k, v in said.items() if v or k in ("op", "sample", "outcome")}


def accepted(subject: Subject, than: Trained) -> bool:
    """Whether eager makes steps of it, the same ones again, and with finite losses where those of another one are."""
    try:
        found = eager(subject)
        again = eager(subject)
    except Unusable:
        return False
    finite = all(a.isfinite() or not b.isfinite() for a, b in zip(found.losses, than.losses, strict=True))
    return finite and found.same(again)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"
