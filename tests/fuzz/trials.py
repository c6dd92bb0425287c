"""Trains a recipe in eager and compiled, and says what became of it: equal, near, refused, or no program at all.

Raises `Wrong` for other results than eager's, and for a `VerifyError`: takeback noticed, but a plan was wrong. Any
other exception is foreign, and goes through.

Near, in mode fast: within a tolerance of eager's, by norms, plus FLOOR. What is not (a gradient that is zero but for
rounding) may be no further from the same training in float64 than twice what eager's is, plus the same tolerance of
itself, plus FLOOR.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from drawn_steps import DrawnModel, Recipe, batch, loss_fn, optimizers_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

import takeback as tb
from harness import same
from takeback.errors import TakebackError, VerifyError

CLIP = 0.5
NEAR = 1e-3  #: in mode fast, of a tensor's norm: sums in another order, and what some steps make of that
NEAR_IN_HALF = 3e-2  #: the same where something is computed in bfloat16
FLOOR = 1e-6
SAME_STEPS = 1e-2  #: a training in float64 whose results are further than this from eager's is another one


class Wrong(AssertionError):
    """The compiled program does not do what eager does."""


@dataclass
class Trained:
    """What the steps gave and left."""

    given: list[Tensor]
    left: dict[str, Tensor]


def eager(recipe: Recipe) -> Trained | None:
    """None where eager itself refuses, or gives no finite numbers: then the recipe is no program."""
    found = _eager(recipe, *_made(recipe), lambda t: t)
    if found is None:
        return None
    return found if all(t.isfinite().all() for t in (*found.given, *found.left.values())) else None


def _eager(
    recipe: Recipe,
    model: DrawnModel,
    optimizers: list[torch.optim.Optimizer],
    widen: Callable[[Tensor], Tensor],
) -> Trained | None:
    scaler = _scaler(recipe)
    given: list[Tensor] = []
    for i in range(len(recipe.rows)):
        torch.manual_seed(i)
        try:
            given += _backward(recipe, model, scaler, tuple(map(widen, batch(recipe, i))))
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None
        if not _waits(recipe, i):
            _update(recipe, model, optimizers, scaler)
    return Trained(given, _left(model, optimizers))


class _Double(TorchFunctionMode):
    """What is made in another precision is made in float64, of the same random numbers. Autocast leaves that alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.bfloat16):
            return args[0].double()
        if func is torch.randn_like:
            return torch.randn_like(args[0], dtype=torch.float32).double()
        return func(*args, **(kwargs or {}))


def in_float64(recipe: Recipe, reference: Trained, tolerance: float) -> Trained | None:
    """The same training in float64; None where it is another one, or there is none. A value that decides, or is
    sorted, may come out otherwise there."""
    model, _ = _made(recipe)
    model.double()
    with warnings.catch_warnings(), _Double():
        warnings.simplefilter("ignore")
        found = _eager(recipe, model, optimizers_of(recipe, model), lambda t: t.double())
    if found is None or found.left.keys() != reference.left.keys():
        return None
    near = max(SAME_STEPS, tolerance)
    alike = all(_off(a, b) <= near * _norm(b) + 1e-3 for a, b in zip(found.given, reference.given, strict=True))
    same_random = torch.equal(found.left["random state"], reference.left["random state"])
    return found if alike and same_random else None


def _backward(
    recipe: Recipe, model: DrawnModel, scaler: torch.amp.GradScaler | None, given: tuple[Tensor, ...]
) -> list[Tensor]:
    """As everybody writes it: gradients are added up in `.grad`."""
    count = 2 if recipe.loop == "accumulate" else 1
    total: list[Tensor] = []
    for i in range(count):
        out = loss_fn(model, *(t.chunk(count)[i] if count > 1 else t for t in given))
        loss, *aux = out if isinstance(out, tuple) else (out,)
        loss = loss / count if count > 1 else loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        total = [loss.detach() if not total else total[0] + loss.detach(), *(t.detach().clone() for t in aux)]
    return [t.clone() for t in total]


def _update(
    recipe: Recipe,
    model: DrawnModel,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
) -> None:
    if recipe.clip:
        if scaler is not None:
            scaler.unscale_(optimizers[0])
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], CLIP)
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    model.zero_grad()


def _waits(recipe: Recipe, i: int) -> bool:
    """Whether the gradients of a call wait for the next one's."""
    return recipe.loop == "pending" and i % 2 == 0 and i + 1 < len(recipe.rows)


def _scaler(recipe: Recipe) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if recipe.scaler else None


def compiled(recipe: Recipe, mode: str) -> tuple[Trained, tb.CompiledStep]:
    model, optimizers = _made(recipe)
    step = tb.compile_step(
        model,
        loss_fn,
        optimizers if len(optimizers) > 1 else optimizers[0],
        accumulate=2 if recipe.loop == "accumulate" else 1,
        scaler=_scaler(recipe),
        mode=mode,
        memory=recipe.memory,
        update="early" if recipe.early else "end",
        poison=recipe.poison,
        clip_norm=CLIP if recipe.clip else None,
        solve_s=2.0,
    )
    given: list[Tensor] = []
    for i in range(len(recipe.rows)):
        torch.manual_seed(i)
        out = step(*batch(recipe, i), update=False) if _waits(recipe, i) else step(*batch(recipe, i))
        given += [t.detach().clone() for t in (out if isinstance(out, tuple) else (out,))]
    return Trained(given, _left(model, optimizers)), step


