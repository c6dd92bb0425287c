"""Workspace and NormCache: what S4 only estimated, and what they cost where they do not help.

    python benchmarks/workspace.py [--rounds 15] [--out FILE]

context   the attention context's products (context_products.py) at width 768, 512 tokens, batch 4: plain, and written
          into a Workspace. Requests, sum and peak: of tensors asked for during one call, beside what the workspace
          holds all the time. Values are compared first: bitwise, the gradient of strength within 1e-5
take      ws.take beside torch.empty, by size; alone, and with every byte written
norms     NormCache beside computing every norm, by number and size of parameters and by how often they are asked for
          between two updates. An update is a moved version: neither side pays for the optimizer

Ratios are medians over rounds of one system's time over the other's in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import context_products as products
import takeback as tb
from common import Step, allocated, in_turn, machine, peak_bytes, ratio

WIDTH, LENGTH, BATCH = 768, 512, 4
MIB = 1 << 20
WARM = 3


@dataclass(frozen=True)
class Row:
    """One system in one case."""

    what: str  #: context, take or norms
    case: str
    system: str
    median_us: float  #: of one call, one take, or one norm
    ratio: float  #: to the first system of the case
    requests: int | None = None  #: to the allocator during one call
    allocated_mib: float | None = None  #: their sum
    peak_mib: float | None = None  #: most of them at one time
    held_mib: float | None = None  #: by the workspace, all the time
    page_faults: float | None = None


def page_faults(step: Step, count: int = 5) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / count


def measured(
    what: str, case: str, systems: Mapping[str, Step], rounds: int, *, burst: int = 4, per: int = 1, memory: bool = True
) -> list[Row]:
    """One row for each system; `per` is how many takes or norms one call makes."""
    for step in systems.values():
        for _ in range(WARM):
            step()
    times = in_turn(systems, rounds, burst, "cpu")
    first = next(iter(systems))
    rows = []
    for name, step in systems.items():
        held = getattr(step, "ws", None)
        requests, sum_bytes = allocated(step) if memory else (None, None)
        rows.append(
            Row(
                what,
                case,
                name,
                round(statistics.median(times[name]) / per * 1e6, 3),
                round(ratio(times, name, first), 3),
                requests,
                None if sum_bytes is None else round(sum_bytes / MIB, 3),
                round(peak_bytes(step, "cpu") / MIB, 3) if memory else None,
                round(held.stats().held_bytes / MIB, 3) if held is not None else None,
                round(page_faults(step) / per, 3),
            )
        )
    return rows


def with_ws(ws: tb.Workspace, step: Step) -> Step:
    step.ws = ws  # type: ignore[attr-defined]
    return step


# -- the attention context ---------------------------------------------------------------------------------------


def context_cases() -> dict[str, dict[str, Step]]:
    torch.manual_seed(0)
    x_in, x_out, grad = torch.randn(3, BATCH, LENGTH, WIDTH).unbind()
    x, strength = x_out.clone().requires_grad_(), torch.tensor(0.5, requires_grad=True)
    fresh = products.update(torch.zeros(WIDTH, WIDTH), x_in, x_out)
    _check_equal(x_in, x, grad, fresh, strength)
    graphs = tb.Workspace()  # of the graphs that only the backward is measured on
    plain_context, own_context = [fresh.clone()], fresh.clone()
    graph = products.apply(x, fresh, strength)
    with graphs.step():
        own_graph = products.apply_in(x, fresh, strength, graphs)
    for_grad = own_graph.grad_fn
    assert for_grad is not None
    ws = {name: tb.Workspace() for name in ("update", "forward", "backward", "all")}
    for_grad.ws = ws["backward"]  # type: ignore[attr-defined]

    def plain_update() -> None:
        plain_context[0] = products.update(plain_context[0], x_in, x_out)

    def plain_forward() -> None:
        with torch.no_grad():
            products.apply(x, fresh, strength)

    def plain_backward() -> None:
        torch.autograd.grad(graph, (x, strength), grad, retain_graph=True)

    def plain_all() -> None:
        plain_update()
        torch.autograd.grad(products.apply(x, plain_context[0], strength), (x, strength), grad)

    def own_update() -> None:
        with ws["update"].step():
            products.update_(own_context, x_in, x_out, ws["update"])

    def own_forward() -> None:
        with torch.no_grad(), ws["forward"].step():
            products.apply_in(x, fresh, strength, ws["forward"])

    def own_backward() -> None:
        with ws["backward"].step():
            torch.autograd.grad(own_graph, (x, strength), grad, retain_graph=True)

    def own_all() -> None:
        with ws["all"].step():
            products.update_(own_context, x_in, x_out, ws["all"])
            torch.autograd.grad(products.apply_in(x, own_context, strength, ws["all"]), (x, strength), grad)

    return {
        "update of the context": {"plain": plain_update, "Workspace": with_ws(ws["update"], own_update)},
        "forward": {"plain": plain_forward, "Workspace": with_ws(ws["forward"], own_forward)},
        "backward": {"plain": plain_backward, "Workspace": with_ws(ws["backward"], own_backward)},
        "one batch: all three": {"plain": plain_all, "Workspace": with_ws(ws["all"], own_all)},
    }


def _check_equal(
    x_in: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, context: torch.Tensor, strength: torch.Tensor
) -> None:
    """Before anything is measured: the two forms give the same values."""
    ws = tb.Workspace()
    updated = products.update(context, x_in, x.detach())
    out = products.apply(x, updated, strength)
    expected = torch.autograd.grad(out, (x, strength), grad)
    with ws.step():
        own = products.update_(context.clone(), x_in, x.detach(), ws)
        got_out = products.apply_in(x, own, strength, ws)
        got = torch.autograd.grad(got_out, (x, strength), grad)
        assert torch.equal(own, updated)
        assert torch.equal(got_out, out)
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)


# -- take beside torch.empty -------------------------------------------------------------------------------------

SIZES = {"256 B": 1 << 8, "16 KiB": 1 << 14, "1 MiB": 1 << 20, "8 MiB": 1 << 23, "64 MiB": 1 << 26}


def take_cases() -> dict[str, tuple[dict[str, Step], int]]:
    found = {}
    for label, size_bytes in SIZES.items():
        for writes in (False, True):
            count = 200 if size_bytes < MIB or not writes else max(2, (32 * MIB) // size_bytes)
            how = "written" if writes else "untouched"
            found[f"{label}, {how}"] = (_takers(size_bytes // 4, count, writes=writes), count)
    return found


def _takers(numel: int, count: int, *, writes: bool) -> dict[str, Step]:
    ws, named = tb.Workspace(), tb.Workspace()

    def loop(make: Callable[[], torch.Tensor]) -> None:
        for _ in range(count):
            t = make()
            if writes:
                t.fill_(1.0)
            del t

    def empty() -> None:
        loop(lambda: torch.empty(numel))

    def take() -> None:
        with ws.step():
            loop(lambda: ws.take(numel))

    def take_named() -> None:
        with named.step():
            loop(lambda: named.take(numel, name="scratch"))

    return {"torch.empty": empty, "take": with_ws(ws, take), "take, with a name": with_ws(named, take_named)}


# -- norms -------------------------------------------------------------------------------------------------------

PARAMETERS = {
    "148 of 1 Ki elements": (148, 1 << 10),
    "148 of 64 Ki elements": (148, 1 << 16),
    "12 of 2 Mi elements": (12, 1 << 21),
}
ASKS = (1, 2, 8)


def norm_cases() -> dict[str, tuple[dict[str, Step], int]]:
    found = {}
    for label, (count, numel) in PARAMETERS.items():
        params = [torch.nn.Parameter(torch.randn(numel)) for _ in range(count)]
        for asks in ASKS:
            times = "once" if asks == 1 else f"{asks} times"
            found[f"{label}, asked {times} per update"] = (_askers(params, asks), count * asks)
    return found


def _askers(params: list[torch.nn.Parameter], asks: int) -> dict[str, Step]:
    cache = tb.NormCache()

    def plain() -> None:
        torch.autograd.graph.increment_version(params)
        for _ in range(asks):
            for p in params:
                torch.linalg.vector_norm(p.detach())

    def cached() -> None:
        torch.autograd.graph.increment_version(params)
        for _ in range(asks):
            for p in params:
                cache.norm(p)

    def foreach() -> None:
        torch.autograd.graph.increment_version(params)
        tensors = [p.detach() for p in params]
        for _ in range(asks):
            torch._foreach_norm(tensors)

    plain()
    assert all(torch.equal(cache.norm(p), torch.linalg.vector_norm(p.detach())) for p in params)
    return {"computed": plain, "NormCache": cached, "computed, foreach": foreach}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds for each case")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "workspace-cpu.json")
    arguments = parser.parse_args()
    console = Console(width=130, file=sys.stdout)
    rounds, load = arguments.rounds, round(os.getloadavg()[0], 2)
    rows: list[Row] = []
    for case, systems in track(context_cases().items(), "context", console=console, transient=True):
        rows += measured("context", case, systems, rounds)
    for what, cases in (("take", take_cases()), ("norms", norm_cases())):
        for case, (systems, per) in track(cases.items(), what, console=console, transient=True):
            rows += measured(what, case, systems, rounds, burst=3, per=per, memory=False)
    about = machine() | {"rounds": rounds, "width": WIDTH, "tokens": LENGTH, "batch": BATCH, "load_before": load}
    arguments.out.write_text(json.dumps({"machine": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    show(console, rows)
    console.print(f"written to {arguments.out}")


def show(console: Console, rows: list[Row]) -> None:
    table = Table(
        "what", "case", "system", "median us", "ratio", "requests", "sum MiB", "peak MiB", "held MiB", "faults"
    )
    for r in rows:
        rest = (r.requests, r.allocated_mib, r.peak_mib, r.held_mib, r.page_faults)
        values = ("" if value is None else f"{value:g}" for value in rest)
        table.add_row(r.what, r.case, r.system, f"{r.median_us:.2f}", f"{r.ratio:.3f}", *values)
    console.print(table)


if __name__ == "__main__":
    main()
