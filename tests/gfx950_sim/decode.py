"""From machine code to `Instruction` records, through the tinygrad wheel's decoder.

The wheel knows each encoding's bit fields and each opcode's operands and their sizes. Here
operands become register rows, and modifiers a dict; whatever the tables do not know is an error.
"""

import functools
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import AlignedSGPRField, FixedBitField, SrcField

VCC, M0, EXEC, SCC = 106, 124, 126, 253
ACC_BASE = 256
"""Row of a0 in the register file."""

_SPECIAL = {251: "vccz", 252: "execz", 253: "scc"}
_SGPR_NAMES = {106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi"}
_PAIR_NAMES = {106: "vcc", 126: "exec"}
# Inline constants 240..248 as f32, f64 and f16 bits (CDNA4 ISA, table "SSRC operand encoding").
_FLOATS = {
    **{240 + i: v for i, v in enumerate((0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0))},
    248: 0.15915494309189532,
}


class UnknownInstruction(NotImplementedError):
    """Machine code, an instruction or a modifier the simulator does not know."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A register range or a constant.

    kind: "vgpr" (index is the row in the register file, AGPRs from 256), "sgpr" (index is the
    hardware number), "inline" (index is the encoding), "literal" (value holds the 32 bits),
    "special" (vccz, execz, scc).
    """

    kind: str
    index: int
    count: int = 1
    value: int = 0

    def bits(self, dtype: str) -> int:
        """A constant's value as the bits of ``dtype`` ("u32", "f64", "f16", "i64" ...)."""
        wide = dtype[1:3] == "64"
        mask = (1 << 64) - 1 if wide else (1 << 32) - 1
        if self.kind == "literal":
            if dtype == "f64":  # a 32-bit literal is the high half of a double
                return self.value << 32
            if dtype == "i64" and self.value >> 31:
                return self.value | 0xFFFFFFFF << 32
            return self.value
        code = self.index
        if 128 <= code <= 192:
            return code - 128
        if 193 <= code <= 208:
            return (192 - code) & mask
        if code in _FLOATS:
            form, integer = (
                ("<d", "<Q") if wide else ("<e", "<H") if dtype == "f16" else ("<f", "<I")
            )
            bits: int = struct.unpack(integer, struct.pack(form, _FLOATS[code]))[0]
            return bits
        raise UnknownInstruction(f"operand encoding {code} is not modelled")

    def __str__(self) -> str:
        if self.kind == "vgpr":
            letter, first = (
                ("a", self.index - ACC_BASE) if self.index >= ACC_BASE else ("v", self.index)
            )
        elif self.kind == "sgpr":
            if self.index in _SGPR_NAMES:
                names = _PAIR_NAMES if self.count == 2 else _SGPR_NAMES
                return names.get(self.index, _SGPR_NAMES[self.index])
            letter, first = "s", self.index
        elif self.kind == "literal":
            return f"{self.value:#x}"
        elif self.kind == "special":
            return _SPECIAL[self.index]
        elif self.index in _FLOATS:
            return str(round(_FLOATS[self.index], 8))
        else:
            return str(self.index - 128 if self.index <= 192 else 192 - self.index)
        return (
            f"{letter}{first}" if self.count == 1 else f"{letter}[{first}:{first + self.count - 1}]"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One decoded instruction."""

    index: int
    """Position in the program."""
    pc: int
    """Byte offset from the kernel's first instruction."""
    size: int
    name: str
    """LLVM's mnemonic without the encoding suffix."""
    encoding: str
    """"SOP1", "VOP3", "VOP3P_MFMA", "VOP1_SDWA", "DS", "GLOBAL" ..."""
    operands: dict[str, Operand]
    modifiers: dict[str, int] = field(default_factory=dict)
    """Fields that are not at their default."""

    @property
    def text(self) -> str:
        """Assembly-like text for messages."""
        parts = ", ".join(str(o) for o in self.operands.values())
        if self.name == "s_waitcnt":
            return "s_waitcnt " + str(Waitcnt.of(self.modifiers["simm16"]))
        if self.encoding.startswith("VOPC") and "sdst" not in self.operands:
            parts = f"vcc, {parts}"
        modifiers = " ".join(
            f"{k}:{v:#x}" if v > 9 else f"{k}:{v}" for k, v in self.modifiers.items()
        )
        return " ".join(p for p in (self.name, parts, modifiers) if p)


class Waitcnt(NamedTuple):
    """The counters of an s_waitcnt (CDNA4 ISA 4.4): simm16 holds vmcnt in [3:0] and [15:14],
    expcnt in [6:4], lgkmcnt in [11:8]."""

    vmcnt: int
    expcnt: int
    lgkmcnt: int

    @classmethod
    def of(cls, simm16: int) -> "Waitcnt":
        """Unpack the immediate."""
        return cls(simm16 & 15 | simm16 >> 14 << 4, simm16 >> 4 & 7, simm16 >> 8 & 15)

    def pack(self) -> int:
        """The immediate with these counts."""
        return self.vmcnt & 15 | self.vmcnt >> 4 << 14 | self.expcnt << 4 | self.lgkmcnt << 8

    def __str__(self) -> str:
        limits = zip(self._fields, self, NO_WAIT, strict=True)
        return (
            " ".join(f"{name}({count})" for name, count, most in limits if count != most)
            or "(none)"
        )


NO_WAIT = Waitcnt(63, 7, 15)
"""The counts that wait for nothing."""


def decode_program(code: bytes) -> tuple[Instruction, ...]:
    """All instructions of a kernel's machine code.

    Raises:
        UnknownInstruction: naming the pc and the bytes no table knows.
    """
    program: list[Instruction] = []
    pc = 0
    while pc < len(code):
        raw = code[pc : pc + 16]
        try:
            size, name, encoding, operands, modifiers = _decode(raw.ljust(16, b"\0"))
        except UnknownInstruction as error:
            raise UnknownInstruction(f"pc {pc:#x}: {error}") from error
        program.append(Instruction(len(program), pc, size, name, encoding, operands, modifiers))
        pc += size
    return tuple(program)


_MODIFIER_NAMES = {
    "clmp": "clamp",
    "opsel": "op_sel",
    "opsel_hi": "op_sel_hi",
    "opsel_hi2": "op_sel_hi2",
}
_CACHE_POLICY = {"sc0", "sc1", "nt", "glc", "nv"}
_NOT_MODIFIERS = _CACHE_POLICY | {
    *(
        "encoding",
        "op",
        "seg",
        "x2encoding",
        "acc",
        "acc_cd",
        "literal",
        "s0",
        "s1",
        "scale_src0",
        "scale_src1",
    )
}
_DEFAULTS = {"dst_sel": 6, "src0_sel": 6, "src1_sel": 6, "opsel_hi": 3, "opsel_hi2": 1}
"""SDWA selects: 6 is the whole dword."""
_SADDR_OFF = 0x7F


_LLVM_NAMES = {
    "v_accvgpr_read": "v_accvgpr_read_b32",
    "v_accvgpr_write": "v_accvgpr_write_b32",
    "v_mad_mix_f32": "v_fma_mix_f32",
    "v_mad_mixlo_f16": "v_fma_mixlo_f16",
    "v_mad_mixhi_f16": "v_fma_mixhi_f16",
}
"""Where the ISA document's name is not LLVM's."""


@functools.lru_cache(maxsize=65536)
def _decode(raw: bytes) -> tuple[int, str, str, dict[str, Operand], dict[str, int]]:
    # The wheel takes any 8 bytes before an MFMA on F8F6F4 for the scale half of a 16-byte
    # instruction; that half starts with 0xd3ac.
    if raw[2:4] != b"\xac\xd3":
        raw = raw[:8]
    try:
        inst = decode_inst(raw, "cdna")
        op_name: str = inst.op_name
    except (ValueError, KeyError) as error:
        raise UnknownInstruction(f"no CDNA4 instruction has the bytes {raw[:8].hex()}") from error
    encoding = type(inst).__name__.removesuffix("_LIT")
    name = op_name.lower().removesuffix("_e32").removesuffix("_e64")
    name = _LLVM_NAMES.get(name, name)
    fields = {key: ((inst._raw >> bits.lo) & bits.mask, bits) for key, bits in type(inst)._fields}
    operands = _operands(inst, fields)
    modifiers = _modifiers(fields)
    _settle(inst, name, encoding, operands, modifiers)
    order = ("vdst", "sdst", "sdata", "vdata", "addr", "vaddr", "data", "data0", "data1")
    operands = dict(
        sorted(operands.items(), key=lambda kv: order.index(kv[0]) if kv[0] in order else 99)
    )
    if encoding == "VOP3P" and name.startswith(("v_mfma", "v_smfmac", "v_accvgpr")):
        encoding = "VOP3P_MFMA"
    return inst.size(), name, encoding, operands, modifiers


def _operands(inst: Any, fields: dict[str, tuple[int, Any]]) -> dict[str, Operand]:
    """Registers and constants by role (vdst, src0 ...); vsrc0 and vsrc1 become src0 and src1."""
    literal = inst._literal
    known = set(inst.operands)
    operands: dict[str, Operand] = {}
    for key, (value, bits) in fields.items():
        is_scale = key in ("scale_src0", "scale_src1")
        if not (is_scale or isinstance(bits, (SrcField, AlignedSGPRField))):
            continue
        if (
            key == "src0" and "vsrc0" in fields
        ):  # only a marker: SDWA and DPP name the register in vsrc0
            continue
        role = {"vsrc0": "src0", "vsrc1": "src1"}.get(key, key)
        if not {key, role} & known and key not in ("vsrc0", "sdst"):
            continue
        count = (
            2
            if key == "sdst" and key not in known
            else inst.op_regs.get(key, inst.op_regs.get(role, 1))
        )
        if is_scale:
            operands[role] = _operand_of_code(value, 1, literal)
        elif isinstance(bits, AlignedSGPRField):
            operands[role] = Operand("sgpr", value * bits._align, count)
        elif key == "vsrc0" and fields.get("s0", (0, None))[0]:
            operands[role] = Operand("sgpr", value, count)
        elif key == "saddr" and value == _SADDR_OFF:
            continue
        else:
            operands[role] = _operand_of_code(value + bits._valid_range[0], count, literal)
    if literal is not None and not any(o.kind == "literal" for o in operands.values()):
        operands["literal"] = Operand("literal", 255, 1, literal)  # fmaak, fmamk, s_setreg_imm32
    return operands


def _modifiers(fields: dict[str, tuple[int, Any]]) -> dict[str, int]:
    """Every other field that is not at its default; cache policy bits change no value and are left
    out."""
    modifiers = {}
    for key, (value, bits) in fields.items():
        if key in _NOT_MODIFIERS or isinstance(bits, (FixedBitField, SrcField, AlignedSGPRField)):
            continue
        default = bits.default if isinstance(bits.default, int) else _DEFAULTS.get(key, 0)
        if key in _DEFAULTS:
            default = _DEFAULTS[key]
        if value != default or key == "simm16":
            modifiers[_MODIFIER_NAMES.get(key, key)] = value
    return modifiers


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _settle(
    inst: Any, name: str, encoding: str, operands: dict[str, Operand], modifiers: dict[str, int]
) -> None:
    """What the generic tables do not say of single encodings."""
    if name in ("v_readlane_b32", "v_readfirstlane_b32") and operands["vdst"].kind == "vgpr":
        operands["vdst"] = Operand("sgpr", operands["vdst"].index, 1)
    if encoding.startswith("VOP3P"):
        hi2 = modifiers.pop("op_sel_hi2", 1)
        op_sel_hi = modifiers.pop("op_sel_hi", 3) | hi2 << 2
        if name.startswith(("v_mfma", "v_smfmac", "v_accvgpr")):
            # The same bits are cbsz, abid, blgp and the accumulator flags here.
            raw = inst._raw
            for key in ("neg", "neg_hi", "op_sel", "clamp", "cbsz", "abid", "blgp"):
                modifiers.pop(key, None)
            if encoding != "VOP3PX2":
                fields = {"cbsz": raw >> 8 & 7, "abid": raw >> 11 & 15, "blgp": raw >> 61 & 7}
                if name.startswith("v_accvgpr"):
                    fields["abid"] &= 7  # the top bit is op_sel_hi's, set by default
                modifiers.update({k: v for k, v in fields.items() if v})
        elif op_sel_hi != 7:
            modifiers["op_sel_hi"] = op_sel_hi
    if encoding == "VOP3PX2":
        raw = inst._raw
        fields = {
            "op_sel": raw >> 11 & 7,
            "op_sel_hi": raw >> 59 & 3,
            "neg": raw >> 61 & 7,
            "neg_hi": raw >> 8 & 7,
        }
        fields |= {"cbsz": raw >> 72 & 7, "blgp": raw >> 125 & 7}
        modifiers.clear()
        modifiers.update({k: v for k, v in fields.items() if v})
    elif name == "v_bitop3_b32":  # the truth table stands in the modifier bits
        table = (
            modifiers.pop("omod", 0) << 6 | modifiers.pop("abs", 0) << 3 | modifiers.pop("neg", 0)
        )
        modifiers["bitop3"] = table
    elif encoding == "VOP1_SDWA":
        modifiers.pop("src1_sel", None)
    elif encoding == "SMEM":
        if "soffset_en" not in modifiers:
            operands.pop("soffset", None)
            if "imm" not in modifiers:
                raise UnknownInstruction(f"{name} with an SGPR in its offset field is not modelled")
        if modifiers.pop("imm", 0) and "offset" in modifiers:
            modifiers["offset"] = _signed(modifiers["offset"], 21)
        modifiers.pop("soffset_en", None)
    elif encoding == "GLOBAL":
        operands["addr"] = Operand("vgpr", operands["addr"].index, 1 if "saddr" in operands else 2)
        if "offset" in modifiers:
            modifiers["offset"] = _signed(modifiers["offset"], 13)
        if "_load_lds_" in name or name.startswith("global_store"):
            operands.pop("vdst", None)
        if "_atomic_" in name:  # sc0: the old value is returned
            if inst.sc0:
                modifiers["sc0"] = 1
            else:
                operands.pop("vdst", None)
    elif encoding == "SCRATCH":
        if not modifiers.pop("sve", 0):
            operands.pop("addr", None)
        if "offset" in modifiers:
            modifiers["offset"] = _signed(modifiers["offset"], 13)
    elif encoding == "MUBUF":
        if "_atomic_" in name and inst.sc0:
            modifiers["sc0"] = 1
        if not modifiers.get("offen", 0) and not modifiers.get("idxen", 0):
            operands.pop("vaddr", None)
        if "lds" in modifiers:
            operands.pop("vdata", None)
    _place_accumulators(inst, name, operands)


def _operand_of_code(code: int, count: int, literal: int | None) -> Operand:
    """The register or constant of a 9-bit source encoding (CDNA4 ISA, table "SSRC operand
    encoding")."""
    if code >= 256:
        return Operand("vgpr", code - 256, count)
    if code == 255:
        if literal is None:
            raise UnknownInstruction("a literal operand without a literal")
        return Operand("literal", code, count, literal)
    if code <= 107 or code in (M0, EXEC, EXEC + 1):
        return Operand("sgpr", code, count)
    if code in _SPECIAL:
        return Operand("special", code, count)
    if 128 <= code <= 208 or code in _FLOATS:
        return Operand("inline", code, count)
    raise UnknownInstruction(f"operand encoding {code} is not modelled")


def _place_accumulators(inst: Any, name: str, operands: dict[str, Operand]) -> None:
    """Move operands to the accumulation registers (rows from 256) where the encoding says so."""

    def move(key: str) -> None:
        operand = operands.get(key)
        if operand is not None and operand.kind == "vgpr":
            operands[key] = Operand("vgpr", operand.index + ACC_BASE, operand.count)

    if name in ("v_accvgpr_read_b32", "v_accvgpr_mov_b32"):
        move("src0")
    if name in ("v_accvgpr_write_b32", "v_accvgpr_mov_b32"):
        move("vdst")
    acc = getattr(inst, "acc", 0)
    if hasattr(inst, "acc_cd"):
        if not name.startswith("v_accvgpr"):
            for key, on in (
                ("src0", acc & 1),
                ("src1", acc & 2),
                ("src2", inst.acc_cd),
                ("vdst", inst.acc_cd),
            ):
                if on:
                    move(key)
    elif acc:
        for key in ("vdst", "data", "data0", "data1", "vdata"):
            move(key)
