"""What torch computes another way while a dispatch mode looks on is known to eager_forms.py: of first gradients of real
numbers nothing else is found. Of second ones tests/step/test_other_forms.py has those that are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from takeback.compiler.capture.eager_products import running_products_differ

EXTREMES = {"max", "min", "median", "nanmedian"}
KNOWN = {"prod", "masked.prod", "masked_fill"} | EXTREMES  #: of torch's table of ops; of losses cross_entropy, too
RUNNING = {"cumprod", "masked.cumprod", "linalg.vander"}  #: in torch 2.11
GRADIENTS = ((0.7, 0.7), (-0.7, 0.7), (0.0, -0.7), (float("inf"), 0.7))  #: what comes in: the first element, the others
TRIES = len(GRADIENTS)  #: of each sample, on other values: a difference is one of rounding or of a sign, which may hide


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def samples_of_torch() -> Sequence[Any]:
    """Torch's table of ops, which takes seconds to import: not while tests are collected."""
    from torch.testing._internal.common_methods_invocations import op_db

    torch.backends.__allow_nonbracketed_mutation_flag = True  # which that import takes from all who come later
    return [op for op in op_db if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")]


def bits(results: Iterable[Any]) -> tuple[bytes, ...]:
    plain = (t.detach() for t in results if isinstance(t, torch.Tensor) and t.layout is torch.strided)
    one_nan = (t.masked_fill(t.isnan(), torch.nan) if t.is_floating_point() else t for t in plain)
    return tuple(t.resolve_conj().resolve_neg().contiguous().view(-1).numpy().tobytes() for t in one_nan)


def gradient_for(t: torch.Tensor, turn: int) -> torch.Tensor:
    first, others = GRADIENTS[turn]
    given = torch.full_like(t, others).contiguous()
    given.view(-1)[:1] = first
    return given


def run(op: Any, inputs: Any, turn: int) -> tuple[bytes, ...] | None:
    """What it gives, and the gradients; None if it does not run."""
    torch.manual_seed(1)
    first, args, kwargs = mine = tree_map_only(torch.Tensor, own, inputs)
    try:
        outs = tree_leaves(op(first, *args, **kwargs))
        ends = [t for t in outs if isinstance(t, torch.Tensor) and t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [gradient_for(t, turn) for t in ends])
        return bits(outs) + bits(t.grad for t in tree_leaves(mine) if isinstance(t, torch.Tensor))
    except Exception:
        return None


def own(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def looked_on(op: Any, inputs: Any, turn: int) -> tuple[bytes, ...] | None:
    with Looking():
        return run(op, inputs, turn)


def differs(op: Any, inputs: Any, turn: int) -> bool:
    """Whether it never has the same bits while a mode looks on. Those of LAPACK depend on where operands lie, too.
    Where torch refuses a loss (of complex eigenvectors' phase), it does so unseen only."""
    plain = run(op, inputs, turn)
    if plain is None or plain == looked_on(op, inputs, turn):
        return False
    unseen, seen = ({each(op, inputs, turn) for _ in range(8)} for each in (run, looked_on))
    return unseen.isdisjoint(seen)


def search(ops: Iterable[Any], most: int) -> tuple[set[str], int]:
    """The names of those that differ, and how many samples were tried."""
    found, tried = set(), 0
    for op in ops:
        torch.manual_seed(0)
        samples = op.sample_inputs_func(op, "cpu", torch.float32, True)  # sample_inputs looks at pytest's whole stack
        for sample, turn in itertools.product(itertools.islice(samples, most), range(TRIES)):

            def moved(t: torch.Tensor, turn: int = turn) -> torch.Tensor:
                changes = t.is_floating_point() and t.layout is torch.strided
                return (t.detach() * (1 - 0.03 * turn)).requires_grad_(t.requires_grad) if changes else t

            inputs = tree_map_only(torch.Tensor, moved, (sample.input, tuple(sample.args), dict(sample.kwargs)))
            tried += 1
            if differs(op, inputs, turn):
                found.add(op.name)
                break
    return found, tried


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_no_other_op_of_torchs_has_other_bits_while_a_mode_looks_on() -> None:
    found, tried = search(samples_of_torch(), most=24)
    assert {"prod", "masked_fill", *EXTREMES} <= found <= KNOWN | (RUNNING if running_products_differ() else set())
    assert ("cumprod" in found) == running_products_differ()
    assert tried > 10_000


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
def test_few_ops_of_torchs_have_other_bits_while_a_mode_looks_on() -> None:
    sure = {"prod", "masked_fill", *EXTREMES}
    some = (op for i, op in enumerate(samples_of_torch()) if i % 12 == 0 or op.name in sure)
    found, tried = search(some, most=8)
    assert found == sure
    assert tried > 500
