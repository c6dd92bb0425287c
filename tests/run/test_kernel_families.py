"""One kernel for clusters of many lengths: what varies is found in three texts, never guessed; kernels hold where their
guards do; steps take them over, and are eager's within rounding on lengths that nobody compiled for."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.program import BufferId, Cluster, Region
from takeback.compiler.run import kernel_families, kernels, symbolic
from takeback.compiler.run.cluster_family import (
    ClusterFamily,
    Expression,
    Ratio,
    family_of,
    fitted,
    fitted_ratio,
    outline_of,
)
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.cluster_proof import drawn, what_is_wrong
from takeback.compiler.run.earnings import Earnings
from takeback.compiler.run.inductor import NotCompiled
from takeback.compiler.run.kernel_families import KernelFamilies
from takeback.compiler.run.kernel_file import Generated
from takeback.compiler.run.symbolic import SymbolicKernel, compile_family

pytestmark = pytest.mark.usefixtures("one_thread", "kernels_for_all_lengths")
CPU = torch.device("cpu")


# -- texts -------------------------------------------------------------------------------------------------------------


def text(length: int, rows: int = 8, factor: str = "0x1.8p+3") -> str:
    return (
        f"%0:float32[{rows}, {length}, 16][{16 * length}, 16, 1]+0 mul({factor}) [{rows * length}, {length * length}]"
    )


def test_family_is_found_in_three_texts_and_knows_a_fourth() -> None:
    found = family_of([text(n) for n in (24, 32, 20)])
    assert found is not None
    family, members = found
    assert members == (text(20), text(24), text(32)), "by their bases"
    assert family.base_of(text(92)) == 92
    assert [e for e in family.numbers if isinstance(e, Expression) and e.square] == [Expression(square=1)]


@pytest.mark.parametrize(
    "other",
    [text(92, rows=4), text(92, factor="0x1.9p+3"), text(92).replace("1472", "1473"), text(92).replace("mul", "add")],
    ids=["rows", "a fraction", "a stride", "an op"],
)
def test_text_that_differs_by_anything_else_is_not_of_the_family(other: str) -> None:
    found = family_of([text(n) for n in (24, 32, 20)])
    assert found is not None
    assert found[0].base_of(other) is None


@pytest.mark.parametrize(
    "texts",
    [
        [text(24), text(32)],
        [text(24), text(32), text(32, rows=4)],
        [text(24), text(32), text(20, factor="0x1.9p+3")],
        [text(24), text(32), text(20).replace("400", "401")],
        [text(24), text(32), text(1)],
    ],
    ids=["two", "rows", "a fraction", "no expression", "a length of one"],
)
def test_what_does_not_fit_has_no_family(texts: list[str]) -> None:
    assert family_of(texts) is None


def test_family_is_found_among_others() -> None:
    """Batches of fewer rows come between."""
    found = family_of([text(24), text(24, rows=3), text(32), text(48, rows=5), text(20)])
    assert found is not None
    assert found[0].base_of(text(92)) == 92
    assert outline_of(text(24)) == outline_of(text(92, rows=3))


def test_expression_is_exact_or_there_is_none() -> None:
    assert fitted([7, 7, 7], [2, 3, 5]) == Expression(plus=7)
    assert fitted([15, 23, 39], [2, 3, 5]) == Expression(times=8, plus=-1)
    assert fitted([8, 18, 50], [2, 3, 5]) == Expression(square=2)
    assert fitted([8, 18, 51], [2, 3, 5]) is None
    assert fitted([1, 2, 3], [2, 4, 6]) is None, "there is no half of a length"


def test_ratio_is_exact_or_there_is_none() -> None:
    """What batch norms divide by: a float alone says which ratio it was rounded from."""
    bases = [2, 3, 5]
    places = [3136 * base for base in bases]
    assert fitted_ratio([1 / n for n in places], bases) == Ratio(Expression(plus=1), Expression(times=3136))
    assert fitted_ratio([n / (n - 1) for n in places], bases) == Ratio(
        Expression(times=3136), Expression(times=3136, plus=-1)
    )
    assert fitted_ratio([2.0, 1.5, 1.25], bases) == Ratio(Expression(times=1), Expression(times=1, plus=-1))
    assert fitted_ratio([0.5, 1 / 3, 0.2 + 1e-16], bases) is None
    assert fitted_ratio([2**0.5, 3**0.5, 5**0.5], bases) is None
    assert fitted_ratio([float("inf")] * 3, bases) is None


# -- kernels -----------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        return self.down(F.gelu(self.up(x)))


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def batch(length: int) -> Tensor:
    return torch.randint(0, 50, (3, length), generator=torch.Generator().manual_seed(length))


def made(**options: Any) -> tuple[tb.CompiledStep, nn.Module]:
    model = Tagger()
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), mode="fast", **options)
    return step, model


def clusters_of(step: tb.CompiledStep) -> list[list[Cluster]]:
    programs = [plan.executor.program for plan in step._plans]
    found = [{op.target.key: op.target for op in p.ops if isinstance(op.target, Cluster)} for p in programs]
    return [list(each.values()) for each in found]


def interpreted(graph: Any, operands: Any, mode: Any, strides: Any, cluster: Any) -> Callable[[list[Any]], Any]:
    """In place of Inductor: what it would be given, op by op."""
    return lambda given: [t.clone() for t in graph(*given)]


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(cluster: Cluster, device: torch.device) -> Any:
        raise NotCompiled("there is no compiler for one length")

    monkeypatch.setattr(kernels, "compile_cluster", kernel)
    monkeypatch.setattr(symbolic, "compile_graph", interpreted)
    monkeypatch.setattr("takeback.compiler.run.kernel_file.key_of", lambda *args: None)


@pytest.mark.slow
@pytest.mark.usefixtures("_interpreted", "whole_head")
def test_symbolic_kernel_is_right_for_a_length_that_had_no_part_in_it() -> None:
    step, _ = made(max_plans=4)
    for length in (7, 12, 9, 31):
        step(batch(length))
    *seen, last = clusters_of(step)
    count = 0
    for cluster in last:
        same = [c for each in seen for c in each if outline_of(c.key) == outline_of(cluster.key)]
        found = family_of([c.key for c in same])
        assert found is not None
        family, texts = found
        base = family.base_of(cluster.key)
        assert base is not None
        kernel = compile_family(family, [next(c for c in same if c.key == t) for t in texts], base, CPU)
        assert kernel.holds_for(base)
        assert what_is_wrong(cluster, kernel.at(base), drawn(cluster, CPU)) is None
        count += 1
    assert count > 5


@pytest.mark.usefixtures("_interpreted", "whole_head")
def test_steps_of_further_lengths_take_kernels_over_and_stay_near_eager() -> None:
    step, model = made(max_plans=8)
    twin = Tagger()
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    for length in (12, 7, 9, 7, 9, 7, 9, 31, 31, 31, 5, 5, 5, 12):
        loss = loss_fn(twin, batch(length))
        torch.testing.assert_close(step(batch(length)), loss.detach(), rtol=1e-4, atol=1e-5)
        loss.backward()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()), rtol=1e-3, atol=1e-4)
    generated = {}
    for plan in step._plans:
        notes = [k.note for k in plan.executor.kernels.in_program(plan.executor.program)]
        generated[plan.made_for] = sum(note is None for note in notes) / len(notes)
    assert {name for name, share in generated.items() if share == 1.0} == {"3x7", "3x9", "3x31", "3x5"}
    assert generated["3x12"] == 0.0, "the first one's are compiled for it alone"


@pytest.mark.usefixtures("_interpreted")
def test_batch_norms_over_other_numbers_of_rows_have_one_kernel() -> None:
    """They divide by the number of rows, and by one less: fractions, which differ with it."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), optimizer, mode="fast", max_plans=8)
    for rows in (12, 7, 9, 7, 9, 7, 9, 30, 30, 30):
        step(torch.randn(rows, 4))
    [last] = [plan for plan in step._plans if plan.made_for == "30x4"]
    norms = [k for k in last.executor.kernels.in_program(last.executor.program) if "batch_norm" in str(k.cluster)]
    assert norms
    assert [k.note for k in norms] == [None] * len(norms)


