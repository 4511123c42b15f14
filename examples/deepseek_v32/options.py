"""How a step is computed, apart from what the model is."""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Options:
    """Choices of one compiled step; all static."""

    dtype: Any = jnp.bfloat16
    """Of activations and parameters. The op takes bfloat16 queries whatever it is."""
    implementation: str | None = None
    """``sparse_mla_fwd``'s: None, ``"kernel"`` or ``"reference"``."""
    record_format: str = "fp8"
    """``"fp8"``: 656-byte records; ``"bf16"``: unquantised, read by the op's reference only."""
    index_format: str = "bf16"
    """Index keys in ``"bf16"``, or in ``"fp8"`` behind a Hadamard rotation of queries and keys."""
    tensor_axis: str | None = None
    """Mesh axis over which heads, experts and MLP widths are split, inside ``shard_map``."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("record_format", ("fp8", "bf16")),
            ("index_format", ("fp8", "bf16")),
            ("implementation", (None, "kernel", "reference")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.record_format == "bf16" and self.implementation == "kernel":
            raise ValueError(
                "the kernel reads fp8 records only: record_format 'bf16' needs the reference"
            )
