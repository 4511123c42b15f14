"""Scalar ALU and branches, over Python ints as stored (unsigned).

Sources: the pseudocode of the CDNA4 ISA, chapter 12 (SOP2, SOPK, SOP1, SOPC, SOPP). SCC is a
carry, or "result is not 0", or the outcome of a comparison.
"""

from collections.abc import Callable

from gfx950_sim.isa.records import Salu

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def signed(value: int, bits: int = 32) -> int:
    """The two's complement reading of a stored value."""
    return value - (1 << bits) if value >> (bits - 1) else value


def add_i32(a: int, b: int) -> tuple[int, int]:
    """Wraps; SCC is signed overflow."""
    total = signed(a) + signed(b)
    return total & M32, int(total != signed(total & M32))


def sub_i32(a: int, b: int) -> tuple[int, int]:
    """Wraps; SCC is signed overflow."""
    total = signed(a) - signed(b)
    return total & M32, int(total != signed(total & M32))


def carry_out(total: int) -> tuple[int, int]:
    """Low 32 bits and whether there is anything outside them (carry, or borrow when negative)."""
    return total & M32, int(not 0 <= total <= M32)


def nonzero(value: int) -> tuple[int, int]:
    """A result whose SCC is "not 0"."""
    return value, int(value != 0)


def shift_add(shift: int) -> Callable[[int, int], tuple[int, int]]:
    """s_lshlN_add_u32: SCC is the carry."""
    return lambda a, b: carry_out((a << shift) + b)


def bit_field(a: int, b: int, bits: int) -> int:
    """Field of ``a`` at offset b[4:0] (b[5:0] in 64 bits) of width b[22:16]."""
    offset, width = b & (bits - 1), b >> 16 & 0x7F
    return (a >> offset) & ((1 << width) - 1)


def bit_field_signed(a: int, b: int, bits: int) -> int:
    """`bit_field` of the sign-extended value, sign-extended."""
    offset, width = b & (bits - 1), b >> 16 & 0x7F
    field = (signed(a, bits) >> offset) & ((1 << width) - 1)
    if width and width < bits and field >> (width - 1):
        field -= 1 << width
    return field & ((1 << bits) - 1)


def first_one(a: int, bits: int) -> int:
    """Position of the lowest set bit; -1 if none."""
    return (a & -a).bit_length() - 1 & M32


def leading_zeros(a: int, bits: int) -> int:
    """Zeros above the highest set bit; -1 if none is set."""
    return bits - a.bit_length() if a else M32


def reverse(a: int, bits: int) -> int:
    """Bits in reverse order."""
    return int(format(a, f"0{bits}b")[::-1], 2)


def pack(a: int, b: int) -> int:
    """Two 16-bit values in one dword."""
    return (a & 0xFFFF) | (b & 0xFFFF) << 16


def _alu2(bits: int) -> dict[str, Salu]:
    """Bitwise operations of 32 or 64 bits; SCC is "not 0"."""
    m = (1 << bits) - 1
    both = (bits, bits)
    rules: dict[str, Callable[[int, int], int]] = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "andn2": lambda a, b: a & ~b & m,
        "orn2": lambda a, b: (a | ~b) & m,
        "nand": lambda a, b: ~(a & b) & m,
        "nor": lambda a, b: ~(a | b) & m,
        "xnor": lambda a, b: ~(a ^ b) & m,
    }
    table = {
        f"s_{name}_b{bits}": Salu(_with_scc(rule), bits, both, True) for name, rule in rules.items()
    }
    by = bits - 1
    shifts: dict[str, Callable[[int, int], int]] = {
        f"s_lshl_b{bits}": lambda a, b: a << (b & by) & m,
        f"s_lshr_b{bits}": lambda a, b: a >> (b & by),
        f"s_ashr_i{bits}": lambda a, b: signed(a, bits) >> (b & by) & m,
        f"s_bfe_u{bits}": lambda a, b: bit_field(a, b, bits),
        f"s_bfe_i{bits}": lambda a, b: bit_field_signed(a, b, bits),
    }
    for name, rule in shifts.items():
        table[name] = Salu(_with_scc(rule), bits, (bits, 32), True)
    table[f"s_bfm_b{bits}"] = Salu(
        lambda a, b: ((1 << (a & by)) - 1) << (b & by) & m, bits, (32, 32)
    )
    table[f"s_cselect_b{bits}"] = Salu(
        lambda a, b, scc: a if scc else b, bits, both, reads_scc=True
    )
    return table


