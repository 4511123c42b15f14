"""Long context: an attention layer against dense attention restricted to the selected tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v32 import attention
from examples.deepseek_v32.attention import Rows, geometry, project
from examples.deepseek_v32.cache import cache_shapes
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.random_checkpoint import tiny_config, write_random_checkpoint
from examples.deepseek_v32.scheduler import Limits, Request, Scheduler
from examples.deepseek_v32.weights import load_params
from jax_sparse_mla import unpack_records

CONFIG = tiny_config(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    index_n_heads=2,
    index_topk=2048,
    max_position_embeddings=32768,
)
OPTIONS = Options(dtype=jnp.float32)
CHUNK = 512


@jax.jit
def layer(p, x, cache, rows):
    shared = geometry(CONFIG, rows, cache.records.shape[1])
    out, cache, selected = attention.attention(p, x, cache, 0, rows, shared, CONFIG, OPTIONS)
    return out, cache, selected, project(p, x, shared, CONFIG, OPTIONS)


def exact_selection(q, weights, keys):
    """The indexer's choice for the last of some tokens, float64."""
    scores = np.maximum(q.astype(np.float64) @ keys.astype(np.float64).T, 0)
    logits = weights.astype(np.float64) @ scores
    order = np.argsort(-logits, kind="stable")
    k = min(CONFIG.index_topk, len(logits))
    return logits, set(order[:k].tolist()), logits[order[k - 1]]


def dense(p, q_nope, q_rope, latent, rope):
    """One row over some tokens, float64."""
    q_latent = np.einsum("hd,hcd->hc", q_nope, np.asarray(p.w_uk, np.float64))
    logits = (q_latent @ latent.T + q_rope @ rope.T) * CONFIG.softmax_scale
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    values = np.einsum("hc,hvc->hv", weights @ latent, np.asarray(p.w_uv, np.float64))
    return np.asarray(p.o, np.float64) @ values.reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(2047, 2048, 2049), (20000,)])
def test_chunked_prompt(tmp_path, lengths):
    write_random_checkpoint(tmp_path, CONFIG, seed=1)
    p = load_params(tmp_path, CONFIG, dtype=jnp.float32).dense[0].attention
    block_size = 64
    blocks = sum(-(-(n + 1) // block_size) for n in lengths)
    limits = Limits(blocks, block_size, max(lengths) + 1, len(lengths), CHUNK)
    scheduler = Scheduler(limits)
    rng = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        scheduler.add(Request(number, rng.integers(2, 100, length).tolist(), 1))
    shapes = cache_shapes(CONFIG, blocks, block_size, OPTIONS)
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    wanted = {2046, 2047, 2048, 3001, 9999, *(n - 1 for n in lengths)}
    kept, table = [], scheduler.block_table
    while scheduler.is_busy:
        choice = scheduler.choose()
        plan = scheduler.plan(choice, has_prompt=True)
        rows = Rows(plan.tokens, plan.requests, plan.positions, plan.block_table)
        x = rng.standard_normal((CHUNK, CONFIG.hidden_size)).astype(np.float32)
        out, cache, selected, view = layer(p, x, cache, rows)
        for row in np.flatnonzero(np.isin(plan.positions, list(wanted))):
            where = int(plan.requests[row]), int(plan.positions[row])
            one = jax.tree.map(lambda array, row=row: np.asarray(array[row]), view)
            kept.append((where, np.asarray(out[row]), np.asarray(selected[row]), one))
        # A line is emptied when its request is done; no line has a second request here.
        table = np.maximum(table, plan.block_table)
        scheduler.finish(plan, np.full(len(plan.output_rows), 2), ())

    latent, rope = unpack_records(cache.records.reshape(-1, 656))
    latent, rope = np.asarray(latent, np.float64), np.asarray(rope, np.float64)
    keys = np.asarray(cache.index_keys, np.float32).reshape(-1, 128)
    assert {position for (_, position), *_ in kept} >= {n - 1 for n in lengths}
    for (request, position), out, selected, view in kept:
        tokens = np.arange(position + 1)
        slots = table[request, tokens // block_size] * block_size + tokens % block_size
        chosen = selected[selected >= 0]
        assert len(chosen) == len(set(chosen.tolist())) == min(2048, position + 1)
        logits, exact, threshold = exact_selection(view.index_q, view.index_weights, keys[slots])
        for token in exact ^ set(chosen.tolist()):
            assert abs(logits[token] - threshold) < 1e-4
        expected = dense(p, view.q_nope, view.q_rope, latent[slots[chosen]], rope[slots[chosen]])
        error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
        assert error < 8e-3, (request, position, error)
