"""predict and largest_batch for a GPU that is not there: its kernels, its bytes, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import takeback as tb
from takeback import zoo
from takeback.cli import app
from takeback.compiler.program import Op, Program
from takeback.compiler.run.gpu_table import GPUS, gpu_named
from takeback.compiler.run.rate_table import table_rates
from takeback.errors import CaptureError, OptionError
from takeback.options import Options
from takeback.tracing import TracedStep

pytestmark = pytest.mark.usefixtures("short_search")

H200 = gpu_named("H200")


def program_of(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Tensor, **optimizer: Any) -> Program:
    """As it would be recorded on an H200."""
    adam = torch.optim.AdamW(model.parameters(), **optimizer)
    return TracedStep(model, loss_fn, adam, batch, {}, Options(), H200).traced().program


def names(program: Program) -> set[str]:
    return {op.name for op in program.ops}


class Attention(nn.Module):
    """Heads of `width`, of a projection."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.project = width, nn.Linear(2 * width, 6 * width, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, self.width)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


@pytest.mark.parametrize(
    ("width", "dtype", "masked", "kernel"),
    [
        (64, torch.bfloat16, False, "_scaled_dot_product_cudnn_attention"),
        (64, torch.bfloat16, True, "_scaled_dot_product_cudnn_attention"),
        (256, torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (256, torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        (64, torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (64, torch.float64, False, "_softmax"),
    ],
)
def test_attention_runs_on_the_kernel_that_an_h200_would_take(
    width: int, dtype: torch.dtype, masked: bool, kernel: str
) -> None:
    x = torch.empty(2, 16, 2 * width, dtype=dtype)
    batch = (x, torch.ones(16, 16, dtype=torch.bool)) if masked else (x,)
    found = names(program_of(Attention(width, dtype), lambda m, *batch: m(*batch).sum(), *batch))
    assert kernel in found or f"_safe{kernel}" in found
    if kernel.startswith("_scaled"):
        assert f"{kernel}_backward" in found
        assert {n for n in found if n.startswith("_scaled")} == {kernel, f"{kernel}_backward"}


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "efficient"), (torch.bfloat16, "cudnn")])
def test_bias_that_lies_by_heads_is_added_by_plain_products(dtype: torch.dtype, kernel: str) -> None:
    """As T5's relative positions: the kernels that know a bias want its rows one after the other, cuDNN's too."""
    x, bias = torch.empty(2, 16, 128, dtype=dtype), torch.empty(1, 2, 16, 16, dtype=dtype)
    model = Attention(64, dtype)
    for given, fused in ((bias, True), (bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), False)):
        found = names(program_of(model, lambda m, *batch: m(*batch).sum(), x, given))
        assert (f"_scaled_dot_product_{kernel}_attention" in found) is fused
        assert ("bmm" in found) is not fused


def test_switches_of_torch_choose_another_attention() -> None:
    x = torch.empty(2, 16, 128, dtype=torch.bfloat16)
    model = Attention(64, torch.bfloat16)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert "_scaled_dot_product_flash_attention" in names(program_of(model, lambda m, x: m(x).sum(), x))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_layers_run_on_the_kernels_of_cuda() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
    x = torch.empty(2, 3, 8, 8)

    def half(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return m(x).float().mean()

    single = program_of(model, lambda m, x: m(x).mean(), x)
    assert {"cudnn_batch_norm", "native_dropout", "_fused_adamw_"} <= names(single)
    cast = program_of(model, half, x, fused=True)
    assert {"native_batch_norm", "_fused_adamw_"} <= names(cast)
    [convolution] = [op for op in cast.ops if op.name == "convolution"]
    assert convolution.outputs[0].dtype is torch.bfloat16
    assert cast.device == torch.device("cuda", 0)


def test_channels_last_stays_channels_last_behind_a_convolution() -> None:
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    x = torch.empty(2, 4, 8, 8).to(memory_format=torch.channels_last)
    [convolution] = [op for op in program_of(model, lambda m, x: m(x).mean(), x).ops if op.name == "convolution"]
    assert convolution.outputs[0].stride[1] == 1


def step_of(rows: int = 4) -> tuple[nn.Module, Callable[..., Tensor], torch.optim.Optimizer, Tensor]:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda m, x: m(x).square().mean(), optimizer, torch.ones(rows, 64)


def test_report_counts_bytes_of_tensors_and_the_workspaces_of_cublas() -> None:
    report = tb.predict(*step_of(), device="cuda", gpu="H200", mode="exact", memory="keep")
    parameters = 4 * (64 * 256 + 256 + 256 * 8 + 8)
    assert report.resident_bytes == parameters + 4 * 64 * 4 + (64 << 20)
    assert report.eager_peak_bytes > report.resident_bytes
    assert not report.has_arena
    assert report.mode == "exact"


def test_report_says_whose_kernels_were_chosen() -> None:
    other = tb.predict(*step_of(), device="cuda", gpu="RTX 4090")
    own = tb.predict(*step_of(), device="cuda", gpu="H200")
    assert "kernel choices are the H200's" in " ".join(str(other).split())
    assert "kernel choices" not in str(own)
    assert "RTX 4090, predicted" in " ".join(str(other).split())
    assert other.mode == own.mode == "fast"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"device": "cuda", "gpu": "RTX 9999"}, r"gpu='RTX 9999' is not known; there are H200, .*RTX 4090"),
        ({"device": "cuda"}, r"device='cuda' needs gpu=: the name of one of H200, "),
        ({"device": "cpu", "gpu": "H200"}, r"gpu='H200' belongs to device='cuda'"),
        ({"device": "tpu"}, r"device must be 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_what_cannot_be_meant_is_said(asked: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        tb.predict(*step_of(), **asked)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_peak_grows_with_the_batch(mode: str) -> None:
    peaks = [tb.predict(*step_of(rows), device="cuda", gpu="H200", mode=mode).peak_bytes for rows in (1, 64, 512, 4096)]
    assert peaks == sorted(set(peaks))


def test_meta_and_fake_models_give_what_those_on_the_cpu_do() -> None:
    def predicted(made: Any) -> tuple[int, int]:
        report = tb.predict(*made, device="cuda", gpu="H200")
        return report.peak_bytes, report.eager_peak_bytes

    with FakeTensorMode():
        fake = step_of()
    with torch.device("meta"):
        meta = step_of()
    assert predicted(step_of()) == predicted(meta) == predicted(fake)


def test_nothing_is_left_of_a_prediction() -> None:
    case = zoo.case("gpt")
    before = torch.cuda.is_bf16_supported, torch.cuda.amp.common.amp_definitely_not_available
    bits = [p.detach().clone() for p in case.model.parameters()]
    tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, device="cuda", gpu="H200")
    assert (torch.cuda.is_bf16_supported, torch.cuda.amp.common.amp_definitely_not_available) == before
    assert all(torch.equal(p, was) for p, was in zip(case.model.parameters(), bits, strict=True))
    assert torch.autograd.is_multithreading_enabled()
    if not torch.cuda.is_available():
        assert torch.accelerator.current_accelerator() is None
        with pytest.raises((RuntimeError, AssertionError)):
            torch.empty(1, device="cuda")
    case.loss_fn(case.model, *case.batch).backward()  # autograd still has its threads


