"""Layers that keep less for backward and overwrite what dies there, in plain eager PyTorch; and their kernels."""

from takeback.nn.abn import ABN, InPlaceABN, InPlaceABNSync
from takeback.nn.convert import Conversion, conversion, convert, revert
from takeback.nn.functional import inplace_abn, inplace_abn_sync
from takeback.nn.gated import GELU, SwiGLU, gelu, swiglu
from takeback.nn.rows import InPlaceLayerNorm, InPlaceRMSNorm

__all__ = [
    "ABN",
    "GELU",
    "Conversion",
    "InPlaceABN",
    "InPlaceABNSync",
    "InPlaceLayerNorm",
    "InPlaceRMSNorm",
    "SwiGLU",
    "conversion",
    "convert",
    "gelu",
    "inplace_abn",
    "inplace_abn_sync",
    "revert",
    "swiglu",
]
