"""Running a few instructions on the simulator: registers in, assembled code, registers out.

A snippet becomes a kernel of one wave that loads its input registers, sets EXEC, runs the code and
stores its output registers, so that a test covers the decoder, the operands and the semantics of an
instruction together. The snippets of a test module are assembled together, once.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gfx950_sim import CodeObject, Memory, run
from gfx950_sim.assemble import Assembly, assemble

Array = np.ndarray[Any, Any]

ALL_LANES = (1 << 64) - 1
SOME_LANES = 0xF0F0_1234_8000_0001
"""An EXEC with whole rows, single lanes, the first and the last lane on, and the others off."""
LANES = np.arange(64)


def lanes_of(exec_mask: int) -> Array:
    """bool [64]: the lanes that are on."""
    return (np.uint64(exec_mask) >> LANES.astype(np.uint64)) & np.uint64(1) == 1


@dataclass(frozen=True)
class Snippet:
    """A few lines of assembly and what they start from.

    v253 to v255 and s[8:13] belong to the frame; s[12:13] is the address of `memory`.
    """

    code: str
    inputs: Mapping[int, Array] = field(default_factory=dict)
    """Vector registers (AGPRs from 256) before the code: 32-bit values, [64]."""
    outputs: tuple[int, ...] = (0,)
    """Vector registers to return."""
    exec_mask: int = ALL_LANES
    lds_bytes: int = 0
    private_bytes: int = 0
    fp16_overflow: bool = False
    memory: Array | None = None
    """Memory the code may read and write, in place."""

    def with_exec(self, mask: int) -> "Snippet":
        """The same with other lanes on."""
        return replace(self, exec_mask=mask)


def _load(position: int, register: int) -> str:
    if register >= 256:
        move = f"v_accvgpr_write_b32 a{register - 256}, v254"
    else:
        move = f"v_mov_b32 v{register}, v254"
    return f"""
global_load_dword v254, v255, s[8:9]
s_waitcnt vmcnt(0)
{move}
v_add_u32 v255, 0x100, v255"""


def _store(register: int) -> str:
    if register >= 256:
        move = f"v_accvgpr_read_b32 v254, a{register - 256}"
    else:
        move = f"v_mov_b32 v254, v{register}"
    return f"""
{move}
global_store_dword v255, v254, s[10:11]
v_add_u32 v255, 0x100, v255"""


def _body(snippet: Snippet) -> str:
    return f"""
v_lshlrev_b32 v253, 2, v0
v_mov_b32 v255, v253
s_load_dwordx4 s[8:11], s[0:1], 0x0
s_load_dwordx2 s[12:13], s[0:1], 0x10
s_waitcnt lgkmcnt(0)
{"".join(_load(i, r) for i, r in enumerate(snippet.inputs))}
s_mov_b32 exec_lo, {snippet.exec_mask & 0xFFFFFFFF:#x}
s_mov_b32 exec_hi, {snippet.exec_mask >> 32:#x}
{snippet.code}
s_waitcnt vmcnt(0) lgkmcnt(0)
s_mov_b64 exec, -1
v_mov_b32 v255, v253
{"".join(_store(r) for r in snippet.outputs)}
s_endpgm
"""


class Runner:
    """Assembles snippets by name, together, and runs them one at a time."""

    def __init__(self, snippets: Mapping[str, Snippet]) -> None:
        self.snippets = dict(snippets)
        self._symbols = {name: f"snippet_{i}" for i, name in enumerate(snippets)}
        kernels = {
            self._symbols[n]: Assembly(
                _body(s), 3, s.lds_bytes, s.private_bytes, s.fp16_overflow, block_size=64
            )
            for n, s in snippets.items()
        }
        self._code = CodeObject(assemble(kernels))

    def run(self, name: str) -> Array:
        """The output registers of a snippet, uint32 [outputs, 64]."""
        snippet = self.snippets[name]
        inputs = np.zeros((max(len(snippet.inputs), 1), 64), np.uint32)
        for row, values in zip(inputs, snippet.inputs.values(), strict=False):
            row[:] = values
        outputs = np.zeros((len(snippet.outputs), 64), np.uint32)
        memory = Memory()
        addresses = [
            memory.map(inputs, name="inputs"),
            memory.map(outputs, name="outputs", writable=True),
            0,
        ]
        if snippet.memory is not None:
            addresses[2] = memory.map(snippet.memory, name="memory", writable=True)
        kernel = self._code.kernel(self._symbols[name])
        run(kernel, grid=(1, 1, 1), block=(64, 1, 1), args=addresses, memory=memory)
        return outputs


def instructions_in(snippets: Iterable[Snippet]) -> set[str]:
    """The mnemonics of the snippets, without encoding suffix."""
    words = {word for snippet in snippets for word in re.findall(r"\w+", snippet.code)}
    return {re.sub("_(sdwa|dpp|e64)$", "", word) for word in words}


def assert_same_floats(registers: Array, expected: Any) -> None:
    """Registers [k, 64] equal the expected values bit for bit, where any NaN equals any NaN.

    `expected` has the values of lane l in [l] or [l, item] (items packed in one register), or rows
    [k, 64].
    """
    expected = np.asarray(expected)
    if expected.shape[-1] == 64 and expected.ndim <= 2 and expected.dtype.itemsize == 4:
        actual = registers.reshape(expected.shape).view(expected.dtype)
    else:
        actual = np.ascontiguousarray(registers[0]).view(expected.dtype).reshape(64, -1)
        expected = expected.reshape(64, -1)
    unsigned = np.dtype(f"u{expected.dtype.itemsize}")
    same = np.ascontiguousarray(actual).view(unsigned) == np.ascontiguousarray(expected).view(
        unsigned
    )
    if expected.dtype.kind != "u" and expected.dtype.kind != "i":
        same |= np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    assert same.all(), (
        f"lanes {np.flatnonzero(~same)[:8]}: {actual[~same][:8]}, not {expected[~same][:8]}"
    )
