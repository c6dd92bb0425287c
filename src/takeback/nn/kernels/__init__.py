"""Kernels of our own: the backward of the norms, which torch cannot compute into memory that is already there."""
