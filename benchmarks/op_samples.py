"""PyTorch's own samples of its differentiable operators and of its modules, each trained by takeback beside eager.

    python benchmarks/op_samples.py [--of ops|modules] [--mode fast|exact] [--memory auto] [--early] [--poison]
        [--kernels eager|traced|generated] [--samples 1] [--limit N] [--only NAME ...] [--json FILE --key NAME]
        [--processes N]

From `torch.testing._internal`: `common_methods_invocations.op_db` and `common_modules.module_db`, on the CPU, in
float32, the first samples of each. A step multiplies each floating-point tensor of the sample by a parameter of its
own, calls the op, and adds up what it gives; whole numbers move on along a dimension from step to step. Where eager
does not accept one of these, that tensor is taken as it is. sample_steps.py says how it is trained and what the
outcomes are. In mode fast clusters run with eager's kernels, so that what is looked at is the plan; with `--kernels
traced` as what Inductor would be given, op by op, each compared with double precision; with `--kernels generated`
Inductor compiles them, a few seconds each. The JSON file holds several such runs, by `--key`. Of several processes each
takes every so-manieth op.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from common import machine
from sample_steps import (
    STEPS,
    How,
    Row,
    Subject,
    Unusable,
    accepted,
    as_data,
    counts,
    eager,
    is_float,
    not_compiled,
    outcome,
    total,
)

__all__ = ["How", "differentiable", "not_compiled", "outcome", "subjects_of_module", "subjects_of_op"]


class Scaled(nn.Module):
    """Numbers, by which tensors are multiplied, and perhaps a module that takes the products."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        self.inner = inner

    def with_weights_(self, count: int) -> Scaled:
        self.weights = nn.ParameterList(nn.Parameter(torch.tensor(0.9 + 0.01 * i)) for i in range(count))
        return self


def differentiable() -> list[Any]:
    from torch.testing._internal import common_methods_invocations

    # Samples of ops that draw random numbers set the seed inside of the step; here each step has one before it.
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    ops = common_methods_invocations.op_db
    return [op for op in ops if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")]


def modules() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def named(info: Any) -> str:
    """An op or a module. Of an op there may be variants."""
    variant = getattr(info, "variant_test_name", "")
    return f"{info.name}.{variant}" if variant else str(info.name)


def subjects_of_op(op: Any, count: int) -> Iterator[Subject | Row]:
    """Of its first samples; a row for one of which there can be no step."""
    name = named(op)
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
    name: str, number: int, build: Callable[[], Scaled], given: Any, call: Callable[..., Any]
) -> Subject | Row:
    """`given`: what `call` takes after the model, of which floating-point tensors are multiplied, and tensors of whole
    numbers turned, each if eager accepts that."""
    leaves, form = pytree.tree_flatten(given)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i].detach() for i in places]
    floats = [i for i, t in enumerate(tensors) if is_float(t)]
    try:
        trains = any(p.requires_grad for p in build().parameters()) and name.startswith("nn.")
    except Exception as error:
        return Row(name, number, "refused", f"skipped: it is not built: {type(error).__name__}: {str(error)[:120]}")
    if not floats and not trains:
        return Row(name, number, "refused", "skipped: none of its operands is a floating-point tensor")

    def made(scaled: Sequence[int], turned: Mapping[int, int]) -> Subject:
        def loss(model: Any, *given: Tensor) -> Tensor:
            filled = list(leaves)
            for i, (place, tensor) in enumerate(zip(places, given, strict=True)):
                filled[place] = tensor * model.weights[scaled.index(i)] if i in scaled else tensor
            found = total(call(model, *pytree.tree_unflatten(filled, form)))
            return found if scaled else found + 0 * model.weights[0]

        return Subject(name, number, lambda: build().with_weights_(len(scaled) or 1), loss, tensors, turned)

    scaled, turned = floats[:1], {}
    try:
        reference = eager(made(scaled, turned))
    except Unusable:
        return made(scaled, turned)  # which says so
    if accepted(made(floats, turned), reference):
        scaled = floats
    else:
        for i in floats[1:]:
            scaled += [i] if accepted(made([*scaled, i], turned), reference) else []
    for i, t in enumerate(tensors):
        for dim in turns(t):
            if accepted(made(scaled, turned | {i: dim}), reference):
                turned[i] = dim
                break
    return made(scaled, turned)


