"""Kernels with one instruction changed, to show that the simulator notices."""

import dataclasses

from gfx950_sim.decode import NO_WAIT, Instruction, Waitcnt
from gfx950_sim.elf import Kernel

_S_NOP = 0xBF800000
_S_WAITCNT = 0xBF8C0000


def replace(kernel: Kernel, instruction: Instruction, code: bytes) -> Kernel:
    """The kernel with other bytes in place of an instruction.

    Raises:
        ValueError: the bytes are not as many as the instruction has.
    """
    if len(code) != instruction.size:
        raise ValueError(f"{instruction.text} has {instruction.size} bytes, not {len(code)}")
    at = instruction.pc
    return dataclasses.replace(kernel, code=kernel.code[:at] + code + kernel.code[at + len(code) :])


def without(kernel: Kernel, instruction: Instruction) -> Kernel:
    """The kernel with s_nop in place of an instruction."""
    return replace(kernel, instruction, _S_NOP.to_bytes(4, "little") * (instruction.size // 4))


def with_wait(kernel: Kernel, instruction: Instruction, counter: str, count: int | None) -> Kernel:
    """The kernel with another count in an s_waitcnt; None: that counter is not waited on at all."""
    counts = Waitcnt.of(instruction.modifiers["simm16"])
    value = getattr(NO_WAIT, counter) if count is None else count
    simm16 = counts._replace(**{counter: value}).pack()
    return replace(kernel, instruction, (_S_WAITCNT | simm16).to_bytes(4, "little"))