def test_kernel_is_not_used_where_its_guards_do_not_hold() -> None:
    called: list[int] = []
    kernel = SymbolicKernel(Generated(lambda given: called.append(given[0]), "2 <= L['t0'] and L['t0'] <= 512"))
    assert [kernel.holds_for(base) for base in (1, 2, 512, 513)] == [False, True, True, False]
    assert SymbolicKernel(Generated(lambda given: None)).holds_for(10**6)
    operands = [torch.ones(1)]
    kernel.at(5)(operands)
    assert called == [5]
    assert operands == [], "it empties them, as every kernel does"


def test_family_that_cannot_be_compiled_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ClusterFamily] = []

    def fails(family: ClusterFamily, members: Sequence[Cluster], base: int, device: torch.device) -> SymbolicKernel:
        tried.append(family)
        raise NotCompiled("its graphs differ")

    monkeypatch.setattr(kernel_families, "compile_family", fails)
    monkeypatch.setattr(kernel_families, "is_kept", lambda *args: False)
    monkeypatch.setattr(kernels, "compile_cluster", lambda cluster, device: eagerly(cluster))
    step, _ = made(max_plans=8)
    for length in (12, 7, 9, 7, 9, 31, 31):
        step(batch(length))
    assert tried
    assert len({f.text for f in tried}) == len(tried)


