"""A kernel's instructions with their table records, and the registers each reads and writes.

Register sets are Python ints used as bit sets: bit r < 512 is row r of the vector register file,
bit 512 + n scalar register n, bit 640 SCC. One AND then tells whether an instruction touches a
register that needs a closer look.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from gfx950_sim.decode import (
    EXEC,
    M0,
    VCC,
    Instruction,
    Operand,
    UnknownInstruction,
    decode_program,
)
from gfx950_sim.isa import atomics, convert, lanes, lds, matrix, scalar, vector, vmem
from gfx950_sim.isa.records import Atomic, Lanes, LdsAccess, Matrix, Salu, Valu, VmemAccess

SGPR_BIT = 512
SCC_BIT = 640
ALL_VGPRS = (1 << 512) - 1
ALL_REGISTERS = (1 << 641) - 1

Record = Atomic | Valu | Matrix | Lanes | LdsAccess | VmemAccess | Salu | None

_VALU: dict[str, Valu] = {**vector.INSTRUCTIONS, **convert.INSTRUCTIONS}
SMEM_DWORDS = {
    f"s_load_dword{suffix}": count
    for suffix, count in (("", 1), ("x2", 2), ("x4", 4), ("x8", 8), ("x16", 16))
}
"""Scalar loads: dwords from 64-bit base + offset (CDNA4 ISA, "Scalar memory")."""

WAIT, BARRIER, END, NOTHING, BRANCH = "wait", "barrier", "end", "nothing", "branch"
CONTROL = {
    "s_waitcnt": WAIT,
    "s_barrier": BARRIER,
    "s_endpgm": END,
    # Scheduling hints and time: no effect on values. s_nop also covers hazards, which LLVM inserts
    # and this simulator does not check.
    **dict.fromkeys(
        ("s_nop", "v_nop", "s_setprio", "s_sleep", "s_sched_barrier", "s_inst_prefetch"), NOTHING
    ),
    **dict.fromkeys(("s_icache_inv", "s_dcache_inv", "s_dcache_wb", "buffer_wbl2"), NOTHING),
    "buffer_inv": NOTHING,
    **dict.fromkeys(scalar.BRANCHES, BRANCH),
}


def bits_of(operand: Operand | None) -> int:
    """The registers an operand names, as bits."""
    if operand is None:
        return 0
    if operand.kind == "vgpr":
        return ((1 << operand.count) - 1) << operand.index
    if operand.kind == "sgpr":
        return ((1 << operand.count) - 1) << (SGPR_BIT + operand.index)
    if operand.kind == "special" and operand.index == 253:
        return 1 << SCC_BIT
    return 0


def rows_of(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def register_name(bit: int) -> str:
    """Name of a register by its bit."""
    if bit == SCC_BIT:
        return "scc"
    if bit >= SGPR_BIT:
        return str(Operand("sgpr", bit - SGPR_BIT))
    return str(Operand("vgpr", bit))


_VCC = 3 << (SGPR_BIT + VCC)
_EXEC = 3 << (SGPR_BIT + EXEC)
_SCC = 1 << SCC_BIT


def record_of(instruction: Instruction) -> Record:
    """The table entry of an instruction; None for control flow and scalar loads.

    Raises:
        UnknownInstruction: naming it.
    """
    name, encoding = instruction.name, instruction.encoding
    if name in CONTROL:
        return None
    found: Record = None
    if encoding.startswith("VOP"):
        found = matrix.INSTRUCTIONS.get(name) or lanes.INSTRUCTIONS.get(name) or _VALU.get(name)
    elif encoding == "DS":
        found = lds.INSTRUCTIONS.get(name) or atomics.LDS.get(name)
    elif encoding in ("GLOBAL", "MUBUF", "SCRATCH"):
        if instruction.modifiers.get("lds"):
            found = vmem.DMA.get(name.removeprefix("buffer_load_"))
        else:
            found = vmem.INSTRUCTIONS.get(name) or atomics.VMEM.get(name)
    elif encoding in ("SOP1", "SOP2", "SOPC", "SOPK"):
        found = scalar.INSTRUCTIONS.get(name)
    elif name in SMEM_DWORDS:
        return None
    if found is None:
        raise UnknownInstruction(
            f"{instruction.text} at pc {instruction.pc:#x} ({encoding}) is not modelled"
        )
    return found


def sources_of(instruction: Instruction) -> list[Operand]:
    """Source operands of an ALU instruction, in order."""
    names = ("src0", "src1", "src2", "literal", "ssrc0", "ssrc1")
    return [instruction.operands[n] for n in names if n in instruction.operands]


def check_modifiers(instruction: Instruction, allowed: set[str]) -> None:
    """Any modifier that nothing interprets is an error.

    Raises:
        UnknownInstruction: naming it.
    """
    for name, value in instruction.modifiers.items():
        if name not in allowed:
            raise UnknownInstruction(
                f"modifier {name}:{value:#x} of {instruction.text} at pc {instruction.pc:#x} "
                "is not modelled"
            )


def is_partial_write(record: Record) -> bool:
    """Whether ``old`` only fills what is not written (a half, bytes), so that it may be
    undefined."""
    return isinstance(record, Valu) and record.reads_dst and "op_sel" in record.modifiers


def _packed_reads(instruction: Instruction, source: Operand, position: int) -> int:
    """Of a register pair, a packed 32-bit instruction reads what op_sel and op_sel_hi pick."""
    if source.kind not in ("vgpr", "sgpr") or source.count != 2:
        return bits_of(source)
    picked = {
        instruction.modifiers.get("op_sel", 0) >> position & 1,
        instruction.modifiers.get("op_sel_hi", 7) >> position & 1,
    }
    return sum(bits_of(Operand(source.kind, source.index + half)) for half in picked)


def upper_addends(instruction: Instruction) -> int:
    """Registers that the lower half of a 64-bit sum does not depend on, as bits.

    LLVM leaves them undefined where it uses only the lower half of the result.
    """
    roles = {
        "v_mad_u64_u32": ("src2",),
        "v_mad_i64_i32": ("src2",),
        "v_lshl_add_u64": ("src0", "src2"),
    }
    operands = [instruction.operands[r] for r in roles.get(instruction.name, ())]
    return sum(1 << o.index + 1 for o in operands if o.kind == "vgpr" and o.count == 2)


def registers_of(instruction: Instruction, record: Record) -> tuple[int, int]:
    """(registers read, registers written), as bits."""
    operands, name = instruction.operands, instruction.name
    reads = writes = 0
    for i, source in enumerate(sources_of(instruction)):
        if isinstance(record, Valu) and record.packed:
            reads |= _packed_reads(instruction, source, i)
        else:
            reads |= bits_of(source)
    if isinstance(record, Valu):
        implicit_vcc = len(record.src) > len(sources_of(instruction))
        reads |= _VCC if implicit_vcc else 0
        destination = bits_of(operands.get("vdst"))
        if record.dst == "mask":
            writes |= (bits_of(operands.get("vdst")) or bits_of(operands.get("sdst"))) or _VCC
            writes |= _EXEC if "cmpx" in name else 0
        else:
            writes |= destination
        if record.reads_dst:
            reads |= destination
        if record.extra:
            writes |= bits_of(operands.get("sdst")) or _VCC
    elif isinstance(record, Matrix):
        writes |= bits_of(operands["vdst"])
        reads |= bits_of(operands.get("scale_src0")) | bits_of(operands.get("scale_src1"))
    elif isinstance(record, Lanes):
        writes |= bits_of(operands["vdst"])
        if record.kind in ("swap", "write"):
            reads |= bits_of(operands["vdst"])
        if record.kind == "swap":
            writes |= bits_of(operands["src0"])
    elif isinstance(record, Atomic):
        for key in (
            "addr",
            "vaddr",
            "saddr",
            "srsrc",
            "soffset",
            "data",
            "data0",
            "data1",
            "vdata",
        ):
            reads |= bits_of(operands.get(key))
        writes |= bits_of(operands.get("vdst"))
        if instruction.modifiers.get("sc0"):
            writes |= bits_of(operands.get("vdata"))
    elif isinstance(record, (LdsAccess, VmemAccess)):
        for key in ("addr", "vaddr", "saddr", "srsrc", "soffset", "data", "data0", "data1"):
            reads |= bits_of(operands.get(key))
        data = bits_of(operands.get("vdata"))
        destination = bits_of(operands.get("vdst"))
        if record.kind == "store":
            reads |= data | destination
        else:
            writes |= data | destination
            if record.reads_dst:
                reads |= data | destination
        if record.kind == "dma":
            reads |= 1 << (SGPR_BIT + M0)
    elif isinstance(record, Salu):
        destination = bits_of(operands.get("sdst"))
        if record.dst:
            writes |= destination
        if record.reads_dst or not record.dst:  # s_cmpk reads sdst, s_cmp has none
            reads |= destination
        writes |= _SCC if record.writes_scc or not record.dst else 0
        reads |= _SCC if record.reads_scc else 0
        if "saveexec" in name:
            writes |= _EXEC
    elif name in SMEM_DWORDS:
        reads |= bits_of(operands["sbase"]) | bits_of(operands.get("soffset"))
        writes |= bits_of(operands["sdata"])
    elif "vccz" in name or "vccnz" in name:
        reads |= _VCC
    elif "scc" in name:
        reads |= _SCC
    return reads, writes


@dataclass(frozen=True)
class Program:
    """A kernel, decoded and looked up."""

    instructions: tuple[Instruction, ...]
    records: tuple[Record, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    touches: tuple[int, ...]
    """reads | writes."""
    special: tuple[bool, ...]
    """Control flow, or EXEC may change: executing it gives a signal or the next index."""
    index_at: dict[int, int]
    """From pc to index."""
    lds_granule: int


@functools.lru_cache(maxsize=64)
def load_program(code: bytes) -> Program:
    """Decode and look up a kernel's machine code.

    Raises:
        UnknownInstruction: naming the first instruction or modifier that is not modelled.
    """
    instructions = decode_program(code)
    records = tuple(record_of(i) for i in instructions)
    both = [registers_of(i, r) for i, r in zip(instructions, records, strict=True)]
    narrow = any(isinstance(r, LdsAccess) and r.kind != "exchange" and r.size < 4 for r in records)
    return Program(
        instructions,
        records,
        tuple(r for r, _ in both),
        tuple(w for _, w in both),
        tuple(r | w for r, w in both),
        tuple(
            (i.encoding == "SOPP" and i.name != "s_nop")
            or i.name in scalar.BRANCHES
            or bool(w & _EXEC)
            for i, (_, w) in zip(instructions, both, strict=True)
        ),
        {i.pc: i.index for i in instructions},
        1 if narrow else 4,
    )
