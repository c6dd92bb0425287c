"""takeback compiles a PyTorch training step so that every buffer has one owner.

Everything public is a name of this package. To import it imports nothing else, not even torch: each name brings its
module when it is first asked for.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same table as _HOMES, for whoever reads the source and does not run it
    from takeback import bucket, nn, optim
    from takeback.compiler.explain.report import Report
    from takeback.entry import compile_step
    from takeback.errors import (
        BorrowError,
        CaptureError,
        ConvertError,
        GradBufferError,
        MemoryTargetError,
        NoRoomError,
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
    from takeback.step import CompiledStep
    from takeback.workspace import Workspace

__version__ = "0.1.0"  # the only place: pyproject.toml reads it here

__all__ = [
    "BorrowError",
    "CaptureError",
    "CompiledStep",
    "ConvertError",
    "GradBuffer",
    "GradBufferError",
    "MemoryTargetError",
    "NoRoomError",
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

_HOMES = {
    **{name: "takeback.errors" for name in __all__ if name.endswith("Error")},
    "CompiledStep": "takeback.step",
    "GradBuffer": "takeback.grads",
    "NormCache": "takeback.norm_cache",
    "Report": "takeback.compiler.explain.report",
    "Workspace": "takeback.workspace",
    "compile_step": "takeback.entry",
    "guard": "takeback.guard",
    "largest_batch": "takeback.predict",
    "predict": "takeback.predict",
}


class _Package(ModuleType):
    """A package that fetches what it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if home := _HOMES.get(name):
            value = getattr(importlib.import_module(home), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            value = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # `guard` and `predict` live in modules of the same names, which Python puts here when anybody imports them.
        if isinstance(value, ModuleType) and _HOMES.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
