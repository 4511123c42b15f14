"""The end of a row: the waves' sums of weights joined, the output divided and stored."""

import math
from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.contract import LATENT_DIM
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.query import sum_of_groups
from jax_sparse_mla.kernel.softmax import Total
from jax_sparse_mla.kernel.values import Output
from jax_sparse_mla.kernel.workgroup import Lane, Work


class Destination(NamedTuple):
    """Where results go, 64-bit addresses."""

    out: Value
    lse: Value
    num_heads: Value
    partial: bool
    """Whether out is float32 rather than bfloat16."""


def finish(
    output: Output,
    total: Total,
    is_empty: Value,
    work: Work,
    destination: Destination,
    lane: Lane,
    lds_base: Value,
) -> None:
    """Store out and lse of the row; an empty row's are 0 and -inf.

    A sum of weights that float32 does not hold, from scores beyond softmax.TOP_LIMIT or infinite
    ones, makes both NaN, lse as well as out.
    """
    top, weight = _join(total, lane, lds_base)
    held = (weight > 0.0) & (weight < math.inf)
    weight = held.select(weight, fx.Float32(math.nan))
    factor = isa.ldexp(isa.reciprocal(weight), output.reference - top)
    factor = is_empty.select(fx.Float32(0.0), factor)
    lse = (fx.Float32(top) + isa.log2(weight)) * math.log(2.0)
    lse = is_empty.select(fx.Float32(-math.inf), lse)
    head = work.first_head + lane.t
    row_of_heads = fx.Uint64(fx.Uint32(work.row)) * fx.Uint64(fx.Uint32(destination.num_heads))
    number = row_of_heads + fx.Uint64(fx.Uint32(head))

    def store() -> list[Value]:
        size = 4 if destination.partial else 2
        column = lane.wave * 128 + lane.g * 4
        where = destination.out + number * (LATENT_DIM * size)
        where = where + fx.Uint64(fx.Uint32(column * size))
        for chunk, part in enumerate(output.parts):
            values = part * factor
            if not destination.partial:
                values = values.to(fx.BFloat16)
            isa.global_store(where, values, 16 * size * chunk, align=4 * size)

        def store_lse() -> list[Value]:
            isa.global_store(destination.lse + number * 4, lse)
            return []

        isa.when((lane.wave * 4 + lane.g) == 0, store_lse, [])
        return []

    isa.when(head < destination.num_heads, store, [])


def _join(total: Total, lane: Lane, lds_base: Value) -> tuple[Value, Value]:
    """The row's sum of weights for head t over all waves: (top, sum), sum * 2^top."""
    own = lds_base + (lds.EXPONENTS.start + lane.wave * 128 + lane.t * 8)
    words = [total.top, sum_of_groups(total.sum).bitcast(fx.Int32)]
    isa.lds_store(own, Vector.from_elements(words, fx.Int32), 2)
    isa.barrier()
    base = lds_base + (lds.EXPONENTS.start + lane.t * 8)
    waves = [isa.lds_load(base, 2, 128 * wave) for wave in range(lds.WAVES)]
    top = waves[0][0]
    for words in waves[1:]:
        top = (words[0] > top).select(words[0], top)
    weight = fx.Float32(0.0)
    for words in waves:
        weight = weight + isa.ldexp(words[1].bitcast(fx.Float32), words[0] - top)
    return top, weight
