"""Reusable scratch for eager code: `Workspace` hands out buffers of earlier steps in place of new memory.

internals  what only torch's internals can say: who holds a storage, whether a tracer is running
pool       buffers by capacity, of one thread on one device and stream
debug      what debug mode adds: poison, versions, and tensors that know when their step is over
scratch    Workspace itself, and its steps
"""

from takeback.workspace.scratch import Stats, Step, Workspace

__all__ = ["Stats", "Step", "Workspace"]
