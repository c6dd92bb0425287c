"""NormCache: a norm is computed once, and anew after every write that a version, an optimizer or an address shows."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import takeback as tb


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def check(cache: tb.NormCache, model: nn.Module) -> None:
    """Every norm is what it would be if it were computed now."""
    for p in model.parameters():
        expected = torch.linalg.vector_norm(p.detach(), cache.norm_type, dtype=cache.dtype)
        assert torch.equal(cache.norm(p), expected)


def backward(model: nn.Module) -> None:
    model(torch.randn(3, 4)).square().sum().backward()


def test_a_norm_is_computed_once_while_nothing_is_written() -> None:
    model, cache = net(), tb.NormCache()
    for _ in range(5):
        check(cache, model)
        backward(model)  # writes gradients, not parameters
    assert (cache.misses, cache.hits) == (6, 24)


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_every_way_an_optimizer_updates_is_seen(kind: type[torch.optim.Optimizer], how: dict[str, bool]) -> None:
    model, cache = net(), tb.NormCache()
    optimizer = kind(model.parameters(), lr=0.1, **how)  # type: ignore[call-arg]
    for _ in range(3):
        check(cache, model)
        check(cache, model)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    check(cache, model)
    assert (cache.misses, cache.hits) == (24, 18)


@pytest.mark.parametrize("kind", [tb.optim.SGD, tb.optim.Adam, tb.optim.AdamW])
def test_flat_optimizers_are_seen(kind: type[tb.optim.AdamW]) -> None:
    model, cache = net(), tb.NormCache()
    buf = tb.GradBuffer(model)
    optimizer = kind(buf, lr=0.1, clip_norm=1.0)
    for _ in range(3):
        check(cache, model)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    check(cache, model)


@pytest.mark.parametrize("kind", [tb.optim.SGD, tb.optim.AdamW])
def test_flat_optimizers_move_the_versions_of_what_they_update(
    kind: type[tb.optim.AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that autograd refuses a graph over the old values, as with torch's own that are not fused."""
    hooks = importlib.import_module("torch.optim.optimizer")._global_optimizer_post_hooks
    for key in tuple(hooks):  # a NormCache's does the same
        monkeypatch.delitem(hooks, key)
    model = net()
    buf = tb.GradBuffer(model)
    optimizer = kind(buf, lr=0.1)
    backward(model)
    graph = model(torch.randn(3, 4)).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


@pytest.mark.parametrize("update", ["end", "early"])
@pytest.mark.parametrize("how", [{}, {"fused": True}], ids=str)
def test_replays_of_compile_step_are_seen(update: str, how: dict[str, bool]) -> None:
    model, cache = net(), tb.NormCache()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **how)
    step = tb.compile_step(model, lambda m, x: m(x).square().sum(), optimizer, update=update)
    for _ in range(6):
        check(cache, model)
        step(torch.randn(3, 4))
    check(cache, model)
    unplanned = [refusal for refusal in step.report().refusals if refusal.decision == "plan the update"]
    assert unplanned == []  # the cache's hook on optimizers is no reason to leave the plan


