"""Values that torch reads in C++, where no op is dispatched, are assumptions of a plan: another value is recorded anew,
the same one is replayed, and eager's bits come out each time."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import takeback as tb
from takeback.compiler.capture.reads import Reads
from takeback.compiler.capture.recorder import Recorder

Batch = tuple[torch.Tensor, ...]
Around = Callable[[], contextlib.AbstractContextManager[Any]]


def plans_made(model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor], batches: list[Batch]) -> list[bool]:
    """Trains beside eager; says at which steps a plan was made."""
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tb.compile_step(model, loss_fn, optimizer)
    beside = torch.optim.SGD(other.parameters(), lr=0.1)
    made = []
    for batch in batches:
        before = len(step._plans)
        loss = step(*batch)
        made.append(len(step._plans) > before)
        beside.zero_grad()
        expected = loss_fn(other, *batch)
        expected.backward()
        beside.step()
        assert torch.equal(loss, expected.detach())
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    return made


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = torch.nn.LSTM(4, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(pack_padded_sequence(x, lengths))
        padded, _ = pad_packed_sequence(out)
        return padded


X = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(0))
A, B = torch.tensor([6, 5, 4, 3]), torch.tensor([6, 6, 4, 2])


def test_packed_lengths_of_the_same_sum_get_plans_of_their_own() -> None:
    batches = [(X, A), (X, A), (X, B), (X, B), (X, A)]
    assert plans_made(Tagger(), lambda m, x, n: m(x, n).square().sum(), batches) == [
        True,
        False,
        True,
        False,
        False,
    ]


def test_lengths_that_only_a_backward_reads_are_held() -> None:
    def loss_fn(model: torch.nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return pack_padded_sequence(model(x), lengths).data.cumsum(0).square().sum()

    assert plans_made(torch.nn.Linear(4, 4), loss_fn, [(X, A), (X, A), (X, B), (X, A)]) == [True, False, True, False]


def test_a_result_of_another_shape_gets_a_plan_of_its_own() -> None:
    def loss_fn(model: torch.nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return model(pack_padded_sequence(x, lengths).data).square().sum()

    other = torch.tensor([6, 5, 4, 2])
    batches = [(X, A), (X, A), (X, other), (X, A)]
    assert plans_made(torch.nn.Linear(4, 4), loss_fn, batches) == [True, False, True, False]


def test_batch_sizes_that_come_with_the_batch_are_held() -> None:
    def loss_fn(model: torch.nn.Module, data: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        out, _ = model(PackedSequence(data, sizes))
        return out.data.square().sum()

    data = torch.randn(6, 4)
    one, two = torch.tensor([3, 2, 1]), torch.tensor([2, 2, 2])
    batches = [(data, one), (data, one), (data, two), (data, one)]
    assert plans_made(torch.nn.GRU(4, 3), loss_fn, batches) == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_numbers_put_into_a_constant_are_held(dtype: torch.dtype) -> None:
    def loss_fn(model: torch.nn.Module, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * torch.tensor([n[0], n[1]]).prod()

    one, two = torch.tensor([2, 5], dtype=dtype), torch.tensor([3, 5], dtype=dtype)
    batches = [(X, one), (X, one), (X, two), (X, one)]
    assert plans_made(torch.nn.Linear(4, 4), loss_fn, batches) == [True, False, True, False]


def test_sections_of_a_tensor_split_are_held_in_a_custom_backward_too() -> None:
    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(at)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            (at,) = ctx.saved_tensors
            parts = torch.tensor_split(grads[0], at)
            return torch.cat([part * (i + 1) for i, part in enumerate(parts)]), None

    def loss_fn(model: torch.nn.Module, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return Weighted.apply(model(x), at).square().sum()

    one, two = torch.tensor([2, 5]), torch.tensor([3, 5])
    batches = [(X, one), (X, one), (X, two), (X, one)]
    assert plans_made(torch.nn.Linear(4, 4), loss_fn, batches) == [True, False, True, False]


def test_operators_of_others_whose_shape_follows_the_data_are_recorded_anew() -> None:
    @torch.library.custom_op("takeback_test::positive_rows", mutates_args=())
    def positive_rows(x: torch.Tensor) -> torch.Tensor:
        return x[: int((x.sum(-1) > 0).sum())].clone()

    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(torch.ops.takeback_test.positive_rows(x)).sum()

    x = torch.randn(20, 4)
    assert plans_made(torch.nn.Linear(4, 4), loss_fn, [(x,), (x,), (x + 1,), (x,)]) == [True, False, True, False]


def test_ordinary_indices_and_masks_are_not_held() -> None:
    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.bag = torch.nn.Embedding(8, 4), torch.nn.EmbeddingBag(8, 4)

    def loss_fn(m: Reader, i: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rows = m.rows(i)
        masked = rows.masked_fill(i[:, None] > 3, 0.0)
        masked[k % 6] = 0.5
        hot = F.one_hot(i, 8).to(rows.dtype) @ rows.new_ones(8, 4)
        return (
            F.cross_entropy(rows, k % 4)
            + m.bag(i, offsets).sum()
            + masked[k % 6].sum()
            + (hot * rows[[0, 1] * 3]).sum()
        )

    draw = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.tensor([n, 7 - n, 1 + n, 4, n, 2]),
            torch.tensor([0, 1 + n % 2, 4]),
            torch.randint(0, 8, (6,), generator=draw),
        )
        for n in range(4)
    ]
    assert plans_made(Reader(), loss_fn, batches) == [True, False, False, False]


Loss = Callable[..., torch.Tensor]


def checkpointed(loss_fn: Loss) -> Loss:
    return lambda m, *batch: checkpoint(lambda *b: loss_fn(m, *b), *batch, use_reentrant=False)


def under(around: Around) -> Callable[[Loss], Loss]:
    def wrap(loss_fn: Loss) -> Loss:
        def inner(*args: Any) -> torch.Tensor:
            with around():
                return loss_fn(*args)

        return inner

    return wrap


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if tensor.dim() else tensor


SAVINGS = {
    "checkpoint": checkpointed,
    "on the CPU": under(save_on_cpu),
    "as it is": under(lambda: saved_tensors_hooks(lambda t: t, lambda t: t)),
    "as a copy": under(lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t)),
    "flipped": under(lambda: saved_tensors_hooks(flipped, flipped)),
}


def targets(n: int) -> Batch:
    draw = torch.Generator().manual_seed(n)
    y = torch.randint(4, (9,), generator=draw)
    y[torch.rand(9, generator=draw) > 0.6] = -100
    y[0] = 1
    return torch.randn(9, 4, generator=draw), y


def weighted(m: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 0.5, 3.0]), label_smoothing=0.1)


@pytest.mark.parametrize("loss", [lambda m, x, y: F.cross_entropy(m(x), y), weighted], ids=["plain", "weighted"])
@pytest.mark.parametrize("saved", SAVINGS)
def test_targets_of_a_loss_whose_tensors_are_saved_by_hooks_are_not_held(saved: str, loss: Loss) -> None:
    batches = [targets(n) for n in range(12)]
    assert plans_made(torch.nn.Linear(4, 4), SAVINGS[saved](loss), batches) == [True] + [False] * 11


@pytest.mark.parametrize("saved", SAVINGS)
def test_targets_that_split_a_loss_whose_tensors_are_saved_by_hooks_are_held(saved: str) -> None:
    def loss_fn(m: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        first, second = torch.tensor_split(m(x).log_softmax(-1), at)
        return F.nll_loss(first, y[: len(first)]) + 2 * F.nll_loss(second, y[len(first) :])

    at = [torch.tensor([n]) for n in (3, 3, 5, 5, 3)]
    batches = [(*targets(n), at[n]) for n in range(5)]
    expected = [True, False, True, False, False]
    assert plans_made(torch.nn.Linear(4, 4), SAVINGS[saved](loss_fn), batches) == expected


@pytest.mark.parametrize("saved", SAVINGS)
def test_targets_that_decide_in_python_below_hooks_are_held(saved: str) -> None:
    def loss_fn(m: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(m(x), y)
        return loss * 2 if y[1] > 1 else loss

    batches = []
    for n, second in enumerate((0, 0, 3, 3, 0)):
        x, y = targets(n)
        y[1] = second
        batches.append((x, y))
    expected = [True, False, True, False, False]
    assert plans_made(torch.nn.Linear(4, 4), SAVINGS[saved](loss_fn), batches) == expected


def weighed_by_parts(grad: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.cat([part * (i + 1) for i, part in enumerate(torch.tensor_split(grad, at))])


def test_what_a_hook_reads_of_another_tensor_while_it_saves_one_is_held() -> None:
    def loss_fn(m: torch.nn.Module, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        def pack(t: torch.Tensor) -> torch.Tensor:
            return weighed_by_parts(t.detach(), at) if t.shape == x.shape else t

        h = m(x)
        with saved_tensors_hooks(pack, lambda t: t):
            return h.sin().sum()

    one, two = torch.tensor([2, 5]), torch.tensor([3, 5])
    batches = [(X, one), (X, one), (X, two), (X, one)]
    assert plans_made(torch.nn.Linear(4, 4), loss_fn, batches) == [True, False, True, False]


def test_what_a_hook_reads_of_the_tensor_that_it_saves_is_held() -> None:
    def loss_fn(m: torch.nn.Module, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        def pack(t: torch.Tensor) -> torch.Tensor:
            return weighed_by_parts(torch.arange(6), t)[t] % 6 if whole(t) else t

        with saved_tensors_hooks(pack, lambda t: t):
            return m(x).index_select(0, at).sin().sum()

    one, two = torch.tensor([2, 5]), torch.tensor([3, 5])
    batches = [(X, one), (X, one), (X, two), (X, one)]
    assert plans_made(torch.nn.Linear(4, 4), loss_fn, batches) == [True, False, True, False]


def test_too_many_values_are_refused() -> None:
    def loss_fn(model: torch.nn.Module, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.sum() for p in torch.tensor_split(model(x), at)]).square().sum()

    step = tb.compile_step(model := torch.nn.Linear(4, 4), loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    from takeback.compiler.capture import recorder

    most = recorder.MOST_HELD_ELEMENTS
    recorder.MOST_HELD_ELEMENTS = 1
    try:
        with pytest.raises(tb.CaptureError, match=r"tensor_split at .* reads the values of a tensor of 2 elements"):
            step(X, torch.tensor([2, 5]))
    finally:
        recorder.MOST_HELD_ELEMENTS = most


# -- ops that the rule was not written for -------------------------------------------------------------------------


class Log(TorchDispatchMode):
    """Every op with the arguments that a replay would repeat, and every value that was read openly."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, str]] = []
        self.read: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.data_dependent_output in func.tags:
            self.read.append(repr(out))
        else:
            plain = tree_map(lambda t: t.shape if isinstance(t, torch.Tensor) else t, (args, kwargs, out))
            self.ops.append((func, repr(plain)))
        return out