def test_values_that_depend_on_no_data_may_be_read() -> None:
    def reads(model: nn.Module, x: Tensor) -> Tensor:
        positions = torch.arange(8, device=x.device)
        positions[3] += 1
        return model(x).mean() * (2.0 if bool((positions.cumsum(0)[-1] == 29).all()) else positions.max().item())

    program = program_of(nn.Linear(4, 4), reads, torch.ones(2, 4))
    assert [op.args[1] for op in program.ops if op.name.startswith("mul") and 2.0 in op.args]


def test_a_value_of_the_batch_cannot_be_read() -> None:
    with pytest.raises(CaptureError, match="reads a tensor's value into Python"):
        program_of(nn.Linear(4, 4), lambda m, x: m(x).mean() * x.max().item(), torch.ones(2, 4))


def test_a_tensor_that_is_elsewhere_is_named() -> None:
    weights = torch.ones(4)
    with pytest.raises(CaptureError, match=r"tensors on different devices at test_predict_cuda.py:\d+.*in the batch"):
        program_of(nn.Linear(4, 4), lambda m, x: (m(x) * weights).mean(), torch.ones(2, 4))


def test_backward_of_attention_takes_scratch_for_the_gradient_of_queries() -> None:
    def taken(program: Program) -> int:
        [op] = [op for op in program.ops if op.name.endswith("attention_backward")]
        assert isinstance(op, Op)
        return sum(s.size_bytes for s in op.scratch)

    x = torch.empty(2, 256, 128, dtype=torch.bfloat16)
    program = program_of(Attention(64, torch.bfloat16), lambda m, x: m(x).sum(), x)
    assert taken(program) == 2 * 2 * 256 * (64 + 1) * 4


def test_rates_of_gpus_are_in_the_order_of_their_data_sheets() -> None:
    assert H200.rates == table_rates("cuda", "NVIDIA H200", 1)
    for slow, fast in (("RTX 3090", "RTX 4090"), ("A100-40GB", "H100-80GB"), ("L4", "L40S")):
        assert GPUS[slow].rates.product(torch.bfloat16) < GPUS[fast].rates.product(torch.bfloat16)
        assert GPUS[slow].rates.bytes_per_s < GPUS[fast].rates.bytes_per_s
    assert gpu_named("NVIDIA GeForce rtx4090") is GPUS["RTX 4090"]
    assert GPUS["RTX 4090"].usable_bytes < 24 << 30 < GPUS["RTX 5090"].usable_bytes


def test_largest_batch_is_the_last_that_fits() -> None:
    def peak(rows: int) -> int:
        return tb.predict(*step_of(rows), device="cuda", gpu="H200", mode="exact", memory="keep").eager_peak_bytes

    found = tb.largest_batch(lambda n: step_of(n), "80MiB", memory_mode="eager", device="cuda", gpu="H200")
    assert peak(found) <= 80 << 20 < peak(found + 1)


def test_fit_names_the_gpu_and_whose_kernels_they_are() -> None:
    room, gpu = ["--memory", "18560KiB"], ["--gpu", "RTX 4090"]
    result = CliRunner().invoke(app, ["fit", "mlp", *room, *gpu, "--memory-mode", "keep"])
    assert result.exit_code == 0, result.output
    assert "fits 18560KiB on the RTX 4090, predicted" in result.stdout
    assert "kernel choices are the H200's" in result.stdout
    assert "in eager" in result.stdout


def test_commands_name_the_gpus_there_are() -> None:
    for words in (["fit", "mlp", "--gpu", "none"], ["predict", "mlp", "--gpu", "none"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1
        assert "RTX 4090" in result.stderr
    assert CliRunner().invoke(app, ["fit", "mlp"]).exit_code == 2


def test_predict_shows_the_report_for_the_gpu() -> None:
    result = CliRunner().invoke(app, ["predict", "mlp", "--gpu", "A100-80GB", "--fail-over", "1MiB"])
    assert "A100-80GB, predicted" in " ".join(result.stdout.split())
    assert result.exit_code == 1  # the peak is above --fail-over
