"""Trains a recipe in eager and compiled, and says what became of it: equal, near, refused, or no program at all.

Raises `Wrong` for other results than eager's, and for a `VerifyError`: takeback noticed, but a plan was wrong. Any
other exception is foreign, and goes through.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from drawn_steps import DrawnModel, Recipe, batch, loss_fn, optimizers_of
from torch import Tensor

import takeback as tb
from harness import same
from takeback.errors import TakebackError, VerifyError

CLIP = 0.5
NEAR = 1e-3  #: in mode fast, of a tensor's norm: sums in another order, and what some steps make of that
NEAR_IN_HALF = 3e-2  #: the same where something is computed in bfloat16


class Wrong(AssertionError):
    """The compiled program does not do what eager does."""


@dataclass
class Trained:
    """What the steps gave and left."""

    given: list[Tensor]
    left: dict[str, Tensor]


def eager(recipe: Recipe) -> Trained | None:
    """None where eager itself refuses, or gives no finite numbers: then the recipe is no program."""
    model, optimizers = _made(recipe)
    scaler = _scaler(recipe)
    given: list[Tensor] = []
    for i in range(len(recipe.rows)):
        torch.manual_seed(i)
        try:
            given += _backward(recipe, model, scaler, batch(recipe, i))
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None
        if not _waits(recipe, i):
            _update(recipe, model, optimizers, scaler)
    found = Trained(given, _left(model, optimizers))
    return found if all(t.isfinite().all() for t in (*found.given, *found.left.values())) else None


def _backward(
    recipe: Recipe, model: DrawnModel, scaler: torch.amp.GradScaler | None, given: tuple[Tensor, Tensor]
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
    """The outcome in a word, a refusal with the start of its message. A kernel that was found wrong is wrong. `whole`:
    what the training leaves is compared, too. Where kernels round otherwise than eager's, it says nothing: an optimizer
    that divides a gradient by its size makes a step of what is zero but for rounding."""
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
    if given_up:
        raise Wrong(f"{mode}: {given_up}\n{recipe}")
    if _same(ours, expected):
        return "equal"
    if not whole:
        return "near"
    apart = _apart(ours, expected, near=_tolerance(recipe) if mode == "fast" else 0.0)
    if apart:
        raise Wrong(f"{mode}: {', '.join(apart[:5])} differ\n{recipe}")
    return "near"


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


def _apart(ours: Trained, expected: Trained, near: float) -> list[str]:
    """What is further off than `near` of itself. The random state and whole numbers must be the same."""
    named: Mapping[str, tuple[Tensor, Tensor]] = {
        **{f"result {i}": pair for i, pair in enumerate(zip(ours.given, expected.given, strict=True))},
        **{k: (ours.left.get(k, torch.empty(0)), t) for k, t in expected.left.items()},
    }
    found = [k for k in ours.left if k not in expected.left]
    for name, (mine, true) in named.items():
        if mine.shape != true.shape or mine.dtype != true.dtype:
            found.append(name)
        elif not mine.is_floating_point():
            found += [name] * (not torch.equal(mine, true))
        elif not same(mine, true):
            off, norm = (float(t.double().norm()) for t in (mine - true, true))
            if not off <= near * norm + (1e-6 if near else 0.0):
                found.append(f"{name} by {off / (norm or 1):.2g}")
    return found