def whole(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and not value.is_complex()
        and value.layout is torch.strided
        and value.numel() > 0
    )


def others(t: torch.Tensor) -> Iterator[torch.Tensor]:
    yield t.flip(-1) if t.dim() else t
    yield ~t if t.dtype is torch.bool else (t - 1).clamp(min=0)
    yield t.clone().fill_(1)


def changed(inputs: Any, turn: int) -> Any:
    """The inputs as leaves of their own, with other whole numbers from the second turn on."""

    def change(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        new = list(others(t))[turn - 1] if turn and whole(t) else t.detach().clone()
        return new.requires_grad_(t.requires_grad)

    return tree_map(change, inputs)


def run(op: Any, inputs: Any, around: Around = contextlib.nullcontext) -> None:
    first, args, kwargs = inputs
    with around():
        outs = op(first, *args, **kwargs)
    for out in tree_leaves(outs):
        if isinstance(out, torch.Tensor) and out.requires_grad:
            torch.autograd.backward(out, torch.ones_like(out), retain_graph=True)


def log_of(op: Any, inputs: Any, around: Around) -> Log | None:
    try:
        with Log() as log:
            run(op, inputs, around)
    except Exception:
        return None
    return log


def samples_of_torch() -> Sequence[Any]:
    """Torch's table of ops, which takes seconds to import: not while tests are collected."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: Sequence[Any] = op_db
    return found


#: Ops that resize what they are given are refused anyway.
RESIZE = ("resize_", "resize_as_")
#: Ops with whole numbers that save what they give.
SAVES_RESULTS = ("nn.functional.cross_entropy", "masked.softmax", "masked.logsumexp", "masked.amax")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_every_hidden_read_among_torch_s_ops_is_found_and_nothing_else_is_held() -> None:
    assert _search(samples_of_torch(), most=6) > 500


@pytest.mark.filterwarnings("ignore")
def test_hidden_reads_in_a_few_samples_of_each_op() -> None:
    few = [op for i, op in enumerate(samples_of_torch()) if i % 5 == 0 or op.name == "tensor_split"]
    assert _search(few, most=2) > 50


def copied() -> contextlib.AbstractContextManager[Any]:
    """What is saved for the backward is saved as a copy."""
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


@pytest.mark.filterwarnings("ignore")
def test_hidden_reads_under_hooks_for_what_is_saved() -> None:
    few = [op for i, op in enumerate(samples_of_torch()) if i % 10 == 1 or op.name in ("tensor_split", *SAVES_RESULTS)]
    assert _search(few, most=1, around=copied) > 30
    assert _search([op for op in few if op.name in SAVES_RESULTS], most=1, around=save_on_cpu) > 2


def _search(ops: Sequence[Any], most: int, around: Around = contextlib.nullcontext) -> int:
    """How many samples were tried."""
    hidden, tried = set(), 0
    for op in ops:
        for dtype in (torch.float32, torch.int64):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            needs_grad = dtype.is_floating_point and op.supports_autograd
            samples = op.sample_inputs_func(op, "cpu", dtype, needs_grad)  # sample_inputs looks at pytest's whole stack
            for sample in itertools.islice(samples, most):
                if not any(map(whole, tree_leaves((sample.input, sample.args, sample.kwargs)))):
                    continue
                inputs = (sample.input, sample.args, sample.kwargs)
                mine = changed(inputs, 0)
                recorder = Recorder({}, [t for t in tree_leaves(mine) if isinstance(t, torch.Tensor)])
                try:
                    with Reads(recorder) as reads, recorder:
                        run(op, mine, around)
                except Exception:
                    continue  # refused, or not an op that runs
                tried += 1
                logs = [log_of(op, changed(inputs, turn), around) for turn in range(4)]
                first = logs[0]
                assert first is not None
                if any(torch.Tag.dynamic_output_shape in target.tags for target, _ in first.ops):
                    continue  # each replay looks whether its result has the recorded shape: test_data_in_shapes.py
                in_secret = any(log and log.ops != first.ops and log.read == first.read for log in logs)
                assert reads.found or not in_secret, f"{op.name} reads values in secret"
                assert not reads.found or in_secret or op.name in RESIZE, f"{op.name} is held for nothing"
                if in_secret:
                    hidden.add(op.name)
    assert hidden == {op.name for op in ops} & {"tensor_split"}
    return tried


def test_whole_numbers_inside_of_vmap_are_recorded_as_they_are() -> None:
    """As transformers makes masks: batched places, and a mask that is not batched."""

    def loss_fn(model: torch.nn.Module, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        def sees(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return i.new_ones((), dtype=torch.bool) & (j <= i) & allowed[j]

        each = torch.vmap(torch.vmap(sees, in_dims=(None, 0)), in_dims=(0, None))
        places = torch.arange(6)
        return (model(x) * each(places, places)).pow(2).mean()

    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 6, generator=g), torch.rand(6, generator=g) < 0.7) for _ in range(3)]
    assert plans_made(torch.nn.Linear(6, 6), loss_fn, batches) == [True, False, False]


class _Split(torch.autograd.Function):
    """Reads lengths in its backward, in C++."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(lengths)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (lengths,) = ctx.saved_tensors
        return weighted(grad, lengths), None


def weighted(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([part * (i + 1) for i, part in enumerate(torch.tensor_split(x, lengths))])


def asked_for(keep: bool) -> Callable[..., torch.Tensor]:
    def loss_fn(model: torch.nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = (x * 1).requires_grad_()
        h = model(x)
        total = _Split.apply(h, lengths).sin().sum()
        (grad,) = torch.autograd.grad(total, x, retain_graph=True, create_graph=keep)
        return (grad * model.weight.sum()).sum() + h.sum()

    return loss_fn


def backwards(model: torch.nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    probe = (x * 1).detach().requires_grad_()
    _Split.apply(probe, lengths).sin().sum().backward()
    assert probe.grad is not None
    return (model(x) * probe.grad.detach()).sum()


def by_distance(model: torch.nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.triplet_margin_with_distance_loss(
        model(x),
        x,
        x + 1,
        margin=100.0,
        distance_function=lambda a, b: weighted((a - b).square(), lengths).sum(-1),
    )


@pytest.mark.parametrize(
    "loss_fn",
    [asked_for(False), asked_for(True), backwards, by_distance],
    ids=["grad", "grad with a graph", "backward", "distance"],
)
def test_lengths_that_python_inside_of_a_call_reads_are_held(loss_fn: Callable[..., torch.Tensor]) -> None:
    """Torch takes the mode off that would see it."""
    engine = torch.autograd._engine_run_backward
    one, two = torch.tensor([2, 5]), torch.tensor([3, 5])
    batches = [(X, one), (X, one), (X, two), (X, one)]
    assert plans_made(torch.nn.Linear(4, 4), loss_fn, batches) == [True, False, True, False]
    assert torch.autograd._engine_run_backward is engine
