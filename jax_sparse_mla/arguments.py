"""Converting arguments, with errors that name them."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

INT32_MAX = 2**31 - 1


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
    held = jnp.iinfo(array.dtype)
    if held.max > INT32_MAX:
        array = array.clip(max(int(held.min), -INT32_MAX - 1), INT32_MAX)
    return jnp.asarray(array.astype(jnp.int32))


def as_indptr(value: ArrayLike, num_rows: int) -> jax.Array:
    """The argument ``kv_indptr`` as int32 [num_rows + 1].

    Raises:
      TypeError: value is not integer.
      ValueError: it has another shape.
    """
    indptr = as_int32("kv_indptr", value)
    if indptr.shape != (num_rows + 1,):
        raise ValueError(
            f"kv_indptr must be [{num_rows + 1}], one more than rows of q, not {list(indptr.shape)}"
        )
    return indptr


def as_array(name: str, value: object) -> jax.Array:
    """The argument ``name``, which must be an array already, as a JAX array.

    Raises:
      TypeError: value is no JAX nor NumPy array.
    """
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be an array, not {type(value).__name__}")
    return jnp.asarray(value)


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