def turns(t: Tensor) -> list[int]:
    """Dimensions along which values of whole numbers can be moved on so that it makes a difference."""
    if is_float(t) or t.layout is not torch.strided:
        return []
    return [dim for dim in reversed(range(t.dim())) if not torch.equal(t.roll(1, dim), t)]


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
    parser.add_argument("--processes", type=int, default=1, help="that share the ops")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.processes > 1:
        at_once(asked)
    else:
        try_all(asked)


def try_all(asked: argparse.Namespace) -> None:
    how = How(asked.mode, asked.memory, "early" if asked.early else "end", asked.poison, asked.kernels)
    how.use_kernels_()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    infos = differentiable() if asked.of == "ops" else modules()
    infos = [info for info in infos if not asked.only or info.name in asked.only][: asked.limit]
    infos = infos[asked.part[0] :: asked.part[1]]
    subjects_of = subjects_of_op if asked.of == "ops" else subjects_of_module
    rows: list[Row] = []
    varied: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    for done, info in enumerate(infos, 1):
        for subject in subjects_of(info, asked.samples):
            rows.append(rows_of(subject, how))
            if isinstance(subject, Subject):
                varied["tensors of whole numbers"] += sum(not is_float(t) for t in subject.tensors)
                varied["of which other values in each step"] += len(subject.turned)
                varied["floating-point operands"] += sum(map(is_float, subject.tensors))
                varied["of which with a gradient"] += len(subject.build().weights) * any(map(is_float, subject.tensors))
            if rows[-1].outcome in ("wrong", "foreign exception") or asked.only:
                print(rows[-1], flush=True)
        if done % 20 == 0 or done == len(infos):
            print(f"{time.perf_counter() - start:.0f} s, {done} of {len(infos)}: {counts(rows)}", flush=True)
            found = {
                "how": asdict(how) | {"of": asked.of, "steps": STEPS, "samples of each": asked.samples},
                "subjects": done,
                "counts": counts(rows),
                "operands": dict(varied),
                "least replays": min((r.replays for r in rows if r.outcome != "refused"), default=0),
                "kernels": {
                    "generated": sum(r.generated for r in rows),
                    "given up": sum(len(r.given_up) for r in rows),
                },
                "rows": list(as_data(rows)),
            }
            write_(asked, found, time.perf_counter() - start)


def at_once(asked: argparse.Namespace) -> None:
    """In processes of their own, whose rows come together in the order of the ops."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(asked.processes)]
        parts = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, *sys.argv[1:]),
                    *(
                        "--processes",
                        "1",
                        "--part",
                        str(i),
                        str(len(files)),
                        "--json",
                        str(file),
                    ),  # the last word counts
                ]
            )
            for i, file in enumerate(files)
        ]
        ended = [part.wait() for part in parts]
        if any(ended):
            raise SystemExit(f"processes ended with {ended}: nothing is written")
        parts_found = [json.loads(file.read_text())[asked.key] for file in files]
    names = [named(info) for info in (differentiable() if asked.of == "ops" else modules())]
    found = merged(parts_found, names)
    write_(asked, found, time.perf_counter() - start)
    print(found["counts"])


def merged(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """What parts of the ops came to, as one; rows in the order of `names`."""
    added = {
        key: dict(sum((collections.Counter(part[key]) for part in parts), collections.Counter[str]()))
        for key in ("operands", "kernels")
    }
    return {
        "how": parts[0]["how"],
        "subjects": sum(part["subjects"] for part in parts),
        "counts": {outcome: sum(part["counts"][outcome] for part in parts) for outcome in parts[0]["counts"]},
        **{key: {name: added[key].get(name, 0) for name in parts[0][key]} for key in added},
        "least replays": min(part["least replays"] for part in parts),
        "rows": sorted(
            (row for part in parts for row in part["rows"]), key=lambda row: (names.index(row["op"]), row["sample"])
        ),
    }


def write_(asked: argparse.Namespace, found: Mapping[str, Any], seconds: float) -> None:
    if asked.json is None:
        return
    known = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    about = {"date": datetime.date.today().isoformat(), "minutes": round(seconds / 60, 1), "machine": machine()}
    known[asked.key] = about | dict(found)
    asked.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
