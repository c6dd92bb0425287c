"""PyTorch's own samples of its differentiable operators and of its modules, each trained by takeback beside eager.

    python benchmarks/op_samples.py [--of ops|modules] [--mode fast|exact] [--memory auto] [--early] [--poison]
        [--kernels eager|traced|generated] [--samples 1] [--limit N] [--only NAME ...] [--json FILE --key NAME]

From `torch.testing._internal`: `common_methods_invocations.op_db` and `common_modules.module_db`, on the CPU, in
float32, the first samples of each. A step multiplies the sample's first tensor by a parameter, calls the op, and adds
up what it gives; sample_steps.py says how it is trained and what the outcomes are. In mode fast clusters run with
eager's kernels, so that what is looked at is the plan; with `--kernels traced` as what Inductor would be given, op by
op, each compared with double precision; with `--kernels generated` Inductor compiles them, a few seconds each. The JSON
file holds several such runs, by `--key`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from common import machine
from sample_steps import STEPS, How, Row, Subject, Unusable, as_data, counts, not_compiled, outcome, total

__all__ = ["How", "differentiable", "not_compiled", "outcome", "subjects_of_module", "subjects_of_op"]


class Scaled(nn.Module):
    """One number, by which the first tensor is multiplied, and perhaps a module that takes the product."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.9))
        self.inner = inner


def differentiable() -> list[Any]:
    from torch.testing._internal import common_methods_invocations

    # Samples of ops that draw random numbers set the seed inside of the step; here each step has one before it.
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    ops = common_methods_invocations.op_db
    return [op for op in ops if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")]


def modules() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def subjects_of_op(op: Any, count: int) -> Iterator[Subject | Row]:
    """Of its first samples; a row for one of which there can be no step."""
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    torch.manual_seed(0)
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=False)):
        if number >= count:
            return
        given = (sample.input, tuple(sample.args), dict(sample.kwargs))
        yield _subject(name, number, Scaled, given, lambda model, first, args, named: op(first, *args, **named))


def subjects_of_module(info: Any, count: int) -> Iterator[Subject | Row]:
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    for number, sample in enumerate(list(samples)[:count]):
        made, taken = sample.constructor_input, sample.forward_input
        if taken is None:
            yield Row(info.name, number, "refused", "skipped: the sample has no call of the module")
            continue

        def build(made: Any = made, taken: Any = taken) -> nn.Module:
            torch.manual_seed(0)
            module = info.module_cls(*made.args, **made.kwargs).train()
            if any(torch.nn.parameter.is_lazy(p) for p in module.parameters()):
                with torch.no_grad():
                    module(*taken.args, **taken.kwargs)  # which gives a lazy module its shapes
            return Scaled(module)

        given = (None, tuple(taken.args), dict(taken.kwargs))
        call = lambda model, _, args, named: model.inner(*args, **named)  # noqa: E731
        yield _subject(info.name, number, build, given, call)


def _subject(
    name: str, number: int, build: Callable[[], nn.Module], given: Any, call: Callable[..., Any]
) -> Subject | Row:
    """`given`: what `call` takes after the model, of which the first floating-point tensor is multiplied."""
    leaves, form = pytree.tree_flatten(given)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    scaled = next((i for i in places if leaves[i].is_floating_point() or leaves[i].is_complex()), None)
    try:
        trains = any(p.requires_grad for p in build().parameters()) and name.startswith("nn.")
    except Exception as error:
        return Row(name, number, "refused", f"skipped: it is not built: {type(error).__name__}: {str(error)[:120]}")
    if scaled is None and not trains:
        return Row(name, number, "refused", "skipped: none of its operands is a floating-point tensor")

    def loss(model: Any, *tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor * model.weight if place == scaled else tensor
        found = total(call(model, *pytree.tree_unflatten(filled, form)))
        return found + 0 * model.weight if scaled is None else found

    return Subject(name, number, build, loss, [leaves[i].detach() for i in places])


def rows_of(subject: Subject | Row, how: How) -> Row:
    if isinstance(subject, Row):
        return subject
    try:
        return outcome(subject, how)
    except Unusable as error:
        return Row(subject.name, subject.sample, "refused", f"skipped: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=("ops", "modules"), default="ops")
    parser.add_argument("--mode", choices=("exact", "fast"), default="fast")
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--early", action="store_true", help='update="early"')
    parser.add_argument("--poison", action="store_true")
    parser.add_argument(
        "--kernels", choices=("eager", "traced", "generated"), default="eager", help="of clusters, in mode fast"
    )
    parser.add_argument("--samples", type=int, default=1, help="of each op")
    parser.add_argument("--limit", type=int, help="so many ops")
    parser.add_argument("--only", nargs="*", help="ops by name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--key", default="run", help="under which name it is put into the JSON file")
    asked = parser.parse_args()
    how = How(asked.mode, asked.memory, "early" if asked.early else "end", asked.poison, asked.kernels)
    how.use_kernels_()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    infos = differentiable() if asked.of == "ops" else modules()
    infos = [info for info in infos if not asked.only or info.name in asked.only][: asked.limit]
    subjects_of = subjects_of_op if asked.of == "ops" else subjects_of_module
    rows: list[Row] = []
    start = time.perf_counter()
    for done, info in enumerate(infos, 1):
        for subject in subjects_of(info, asked.samples):
            rows.append(rows_of(subject, how))
            if rows[-1].outcome in ("wrong", "foreign exception") or asked.only:
                print(rows[-1], flush=True)
        if done % 20 == 0 or done == len(infos):
            print(f"{time.perf_counter() - start:.0f} s, {done} of {len(infos)}: {counts(rows)}", flush=True)
            if asked.json is not None:
                known = json.loads(asked.json.read_text()) if asked.json.exists() else {}
                known[asked.key] = {
                    "date": datetime.date.today().isoformat(),
                    "minutes": round((time.perf_counter() - start) / 60, 1),
                    "machine": machine(),
                    "how": asdict(how) | {"of": asked.of, "steps": STEPS, "samples of each": asked.samples},
                    "subjects": done,
                    "counts": counts(rows),
                    "kernels": {
                        "generated": sum(r.generated for r in rows),
                        "given up": sum(len(r.given_up) for r in rows),
                    },
                    "rows": list(as_data(rows)),
                }
                asked.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