def judge(recipe: Recipe, mode: str, *, whole: bool = True) -> str:
    """The outcome in a word, a refusal with the start of its message. `whole`: what the training leaves is compared,
    too. Where kernels round otherwise than eager's, it says nothing: an optimizer that divides a gradient by its size
    makes a step of what is zero but for rounding. There a kernel that was further from double precision than it may be
    is "given up", as it is in a step of the user's; elsewhere, where eager's kernels run, it is wrong."""
    expected = eager(recipe)
    if expected is None:
        return "no program"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours, step = compiled(recipe, mode)
        except VerifyError as error:
            raise Wrong(f"{mode}: {error}\n{recipe}") from error
        except TakebackError as error:
            return f"refused: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    given_up = [note for note in _notes(step) if "double precision" in note or "result" in note or "operand" in note]
    if given_up and not whole:
        return f"given up: {'; '.join(given_up)}\n{recipe}"
    if given_up:
        raise Wrong(f"{mode}: {given_up}\n{recipe}")
    if _same(ours, expected):
        return "equal"
    if not whole:
        return "near"
    tolerance = _tolerance(recipe) if mode == "fast" else 0.0
    apart = _apart(ours, expected, tolerance)
    truth = in_float64(recipe, expected, tolerance) if apart and mode == "fast" else None
    wrong = [name for name in apart if truth is None or not _as_near_to(truth, name, ours, expected, tolerance)]
    if wrong:
        raise Wrong(f"{mode}: {', '.join(apart[name] for name in wrong[:5])} differ\n{recipe}")
    return "near"


def _as_near_to(truth: Trained, name: str, ours: Trained, expected: Trained, tolerance: float) -> bool:
    """Whether what is not near eager's is no further from float64 than that explains."""
    mine, theirs, right = (_named(trained).get(name) for trained in (ours, expected, truth))
    if mine is None or theirs is None or right is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if not mine.is_floating_point() or not right.isfinite().all():
        return False
    return _off(mine, right) <= 2 * _off(theirs, right) + tolerance * _norm(right) + FLOOR


def _notes(step: tb.CompiledStep) -> list[str]:
    """Why kernels of clusters were given up."""
    if step._last is None:
        return []
    executor = step._last.executor
    return [f"{k.cluster}: {k.note}" for k in executor.kernels.in_program(executor.program) if k.note is not None]


def _tolerance(recipe: Recipe) -> float:
    in_half = recipe.autocast or any(name in ("half", "autocast") for name, _, _ in recipe.instructions)
    return NEAR_IN_HALF if in_half else NEAR


def _made(recipe: Recipe) -> tuple[DrawnModel, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = DrawnModel(recipe)
    return model, optimizers_of(recipe, model)


def _left(model: DrawnModel, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    names = {p: name for name, p in model.named_parameters()}
    found = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    for p, states in (item for optimizer in optimizers for item in optimizer.state.items()):
        found |= {f"{names[p]}.{k}": v.detach().clone() for k, v in states.items() if isinstance(v, Tensor)}
    found["random state"] = torch.get_rng_state()
    return found


def _same(ours: Trained, expected: Trained) -> bool:
    pairs = zip(ours.given, expected.given, strict=True)
    left = ours.left.keys() == expected.left.keys()
    return left and all(same(a, b) for a, b in pairs) and all(same(t, ours.left[k]) for k, t in expected.left.items())


def _apart(ours: Trained, expected: Trained, near: float) -> dict[str, str]:
    """What is further off than `near` of itself, with by how much. The random state and whole numbers must be the
    same."""
    mine_of, true_of = _named(ours), _named(expected)
    found = {k: k for k in (*mine_of, *true_of) if k not in mine_of or k not in true_of}
    for name, true in true_of.items():
        if name in found:
            continue
        mine = mine_of[name]
        if mine.shape != true.shape or mine.dtype != true.dtype:
            found[name] = name
        elif not mine.is_floating_point():
            if not torch.equal(mine, true):
                found[name] = name
        elif not same(mine, true) and not _off(mine, true) <= near * _norm(true) + (FLOOR if near else 0.0):
            found[name] = f"{name} by {_off(mine, true) / (_norm(true) or 1):.2g}"
    return found


def _named(trained: Trained) -> Mapping[str, Tensor]:
    return {**{f"result {i}": t for i, t in enumerate(trained.given)}, **trained.left}


def _off(a: Tensor, b: Tensor) -> float:
    return _norm(a.double() - b.double())


def _norm(t: Tensor) -> float:
    return float(t.double().norm())
