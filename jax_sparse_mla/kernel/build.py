"""The kernel put together: one workgroup computes 16 heads of one row, tile after tile.

Of a tile's 128 entries each of the four waves loads 32, computes their scores against the 16 heads
and publishes their weights in LDS; then it adds up 128 of the 512 output columns over all 128.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flydsl.compiler as flyc
import flydsl.expr as fx

from jax_sparse_mla.kernel import contract, lds
from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel.finish import Destination, finish
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.query import (
    ChunkOrder,
    QueryPlace,
    load_q,
    positive_factor,
    quantise_q,
)
from jax_sparse_mla.kernel.scores import read_address, scores_of
from jax_sparse_mla.kernel.softmax import Total, nothing_yet, softmax, weights_of
from jax_sparse_mla.kernel.specialisation import Specialisation
from jax_sparse_mla.kernel.tile import (
    MOVES,
    SUBTILES,
    Indices,
    Side,
    stage,
    stage_address,
    stream_of,
    tiles_of,
)
from jax_sparse_mla.kernel.values import Output, no_output, values_address, values_of
from jax_sparse_mla.kernel.workgroup import (
    Work,
    address,
    load_row,
    same_lane,
    start_search,
    this_lane,
    this_work,
)

BLOCK_SIZE = lds.WAVES * lds.LANES


@fx.struct
class _SharedMemory:
    bytes: fx.Array[fx.Uint8, lds.TOTAL, 1024]


class _Arguments(NamedTuple):
    """The kernel's arguments, in the order of contract.ARGUMENTS; pointers as 64-bit addresses."""

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
                address(q_latent),
                address(q_rope),
                address(kv),
                address(indices),
                address(row_begin),
                address(row_end),
                address(out),
                address(lse),
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

    # What is packed is written packed; LLVM's own packing breaks the fusion of DPP into its user.
    launch.compile_hints = {"waves_per_eu": 2, "llvm_options": {"vectorize-slp": False}}
    return launch


def _compute_block(specialisation: Specialisation, a: _Arguments) -> None:
    """One workgroup's work, if there is any for it."""
    # Opaque, or the compiler loads each where it is used, a wait every time.
    a = _Arguments(*[isa.opaque_scalar(value) for value in a])
    work = this_work(a.num_heads, a.num_splits)
    isa.when(work.row < a.num_rows, lambda: _compute_row(specialisation, a, work), [])


def _compute_row(specialisation: Specialisation, a: _Arguments, work: Work) -> list[Value]:
    lane = this_lane()
    lds_base = isa.first_lane(
        fx.Int32(fx.ptrtoint(fx.SharedAllocator().allocate(_SharedMemory).peek().bytes.ptr))
    )
    order = ChunkOrder(specialisation.scale_format, lane)
    # Everything from memory is asked for before anything is waited for.
    raw_query = load_q(_query_place(a, work), lane)
    row = load_row(work, a.indices, a.row_begin, a.row_end, a.num_indices)
    stream = stream_of(row, lane)
    first_indices, next_indices = (stream.load(fx.Int32(tile)) for tile in (0, 1))
    search = start_search(row, lane)
    query = quantise_q(raw_query, a.scale_log2e, order, lds_base)
    last = search.last_entry(a.kv_rows)
    tiles = tiles_of(stream, last, a.kv, a.kv_rows, lane)
    num_tiles = (last.count + (lds.TILE - 1)) >> 7

    def first_records() -> list[Value]:
        slots = tiles.moved_slots(first_indices, fx.Int32(0))
        scored, unmasked = tiles.scored_slots(first_indices, fx.Int32(0))
        latent = [x for move in range(MOVES) for x in tiles.load_latent(slots, move)]
        return latent + tiles.load_side(scored) + unmasked

    first = isa.when(num_tiles > 0, first_records, None)
    factor = positive_factor(a.scale_log2e)
    scores = scores_of(order)
    weights = weights_of(scores, lds_base)
    values = values_of(lane, lds_base)

    def one_tile(tile: Value, state: list[Value]) -> list[Value]:
        # The latents of this tile have come to registers while the one before was worked on, and
        # leave them for LDS; loads of the next tile take their place, those of its rope parts as
        # registers fall free. Loads stay in flight across the barriers. Past the last tile they
        # read the row's last record again: a branch around them would make the compiler wait for
        # more than it needs.
        latent, side, ahead, total, output, addresses = _unpack(state)
        # Opaque, or the compiler keeps every sum of theirs in a register across the loop.
        addresses = Addresses(*[isa.opaque(address) for address in addresses])
        slots = tiles.moved_slots(ahead, tile + 1)
        next_latent: list[Value] = []

        def load_next(moves: range) -> Callable[[int], None]:
            def at(step: int) -> None:
                if step in moves:
                    next_latent.extend(tiles.load_latent(slots, step))

            return at

        stage(latent, addresses.stage, meanwhile=load_next(_WHILE_STAGED))
        scored, unmasked = tiles.scored_slots(ahead, tile + 1)
        # A wave's scores need its own entries alone.
        products = scores.products(
            query, side, tiles, addresses.scores, meanwhile=load_next(_WHILE_SCORED)
        )
        shares, top, total = softmax(products, factor, total)
        own_weights, total = weights.publish(shares, top, side, total)
        load_next(_LAST)(MOVES - 1)
        ahead = stream.load(tile + 2)
        # All waves' latents and weights are in LDS.
        isa.barrier()
        output = values.add_tile(output, own_weights, addresses.values)
        next_side = tiles.load_side(scored)
        # All waves have read them.
        isa.barrier()
        next_records = next_latent + next_side + unmasked
        return _pack(next_records, ahead, total, output, addresses)

    addresses = Addresses(
        stage_address(lane, lds_base), read_address(order, lds_base), values_address(lane, lds_base)
    )
    initial = _pack(first, next_indices, nothing_yet(), no_output(), addresses)
    *_, total, output, _ = _unpack(isa.loop(num_tiles, initial, one_tile))
    destination = Destination(a.out, a.lse, a.num_heads, specialisation.partial)
    finish(output, total, num_tiles == 0, work, destination, same_lane(lane.wave), lds_base)
    return []