def test_a_norm_inside_a_compiled_step_is_of_the_parameter_as_it_is_then() -> None:
    cache = tb.NormCache()

    def loss_fn(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (m(x) / cache.norm(m[0].weight)).square().sum()

    losses = []
    for compiled in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = tb.compile_step(model, loss_fn, optimizer)
        for _ in range(6):
            x = torch.randn(3, 4)
            if compiled:
                losses.append(step(x))
            else:
                loss = loss_fn(model, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    assert all(torch.equal(a, b) for a, b in zip(losses[:6], losses[6:], strict=True))


WRITES: dict[str, Callable[[nn.Sequential], object]] = {
    "in place": lambda m: m[0].weight.detach().mul_(2),
    "through a view": lambda m: m[0].weight.detach()[1:].zero_(),
    "nn.init": lambda m: nn.init.ones_(m[0].weight),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "load_state_dict, assign": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "data assigned": lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2),
    "data assigned, a slice of the same memory": lambda m: setattr(
        m[1].weight, "data", m[0].weight.data.view(-1)[3:11]
    ),
    "dtype": lambda m: m.double(),
    "reduced dtype": lambda m: m.bfloat16(),
    "strides": lambda m: setattr(m[0].weight, "data", m[0].weight.data.as_strided((8, 4), (0, 1))),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 2, m.parameters()
    ),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_other_writes_are_seen(write: str) -> None:
    model, cache = net(), tb.NormCache()
    check(cache, model)
    WRITES[write](model)
    check(cache, model)
    assert cache.misses > 6


def test_memory_that_is_freed_and_allocated_again_at_the_same_place_is_other_memory() -> None:
    """A pointer and a version would say that nothing has happened."""
    cache = tb.NormCache()
    place = np.ones(1024, dtype=np.float32)  # where malloc would put it is up to malloc
    p = nn.Parameter(torch.from_numpy(place))
    for i in range(200):
        before = (p.data_ptr(), p._version)
        assert float(cache.norm(p)) == pytest.approx(32.0 * (i + 1))
        p.data = torch.empty(0)  # frees
        place[:] = i + 2
        p.data = torch.from_numpy(place)
        assert before == (p.data_ptr(), p._version)


def test_a_write_that_moves_no_version_is_not_seen_until_clear() -> None:
    """A footgun, as documented."""
    cache = tb.NormCache()
    p = nn.Parameter(torch.ones(4))
    assert cache.norm(p) == 2
    p.data.mul_(3)
    assert cache.norm(p) == 2
    cache.clear()
    assert cache.norm(p) == 6


def test_a_parameter_that_moves_within_one_storage_is_another() -> None:
    flat = torch.arange(8.0)
    cache = tb.NormCache(1.0)
    p = nn.Parameter(flat[:4])
    assert cache.norm(p) == 6
    p.data = flat[4:]
    assert cache.norm(p) == 22


def test_writes_through_a_flat_tensor_are_seen_when_it_is_named() -> None:
    model = net()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    offset = 0
    for p in model.parameters():
        p.data = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    cache = tb.NormCache(through=[flat])
    check(cache, model)
    flat.mul_(3)
    check(cache, model)
    assert cache.misses == 12
    check(cache, model)
    assert cache.misses == 12


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_total_is_the_norm_of_all_parameters_together(norm_type: float) -> None:
    model, cache = net(), tb.NormCache(norm_type, dtype=torch.float64)
    vector = nn.utils.parameters_to_vector(model.parameters()).double()
    torch.testing.assert_close(cache.total(model.parameters()), torch.linalg.vector_norm(vector, norm_type).detach())
    assert cache.total([]) == 0


def test_a_norm_has_no_gradient_and_one_that_was_overwritten_is_computed_anew() -> None:
    cache = tb.NormCache()
    p = nn.Parameter(torch.ones(4))
    norm = cache.norm(p)
    assert not norm.requires_grad
    norm.zero_()
    assert cache.norm(p) == 2


def test_norms_go_between_inference_mode_and_training() -> None:
    cache = tb.NormCache()
    p = nn.Parameter(torch.ones(4))
    with torch.inference_mode():
        cache.norm(p)
        inner = torch.ones(9)  # has no version
        assert cache.norm(inner) == 3
        inner.mul_(2)
        assert cache.norm(inner) == 6
    (p * cache.norm(p)).sum().backward()
    assert p.grad is not None
    assert (len(cache), cache.hits) == (1, 1)


def test_deleted_parameters_are_forgotten_and_their_memory_is_free_before() -> None:
    cache = tb.NormCache()
    model = net()
    check(cache, model)
    assert len(cache) == 6
    old = torch.multiprocessing.reductions.StorageWeakRef(model[0].weight.untyped_storage())
    model[0].weight.data = torch.zeros(8, 4)
    assert old.expired()
    del model
    gc.collect()
    assert len(cache) == 0
    for _ in range(100):  # objects and ids are used again
        check(cache, net())


@pytest.mark.parametrize("how", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_keeps_the_settings_and_no_norms(how: Callable[[tb.NormCache], tb.NormCache]) -> None:
    cache = tb.NormCache(1.0, dtype=torch.float64)
    check(cache, net())
    twin = how(cache)
    assert (twin.norm_type, twin.dtype, len(twin)) == (1.0, torch.float64, 0)


def test_torch_compile_computes_the_norm_in_its_graph() -> None:
    cache = tb.NormCache()
    p = nn.Parameter(torch.ones(4))
    compiled = torch.compile(lambda: cache.norm(p) + 1, backend="aot_eager", fullgraph=True)
    assert compiled() == 3
    with torch.no_grad():
        p.mul_(2)
    assert compiled() == 5


def test_a_write_while_a_norm_is_computed_makes_that_norm_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """What S4's dirty flags lost: a reader that began before a write must not leave its norm for those after it."""
    cache = tb.NormCache()
    p = nn.Parameter(torch.ones(4))
    compute = cache._compute

    def interrupted(p: torch.Tensor) -> torch.Tensor:
        norm = compute(p)
        p.detach().mul_(2)  # as another thread would, before this one keeps what it has
        return norm

    monkeypatch.setattr(cache, "_compute", interrupted)
    assert cache.norm(p) == 2
    monkeypatch.undo()
    assert cache.norm(p) == 4
    assert cache.norm(p) == 4
    assert (cache.misses, cache.hits) == (2, 1)


def test_an_entry_of_a_parameter_that_is_gone_is_not_taken_for_another_with_its_id() -> None:
    cache = tb.NormCache()
    p = nn.Parameter(torch.ones(4))
    q = nn.Parameter(p.data)  # the same memory, and a version counter of its own
    cache.norm(p)
    cache._entries[id(q)] = cache._entries[id(p)]
    p.detach().mul_(2)
    assert cache.norm(q) == 4


def test_after_any_race_of_readers_and_writers_the_norm_is_right() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        cache = tb.NormCache()
        p = nn.Parameter(torch.ones(64))
        rounds, readers = 60, 6
        barrier = threading.Barrier(readers + 1)
        wrong: list[tuple[int, float]] = []

        def read() -> None:
            for r in range(rounds):
                barrier.wait()
                for _ in range(4):
                    cache.norm(p)  # races with the write
                barrier.wait()
                if float(cache.norm(p)) != pytest.approx(8.0 * (r + 2)):
                    wrong.append((r, float(cache.norm(p))))

        threads = [threading.Thread(target=read) for _ in range(readers)]
        for thread in threads:
            thread.start()
        for r in range(rounds):
            barrier.wait()
            with torch.no_grad():
                p.fill_(float(r + 2))
            barrier.wait()
        for thread in threads:
            thread.join()
        assert wrong == []
    finally:
        sys.setswitchinterval(before)
