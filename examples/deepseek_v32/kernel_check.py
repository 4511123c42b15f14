"""The kernel beside the reference on one step's inputs of the op.

    python -m examples.deepseek_v32.kernel_check FILE.npz

Without a gfx950 GPU, JAX_SPARSE_MLA_HIP_LIBRARY must name the simulator's HIP library.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_sparse_mla import sparse_mla_fwd


class OpInputs(NamedTuple):
    """Arguments of `sparse_mla_fwd`, padded rows."""

    q_latent: np.ndarray  # [n, H, 512] bfloat16
    q_rope: np.ndarray  # [n, H, 64] bfloat16
    records: np.ndarray  # [rows, 656] uint8
    slots: np.ndarray  # [n, w] int32
    softmax_scale: float

    def save(self, path: Path) -> None:
        """Write them; NumPy's format has no bfloat16, so queries go as their bits."""
        arrays = self._asdict()
        for name in ("q_latent", "q_rope"):
            arrays[name] = arrays[name].view(np.uint16)
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> "OpInputs":
        """Read what `save` wrote."""
        with np.load(path) as file:
            return cls(
                q_latent=file["q_latent"].view(ml_dtypes.bfloat16),
                q_rope=file["q_rope"].view(ml_dtypes.bfloat16),
                records=file["records"],
                slots=file["slots"],
                softmax_scale=float(file["softmax_scale"]),
            )


def run(inputs: OpInputs, implementation: str) -> tuple[np.ndarray, np.ndarray, float]:
    """The op's out and lse by one implementation, and the seconds of a call behind the first."""

    @jax.jit
    def op(q_latent: jax.Array, q_rope: jax.Array, records: jax.Array, slots: jax.Array) -> Any:
        return sparse_mla_fwd(
            (q_latent, q_rope),
            records,
            None,
            slots,
            inputs.softmax_scale,
            row_lengths=jnp.sum(slots >= 0, axis=-1, dtype=jnp.int32),
            return_lse=True,
            num_splits=1,
            implementation=implementation,
        )

    arguments = inputs[:4]
    compiled = op.lower(*arguments).compile()
    start = time.perf_counter()
    out, lse = map(np.asarray, compiled(*arguments))
    return out.astype(np.float32), lse, time.perf_counter() - start


def main() -> None:
    """Print how far the two are apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="inputs that OpInputs.save wrote")
    inputs = OpInputs.load(parser.parse_args().file)
    kernel, kernel_lse, seconds = run(inputs, "kernel")
    reference, reference_lse, _ = run(inputs, "reference")
    n, heads, _ = kernel.shape
    error = np.linalg.norm(kernel - reference) / np.linalg.norm(reference)
    seen = np.isfinite(reference_lse)
    if not np.array_equal(seen, np.isfinite(kernel_lse)):
        raise SystemExit("kernel and reference differ in which rows are empty")
    lse_error = np.max(np.abs(kernel_lse - reference_lse), where=seen, initial=0.0)
    print(
        f"kernel beside reference, {n} rows x {heads} heads, up to {inputs.slots.shape[1]} tokens: "
        f"out {error:.1e} apart (2-norm, relative), lse {lse_error:.1e}; kernel {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
