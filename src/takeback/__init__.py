"""takeback compiles a PyTorch training step so that every buffer has one owner."""

from takeback.step import CompiledStep, compile_step

__all__ = ["CompiledStep", "compile_step"]
