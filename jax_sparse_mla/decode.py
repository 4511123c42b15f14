"""From a record's bytes to its values, as the reference reads them."""

import jax.numpy as jnp
from jax import Array, lax

from jax_sparse_mla.kernel.contract import LATENT_DIM, ROPE_DIM
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.records import GROUP, NUM_GROUPS, SCALES_END
from jax_sparse_mla.scales import scale_is_usable


def decode(record: Array, scale_format: ScaleFormat) -> Array:
    """The values [..., 576] of records [..., 656] of one-byte dtype, float32: latent and rope.

    A record is 512 e4m3fn codes, 4 float32 scales, 64 bfloat16. A scale that the format does not
    allow makes its latents NaN. A [..., 576] bfloat16 record is an unquantised one: as it is.
    """
    if record.dtype.itemsize > 1:
        return record
    record = lax.bitcast_convert_type(record, jnp.uint8)
    leading = record.shape[:-1]
    codes, scales, rope = jnp.split(record, [LATENT_DIM, SCALES_END], -1)
    scale_bits = lax.bitcast_convert_type(scales.reshape(*leading, NUM_GROUPS, 4), jnp.int32)
    usable = scale_is_usable(scale_bits, scale_format)
    scale = jnp.where(usable, lax.bitcast_convert_type(scale_bits, jnp.float32), jnp.nan)
    value = decode_e4m3fn(codes).reshape(*leading, NUM_GROUPS, GROUP)
    latent = (value * scale[..., None]).reshape(*leading, LATENT_DIM)
    rope = lax.bitcast_convert_type(rope.reshape(*leading, ROPE_DIM, 2), jnp.bfloat16)
    return jnp.concatenate([latent, rope.astype(jnp.float32)], -1)


def decode_e4m3fn(code: Array) -> Array:
    """Float32 values of e4m3fn codes (uint8): sign, 4 bits of exponent of bias 7, 3 of mantissa.

    The bits are moved to where float32 has them. (OCP 8-bit floating point specification, 1.0.)
    """
    bits = code.astype(jnp.uint32)
    magnitude = bits & 0x7F
    value = jnp.where(
        magnitude < 8,  # subnormal: multiples of 2^-9
        magnitude.astype(jnp.float32) * jnp.float32(2**-9),
        lax.bitcast_convert_type((magnitude << 20) + jnp.uint32((127 - 7) << 23), jnp.float32),
    )
    value = jnp.where(magnitude == 0x7F, jnp.nan, value)
    return jnp.where(bits >= 0x80, -value, value)
