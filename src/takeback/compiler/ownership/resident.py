"""What of a program is alive between steps anyway, in bytes by role: parameters, state, buffers, the batch."""

from __future__ import annotations

from takeback.compiler.program import Buffer, Program, Role


def resident_by_role(program: Program) -> dict[str, int]:
    """The bytes on the step's device that are alive between steps, by whose they are."""
    resident = {role.value: 0 for role in Role if role.borrowed}
    for buffer in program.buffers.values():
        if buffer.role.borrowed and _on_device(buffer, program):
            resident[buffer.role.value] += buffer.size_bytes
    return resident


def resident_bytes(program: Program) -> int:
    """All of it."""
    return sum(resident_by_role(program).values())


def grad_bytes(program: Program) -> int:
    """What the gradients take where they are kept after the step."""
    return sum(r.numel * r.dtype.itemsize for r in program.grads.values())


def _on_device(buffer: Buffer, program: Program) -> bool:
    tensor = program.externals.get(buffer.id)
    return not buffer.device and (tensor is None or tensor.device.type == program.device_type)
