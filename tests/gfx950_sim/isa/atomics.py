"""Atomic read-modify-write operations on LDS and global memory.

A record's function maps the old value and the data to the new value, as NumPy scalars. Lanes that
meet at an address take their turns in lane order, which is a choice: the hardware's order is not
documented. Source: the CDNA4 ISA's pseudocode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import formats
from .records import Atomic

Scalar = Any


def _increment(old: Scalar, limit: Scalar) -> Scalar:
    return old * 0 if old >= limit else old + old.dtype.type(1)


def _decrement(old: Scalar, limit: Scalar) -> Scalar:
    return limit if old == 0 or old > limit else old - old.dtype.type(1)


def _add_halves_f16(old: Scalar, data: Scalar) -> Scalar:
    pair = np.array([old, data]).view(np.float16).reshape(2, 2)
    return (pair[0] + pair[1]).view(np.uint32)[0]


def _add_halves_bf16(old: Scalar, data: Scalar) -> Scalar:
    pair = formats.decode_bf16(np.array([old, data]).view(np.uint16)).reshape(2, 2)
    return formats.encode_bf16(pair[0] + pair[1]).view(np.uint32)[0]


_INTEGER: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "rsub": lambda old, x: x - old,
    "inc": _increment,
    "dec": _decrement,
    "min": lambda old, x: x if x < old else old,
    "max": lambda old, x: x if x >= old else old,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "swap": lambda old, x: x,
}
_FLOAT: dict[str, Callable[..., Any]] = {
    "add": lambda old, x: old + x,
    "min": lambda old, x: x if x < old else old,
    "max": lambda old, x: x if x > old else old,
}


def _lds() -> dict[str, Atomic]:
    table: dict[str, Atomic] = {}

    def both(operation: str, kind: str, record: Atomic) -> None:
        table[f"ds_{operation}_{kind}"] = record
        table[f"ds_{operation}_rtn_{kind}"] = record

    for bits in ("32", "64"):
        for operation in ("add", "sub", "rsub", "inc", "dec", "min", "max"):
            both(operation, f"u{bits}", Atomic(_INTEGER[operation], f"u{bits}"))
        for operation in ("min", "max"):
            both(operation, f"i{bits}", Atomic(_INTEGER[operation], f"i{bits}"))
        for operation in ("and", "or", "xor"):
            both(operation, f"b{bits}", Atomic(_INTEGER[operation], f"u{bits}"))
        for operation in ("add", "min", "max"):
            both(operation, f"f{bits}", Atomic(_FLOAT[operation], f"f{bits}"))
        # data0 is compared, data1 stored.
        compare = Atomic(lambda old, cmp, new: new if old == cmp else old, f"u{bits}", 2)
        both("cmpst", f"b{bits}", compare)
        table[f"ds_wrxchg_rtn_b{bits}"] = Atomic(_INTEGER["swap"], f"u{bits}")
    both("pk_add", "f16", Atomic(_add_halves_f16, "u32"))
    both("pk_add", "bf16", Atomic(_add_halves_bf16, "u32"))
    return table


def _vmem(family: str) -> dict[str, Atomic]:
    table: dict[str, Atomic] = {}
    for bits, suffix in (("32", ""), ("64", "_x2")):
        for operation in ("add", "sub", "inc", "dec", "and", "or", "xor", "swap"):
            table[operation + suffix] = Atomic(_INTEGER[operation], f"u{bits}")
        for operation in ("min", "max"):
            table[f"u{operation}{suffix}"] = Atomic(_INTEGER[operation], f"u{bits}")
            table[f"s{operation}{suffix}"] = Atomic(_INTEGER[operation], f"i{bits}")
        # The first item is stored, the second compared.
        table[f"cmpswap{suffix}"] = Atomic(
            lambda old, new, cmp: new if old == cmp else old, f"u{bits}", 2
        )
    table["add_f32"] = Atomic(_FLOAT["add"], "f32")
    for operation, function in _FLOAT.items():
        table[f"{operation}_f64"] = Atomic(function, "f64")
    table["pk_add_f16"] = Atomic(_add_halves_f16, "u32")
    table["pk_add_bf16"] = Atomic(_add_halves_bf16, "u32")
    return {f"{family}_atomic_{name}": record for name, record in table.items()}


LDS: dict[str, Atomic] = _lds()
VMEM: dict[str, Atomic] = {**_vmem("global"), **_vmem("buffer")}
