"""The kernel put together: one workgroup computes 16 heads of one row, tile after tile."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flydsl.compiler as flyc
import flydsl.expr as fx

from jax_sparse_mla.kernel import contract, lds
from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel.finish import Destination, finish
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.query import ChunkOrder, quantise_q
from jax_sparse_mla.kernel.scores import scores_of
from jax_sparse_mla.kernel.softmax import Total, nothing_yet, softmax, weights_of
from jax_sparse_mla.kernel.specialisation import Specialisation
from jax_sparse_mla.kernel.tile import SUBTILES, Indices, Side, tiles_of
from jax_sparse_mla.kernel.values import Output, no_output, values_of
from jax_sparse_mla.kernel.workgroup import Lane, Work, address, load_row, this_lane, this_work

BLOCK_SIZE = lds.WAVES * lds.LANES


@fx.struct
class _SharedMemory:
    bytes: fx.Array[fx.Uint8, lds.TOTAL, 1024]


class _Arguments(NamedTuple):
    """The kernel's arguments, in the order of contract.ARGUMENTS."""

    q_latent: Value
    q_rope: Value
    kv: Value
    indices: Value
    row_begin: Value
    row_end: Value
    out: Value
    lse: Value
    q_latent_row_stride: Value
    q_latent_head_stride: Value
    q_rope_row_stride: Value
    q_rope_head_stride: Value
    scale_log2e: Value
    num_rows: Value
    num_heads: Value
    num_splits: Value
    kv_rows: Value
    num_indices: Value
    flags: Value


def build(specialisation: Specialisation) -> Callable[..., Any]:
    """The FlyDSL jit function of a specialisation; its arguments are contract.ARGUMENTS."""

    # FlyDSL takes a kernel's arguments from a plain signature, so they are listed here once more.
    @flyc.kernel(name=specialisation.name, known_block_size=[BLOCK_SIZE, 1, 1])
    def kernel(
        q_latent: fx.Pointer,
        q_rope: fx.Pointer,
        kv: fx.Pointer,
        indices: fx.Pointer,
        row_begin: fx.Pointer,
        row_end: fx.Pointer,
        out: fx.Pointer,
        lse: fx.Pointer,
        q_latent_row_stride: fx.Int32,
        q_latent_head_stride: fx.Int32,
        q_rope_row_stride: fx.Int32,
        q_rope_head_stride: fx.Int32,
        scale_log2e: fx.Float32,
        num_rows: fx.Int32,
        num_heads: fx.Int32,
        num_splits: fx.Int32,
        kv_rows: fx.Int32,
        num_indices: fx.Int32,
        flags: fx.Int32,
    ) -> None:
        _compute_block(
            specialisation,
            _Arguments(
                q_latent,
                q_rope,
                kv,
                indices,
                row_begin,
                row_end,
                out,
                lse,
                q_latent_row_stride,
                q_latent_head_stride,
                q_rope_row_stride,
                q_rope_head_stride,
                scale_log2e,
                num_rows,
                num_heads,
                num_splits,
                kv_rows,
                num_indices,
                flags,
            ),
        )

    @flyc.jit
    def launch(
        q_latent: fx.Pointer,
        q_rope: fx.Pointer,
        kv: fx.Pointer,
        indices: fx.Pointer,
        row_begin: fx.Pointer,
        row_end: fx.Pointer,
        out: fx.Pointer,
        lse: fx.Pointer,
        q_latent_row_stride: fx.Int32,
        q_latent_head_stride: fx.Int32,
        q_rope_row_stride: fx.Int32,
        q_rope_head_stride: fx.Int32,
        scale_log2e: fx.Float32,
        num_rows: fx.Int32,
        num_heads: fx.Int32,
        num_splits: fx.Int32,
        kv_rows: fx.Int32,
        num_indices: fx.Int32,
        flags: fx.Int32,
        stream: fx.Stream = fx.Stream(None),  # noqa: B008
    ) -> None:
        kernel(
            q_latent,
            q_rope,
            kv,
            indices,
            row_begin,
            row_end,
            out,
            lse,
            q_latent_row_stride,
            q_latent_head_stride,
            q_rope_row_stride,
            q_rope_head_stride,
            scale_log2e,
            num_rows,
            num_heads,
            num_splits,
            kv_rows,
            num_indices,
            flags,
        ).launch(grid=(num_rows, 1, 1), block=(BLOCK_SIZE, 1, 1), stream=stream)

    launch.compile_hints = {"waves_per_eu": 2}
    return launch


def _compute_block(specialisation: Specialisation, a: _Arguments) -> None:
    """One workgroup's work, if there is any for it."""
    work = this_work(a.num_heads, a.num_splits)
    isa.when(work.row < a.num_rows, lambda: _compute_row(specialisation, a, work), [])