def _query_place(a: _Arguments, work: Work) -> QueryPlace:
    def row(pointer: Value, stride: Value) -> Value:
        elements = fx.Uint64(fx.Uint32(work.query)) * fx.Uint64(fx.Uint32(stride))
        return pointer + elements * 2

    return QueryPlace(
        latent=row(a.q_latent, a.q_latent_row_stride),
        latent_stride=a.q_latent_head_stride,
        rope=row(a.q_rope, a.q_rope_row_stride),
        rope_stride=a.q_rope_head_stride,
        first_head=work.first_head,
        num_heads=a.num_heads,
    )


# Moves of the next tile's latents: asked for as this one's leave their registers, between score
# products, so that the path to memory is not crowded, and after the weights, which need registers.
_WHILE_STAGED, _WHILE_SCORED, _LAST = range(4), range(4, MOVES - 1), range(MOVES - 1, MOVES)
_LATENT_LOADS = 2 * MOVES
_SIDE_LOADS = 4 * SUBTILES


class Addresses(NamedTuple):
    """Where a lane's accesses to the latents in LDS start."""

    stage: Value
    scores: Value
    values: Value


def _pack(
    records: list[Value], ahead: Indices, total: Total, output: Output, addresses: Addresses
) -> list[Value]:
    """The loop's state; ``records`` are the latents, then the fields of Side."""
    entries = [*records, ahead.moved, *ahead.scored]
    return [*entries, *total, *addresses, output.reference, *output.parts]


def _unpack(state: list[Value]) -> tuple[list[Value], Side, Indices, Total, Output, Addresses]:
    latent, rest = state[:_LATENT_LOADS], state[_LATENT_LOADS:]
    side, rest = rest[:_SIDE_LOADS], rest[_SIDE_LOADS:]
    ahead = Indices(rest[0], rest[1:3])
    total, addresses, output = Total(*rest[3:6]), Addresses(*rest[6:9]), Output(rest[10:], rest[9])
    return latent, Side(side[:2], side[2:6], side[6:]), ahead, total, output, addresses


def compile_kernel(specialisation: Specialisation) -> Any:
    """Compile a specialisation without launching it: the result of ``flyc.compile``."""
    kinds = {"pointer": None, "i32": fx.Int32(0), "f32": fx.Float32(0.0)}
    arguments = [
        flyc.from_c_void_p(fx.Uint8, None) if argument.kind == "pointer" else kinds[argument.kind]
        for argument in contract.ARGUMENTS
    ]
    return flyc.compile(build(specialisation), *arguments)
