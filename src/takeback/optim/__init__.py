"""Optimizers over a GradBuffer: torch.optim's SGD, Adam and AdamW with flat state, and one pass for the whole update.

    buf = takeback.GradBuffer(model)
    optimizer = takeback.optim.AdamW(buf, lr=3e-4)
    optimizer = takeback.optim.AdamW(buf, [{"params": matrices}, {"params": biases, "weight_decay": 0.0}], lr=3e-4)

optimizers    SGD, Adam, AdamW
flat          what they have in common: which parameters have a gradient, and the update
state         each name of state in one flat tensor
fused         torch's fused operators on lists: the CPU, and whatever our kernels do not serve
launch        our kernels: one launch for all chunks of a group
kernels       the Triton code; imported only where triton is installed
proof         compares a kernel's bits with torch's before its first use
"""

from takeback.optim.optimizers import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