def _compute_row(specialisation: Specialisation, a: _Arguments, work: Work) -> list[Value]:
    lane = this_lane()
    lds_base = isa.first_lane(
        fx.Int32(fx.ptrtoint(fx.SharedAllocator().allocate(_SharedMemory).peek().bytes.ptr))
    )
    order = ChunkOrder(specialisation.scale_format)
    row = load_row(work, a.indices, a.row_begin, a.row_end, a.num_indices, a.kv_rows, lane)
    query = quantise_q(*_query_addresses(a, work, lane), a.scale_log2e, order, lane)
    tiles = tiles_of(row, address(a.kv), a.kv_rows, lane, lds_base)
    scores = scores_of(order, lane, lds_base)
    weights = weights_of(scores, lane, lds_base)
    values = values_of(lane, lds_base)
    num_tiles = (row.count + (lds.TILE - 1)) >> 7

    def load_records(indices: Indices, tile: Value) -> list[Value]:
        return tiles.load_latent(indices, tile) + _flat(tiles.load_side(indices, tile))

    def one_tile(tile: Value, state: list[Value]) -> list[Value]:
        loaded, ahead, total, output = _unpack(state)
        tiles.stage(loaded[:16])
        side = _side(loaded[16:])
        loaded = isa.when(tile + 1 < num_tiles, lambda: load_records(ahead, tile + 1), loaded)
        ahead = tiles.load_indices(tile + 2)
        products = scores.products(query, side)
        shares, top, total = softmax(products, query.factor, total)
        weights.publish(shares, top, side)
        isa.barrier()
        output = values.add_tile(output)
        isa.barrier()
        return _pack(loaded, ahead, total, output)

    first = isa.when(
        num_tiles > 0,
        lambda: load_records(tiles.load_indices(fx.Int32(0)), fx.Int32(0)),
        None,
    )
    initial = _pack(first, tiles.load_indices(fx.Int32(1)), nothing_yet(), no_output())
    _, _, total, output = _unpack(isa.loop(num_tiles, initial, one_tile))
    destination = Destination(a.out, a.lse, a.num_heads, specialisation.partial)
    finish(output, total, num_tiles == 0, work, destination, lane, lds_base)
    return []


def _query_addresses(a: _Arguments, work: Work, lane: Lane) -> tuple[Value, Value]:
    """Where head t's latent and this lane's part of its rope lie; heads past the last read it."""
    head = work.first_head + lane.t
    head = fx.Uint64(fx.Uint32((head < a.num_heads).select(head, a.num_heads - 1)))
    query = fx.Uint64(fx.Uint32(work.query))

    def head_address(pointer: Value, row_stride: Value, head_stride: Value) -> Value:
        elements = query * fx.Uint64(fx.Uint32(row_stride)) + head * fx.Uint64(
            fx.Uint32(head_stride)
        )
        return address(pointer) + elements * 2

    latent = head_address(a.q_latent, a.q_latent_row_stride, a.q_latent_head_stride)
    rope = head_address(a.q_rope, a.q_rope_row_stride, a.q_rope_head_stride)
    return latent, rope + fx.Uint64(fx.Uint32(lane.g * 16))


def _pack(loaded: list[Value], ahead: Indices, total: Total, output: Output) -> list[Value]:
    return [
        *loaded,
        ahead.moved,
        *ahead.scored,
        total.sum,
        total.top,
        output.reference,
        *output.parts,
    ]


def _unpack(state: list[Value]) -> tuple[list[Value], Indices, Total, Output]:
    loaded, rest = state[:_LOADED], state[_LOADED:]
    ahead = Indices(rest[0], rest[1:3])
    return loaded, ahead, Total(rest[3], rest[4]), Output(rest[6:], rest[5])


_LOADED = 16 + 4 * SUBTILES


def _flat(side: Side) -> list[Value]:
    return [*side.scales, *side.bias, *[word for pair in side.rope for word in pair]]


def _side(values: list[Value]) -> Side:
    rope = values[2 * SUBTILES :]
    return Side(
        values[:SUBTILES],
        [rope[2 * s : 2 * s + 2] for s in range(SUBTILES)],
        values[SUBTILES : 2 * SUBTILES],
    )


def compile_kernel(specialisation: Specialisation) -> Any:
    """Compile a specialisation without launching it: the result of ``flyc.compile``."""
    kinds = {"pointer": None, "i32": fx.Int32(0), "f32": fx.Float32(0.0)}
    arguments = [
        flyc.from_c_void_p(fx.Uint8, None) if argument.kind == "pointer" else kinds[argument.kind]
        for argument in contract.ARGUMENTS
    ]
    return flyc.compile(build(specialisation), *arguments)
