"""The custom call that launches the kernel, on operands without batch axes."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla.kernel import compiler, contract, shim
from jax_sparse_mla.kernel.specialisation import ScaleFormat, Specialisation


def sparse_mla_call(
    q_latent: jax.Array,
    q_rope: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    row_begin: jax.Array,
    row_end: jax.Array,
    *,
    softmax_scale: float,
    num_splits: int,
    scale_format: ScaleFormat,
    partial: bool,
    has_invalid: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of ``m = n * num_splits`` rows by the gfx950 kernel.

    Args:
      q_latent: [n, H, 512 or 576] bfloat16; the leading 512 of the last axis are read.
      q_rope: [n, H, 64 or 576] bfloat16; the trailing 64 of the last axis are read.
      kv: [rows, 656] one-byte records.
      indices: [nnz] int32 slots; those outside 0 .. rows - 1 are masked.
      row_begin: [m] int32, where row r, a part of query r // num_splits, begins in ``indices``.
      row_end: [m] int32, where it ends.
      softmax_scale: factor on q . k.
      num_splits: parts a query.
      scale_format: how a record's scales are read.
      partial: whether out is float32 instead of bfloat16.
      has_invalid: whether trailing masked entries are worth skipping; never changes the result.

    Returns:
      out [m, H, 512] and lse [m, H] float32 (natural log).

    Raises:
      compiler.CompileError, ValueError: if there is no code object, see `compiler.code_object`.
      RuntimeError: if the shim is not built.
    """
    shim.register_kernel()
    kernel = compiler.code_object(Specialisation(scale_format, partial))
    (m,), heads = row_begin.shape, q_latent.shape[1]
    out = jax.ShapeDtypeStruct(
        (m, heads, contract.LATENT_DIM), jnp.float32 if partial else jnp.bfloat16
    )
    lse = jax.ShapeDtypeStruct((m, heads), jnp.float32)
    call = jax.ffi.ffi_call(shim.KERNEL_TARGET, (out, lse))
    result_out, result_lse = call(
        q_latent,
        q_rope,
        kv,
        indices,
        row_begin,
        row_end,
        code=kernel.code,
        code_hash=kernel.code_hash,
        symbol=kernel.symbol,
        arch=kernel.arch,
        block_size=np.int32(kernel.block_size),
        lds_bytes=np.int32(kernel.lds_bytes),
        softmax_scale=np.float32(softmax_scale),
        num_splits=np.int32(num_splits),
        flags=np.int32(has_invalid),
    )
    return result_out, result_lse
