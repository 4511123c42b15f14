"""Every vector ALU instruction but conversions: integers and bits, floats, comparisons."""

from gfx950_sim.isa import compare, floating, integer
from gfx950_sim.isa.records import Valu

INSTRUCTIONS: dict[str, Valu] = {
    **integer.INSTRUCTIONS,
    **floating.INSTRUCTIONS,
    **compare.INSTRUCTIONS,
}