def test_kernels_for_further_shapes_wait_until_steps_have_earned_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def counted(family: object, members: object, base: object, device: object) -> SymbolicKernel:
        tried.append(family)
        raise NotCompiled("it is only counted")

    monkeypatch.setattr(kernel_families, "compile_family", counted)
    monkeypatch.setattr(kernel_families, "is_kept", lambda *args: False)
    monkeypatch.setattr(kernels, "compile_cluster", lambda cluster, device: eagerly(cluster))
    monkeypatch.setattr(Earnings, "waits", lambda *args, **kwargs: None)
    step, _ = made()
    for length in (12, 7, 9, 7, 9):
        step(batch(length))
    assert not tried
    step._earnings.steps_s = 1e4
    for length in (7, 7, 9, 9):
        step(batch(length))
    assert tried


def test_time_of_kernels_is_booked_by_itself() -> None:
    earnings = Earnings(explicit=False, steps_s=100.0)
    assert earnings.affords_kernels(10.0)
    earnings.compiled_(4.0)
    assert earnings.affords_kernels(6.0)
    assert not earnings.affords_kernels(6.1)
    assert earnings.plans_s == 0.0
    assert Earnings(explicit=True).affords_kernels(1e9), "who says how many plans he wants gets them at once"


def cluster_of(length: int) -> Cluster:
    return Cluster((), {}, (Region(BufferId(0), torch.float32, (3, length), (length, 1), 0),), ())


def test_no_more_than_the_latest_clusters_of_an_outline_are_held() -> None:
    families = KernelFamilies(CPU)
    for length in range(2, 40):
        families.add_(cluster_of(length))
    [relatives] = families._relatives.values()
    assert list(relatives.clusters) == [cluster_of(length).key for length in range(32, 40)]


def test_lengths_that_never_come_again_do_not_each_bring_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel serves them all. What a process has loaded it never gives back."""
    compiled: list[str] = []

    def compile_(cluster: Cluster, device: torch.device) -> Callable[..., Any]:
        compiled.append(cluster.key)
        return eagerly(cluster)

    def fails(*asked: object) -> SymbolicKernel:
        raise NotCompiled("its graphs differ")

    monkeypatch.setattr(kernel_families, "compile_family", fails)
    monkeypatch.setattr(kernel_families, "_MOST_PLANS", 3)
    monkeypatch.setattr(kernels, "compile_cluster", compile_)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), optimizer, mode="fast", max_plans=8)

    def refused(rows: int) -> set[bool]:
        [plan] = [plan for plan in step._plans if plan.made_for == f"{rows}x4"]
        found = plan.executor.kernels.in_program(plan.executor.program)
        return {kernel.note == kernels.TOO_MANY_SIZES for kernel in found if not kernel.is_for_lists}

    for rows in (12, 7, 9, 7):
        for _ in range(60):
            step(torch.randn(rows, 4))
    assert [refused(rows) for rows in (12, 7, 9)] == [{False}] * 3, "they have theirs, also when they come again"
    for rows in range(30, 40):
        for _ in range(60):
            step(torch.randn(rows, 4))
    assert True in refused(39)
    most = max(Counter(map(outline_of, dict.fromkeys(compiled))).values())
    assert most <= 2 * 3, "a plan has two of an outline at most"


def test_lengths_that_the_guards_of_one_kernel_leave_out_get_another(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def compile_(family: object, members: object, base: int, device: object) -> SymbolicKernel:
        compiled.append(base)
        return SymbolicKernel(Generated(lambda given: given[0], f"L['t0'] // 100 == {base // 100}"))

    monkeypatch.setattr(kernel_families, "compile_family", compile_)
    families = KernelFamilies(CPU)
    for length in (110, 120, 130, 50, 150, 250, 350, 450):
        families.add_(cluster_of(length))
        families.compile_(families.uncompiled([cluster_of(length)]), lambda said: None)
    assert compiled == [130, 50, 250], "three kernels of a family at most"
    assert [families.kernel_for(cluster_of(n)) is not None for n in (170, 70, 270, 370)] == [True, True, True, False]


@pytest.mark.slow
@pytest.mark.usefixtures("whole_head")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for the CPU")
def test_generated_kernels_serve_lengths_that_had_no_part_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compile_cluster", lambda cluster, device: eagerly(cluster))
    step, _ = made(max_plans=8)
    for length in (12, 7, 9, 7, 9, 7, 9, 31, 31, 31, 5, 5, 5):
        step(batch(length))
    assert len(step._plans) == 5
    for plan in (plan for plan in step._plans if plan.made_for != "3x12"):  # the first one's are compiled for it alone
        assert [k.note for k in plan.executor.kernels.in_program(plan.executor.program) if k.note] == []
