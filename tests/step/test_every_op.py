"""Layers, activations and losses one by one: each step equals eager's, so no `out=` kernel lies about where it writes.

Each function is placed between two linear layers, in a program whose neighbours a stray write would hit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import Setup, assert_right, sgd
from torch import Tensor, nn

from pairwise import in_turns, quick_ones

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

ROWS, WIDTH = 8, 12
TARGET = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9))
SIGNS = TARGET.sign()
CLASSES = torch.arange(ROWS) % WIDTH


class Between(nn.Module):
    """linear, the layer under test, linear."""

    def __init__(self, middle: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(width, WIDTH)
        self.inner = middle if isinstance(middle, nn.Module) else None
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def rows(step: int) -> tuple[Tensor]:
    return (torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(100 + step)),)


def right_with_loss(loss: Callable[[Tensor], Tensor]) -> None:
    def make() -> Setup:
        model = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        return Setup(model, lambda m, x: loss(m(x)), sgd(model), rows)

    assert_right(make, steps=4, memory="auto")


def right_with_middle(build: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    def make() -> Setup:
        middle = build()
        probe = middle.train(False) if isinstance(middle, nn.Module) else middle
        width = probe(torch.rand(ROWS, WIDTH)).shape[-1]
        if isinstance(middle, nn.Module):
            middle.train()
        model = Between(middle, width)
        return Setup(model, lambda m, x: m(x).square().mean(), sgd(model), rows)

    assert_right(make, steps=4, memory="auto")


ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "mse": lambda h, **k: F.mse_loss(h, TARGET, **k),
    "l1": lambda h, **k: F.l1_loss(h, TARGET, **k),
    "smooth_l1": lambda h, **k: F.smooth_l1_loss(h, TARGET, **k),
    "huber": lambda h, **k: F.huber_loss(h, TARGET, **k),
    "soft_margin": lambda h, **k: F.soft_margin_loss(h, SIGNS, **k),
    "bce": lambda h, **k: F.binary_cross_entropy(h.sigmoid(), TARGET.sigmoid(), **k),
    "bce_weighted": lambda h, **k: F.binary_cross_entropy(h.sigmoid(), TARGET.sigmoid(), TARGET.abs(), **k),
    "bce_logits": lambda h, **k: F.binary_cross_entropy_with_logits(h, TARGET.sigmoid(), **k),
    "bce_logits_pos": lambda h, **k: F.binary_cross_entropy_with_logits(
        h, TARGET.sigmoid(), pos_weight=TARGET[0].abs(), **k
    ),
    "kl": lambda h, **k: F.kl_div(h.log_softmax(-1), TARGET.softmax(-1), **k),
    "poisson": lambda h, **k: F.poisson_nll_loss(h, TARGET.abs(), **k),
    "gaussian": lambda h, **k: F.gaussian_nll_loss(h, TARGET, TARGET.abs() + 1, **k),
    "hinge": lambda h, **k: F.hinge_embedding_loss(h, SIGNS, **k),
    "ranking": lambda h, **k: F.margin_ranking_loss(h, TARGET, SIGNS, **k),
    "multi_margin": lambda h, **k: F.multi_margin_loss(h, CLASSES, **k),
    "multilabel_margin": lambda h, **k: F.multilabel_margin_loss(h, CLASSES.repeat_interleave(12).view(8, 12) % 3, **k),
    "multilabel_soft": lambda h, **k: F.multilabel_soft_margin_loss(h, (SIGNS + 1) / 2, **k),
    "cosine": lambda h, **k: F.cosine_embedding_loss(h, TARGET, SIGNS[:, 0], **k),
    "triplet": lambda h, **k: F.triplet_margin_loss(h, TARGET, SIGNS, **k),
    "nll": lambda h, **k: F.nll_loss(h.log_softmax(-1), CLASSES, **k),
    "nll_weighted": lambda h, **k: F.nll_loss(h.log_softmax(-1), CLASSES, TARGET[0].abs(), ignore_index=3, **k),
    "nll_2d": lambda h, **k: F.nll_loss(h.view(2, 4, 4, 3).log_softmax(1), CLASSES[:24].new_zeros(2, 4, 3), **k),
    "cross_entropy": lambda h, **k: F.cross_entropy(h, CLASSES, **k),
    "cross_entropy_ignored": lambda h, **k: F.cross_entropy(h, CLASSES, ignore_index=2, **k),
    "cross_entropy_weighted": lambda h, **k: F.cross_entropy(h, CLASSES, TARGET[0].abs(), **k),
    "cross_entropy_smoothed": lambda h, **k: F.cross_entropy(h, CLASSES, label_smoothing=0.1, **k),
    "cross_entropy_soft": lambda h, **k: F.cross_entropy(h, TARGET.softmax(-1), **k),
}


@pytest.mark.parametrize(("name", "reduction"), in_turns(ELEMENTWISE, ["mean", "sum", "none"]))
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_loss_function_equals_eager(name: str, reduction: str) -> None:
    loss = ELEMENTWISE[name]
    right_with_loss(lambda h: loss(h, reduction=reduction).square().sum() * 1e-3)


SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": Tensor.mean,
    "sum": Tensor.sum,
    "expanded_sum_of_a_sum": lambda h: (h.sum() + h).sum(),
    "norm": lambda h: h.norm(),
    "vector_norm_3": lambda h: torch.linalg.vector_norm(h, 3.0),
    "logsumexp": lambda h: h.logsumexp(-1).sum(),
    "std": lambda h: h.std(),
    "var_mean": lambda h: sum(torch.var_mean(h, 0)).sum(),  # type: ignore[arg-type]
    "prod": lambda h: h.prod(),
    "max": lambda h: h.max(),
    "max_dim": lambda h: h.max(-1).values.sum(),
    "median": lambda h: h.median(),
    "topk": lambda h: h.topk(3).values.sum(),
    "sort": lambda h: (h.sort(-1).values * TARGET).sum(),
    "kthvalue": lambda h: h.kthvalue(2).values.sum(),
    "cumsum": lambda h: (h.cumsum(0) * TARGET).sum(),
    "dist": lambda h: torch.dist(h, TARGET),
    "cdist": lambda h: torch.cdist(h, TARGET).sum(),
    "einsum": lambda h: torch.einsum("ij,kj->ik", h, TARGET).square().sum(),
    "bmm": lambda h: torch.bmm(h.view(2, 4, 12), h.view(2, 12, 4)).sum(),
    "baddbmm": lambda h: torch.baddbmm(TARGET.view(2, 4, 12)[:, :, :4], h.view(2, 4, 12), h.view(2, 12, 4)).sum(),
    "gather": lambda h: h.gather(1, CLASSES[:, None]).sum(),
    "scatter": lambda h: (torch.zeros(8, 12).scatter(1, CLASSES[:, None], h[:, :1]) * TARGET).sum(),
    "scatter_add": lambda h: torch.zeros(3, 12).index_add(0, CLASSES % 3, h).square().sum(),
    "index_put": lambda h: h.clone().index_put_((CLASSES % 3,), TARGET[0]).square().sum(),
    "index_fill": lambda h: h.index_fill(0, CLASSES[:2], 0.5).square().sum(),
    "masked_fill": lambda h: h.masked_fill(TARGET > 0, 0.3).square().sum(),
    "where": lambda h: torch.where(TARGET > 0, h, TARGET).square().sum(),
    "tril": lambda h: h.tril().square().sum(),
    "cat": lambda h: torch.cat([h, h * 2, TARGET], 1).square().sum(),
    "stack": lambda h: torch.stack([h, h]).square().sum(),
    "chunk_swap": lambda h: torch.cat(h.chunk(2, -1)[::-1], -1).mul(TARGET).sum(),
    "roll": lambda h: (h.roll(3, 1) * TARGET).sum(),
    "flip": lambda h: (h.flip(0) * TARGET).sum(),
    "pad": lambda h: F.pad(h, (1, 2), value=0.5).square().sum(),
    "reflect_pad": lambda h: F.pad(h, (2, 2), mode="reflect").square().sum(),
    "diag": lambda h: torch.diagonal(h @ h.t()).sum(),
    "fft": lambda h: torch.fft.rfft(h).abs().square().sum(),
    "lerp": lambda h: torch.lerp(h, TARGET, 0.3).square().sum(),
    "addcmul": lambda h: torch.addcmul(h, h, TARGET, value=0.5).square().sum(),
    "addcdiv": lambda h: torch.addcdiv(h, TARGET, h.abs() + 1, value=0.5).square().sum(),
    "atan2": lambda h: torch.atan2(h, TARGET).sum(),
    "maximum": lambda h: torch.maximum(h, TARGET).sum(),
    "fmod": lambda h: (h % 0.7).sum(),
    "pow_tensor": lambda h: (h.abs() + 0.1).pow(TARGET).sum(),
    "rsub": lambda h: (1.0 - h).square().sum(),
    "in_place_chain": lambda h: (h * 2).add_(1).mul_(TARGET).add_(h).sum(),
    "repeat_add": lambda h: (h + h.t()[:8, :1].expand(8, 12)).square().sum(),
    "double": lambda h: (h.double() * TARGET.double()).sum().float(),
    "bfloat16": lambda h: (h.bfloat16() * TARGET.bfloat16()).sum().float(),
    "cosine_similarity": lambda h: F.cosine_similarity(h, TARGET).sum(),
    "normalize": lambda h: (F.normalize(h, dim=-1) * TARGET).sum(),
    "inverse": lambda h: torch.linalg.inv(h[:, :8] @ h[:, :8].t() + 5 * torch.eye(8)).sum(),
    "cholesky": lambda h: torch.linalg.cholesky(h @ h.t() + 5 * torch.eye(8)).sum(),
    "svd": lambda h: torch.linalg.svdvals(h).sum(),
    "unfold": lambda h: (h.unfold(1, 4, 2) ** 2).sum(),
    "as_strided": lambda h: h.as_strided((8, 5), (12, 2)).square().sum(),
    "complex_abs": lambda h: torch.view_as_complex(h.view(8, 6, 2)).abs().sum(),
    "batchless_outer": lambda h: torch.outer(h[0], h[1]).square().sum(),
    "new_zeros_written": lambda h: torch.zeros_like(h).copy_(h).square().sum(),
    "bernoulli_mask": lambda h: (h * torch.bernoulli(torch.full_like(h, 0.5))).sum(),
    "gumbel": lambda h: (F.gumbel_softmax(h) * TARGET).sum(),
    "rand_like": lambda h: (h * torch.rand_like(h) + torch.randn(8, 12)).sum(),
    "randperm": lambda h: (h[torch.randperm(8)] * TARGET).sum(),
    "multinomial": lambda h: h.gather(1, torch.multinomial(h.detach().softmax(-1), 2)).sum(),
}


# The others are among those that test_equivalence.py trains, several in one step.
QUICK_SCALARS = (
    *("mean", "expanded_sum_of_a_sum", "norm", "vector_norm_3", "prod", "median", "topk", "dist", "bmm", "index_put"),
    *("scatter_add", "tril", "chunk_swap", "reflect_pad", "diag", "rsub", "in_place_chain", "repeat_add", "double"),
    *("bfloat16", "svd", "as_strided", "new_zeros_written", "bernoulli_mask", "multinomial"),
)


@pytest.mark.parametrize("name", quick_ones(SCALARS, QUICK_SCALARS))
def test_function_equals_eager(name: str) -> None:
    right_with_loss(SCALARS[name])


def image(layer: nn.Module, *shape: int) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, shape or (1, 3, 4)), layer, nn.Flatten())


ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Tanhshrink,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Mish,
)
MIDDLES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    **{kind.__name__: kind for kind in ACTIVATIONS},
    "GELU_tanh": lambda: nn.GELU(approximate="tanh"),
    "Threshold": lambda: nn.Threshold(0.1, 0.2),
    "GLU": nn.GLU,
    "Softmax": lambda: nn.Softmax(-1),
    "Softmin": lambda: nn.Softmin(-1),
    "LogSoftmax_0": lambda: nn.LogSoftmax(0),
    "ReLU_inplace": lambda: nn.ReLU(inplace=True),
    "Dropout": lambda: nn.Dropout(0.3),
    "Dropout_inplace": lambda: nn.Sequential(nn.Identity(), nn.Linear(12, 12), nn.Dropout(0.3, inplace=True)),
    "AlphaDropout": lambda: nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": lambda: image(nn.FeatureAlphaDropout(0.3)),
    "Dropout2d": lambda: image(nn.Dropout2d(0.3)),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm_plain": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "BatchNorm1d": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm1d_no_stats": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "BatchNorm2d": lambda: image(nn.BatchNorm2d(3), 3, 2, 2),
    "GroupNorm": lambda: image(nn.GroupNorm(2, 4), 4, 3, 1),
    "InstanceNorm2d": lambda: image(nn.InstanceNorm2d(3, affine=True, track_running_stats=True), 3, 2, 2),
    "LocalResponseNorm": lambda: image(nn.LocalResponseNorm(2), 3, 2, 2),
    "Conv1d": lambda: image(nn.Conv1d(3, 5, 2), 3, 4),
    "Conv2d": lambda: image(nn.Conv2d(1, 2, 2)),
    "Conv2d_grouped": lambda: image(nn.Conv2d(4, 4, 1, groups=2), 4, 3, 1),
    "Conv2d_strided": lambda: image(nn.Conv2d(1, 2, 3, stride=2, padding=1, dilation=1)),
    "Conv3d": lambda: image(nn.Conv3d(1, 2, (1, 2, 2)), 1, 1, 3, 4),
    "ConvTranspose2d": lambda: image(nn.ConvTranspose2d(1, 2, 2, stride=2)),
    "MaxPool1d": lambda: image(nn.MaxPool1d(2), 3, 4),
    "MaxPool2d": lambda: image(nn.MaxPool2d(2, padding=1)),
    "AvgPool2d": lambda: image(nn.AvgPool2d(2)),
    "AdaptiveAvgPool2d": lambda: image(nn.AdaptiveAvgPool2d((2, 2))),
    "AdaptiveAvgPool2d_1": lambda: image(nn.AdaptiveAvgPool2d(1), 3, 2, 2),
    "AdaptiveMaxPool2d": lambda: image(nn.AdaptiveMaxPool2d((2, 2))),
    "LPPool2d": lambda: image(nn.LPPool2d(2, 2)),
    "FractionalMaxPool2d": lambda: image(nn.FractionalMaxPool2d(2, output_size=(2, 2))),
    "Upsample_nearest": lambda: image(nn.Upsample(scale_factor=2)),
    "Upsample_bilinear": lambda: image(nn.Upsample(scale_factor=2, mode="bilinear")),
    "Upsample_bicubic": lambda: image(nn.Upsample(scale_factor=2, mode="bicubic")),
    "PixelShuffle": lambda: image(nn.PixelShuffle(2), 4, 3, 1),
    "Unfold": lambda: image(nn.Unfold(2)),
    "Fold": lambda: image(nn.Fold((3, 4), 1), 1, 12),
    "ZeroPad2d": lambda: image(nn.ZeroPad2d(1)),
    "ReplicationPad2d": lambda: image(nn.ReplicationPad2d(1)),
    "ReflectionPad1d": lambda: image(nn.ReflectionPad1d(1), 3, 4),
    "Bilinear": lambda: _Twice(nn.Bilinear(WIDTH, WIDTH, 5)),
    "Embedding": lambda: _Looked(nn.Embedding(8, 5, padding_idx=1)),
    "Embedding_max_norm": lambda: _Looked(nn.Embedding(8, 5, max_norm=1.0)),
    "EmbeddingBag": lambda: _Looked(nn.EmbeddingBag(8, 5, mode="mean")),
    "LSTM": lambda: _Sequence(nn.LSTM(4, 5, batch_first=True)),
    "LSTM_2_dropout": lambda: _Sequence(nn.LSTM(4, 5, num_layers=2, dropout=0.3, bidirectional=True)),
    "GRU": lambda: _Sequence(nn.GRU(4, 5)),
    "RNN": lambda: _Sequence(nn.RNN(4, 5)),
    "Attention": lambda: _Attends(nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)),
    "TransformerEncoderLayer": lambda: image(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 3, 4),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 5)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 5)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, 5)),
}


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h, h)


class _Looked(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Any:
        looked = self.inner((h.detach().abs() * 3).long().clamp(0, 7)[:, :3])
        return torch.cat([h, looked.flatten(1)], 1)


class _Sequence(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Any:
        return self.inner(h.view(8, 3, 4))[0].flatten(1)


class _Attends(_Sequence):
    def forward(self, h: Tensor) -> Any:
        s = h.view(8, 3, 4)
        return self.inner(s, s, s)[0].flatten(1)


# Pointwise, of a formula's kind that is there already.
ALIKE = ("Hardtanh", "Hardsigmoid", "Hardshrink", "Tanhshrink", "Softsign", "CELU", "SELU", "ReLU6", "Sigmoid", "Mish")


@pytest.mark.parametrize("name", quick_ones(MIDDLES, MIDDLES.keys() - set(ALIKE)))
def test_layer_equals_eager(name: str) -> None:
    right_with_middle(MIDDLES[name])
