"""Converting arguments, with errors that name them."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def as_int32(name: str, value: ArrayLike) -> jax.Array:
    """The integer argument ``name`` as int32.

    What int32 cannot hold becomes the nearest it can, which is as far out of every range: never
    another slot.

    Raises:
      TypeError: value is not integer.
    """
    # A NumPy array is clipped before JAX sees it: without 64-bit types JAX would wrap it.
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be an integer array, not {array.dtype}")
    held, int32 = jnp.iinfo(array.dtype), jnp.iinfo(jnp.int32)
    if held.max > int32.max:
        lowest = max(int(held.min), int(int32.min))
        array = array.clip(lowest, int(int32.max))
    return jnp.asarray(array.astype(jnp.int32))


def as_floating(name: str, value: ArrayLike) -> jax.Array:
    """The floating argument ``name`` as a JAX array, its dtype kept where JAX has it.

    Raises:
      TypeError: value is not floating.
    """
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating array, not {array.dtype}")
    return array


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise ValueError unless value is one of the Literal type ``choices``."""
    if value not in get_args(choices):
        allowed = ", ".join(repr(choice) for choice in get_args(choices))
        raise ValueError(f"{name} must be one of {allowed}, not {value!r}")
