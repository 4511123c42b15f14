"""The float32 scales of e4m3fn codes: made and judged by their bits.

By bits it is exact, where log2, exp2 and arithmetic on subnormal numbers are not.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla.kernel.specialisation import ScaleFormat

ScaleRule = Literal["pow2", "pow2_fine", "float32"]

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn."""

# Fields of a float32.
SIGN_BIT = -(2**31)
EXPONENT_BITS = 0x7F800000
MANTISSA_BITS = 0x007FFFFF
MANTISSA_WIDTH = 23
_MIN_NORMAL = 2.0**-126


def scale_of_group(amax: jax.Array, scale_rule: ScaleRule) -> jax.Array:
    """The scale a writer gives a group of values, by the rules of ``pack_records``.

    Args:
      amax: [...] float32, the largest magnitude of each group.
      scale_rule: the writer's rule.

    Returns:
      [...] float32; inf or NaN where amax is.
    """
    if scale_rule == "float32":
        return jnp.maximum(amax / E4M3_MAX, _MIN_NORMAL)
    # 448 = 1.75 * 2**8: amax / 448 rounds up to 2**(e - 8) if amax's mantissa is at most 1.75, else
    # to 2**(e - 7).
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    above_1_75 = MANTISSA_BITS - 0x600000
    rounded_up = ((bits + above_1_75) & EXPONENT_BITS) - (8 << MANTISSA_WIDTH)
    # Rounding up keeps order, so the floor can be rounded first: 1e-4 to 2**-13, 1e-4 / 448 to
    # 2**-22.
    floor = np.float32(2.0**-13 if scale_rule == "pow2" else 2.0**-22).view(np.int32)
    scale = lax.bitcast_convert_type(jnp.maximum(rounded_up, floor), jnp.float32)
    return jnp.where(jnp.isfinite(amax), scale, amax)


def scale_is_usable(scale_bits: jax.Array, scale_format: ScaleFormat) -> jax.Array:
    """Whether a scale means a number in the format.

    Args:
      scale_bits: [...] int32, the bits of the float32.
      scale_format: ``"pow2"``: +2**-126 .. +2**127 and zero of either sign. ``"float32"``: what is
        finite.

    Returns:
      [...] bool.
    """
    exponent = scale_bits & EXPONENT_BITS
    finite = exponent != EXPONENT_BITS
    if scale_format == "float32":
        return finite
    power_of_two = finite & ((scale_bits & (SIGN_BIT | MANTISSA_BITS)) == 0)
    return power_of_two | ((scale_bits & ~SIGN_BIT) == 0)
