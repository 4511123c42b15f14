"""Vector comparisons: a lane mask to VCC, to a scalar pair, or (v_cmpx) to EXEC as well.

Source: the pseudocode of the CDNA4 ISA, chapter 12 (VOPC).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950_sim.isa import floats
from gfx950_sim.isa.records import Valu

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

_COMPARE_INTEGERS: dict[str, Function] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "f": lambda a, b: np.zeros(64, bool),
    "t": lambda a, b: np.ones(64, bool),
}
_COMPARE_FLOATS: dict[str, Function] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    # The negated forms are true for NaN.
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "f": lambda a, b: np.zeros(64, bool),
    "tru": lambda a, b: np.ones(64, bool),
}

INSTRUCTIONS: dict[str, Valu] = {
    f"v_{cmp}_{name}_{kind}": Valu(function, "mask", (kind, kind))
    for cmp in ("cmp", "cmpx")
    for kinds, functions in (
        (("i16", "u16", "i32", "u32", "i64", "u64"), _COMPARE_INTEGERS),
        (("f16", "f32", "f64"), _COMPARE_FLOATS),
    )
    for kind in kinds
    for name, function in functions.items()
}
INSTRUCTIONS |= {
    f"v_{cmp}_class_f32": Valu(floats.class_f32, "mask", ("f32", "u32")) for cmp in ("cmp", "cmpx")
}
