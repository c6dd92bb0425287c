"""Flat gradients for plain eager training: `GradBuffer` keeps every `.grad` in one buffer, mostly without a copy.

engine    what the autograd engine is about to do with a gradient
slots     one slice of the flat buffer for each parameter, and how a gradient gets into it
linear    Functions whose backward computes weight gradients straight into slices: products and rows
conv      the same for convolutions
norms     the same for norms
exchange  the mean over a process group, sent in buckets while the backward runs
modules   which modules take which of them, without a change to the user's code
buffer    GradBuffer itself
"""

from takeback.grads.buffer import GradBuffer, clip_factor
from takeback.grads.slots import Slot

__all__ = ["GradBuffer", "Slot", "clip_factor"]