def _alu1(bits: int) -> dict[str, Salu]:
    m = (1 << bits) - 1
    b = f"b{bits}"
    return {
        f"s_mov_{b}": Salu(lambda a: a, bits, (bits,)),
        f"s_cmov_{b}": Salu(
            lambda a, old, scc: a if scc else old, bits, (bits,), reads_scc=True, reads_dst=True
        ),
        f"s_not_{b}": Salu(lambda a: nonzero(~a & m), bits, (bits,), True),
        f"s_brev_{b}": Salu(lambda a: reverse(a, bits), bits, (bits,)),
        f"s_bcnt0_i32_{b}": Salu(lambda a: nonzero(bits - a.bit_count()), 32, (bits,), True),
        f"s_bcnt1_i32_{b}": Salu(lambda a: nonzero(a.bit_count()), 32, (bits,), True),
        f"s_ff0_i32_{b}": Salu(lambda a: first_one(~a & m, bits), 32, (bits,)),
        f"s_ff1_i32_{b}": Salu(lambda a: first_one(a, bits), 32, (bits,)),
        f"s_flbit_i32_{b}": Salu(lambda a: leading_zeros(a, bits), 32, (bits,)),
        f"s_bitset0_{b}": Salu(
            lambda a, old: old & ~(1 << (a & bits - 1)), bits, (32,), reads_dst=True
        ),
        f"s_bitset1_{b}": Salu(
            lambda a, old: old | 1 << (a & bits - 1), bits, (32,), reads_dst=True
        ),
        f"s_bitcmp0_{b}": Salu(lambda a, n: int(not a >> (n & bits - 1) & 1), 0, (bits, 32)),
        f"s_bitcmp1_{b}": Salu(lambda a, n: a >> (n & bits - 1) & 1, 0, (bits, 32)),
    }


def _with_scc(rule: Callable[[int, int], int]) -> Callable[[int, int], tuple[int, int]]:
    return lambda a, b: nonzero(rule(a, b))


_ORDER: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def _compare(order: Callable[[int, int], bool], is_signed: bool) -> Callable[[int, int], int]:
    if is_signed:
        return lambda a, b: int(order(signed(a), signed(b)))
    return lambda a, b: int(order(a, b))


_COMPARES = {
    **{
        f"s_cmp_{name}_{kind}32": Salu(_compare(order, kind == "i"), 0, (32, 32))
        for name, order in _ORDER.items()
        for kind in ("i", "u")
    },
    # SOPK: sdst is compared with the 16-bit immediate.
    **{
        f"s_cmpk_{name}_{kind}32": Salu(_compare(order, kind == "i"), 0, (32, 32))
        for name, order in _ORDER.items()
        for kind in ("i", "u")
    },
    **{f"s_cmp_{n}_u64": Salu(_compare(_ORDER[n], False), 0, (64, 64)) for n in ("eq", "lg")},
}


def _save_exec(combine: Callable[[int, int], int]) -> Salu:
    """D = EXEC; EXEC = combine(source, EXEC); SCC is "EXEC is not 0". Gets and gives EXEC as
    ``old``."""
    return Salu(combine, 64, (64,), writes_scc=True)


