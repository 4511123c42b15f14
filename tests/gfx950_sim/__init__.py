"""A simulator of gfx950 (CDNA4) machine code that distrusts the kernel.

It runs code objects from their bytes: ELF and metadata (`elf`), decoded by the tinygrad wheel's
tables (`decode`), executed in NumPy over the 64 lanes of a wave (`wave`, `launch`), with the
meaning of each instruction in one small module a family (`isa`). README.md says what is modelled.

How the parts fit
=================

Registers (`wave.Wave`). ``vgpr`` is uint32 [512, 64]: rows 0..255 are v0..v255, rows 256..511 are
a0..a255. An operand of n dwords is the contiguous rows [n, 64], a view; float views share its
memory. ``sgpr`` is uint32 [128] by hardware number (VCC 106, M0 124, EXEC 126). A scalar or
constant operand of a vector instruction is an array of shape [1] (or [n, 1]) that broadcasts over
lanes. The Python int ``exec_mask`` and the bool array ``lanes`` [64] say which lanes are on;
``all_lanes`` is true when every one is.

Instructions (`decode.Instruction`): index (position in the program), pc (byte offset in the
kernel), size, name (LLVM's mnemonic without _e32/_e64/_sdwa/_dpp), encoding ("VOP3", "DS", ...),
operands (name -> `decode.Operand`), modifiers (name -> int, only those
that are not at their default), text (for messages).

The ISA tables. Each module in `isa` has a dict ``INSTRUCTIONS: dict[str, <record>]`` from mnemonic
to a record of `isa.records`; the record holds a PURE function over arrays and says what it needs:

* `records.Valu` (isa/integer.py, floating.py, compare.py, convert.py):
  ``function(*sources, **modifiers) -> result``. Each source has the dtype named in ``src`` and
  shape [64] (or [1]); a type may end in "xN" for N dwords or elements, as rows [N, 64]. The result
  is broadcastable to [64] (rows [N, 64]) of type ``dst``; type "mask" is a lane mask (bool [64]).
  The engine applies abs, neg, clamp, omod, SDWA selects, DPP and EXEC. Any other modifier the
  instruction understands is listed in ``modifiers`` and arrives by keyword as an int; one that
  stands in the machine code and is not listed is an error. ``reads_dst`` passes the old
  destination as ``old``.
* `records.Matrix` (isa/matrix.py): ``function(a, b, c, **modifiers)``, uint32 rows in, uint32 or
  float32 rows [n, 64] out. Scaled ones get ``scale_a``, ``scale_b`` (uint32 [64] or [1]).
* `records.Lanes` (isa/lanes.py): instructions that move data between lanes.
* `records.LdsAccess`, `records.VmemAccess` (isa/lds.py, isa/vmem.py): the address rule and, for
  loads, the rule from what was fetched to what the registers receive. The engine does the access
  and all checks.
* isa/scalar.py: ``function(*python ints) -> int`` or (int, scc).

Binding. The first time a wave reaches an instruction, `bind` turns it into a closure over views of
that wave's registers: executing it again is one call. Waves are reused by later workgroups,
closures too.

Time. Loads take effect at the ``s_waitcnt`` that guarantees them: a `Wave` holds its outstanding
`operation.Operation`s in order, and what is known of each register. `lds_memory` holds the history
of each LDS granule, `analysis` which waits and barriers were needed, `launch` the order of waves.

Costs. ``run(..., observer=o)`` calls, for each memory instruction executed, ``o.memory(event)``
with a `hooks.MemoryEvent` (workgroup, wave, position in that wave's trace, instruction, space,
kind, byte addresses uint64 [k, 64] before bounds, bytes a lane and address, lanes that are on).
``result.traces`` maps (workgroup, wave) to the list of instruction indexes in the order the wave
executed them; ``result.program`` is the tuple of Instructions they index.

The API::

    code = CodeObject(elf_bytes)
    memory = Memory()
    a = memory.map(array, name="a")  # used in place; read-only unless writable=True
    out = memory.map(1024, name="out", writable=True)  # no values: reading it first is a fault
    result = run(code.kernel("symbol"), (4, 1, 1), (256, 1, 1), [a, out, 5, 1.5], memory)
"""

from gfx950_sim.decode import UnknownInstruction
from gfx950_sim.elf import CodeObject, CodeObjectError, Kernel
from gfx950_sim.launch import RunResult, run
from gfx950_sim.memory import Memory
from gfx950_sim.reports import Report, SimulationFault

__all__ = [
    "CodeObject",
    "CodeObjectError",
    "Kernel",
    "Memory",
    "Report",
    "RunResult",
    "SimulationFault",
    "UnknownInstruction",
    "run",
]
