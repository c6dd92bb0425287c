"""takeback compiles a PyTorch training step so that every buffer has one owner."""

from takeback import optim
from takeback.errors import (
    BorrowError,
    CaptureError,
    GradBufferError,
    MemoryTargetError,
    OptionError,
    OverwriteError,
    PlanError,
    ReduceError,
    TakebackError,
    VerifyError,
)
from takeback.explain.report import Report
from takeback.grads import GradBuffer
from takeback.guard import guard
from takeback.predict import largest_batch, predict
from takeback.step import CompiledStep, compile_step

__version__ = "0.1.0"

__all__ = [
    "BorrowError",
    "CaptureError",
    "CompiledStep",
    "GradBuffer",
    "GradBufferError",
    "MemoryTargetError",
    "OptionError",
    "OverwriteError",
    "PlanError",
    "ReduceError",
    "Report",
    "TakebackError",
    "VerifyError",
    "compile_step",
    "guard",
    "largest_batch",
    "optim",
    "predict",
]