INSTRUCTIONS: dict[str, Salu] = {
    **_alu2(32),
    **_alu2(64),
    **_alu1(32),
    **_alu1(64),
    **_COMPARES,
    "s_add_u32": Salu(lambda a, b: carry_out(a + b), 32, (32, 32), True),
    "s_sub_u32": Salu(lambda a, b: carry_out(a - b), 32, (32, 32), True),
    "s_add_i32": Salu(add_i32, 32, (32, 32), True),
    "s_sub_i32": Salu(sub_i32, 32, (32, 32), True),
    "s_addc_u32": Salu(lambda a, b, scc: carry_out(a + b + scc), 32, (32, 32), True, True),
    "s_subb_u32": Salu(lambda a, b, scc: carry_out(a - b - scc), 32, (32, 32), True, True),
    # SCC tells whether the first source was chosen.
    "s_min_i32": Salu(lambda a, b: (a, 1) if signed(a) < signed(b) else (b, 0), 32, (32, 32), True),
    "s_max_i32": Salu(
        lambda a, b: (a, 1) if signed(a) >= signed(b) else (b, 0), 32, (32, 32), True
    ),
    "s_min_u32": Salu(lambda a, b: (a, 1) if a < b else (b, 0), 32, (32, 32), True),
    "s_max_u32": Salu(lambda a, b: (a, 1) if a >= b else (b, 0), 32, (32, 32), True),
    "s_mul_i32": Salu(lambda a, b: a * b & M32, 32, (32, 32)),
    "s_mul_hi_u32": Salu(lambda a, b: a * b >> 32, 32, (32, 32)),
    "s_mul_hi_i32": Salu(lambda a, b: signed(a) * signed(b) >> 32 & M32, 32, (32, 32)),
    "s_absdiff_i32": Salu(
        lambda a, b: nonzero(abs(signed((a - b) & M32)) & M32), 32, (32, 32), True
    ),
    **{f"s_lshl{n}_add_u32": Salu(shift_add(n), 32, (32, 32), True) for n in (1, 2, 3, 4)},
    "s_pack_ll_b32_b16": Salu(pack, 32, (32, 32)),
    "s_pack_lh_b32_b16": Salu(lambda a, b: pack(a, b >> 16), 32, (32, 32)),
    "s_pack_hh_b32_b16": Salu(lambda a, b: pack(a >> 16, b >> 16), 32, (32, 32)),
    "s_sext_i32_i8": Salu(lambda a: signed(a & 0xFF, 8) & M32, 32, (32,)),
    "s_sext_i32_i16": Salu(lambda a: signed(a & 0xFFFF, 16) & M32, 32, (32,)),
    "s_abs_i32": Salu(lambda a: nonzero(abs(signed(a)) & M32), 32, (32,), True),
    # SOPK: the immediate is the source.
    "s_movk_i32": Salu(lambda k: k, 32, (32,)),
    "s_cmovk_i32": Salu(
        lambda k, old, scc: k if scc else old, 32, (32,), reads_scc=True, reads_dst=True
    ),
    "s_addk_i32": Salu(lambda k, old: add_i32(old, k), 32, (32,), True, reads_dst=True),
    "s_mulk_i32": Salu(lambda k, old: old * k & M32, 32, (32,), reads_dst=True),
    "s_and_saveexec_b64": _save_exec(lambda a, exec_mask: a & exec_mask),
    "s_or_saveexec_b64": _save_exec(lambda a, exec_mask: a | exec_mask),
    "s_xor_saveexec_b64": _save_exec(lambda a, exec_mask: a ^ exec_mask),
    "s_andn2_saveexec_b64": _save_exec(lambda a, exec_mask: a & ~exec_mask & M64),
    "s_andn1_saveexec_b64": _save_exec(lambda a, exec_mask: ~a & exec_mask),
    "s_orn2_saveexec_b64": _save_exec(lambda a, exec_mask: (a | ~exec_mask) & M64),
}

BRANCHES: dict[str, Callable[[int, int, int], bool]] = {
    "s_branch": lambda scc, vcc, exec_mask: True,
    "s_cbranch_scc0": lambda scc, vcc, exec_mask: not scc,
    "s_cbranch_scc1": lambda scc, vcc, exec_mask: bool(scc),
    "s_cbranch_vccz": lambda scc, vcc, exec_mask: vcc == 0,
    "s_cbranch_vccnz": lambda scc, vcc, exec_mask: vcc != 0,
    "s_cbranch_execz": lambda scc, vcc, exec_mask: exec_mask == 0,
    "s_cbranch_execnz": lambda scc, vcc, exec_mask: exec_mask != 0,
}
"""Whether the branch to pc + 4 + 4 * simm16 (signed) is taken."""
