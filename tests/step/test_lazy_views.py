"""Tensors that are conjugated or negated by a flag only are so for real in the program, and eager's bits come out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from harness import Case, train_both

pytestmark = pytest.mark.usefixtures("short_search")


def draw(i: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i))


class FourierMix(nn.Module):
    """FNet's mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(self.inner(x), dim=-1), dim=-2).real
        return self.out(torch.relu(mixed))


class GlobalFilter(nn.Module):
    """A filter of complex weights between rfft and irfft, as in GFNet and in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(7, 5, 2) * 0.1)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=-1, norm="ortho") * torch.view_as_complex(self.weight)
        return self.out(torch.fft.irfft(spectrum, n=8, dim=-1, norm="ortho"))


class Correlation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.fft.rfft(self.left(x)), torch.fft.rfft(self.right(x))
        return torch.fft.irfft(a * b.conj(), n=8) + (a.conj() * b).imag.sum() + (a.conj().transpose(0, 1)).imag.sum()


class Rotary(nn.Module):
    """Rotary embedding with complex numbers, as in Llama's first code and in DeepSeek V2."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]).float(), 0.5 ** torch.arange(4).float())
        turn = torch.polar(torch.ones_like(angles), angles)

        def rotate(t: Tensor) -> Tensor:
            pairs = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turn).flatten(-2)

        return rotate(self.query(x)) @ rotate(self.key(x)).transpose(-1, -2)


class ComplexLayer(nn.Module):
    """Complex parameters: their gradients come out conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(draw(1, 8, 4), draw(2, 8, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) * self.weight[:, 0]).abs()


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("kind", [FourierMix, GlobalFilter, Correlation, Rotary, ComplexLayer])
@pytest.mark.parametrize("memory", ["auto", "min"])
def test_layers_with_lazy_conjugates_give_eager_s_bits(kind: Callable[[], nn.Module], memory: str) -> None:
    train_both(Case(kind, square, lambda i: (draw(i, 3, 6, 8),)), steps=4, memory=memory)


class ComplexLinear(nn.Module):
    """A product that takes conjugates as they are; the gradient of the weight is left conjugated by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(draw(1, 8, 8), draw(2, 8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight.conj().T).abs()


def test_a_product_of_conjugates_gives_eager_s_bits_or_is_refused() -> None:
    model, other = ComplexLinear(), ComplexLinear()
    step = tb.compile_step(model, square, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for i in range(4):
        x = draw(i, 6, 8)
        try:
            loss = step(x)
        except tb.CaptureError as error:
            assert "other bits" in str(error)  # noqa: PT017
            return
        optimizer.zero_grad()
        expected = square(other, x)
        expected.backward()
        optimizer.step()
        assert torch.equal(loss, expected.detach())
        assert torch.equal(torch.view_as_real(model.weight.detach()), torch.view_as_real(other.weight.detach()))


def test_what_is_conjugated_becomes_an_op_of_its_own() -> None:
    model = Correlation()
    step = tb.compile_step(model, square, torch.optim.SGD(model.parameters(), lr=0.1))
    step(draw(0, 3, 6, 8))
    assert step._last is not None
    assert "_conj_physical" in [op.name for op in step._last.original.ops]


def test_a_conjugated_batch_is_followed() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(8, 8)

    def loss_fn(model: Weighted, z: Tensor) -> Tensor:
        return (z.conj() * model.scale(z.real)).imag.square().mean()

    def batch(i: int) -> tuple[Tensor]:
        return (torch.complex(draw(i, 4, 8), draw(i + 50, 4, 8)),)

    train_both(Case(Weighted, loss_fn, batch), steps=4)


def test_a_lazy_result_is_refused() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        return out.square().mean(), torch.fft.fft(out.detach()).conj()

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tb.CaptureError, match=r"returns a lazily conjugated or negated tensor.*resolve_conj"):
        step(draw(0, 3, 4))
