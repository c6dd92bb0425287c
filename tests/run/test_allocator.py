"""The native CPU allocator: what it leaves alone, what it logs, what it serves, and how it fails."""

from __future__ import annotations

import gc
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from takeback.compiler.run import allocator
from takeback.compiler.run.allocator import ALLOC, FREE, PASS, Arena, Cell, Native, Recording, Script
from takeback.errors import PlanError

Step = Callable[[], tuple[torch.Tensor, ...]]


@pytest.fixture(scope="module")
def native() -> Native:
    loaded = allocator.load()
    assert loaded is not None
    return loaded


@pytest.fixture(autouse=True)
def two_threads_and_nothing_left_on(native: Native) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    assert not native.inside


def inside(arena: Arena, tensor: torch.Tensor) -> bool:
    return arena.address <= tensor.data_ptr() < arena.address + arena.size_bytes


def conv() -> Step:
    m, x = nn.Conv2d(16, 32, 3, padding=1), torch.randn(4, 16, 24, 24, requires_grad=True)
    return lambda: torch.autograd.grad(m(x).square().mean(), [x, *m.parameters()])


def batch_norm() -> Step:
    m, x = nn.BatchNorm2d(32), torch.randn(4, 32, 24, 24, requires_grad=True)
    return lambda: torch.autograd.grad(m(x).square().mean(), [x, *m.parameters()])


def layer_norm() -> Step:
    m, x = nn.LayerNorm(128), torch.randn(512, 128, requires_grad=True)
    return lambda: torch.autograd.grad(m(x).square().mean(), [x, *m.parameters()])


def attention() -> Step:
    q, k, v = (torch.randn(2, 4, 128, 32, requires_grad=True) for _ in range(3))
    return lambda: torch.autograd.grad(
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean(), [q, k, v]
    )


def embedding() -> Step:
    m, i = nn.Embedding(1000, 64), torch.randint(0, 1000, (8, 64))
    return lambda: torch.autograd.grad(m(i).square().mean(), list(m.parameters()))


def lstm() -> Step:
    m, x = nn.LSTM(16, 32), torch.randn(5, 4, 16, requires_grad=True)
    return lambda: torch.autograd.grad(m(x)[0].square().mean(), [x, *m.parameters()])


STEPS = [conv, batch_norm, layer_norm, attention, embedding, lstm]


def sequence(recording: Recording) -> list[tuple[int, int, int]]:
    events = recording.events
    return list(zip(events["kind"].tolist(), events["size_bytes"].tolist(), events["id"].tolist(), strict=True))


