"""On a GPU a GradBuffer's gradients are eager's, computed in place where that is promised, on any stream and dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import takeback as tb

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

Model = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Convolutions in float32, as matrix products are by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


class Tied(nn.Module):
    """Tokens in, logits out, with one table for both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 32, padding_idx=3)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(tokens)))


MODELS: dict[str, tuple[Model, Callable[[], torch.Tensor]]] = {
    "linear, norms": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64), nn.RMSNorm(64)),
        lambda: torch.randn(8, 16, 64, device="cuda"),
    ),
    "1x1, batch norm": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1, stride=2)),
        lambda: torch.randn(4, 8, 12, 12, device="cuda"),
    ),
    "channels_last": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)).to(
            memory_format=torch.channels_last
        ),
        lambda: torch.randn(100, 8, 12, 12, device="cuda").to(memory_format=torch.channels_last),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 1), nn.GroupNorm(4, 16)),
        lambda: torch.randn(4, 8, 6, 6, device="cuda"),
    ),
    "tied": (Tied, lambda: torch.randint(100, (4, 32), device="cuda")),
}


def twins(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    model = make().cuda()
    return model, copy.deepcopy(model), draw()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """A loss that a norm at the end does not make constant."""
    weights = torch.linspace(-1.0, 1.0, out.numel(), device=out.device).view(out.shape)
    return (out.float() * weights).sum()


def assert_close(model: nn.Module, plain: nn.Module, buf: tb.GradBuffer, rtol: float = 1e-4) -> None:
    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None
        assert q[1].grad is not None
        assert p.grad.untyped_storage().data_ptr() in {f.untyped_storage().data_ptr() for f in buf.flats}, name
        torch.testing.assert_close(
            p.grad.float(), q[1].grad.float(), rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_eagers_and_computed_in_place(name: str) -> None:
    model, plain, x = twins(name)
    buf = tb.GradBuffer(model)
    for _ in range(3):  # the second and third are added
        loss_of(model(x)).backward()
        loss_of(plain(x)).backward()
        assert_close(model, plain, buf)
        assert buf.copies == 0, buf.reasons
    assert torch.isclose(buf.clip_(0.01), nn.utils.clip_grad_norm_(plain.parameters(), 0.01), rtol=1e-4)
    assert_close(model, plain, buf)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # eager's own
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_eagers(name: str, dtype: torch.dtype) -> None:
    model, plain, x = twins(name)
    buf = tb.GradBuffer(model)
    for _ in range(2):
        outs = []
        for m in (model, plain):
            with torch.autocast("cuda", dtype=dtype):
                out = m(x)
            outs.append(out)
            loss_of(out).backward()
        assert outs[0].dtype == outs[1].dtype
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-2, atol=1e-2)
        assert_close(model, plain, buf, rtol=3e-2)
        assert buf.copies == 0, buf.reasons


def test_bf16_weights_with_float32_gradients() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("needs a torch with Tensor.grad_dtype")
    model, plain, x = twins("linear, norms")
    model.bfloat16()
    buf = tb.GradBuffer(model, dtype=torch.float32)
    for _ in range(4):
        loss_of(model(x.bfloat16())).backward()
        loss_of(plain(x)).backward()
    assert buf.flat.dtype is torch.float32
    assert_close(model, plain, buf, rtol=5e-2)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # we keep the node, as DDP does
def test_a_backward_on_another_stream_is_right() -> None:
    model, plain, x = twins("linear, norms")
    buf = tb.GradBuffer(model)
    side = torch.cuda.Stream()
    for _ in range(5):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = loss_of(model(x))
        torch.cuda.current_stream().wait_stream(side)
        loss.backward()
        loss_of(plain(x)).backward()
    assert_close(model, plain, buf)
    assert set(buf.reasons.values()) == {"computed on another CUDA stream than the one the buffer was made on"}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_step_makes_no_copy_of_parameter_size() -> None:
    model, _, x = twins("linear, norms")
    buf = tb.GradBuffer(model)
    loss_of(model(x)).backward()
    model.zero_grad()
    loss = loss_of(model(x))
    with torch.profiler.profile(record_shapes=True) as profile:
        loss.backward()
        torch.cuda.synchronize()
    sizes = {p.numel() for p in model.parameters()}
    events = profile.events()
    assert events is not None
    for event in events:
        if event.name in ("aten::copy_", "aten::clone"):
            assert not {torch.Size(s).numel() for s in event.input_shapes} & sizes, event
    assert buf.copies == 0


def test_the_buffer_is_the_only_memory_that_gradients_take() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    buf = tb.GradBuffer(model)
    x = torch.randn(16, 1024, device="cuda")
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(model(x)).backward()
        grown = torch.cuda.max_memory_allocated() - before
    assert grown < 2 * 1024 * 1024 * 4, "a temporary of a weight's size was made"
    assert buf.copies == 0


def test_a_convolution_in_tf32_is_left_to_torch() -> None:
    model, plain, x = twins("1x1, batch norm")
    buf = tb.GradBuffer(model)
    torch.backends.cudnn.allow_tf32 = True
    loss_of(model(x)).backward()
    loss_of(plain(x)).backward()
    assert set(buf.reasons) == {"0.weight", "3.weight"}
    assert_close(model, plain, buf, rtol=1e-2)
