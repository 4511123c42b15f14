"""The op under JAX's transformations on one device: jit, vmap, differentiation, memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_attention import SCALE, assert_same, queries

from jax_sparse_mla import sparse_mla_fwd

N, HEADS, ROWS, WIDTH, BATCH = 3, 2, 40, 256, 3


def attend(q, kv, indices, lengths):
    return sparse_mla_fwd(q, kv, None, indices, SCALE, row_lengths=lengths, return_lse=True)


def attend_csr(q, kv, indices, indptr):
    return sparse_mla_fwd(q, kv, indptr, indices, SCALE, return_lse=True)


@functools.cache
def batch():
    """Operands with a leading axis of BATCH, all different; row lengths, then indptr."""
    rng = np.random.default_rng(0)
    q = queries(rng, BATCH * N, HEADS).reshape(BATCH, N, HEADS, 576)
    kv = oracle.random_records(rng, BATCH * ROWS).reshape(BATCH, ROWS, 656)
    # Entries up to BATCH * ROWS: one past the end of a cache is masked, never the next cache's.
    indices = rng.integers(-5, BATCH * ROWS, (BATCH, N, WIDTH)).astype(np.int32)
    lengths = rng.integers(-1, WIDTH + 2, (BATCH, N)).astype(np.int32)
    indptr = rng.integers(-1, N * WIDTH + 2, (BATCH, N + 1)).astype(np.int32)
    return q, kv, indices, lengths, indptr


def check_item(results, item, q, kv, rows):
    out, lse = (np.asarray(x[item]) for x in results)
    oracle.check(out, lse, oracle.attention(q, kv, rows, SCALE))


@pytest.mark.parametrize("mapped", list(itertools.product([0, None], repeat=4))[:-1])
def test_vmap_over_any_subset(mapped):
    q, kv, indices, lengths, _ = batch()
    operands = (q, kv, indices, lengths)
    args = [x if axis == 0 else x[1] for x, axis in zip(operands, mapped, strict=True)]
    results = jax.vmap(attend, in_axes=mapped)(*args)
    for i in range(BATCH):
        q, kv, indices, lengths = (
            x[i] if axis == 0 else x for x, axis in zip(args, mapped, strict=True)
        )
        check_item(results, i, q, kv, oracle.padded_rows(indices, lengths))


@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (0, 0, None, None), (None, 0, 0, None)])
def test_vmap_of_streams(mapped):
    q, kv, indices, _, indptr = batch()
    operands = (q, kv, indices.reshape(BATCH, -1), indptr)
    args = [x if axis == 0 else x[1] for x, axis in zip(operands, mapped, strict=True)]
    results = jax.vmap(attend_csr, in_axes=mapped)(*args)
    for i in range(BATCH):
        q, kv, indices, indptr = (
            x[i] if axis == 0 else x for x, axis in zip(args, mapped, strict=True)
        )
        check_item(results, i, q, kv, oracle.csr_rows(indptr, indices))


def test_nested_vmap_with_a_cache_for_each_outer_item():
    q, kv, indices, lengths, _ = batch()
    inner = jax.vmap(attend, in_axes=(0, None, None, 0), out_axes=1)
    nested = jax.jit(jax.vmap(inner, in_axes=(None, 0, 0, 0), out_axes=2))
    results = nested(q, kv, indices, np.stack([lengths, lengths[::-1], lengths]))
    assert results[0].shape == (N, BATCH, BATCH, HEADS, 512)
    for outer, item in itertools.product(range(BATCH), repeat=2):
        rows = oracle.padded_rows(indices[outer], (lengths, lengths[::-1], lengths)[outer][item])
        check_item(results, np.s_[:, item, outer], q[item], kv[outer], rows)


def test_vmap_of_nothing_mapped_but_a_number():
    q, kv, indices, lengths, _ = batch()
    results = jax.vmap(lambda _: attend(q[0], kv[0], indices[0], lengths[0]))(jnp.arange(2))
    for a, b in zip(results, attend(q[0], kv[0], indices[0], lengths[0]), strict=True):
        assert_same(a[1], b)


def test_a_mapped_pair_and_sink():
    q, kv, indices, _, _ = batch()

    def call(latent, rope, sink):
        return sparse_mla_fwd((latent, rope), kv[0], None, indices[0], SCALE, attn_sink=sink)

    sinks = np.arange(BATCH * HEADS, dtype=np.float32).reshape(BATCH, HEADS)
    got = jax.vmap(call)(q[..., :512], q[..., 512:], sinks)
    for i in range(BATCH):
        assert_same(got[i], call(q[i][..., :512], q[i][..., 512:], sinks[i]))


class TestDifferentiation:
    """Forward-only, and saying so; but no obstacle to derivatives that do not pass through."""

    def loss(self, q):
        _, kv, indices, lengths, _ = batch()
        return attend(q, kv[0], indices[0], lengths[0])[0].astype(jnp.float32).sum()

    @pytest.mark.parametrize("jit", [False, True])
    def test_grad_and_jvp(self, jit):
        q = jnp.asarray(batch()[0][0])
        loss = jax.jit(self.loss) if jit else self.loss
        for differentiate in (
            lambda: jax.grad(loss)(q),
            lambda: jax.jvp(loss, (q,), (q,)),
            lambda: jax.linearize(loss, q),
            lambda: jax.vmap(jax.grad(loss))(q[None]),
            lambda: jax.grad(lambda q: jax.checkpoint(loss)(q))(q),
        ):
            with pytest.raises(NotImplementedError, match="sparse_mla_fwd is forward-only"):
                differentiate()

    def test_other_gradients_pass(self):
        q = jnp.asarray(batch()[0][0])

        def loss(x):
            return x * self.loss(jax.lax.stop_gradient(q * x.astype(q.dtype)))

        assert np.isfinite(jax.grad(loss)(jnp.float32(1.0)))


class TestMemory:
    """XLA's own account of a compiled call's temporaries."""

    @pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.float8_e4m3fn])
    @pytest.mark.parametrize("paged", [False, True])
    def test_the_cache_is_never_converted_nor_copied(self, dtype, paged):
        records = 1 << 18
        kv = jax.ShapeDtypeStruct((records // 64, 64, 656) if paged else (records, 656), dtype)
        q = jax.ShapeDtypeStruct((2, 16, 576), jnp.bfloat16)
        indices = jax.ShapeDtypeStruct((2, 512), jnp.int32)
        call = jax.jit(lambda q, kv, i: sparse_mla_fwd(q, kv, None, i, SCALE))
        analysis = call.lower(q, kv, indices).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < records * 656 / 8

    def test_mapped_caches_are_not_copied(self):
        caches, records = 4, 1 << 16
        kv = jax.ShapeDtypeStruct((caches, records, 656), jnp.uint8)
        q = jax.ShapeDtypeStruct((caches, 2, 16, 576), jnp.bfloat16)
        indices = jax.ShapeDtypeStruct((caches, 2, 512), jnp.int32)
        call = jax.jit(jax.vmap(lambda q, kv, i: sparse_mla_fwd(q, kv, None, i, SCALE)))
        analysis = call.lower(q, kv, indices).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < caches * records * 656 / 8

    @pytest.mark.parametrize(("n", "heads", "width"), [(64, 16, 2048), (256, 128, 512)])
    def test_temporaries_are_bounded(self, n, heads, width):
        q = jax.ShapeDtypeStruct((n, heads, 576), jnp.bfloat16)
        kv = jax.ShapeDtypeStruct((65536, 656), jnp.uint8)
        indices = jax.ShapeDtypeStruct((n, width), jnp.int32)
        call = jax.jit(lambda q, kv, i: sparse_mla_fwd(q, kv, None, i, SCALE, return_lse=True))
        analysis = call.lower(q, kv, indices).compile().memory_analysis()
        allowed = n * heads * (576 + 512) * 2 + (16 << 20)
        if jax.default_backend() != "cpu":
            allowed = 300 << 20
        assert analysis.temp_size_in_bytes <= allowed


def test_a_single_device_program_has_no_partitioning_in_it():
    """Nothing that would keep it out of exports and the persistent cache."""
    q, kv, indices, lengths, _ = batch()
    text = jax.jit(attend).lower(q[0], kv[0], indices[0], lengths[0]).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert "custom_call" not in text or "@Sharding" not in text