def script_side_by_side(native: Native, recording: Recording) -> Script:
    """Give every request of a recording its own bytes, and op 0 to all of them."""
    events = recording.events
    sizes = events["size_bytes"][events["kind"] == ALLOC]
    ends = np.cumsum(-(-sizes // 64) * 64)
    arena = native.arena(int(ends[-1]))
    return native.script([0, len(sizes)], sizes, [0, *ends[:-1]], arena, recording.cell)


# ------------------------------------------------------------------------------------------------ off


def test_off_logs_and_serves_nothing(native: Native) -> None:
    arena, cell = native.arena(1 << 20), Cell()
    script = native.script([0, 1], [4096], [0], arena, cell)
    with script.replay():
        cell.view[0] = 0
    logged = native._library.tb_logged_count()
    tensor = torch.ones(1024)
    assert not inside(arena, tensor)
    assert native._library.tb_logged_count() == logged
    assert script.counters.served == 0


def test_another_thread_is_untouched_while_this_one_replays(native: Native) -> None:
    arena, cell = native.arena(4096), Cell()
    script = native.script([0, 100_000], [4096] * 100_000, [0] * 100_000, arena, cell)
    stop, seen, broken = threading.Event(), [], []

    def load_data() -> None:
        kept: list[torch.Tensor] = []
        while not stop.is_set():
            kept.append(torch.full((1024,), float(len(seen))))
            seen.append(inside(arena, kept[-1]))
            if len(kept) > 8:
                broken.append(not bool((kept.pop(0) == float(len(seen) - 9)).all()))

    loader = threading.Thread(target=load_data)
    with script.replay():
        cell.view[0] = 0
        loader.start()
        torch.empty(1024).fill_(-1.0)  # the other thread may be through before this one is asked again
        while len(seen) < 200:
            torch.empty(1024).fill_(-1.0)
        stop.set()
        loader.join()
    assert script.counters.served > 0
    assert script.counters.misses == 0
    assert not any(seen)
    assert not any(broken)


# ------------------------------------------------------------------------------------------------ record


def test_record_logs_size_op_and_free(native: Native) -> None:
    cell = Cell()
    with native.record(cell) as recording:
        cell.view[0] = 3
        tensor = torch.empty(1000)
        address = tensor.data_ptr()
        cell.view[0] = 4
        del tensor
        torch.empty(0)
    assert recording.events.tolist() == [(ALLOC, 3, 4000, 0, address, -1), (FREE, 4, 4000, 0, address, -1)]


def test_record_sees_the_outputs_of_conv_and_layer_norm(native: Native) -> None:
    x, w, norm = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3), nn.LayerNorm(16)
    cell = Cell()
    with torch.no_grad(), native.record(cell) as recording:
        cell.view[0] = 0
        y = F.conv2d(x, w, padding=1)
        cell.view[0] = 1
        z = norm(y)
        cell.view[0] = 2
        del y
    events = recording.events
    made = {(e["op"], e["size_bytes"]) for e in events[events["kind"] == ALLOC]}
    freed = {(e["op"], e["size_bytes"]) for e in events[events["kind"] == FREE]}
    assert {(0, 2 * 8 * 16 * 16 * 4), (1, 2 * 8 * 16 * 16 * 4)} <= made
    assert (2, 2 * 8 * 16 * 16 * 4) in freed
    alive = set(events["id"].tolist()) - set(events["id"][events["kind"] == FREE].tolist())
    addresses = {int(e["address"]) for e in events if e["id"] in alive}
    assert addresses == {z.data_ptr()}


@pytest.mark.parametrize("make", STEPS)
def test_the_sequence_repeats(native: Native, make: Callable[[], Step]) -> None:
    step, sequences = make(), []
    step()
    for _ in range(4):
        with native.record(Cell()) as recording:
            step()
        sequences.append(sequence(recording))
    assert len(sequences[0]) > 2
    assert all(s == sequences[0] for s in sequences)


@pytest.mark.parametrize("by_another_thread", [False, True])
def test_recorded_block_may_outlive_its_recording(native: Native, by_another_thread: bool) -> None:
    before = native._library.tb_logged_count()
    with native.record(Cell()) as recording:
        kept = [torch.full((n,), float(n)) for n in (10, 1000, 100_000)]
    assert native._library.tb_logged_count() == before + 3
    assert all(bool((t == float(len(t))).all()) for t in kept)
    if by_another_thread:
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
    else:
        kept.clear()
    assert native._library.tb_logged_count() == before
    assert (recording.events["kind"] == ALLOC).all()


def test_free_of_an_older_recordings_block_is_not_logged(native: Native) -> None:
    with native.record(Cell()):
        old = torch.empty(1000)
    with native.record(Cell()) as second:
        del old
    assert len(second.events) == 0


def test_free_on_another_thread_is_not_logged(native: Native) -> None:
    kept: list[torch.Tensor] = []
    with native.record(Cell()) as recording:
        kept.append(torch.empty(1000))
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
    assert recording.events["kind"].tolist() == [ALLOC]


# ------------------------------------------------------------------------------------------------ replay


def test_replay_serves_exact_addresses(native: Native) -> None:
    arena, cell = native.arena(1 << 16), Cell()
    script = native.script([0, 2, 2, 3], [4096, 400, 400], [8192, 64, PASS], arena, cell)
    for _ in range(3):
        with script.replay() as replayed:
            assert replayed is script
            cell.view[0] = 0
            a, b = torch.empty(1024), torch.empty(100)
            cell.view[0] = 2
            c = torch.empty(100)
        assert (a.data_ptr(), b.data_ptr()) == (arena.address + 8192, arena.address + 64)
        assert not inside(arena, c)
        counters = script.counters
        assert (counters.served, counters.passed, counters.misses) == (2, 1, 0)
    a.fill_(1.0)
    assert bool((arena.tensor[8192 : 8192 + 4096].view(torch.float32) == 1.0).all())


def test_wrong_size_is_a_miss_and_does_not_advance(native: Native) -> None:
    arena, cell = native.arena(1 << 16), Cell()
    script = native.script([0, 1], [4096], [0], arena, cell)
    with script.replay():
        between = torch.empty(8)
        cell.view[0] = 0
        wrong, right, surplus = torch.ones(7), torch.empty(1024), torch.empty(1024)
        cell.view[0] = 99
        beyond = torch.empty(16)
    assert inside(arena, right)
    assert not any(inside(arena, t) for t in (between, wrong, surplus, beyond))
    assert script.misses.tolist() == [(-1, 32), (0, 28), (0, 4096), (99, 64)]
    assert (script.counters.misses, script.counters.missed_bytes) == (4, 32 + 28 + 4096 + 64)
    assert bool((wrong == 1).all())


def test_no_more_than_1024_misses_are_kept(native: Native) -> None:
    script = native.script([0], [], [], native.arena(0), Cell())
    with script.replay():
        for _ in range(1100):
            torch.empty(1)
    assert (script.counters.misses, len(script.misses)) == (1100, 1024)


@pytest.mark.parametrize("make", STEPS)
def test_replayed_step_gives_the_same_bits_without_a_miss(native: Native, make: Callable[[], Step]) -> None:
    step, cell = make(), Cell()
    expected = [g.clone() for g in step()]
    cell.view[0] = 0
    with native.record(cell) as recording:
        step()
    script = script_side_by_side(native, recording)
    for _ in range(3):
        script.arena.tensor.fill_(0xFF)  # NaN, wherever a kernel relied on old bytes
        with script.replay():
            gradients = step()
        assert script.counters.misses == 0
        assert script.counters.served == (recording.events["kind"] == ALLOC).sum()
        assert all(inside(script.arena, g) for g in gradients)
        assert all(map(torch.equal, gradients, expected))


def test_logged_replay_logs_as_a_recording_does(native: Native) -> None:
    step, cell = conv(), Cell()
    cell.view[0] = 0
    step()
    with native.record(cell) as recording:
        step()
    script = script_side_by_side(native, recording)
    with script.replay(log=True):
        step()
    for field in ("kind", "op", "size_bytes", "id"):
        assert script.events[field].tolist() == recording.events[field].tolist()
    allocs = script.events[script.events["kind"] == ALLOC]
    assert allocs["entry"].tolist() == list(range(len(allocs)))
    with script.replay():
        step()
    assert len(script.events) == 0


def test_logged_replay_logs_misses_and_their_frees(native: Native) -> None:
    arena, cell = native.arena(4096), Cell()
    script = native.script([0, 2], [4096, 64], [0, PASS], arena, cell)
    before = native._library.tb_logged_count()
    with script.replay(log=True):
        cell.view[0] = 0
        missed, served, passed = torch.empty(5), torch.empty(1024), torch.empty(16)
        del passed, missed, served
    events = [(int(e["kind"]), int(e["id"]), int(e["entry"])) for e in script.events]
    assert events == [(ALLOC, 0, -1), (ALLOC, 1, 0), (ALLOC, 2, 1), (FREE, 2, 1), (FREE, 0, -1), (FREE, 1, 0)]
    assert native._library.tb_logged_count() == before


def test_bytes_given_on_early_are_freed_oldest_first_in_the_log(native: Native) -> None:
    arena, cell = native.arena(4096), Cell()
    script = native.script([0, 2], [4096, 4096], [0, 0], arena, cell)
    with script.replay(log=True):
        cell.view[0] = 0
        old, new = torch.empty(1024), torch.empty(1024)
        assert old.data_ptr() == new.data_ptr()
        del old
        del new
    assert script.events["id"].tolist() == [0, 1, 0, 1]


def test_free_of_a_block_served_before_the_logged_replay_is_not_logged(native: Native) -> None:
    arena, cell = native.arena(4096), Cell()
    script = native.script([0, 1], [4096], [0], arena, cell)
    cell.view[0] = 0
    with script.replay():
        early = torch.empty(1024)
    with script.replay(log=True):
        late = torch.empty(1024)
        assert late.data_ptr() == early.data_ptr()
        del late
        del early
    assert script.events["kind"].tolist() == [ALLOC, FREE]


def test_served_tensors_can_be_freed_at_any_time(native: Native) -> None:
    gc.collect()
    mapped = native._library.tb_arena_count()
    cell = Cell()
    script: Script | None = native.script([0, 3], [4096] * 3, [0, 4096, 8192], native.arena(1 << 16), cell)
    assert script is not None
    with script.replay():
        cell.view[0] = 0
        within, after, last = torch.empty(1024), torch.empty(1024), torch.full((1024,), 7.0)
        del within
    other = native.script([0], [], [], native.arena(64), cell)
    with other.replay(log=True):
        del after
    assert len(other.events) == 0
    del other, script
    assert native._library.tb_arena_count() == mapped + 1
    assert bool((last == 7.0).all())
    thread = threading.Thread(target=[last].clear)
    del last
    thread.start()
    thread.join()
    del thread
    assert native._library.tb_arena_count() == mapped


def test_arena_is_aligned_writable_and_lives_as_long_as_a_tensor_over_it(native: Native) -> None:
    gc.collect()
    mapped = native._library.tb_arena_count()
    arena = native.arena((5 << 20) + 3)
    assert arena.address % (2 << 20) == 0
    assert arena.tensor.data_ptr() == arena.address
    assert arena.tensor.numel() == (5 << 20) + 3
    part = arena.tensor[-3:]
    part.fill_(9)
    del arena
    assert native._library.tb_arena_count() == mapped + 1
    assert part.tolist() == [9, 9, 9]
    del part
    assert native._library.tb_arena_count() == mapped


def test_arena_that_does_not_fit_says_so(native: Native) -> None:
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes"):
        native.arena(1 << 60)


@pytest.mark.parametrize(
    ("first", "sizes", "offsets", "text"),
    [
        ([0, 1], [128], [4000], "op 0's request of 128 bytes is placed at offset 4000"),
        ([0, 0, 1], [128], [-2], "op 1's request of 128 bytes is placed at offset -2"),
        ([0, 1], [0], [0], "request of 0 bytes"),
        ([0, 1], [128, 128], [0], "2 sizes but 1 offsets"),
        ([0, 2, 1], [128], [0], "op ranges"),
        ([0, 1], [128, 128], [0, 0], "op ranges"),
        ([], [], [], "op ranges"),
    ],
)
def test_script_outside_its_arena_is_refused(
    native: Native, first: list[int], sizes: list[int], offsets: list[int], text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        native.script(first, sizes, offsets, native.arena(4096), Cell())


# ------------------------------------------------------------------------------------------------ entering


def test_exception_inside_leaves_it_off(native: Native) -> None:
    arena, cell = native.arena(4096), Cell()
    script = native.script([0, 1], [4096], [0], arena, cell)
    for context in (native.record(cell), script.replay(), script.replay(log=True)):
        with pytest.raises(ZeroDivisionError), context:
            _ = 1 / (1 - native.inside)  # divides by zero only inside
        assert not native.inside
    cell.view[0] = 0
    assert not inside(arena, torch.empty(1024))


def test_nesting_is_refused_and_the_outer_one_goes_on(native: Native) -> None:
    arena, cell = native.arena(4096), Cell()
    script = native.script([0, 1], [4096], [0], arena, cell)
    for outer in (native.record(cell), script.replay()):
        for inner in (native.record(cell), script.replay()):
            with outer:
                with pytest.raises(RuntimeError, match="already inside"), inner:
                    pass
                assert native.inside
            assert not native.inside


def test_a_script_belongs_to_one_thread(native: Native) -> None:
    script = native.script([0], [], [], native.arena(64), Cell())
    caught: list[str] = []

    def enter() -> None:
        try:
            script.enter()
        except RuntimeError as error:
            caught.append(str(error))
        script.leave()

    with script.replay():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert native.inside
    assert len(caught) == 1
    assert "another thread" in caught[0]


def test_off_leaves_whatever_was_entered(native: Native) -> None:
    script = native.script([0], [], [], native.arena(64), Cell())
    script.enter()
    native.off()
    native.off()
    assert not native.inside
    script.enter()
    del script
    gc.collect()
    assert not native.inside


# ------------------------------------------------------------------------------------------------ threads


def test_workers_take_nothing_new_in_a_steady_step(native: Native) -> None:
    step, cell = attention(), Cell()
    expected = [g.clone() for g in step()]
    cell.view[0] = 0
    with native.record(cell) as recording:
        step()
    assert recording.counters.worker_requests > 0
    script = script_side_by_side(native, recording)
    for _ in range(5):
        with script.replay():
            gradients = step()
        assert script.counters.worker_requests == recording.counters.worker_requests
        assert script.counters.worker_new == 0
        assert script.counters.worker_passed == 0
        assert all(map(torch.equal, gradients, expected))


def test_a_parallel_region_of_another_thread_stays_right_while_this_one_replays(native: Native) -> None:
    step, cell = attention(), Cell()
    expected = [g.clone() for g in step()]
    script = native.script([0, 10_000], [256] * 10_000, [0] * 10_000, native.arena(256), cell)
    right: list[bool] = []

    def other() -> None:
        for _ in range(20):
            right.append(all(map(torch.equal, step(), expected)))

    thread = threading.Thread(target=other)
    with script.replay():
        cell.view[0] = 0
        thread.start()
        while thread.is_alive():
            torch.empty(64).fill_(-1.0)
        thread.join()
    assert right == [True] * 20


@pytest.mark.parametrize("rounds", [12, pytest.param(40, marks=pytest.mark.slow)])  # each mode is one in four of them
def test_stress_all_modes_on_two_threads_with_frees_on_either(native: Native, rounds: int) -> None:
    gc.collect()
    mapped, logged = native._library.tb_arena_count(), native._library.tb_logged_count()
    per_round = 500
    handed: list[queue.SimpleQueue[torch.Tensor | None]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    wrong: list[str] = []

    def check(tensor: torch.Tensor) -> None:
        if not bool((tensor == tensor.numel()).all()):
            wrong.append(f"{tensor.numel()} elements overwritten")

    def work(me: int) -> None:
        rng, cell = random.Random(me), Cell()
        slots, size_bytes = 64, 4096
        offsets = [(i % slots) * size_bytes for i in range(per_round)]
        arena = native.arena(slots * size_bytes)
        script = native.script([0, per_round], [size_bytes] * per_round, offsets, arena, cell)
        kept: list[torch.Tensor] = []
        try:
            for turn in range(rounds):
                mode = turn % 4
                context = [native.record(cell), script.replay(), script.replay(log=True)][mode - 1]
                if mode:
                    context.__enter__()
                cell.view[0] = 0
                for _ in range(per_round):
                    n = size_bytes // 4 if mode > 1 and rng.random() < 0.8 else rng.choice([1, 100, 3000, 70_000])
                    tensor = torch.full((n,), float(n))
                    if inside(arena, tensor):
                        # At most `slots` requests until its bytes are someone else's: let go in time.
                        check(tensor)
                    elif rng.random() < 0.2:
                        handed[1 - me].put(tensor)
                    else:
                        kept.append(tensor)
                    del tensor
                    if len(kept) > 20:
                        check(kept.pop(rng.randrange(len(kept))))
                    while not handed[me].empty():
                        received = handed[me].get()
                        assert received is not None
                        check(received)
                if mode:
                    context.__exit__(None, None, None)
                    if mode > 1 and not script.counters.served:
                        wrong.append("nothing served")
        except BaseException as error:
            wrong.append(repr(error))
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    handed.clear()
    del threads, work
    gc.collect()
    assert native._library.tb_arena_count() == mapped
    assert native._library.tb_logged_count() == logged


# ------------------------------------------------------------------------------------------------ building


def run_python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


LOAD_AND_SERVE = """
import torch
from pathlib import Path
from takeback.compiler.run.allocator import Cell, load
native = load(cache_dir=Path({folder!r}))
cell = Cell()
arena = native.arena(4096)
script = native.script([0, 1], [4096], [0], arena, cell)
with script.replay():
    cell.view[0] = 0
    assert torch.empty(1024).data_ptr() == arena.address
print("served", script.counters.served)
"""


def test_no_compiler_warns_once_and_gives_none(tmp_path: Path) -> None:
    name = "no-such-compiler-takeback"
    with pytest.warns(RuntimeWarning, match=f"no compiler named '{name}'.*Everything works.*Install") as caught:
        assert allocator.load(tmp_path, name) is None
    assert len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__)
    assert allocator.load(tmp_path, name) is None  # a second warning would be an error here


def test_failed_compilation_warns_with_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error told you so\n")
    monkeypatch.setattr(allocator, "_SOURCE", broken)
    with pytest.warns(RuntimeWarning, match="told you so"):
        assert allocator.load(cache_dir=tmp_path) is None
    assert list(tmp_path.iterdir()) == [broken]


@pytest.mark.slow  # test_without_compiler.py has a file where the folder should be
def test_cache_folder_that_cannot_be_written_falls_back_to_a_temporary_one(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    process = run_python(LOAD_AND_SERVE.format(folder=str(blocked / "cache")))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "served 1\n"), err
    assert err.count("cannot keep anything in the cache folder") == 1


@pytest.mark.slow
def test_two_processes_compile_at_once_and_a_third_finds_a_torn_file(tmp_path: Path) -> None:
    code = LOAD_AND_SERVE.format(folder=str(tmp_path))
    processes = [run_python(code) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (0, "served 1\n", "")
    (library,) = tmp_path.iterdir()
    library.write_bytes(library.read_bytes()[:100])
    process = run_python(code)
    assert process.communicate(timeout=120) == ("served 1\n", "")
    assert len(library.read_bytes()) > 100
