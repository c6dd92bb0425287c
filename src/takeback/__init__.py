"""takeback compiles a PyTorch training step so that every buffer has one owner."""

from takeback import bucket, nn, optim
from takeback.compiler.explain.report import Report
from takeback.errors import (
    BorrowError,
    CaptureError,
    ConvertError,
    GradBufferError,
    MemoryTargetError,
    OptionError,
    OverwriteError,
    PlanError,
    ReduceError,
    StalePlanError,
    TakebackError,
    VerifyError,
    WorkspaceError,
)
from takeback.grads import GradBuffer
from takeback.guard import guard
from takeback.norm_cache import NormCache
from takeback.predict import largest_batch, predict
from takeback.step import CompiledStep, compile_step
from takeback.workspace import Workspace

__version__ = "0.1.0"

__all__ = [
    "BorrowError",
    "CaptureError",
    "CompiledStep",
    "ConvertError",
    "GradBuffer",
    "GradBufferError",
    "MemoryTargetError",
    "NormCache",
    "OptionError",
    "OverwriteError",
    "PlanError",
    "ReduceError",
    "Report",
    "StalePlanError",
    "TakebackError",
    "VerifyError",
    "Workspace",
    "WorkspaceError",
    "bucket",
    "compile_step",
    "guard",
    "largest_batch",
    "nn",
    "optim",
    "predict",
]
