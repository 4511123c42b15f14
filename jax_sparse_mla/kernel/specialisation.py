"""The kernel's specialisations: what needs a code object of its own."""

from typing import Literal, NamedTuple

ScaleFormat = Literal["pow2", "float32"]


class Specialisation(NamedTuple):
    """One variant of the kernel; everything else about a call is a runtime argument."""

    scale_format: ScaleFormat
    """How a record's scales are read: their exponent alone, or as they are."""
    partial: bool
    """Whether ``out`` is float32, for parts of a row to be merged, rather than bfloat16."""

    @property
    def name(self) -> str:
        """The kernel's symbol, and its file name without suffix."""
        return f"sparse_mla_{self.scale_format}_{'partial' if self.partial else 'whole'}"


ALL = tuple(
    Specialisation(scale_format, partial)
    for scale_format in ("pow2", "float32")
    for partial in (False, True)
)
