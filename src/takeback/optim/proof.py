"""Proves before a kernel's first use, on this device with these settings, that it has the bits of torch's operators.

In: a dtype and the settings of a group. Out: the empty string, or what differed; kept for the process. The trial runs
both on a few hundred tensors of odd and even sizes, of values from denormal to large, at step counts from 1 up to where
no bias is left. The global random state is not touched. (A new torch or another compiler may round otherwise.)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from takeback.flat import lay_out
from takeback.optim import fused, launch
from takeback.optim.fused import AdamSettings, Lists, ScalerTensors, SGDSettings

ROUNDS = 3
STEPS = (*range(1, 150), *(round(150 * 1.08**i) for i in range(100)))
SIZES = (1, 3, 4, 64, 100, 257, 768, 1000, launch.CHUNK, launch.CHUNK + 2, 2 * launch.CHUNK + 4)

_verdicts: dict[object, str] = {}


def differs(
    device: torch.device,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    settings: AdamSettings | SGDSettings,
    *,
    clips: bool,
) -> str:
    """What differed, or nothing. Kept for what selects the code: values may change at every step. `clips`: gradients
    are multiplied by a factor as they are read, and must come out as if they had been multiplied in place."""
    key = (device, dtype, grad_dtype, clips, *_code(settings))
    if key not in _verdicts:
        _verdicts[key] = _trial(device, dtype, grad_dtype, settings, clips)
    return _verdicts[key]


def _trial(
    device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype, settings: AdamSettings | SGDSettings, clips: bool
) -> str:
    settings = replace(settings, lr=float(settings.lr) or 1e-3)
    generator = torch.Generator().manual_seed(0)
    sizes = [SIZES[i % len(SIZES)] if i < 4 * len(SIZES) else 64 for i in range(len(STEPS))]
    layout = lay_out([(n, dtype) for n in sizes])
    offsets, size = [place.start for place in layout.slices], sum(layout.numels)

    def values(spread: int) -> Tensor:
        scale = 10.0 ** torch.randint(-spread, 3, (size,), generator=generator)
        drawn = torch.randn(size, generator=generator) * scale
        drawn[torch.rand(size, generator=generator) < 0.05] = 0.0
        return drawn.to(dtype).to(device)

    def views(flat: Tensor) -> list[Tensor]:
        return [flat[at : at + n] for at, n in zip(offsets, sizes, strict=True)]

    names = _names(settings)
    params = values(4)
    states = {name: values(8).abs_() for name in names}
    steps = torch.tensor(STEPS, dtype=torch.float32).to(device)
    twin_params, twin_steps = params.clone(), steps.clone()
    twin_states = {name: flat.clone() for name, flat in states.items()}
    table = launch.Chunks(
        views(params), offsets, offsets, range(len(sizes)), [f"trial {i}" for i in range(len(sizes))], dtype, device
    )
    for turn in range(ROUNDS):
        grads = values(25).to(grad_dtype)
        factor = torch.tensor(0.30123, device=device) if clips else None
        theirs = grads if factor is None else grads * factor
        first = turn == 0 and isinstance(settings, SGDSettings)
        twin = Lists(
            views(twin_params),
            views(theirs.to(dtype)),
            {name: views(flat) for name, flat in twin_states.items()},
            list(twin_steps.unbind()),
        )
        if isinstance(settings, AdamSettings):
            launch.adam_(table, grads, states, steps, settings, factor)
            fused.adam_(twin, settings, ScalerTensors())
        else:
            launch.sgd_(table, grads, states, settings, first, factor)
            fused.sgd_(twin, settings, first, ScalerTensors())
        steps.add_(1)
        twin_steps.add_(1)
        pairs = [("parameters", params, twin_params), *((name, states[name], twin_states[name]) for name in names)]
        for what, mine, other in pairs:
            # With the gaps between the slices, which nobody may write.
            unequal = int((_bits(mine) != _bits(other)).sum())
            if unequal:
                return f"in a trial {unequal} of {size} {what} had other bits than torch's"
    return ""


def _code(settings: AdamSettings | SGDSettings) -> tuple[object, ...]:
    decays = settings.weight_decay != 0.0
    if isinstance(settings, SGDSettings):
        return ("sgd", decays, settings.momentum != 0.0, settings.nesterov, settings.maximize)
    return ("adam", decays, settings.decoupled, settings.amsgrad, settings.maximize)


def _names(settings: AdamSettings | SGDSettings) -> tuple[str, ...]:
    if isinstance(settings, SGDSettings):
        return ("momentum_buffer",) if settings.momentum else ()
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if settings.amsgrad else ()))


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)
