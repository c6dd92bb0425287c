"""Layers that keep less for backward and overwrite what dies there, in plain eager PyTorch; and their kernels."""

from takeback.nn.abn import ABN, InPlaceABN, InPlaceABNSync
from takeback.nn.convert import Conversion, conversion, convert, revert
from takeback.nn.forms import copies_of
from takeback.nn.functional import inplace_abn, inplace_abn_sync
from takeback.nn.gated import GELU, SwiGLU, gelu, swiglu
from takeback.nn.gated_linear import gated, gated_linear
from takeback.nn.lazy_logits import LazyLogits
from takeback.nn.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from takeback.nn.rows import InPlaceLayerNorm, InPlaceRMSNorm

__all__ = [
    "ABN",
    "GELU",
    "Conversion",
    "InPlaceABN",
    "InPlaceABNSync",
    "InPlaceLayerNorm",
    "InPlaceRMSNorm",
    "LazyLogits",
    "LinearCrossEntropy",
    "SwiGLU",
    "conversion",
    "convert",
    "copies_of",
    "gated",
    "gated_linear",
    "gelu",
    "inplace_abn",
    "inplace_abn_sync",
    "linear_cross_entropy",
    "revert",
    "swiglu",
]
