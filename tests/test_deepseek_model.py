"""The whole tiny model: the same logits however a sequence is cut into steps."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v32.attention import Rows
from examples.deepseek_v32.cache import cache_shapes
from examples.deepseek_v32.mlp import routed
from examples.deepseek_v32.model import forward
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.params import Mlp
from examples.deepseek_v32.random_checkpoint import tiny_config, write_random_checkpoint
from examples.deepseek_v32.weights import load_params

CONFIG = tiny_config(num_hidden_layers=2, index_topk=16)
OPTIONS = Options(dtype=jnp.float32)
NUM_ROWS = 48
LENGTHS = (45, 20, 33)
BLOCK_SIZE = 8
NUM_BLOCKS = 16

jitted = jax.jit(forward, static_argnums=(4, 5))


class Model(NamedTuple):
    params: object
    table: np.ndarray
    tokens: list

    def empty(self):
        shapes = cache_shapes(CONFIG, NUM_BLOCKS, BLOCK_SIZE, OPTIONS)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def step(self, cache, rows, params=None, tokens=None):
        """Run rows [(request, position)]; logits for each, and the cache."""
        n = len(rows)
        requests, positions = np.zeros(NUM_ROWS, np.int32), np.full(NUM_ROWS, -1, np.int32)
        requests[:n], positions[:n] = np.array(rows).T
        ids = np.zeros(NUM_ROWS, np.int32)
        ids[:n] = tokens or [self.tokens[r][p] for r, p in rows]
        step = Rows(ids, requests, positions, self.table)
        out = np.arange(NUM_ROWS)
        logits, cache = jitted(params or self.params, cache, step, out, CONFIG, OPTIONS)
        return np.asarray(logits)[:n], cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, CONFIG, seed=3)
    return path


@pytest.fixture(scope="module")
def model(folder):
    rng = np.random.default_rng(0)
    blocks = rng.permutation(NUM_BLOCKS).astype(np.int32)
    table = np.full((3, 6), -1, np.int32)
    for request, length in enumerate(LENGTHS):
        count = -(-length // BLOCK_SIZE)
        table[request, :count], blocks = blocks[:count], blocks[count:]
    tokens = [rng.integers(2, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    return Model(load_params(folder, CONFIG, dtype=jnp.float32), table, tokens)


@pytest.fixture(scope="module")
def whole(model):
    """Each request alone, in one step."""
    return [
        model.step(model.empty(), [(r, p) for p in range(length)])[0]
        for r, length in enumerate(LENGTHS)
    ]


def check(whole, rows, logits):
    for (request, position), row in zip(rows, logits, strict=True):
        np.testing.assert_allclose(row, whole[request][position], atol=2e-3, err_msg=f"{position}")


def test_rows_attend_less_than_they_see(whole):
    assert LENGTHS[0] > 2 * CONFIG.index_topk
    assert np.all(np.isfinite(whole[0]))


def test_chunks_decode_and_drafts(model, whole):
    """Three requests side by side: chunks at any start, decode, drafts that are rejected."""
    cache = model.empty()
    steps = [
        [(0, p) for p in range(17)] + [(1, p) for p in range(18)],
        [(0, p) for p in range(17, 40)] + [(1, 18)] + [(2, p) for p in range(9)],
        [(1, 19), (0, 40)] + [(2, p) for p in range(9, 30)],
        [(0, 41), (2, 30)],
    ]
    for rows in steps:
        logits, cache = model.step(cache, rows)
        check(whole, rows, logits)

    # Drafts behind positions 42 of request 0 and 31 of request 2: right ones, then wrong ones.
    rows = [(0, 42), (0, 43), (0, 44), (2, 31), (2, 32)]
    tokens = [model.tokens[0][42], 11, 12, model.tokens[2][31], 13]
    logits, cache = model.step(cache, rows, tokens=tokens)
    check(whole, [rows[0], rows[3]], logits[[0, 3]])
    assert np.max(np.abs(logits[1] - whole[0][43])) > 0.1
    # Rejected: the same positions again, with the right tokens.
    rows = [(0, 43), (2, 32), (0, 44)]
    logits, cache = model.step(cache, rows)
    check(whole, rows, logits)


def test_shared_blocks(model, whole):
    """A request whose table begins with another's blocks attends its tokens."""
    table = model.table.copy()
    table[1, :2] = table[0, :2]
    shared = model._replace(
        table=table, tokens=[model.tokens[0], [*model.tokens[0][:16], 7, 8, 9], []]
    )
    alone = model._replace(tokens=[[], shared.tokens[1], []])
    expected, _ = alone.step(alone.empty(), [(1, p) for p in range(19)])
    rows = [(0, p) for p in range(20)] + [(1, 16), (1, 17), (1, 18)]
    logits, _ = shared.step(shared.empty(), rows)
    np.testing.assert_allclose(logits[20:], expected[16:], atol=2e-3)


def test_padding_rows_are_harmless(model, whole):
    cache = jax.tree.map(lambda x: jnp.full_like(x, 0x7F), model.empty())
    before = jax.tree.map(np.asarray, cache)
    logits, cache = model.step(cache, [(2, p) for p in range(10)])
    check(whole, [(2, p) for p in range(10)], logits)
    written = np.zeros((NUM_BLOCKS, BLOCK_SIZE), bool)
    for position in range(10):
        written[model.table[2, position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    written = np.tile(written, (CONFIG.num_hidden_layers, 1))
    for old, new in zip(before, map(np.asarray, cache), strict=True):
        changed = np.any(old.view(np.uint8) != new.view(np.uint8), axis=-1)
        np.testing.assert_array_equal(changed, written)
    logits, after = model.step(cache, [(0, -1)] * 3, tokens=[1, 2, 3])
    assert np.all(np.isfinite(logits))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, after), cache)


def test_scanned_layers(model, whole, folder):
    stacked = load_params(folder, CONFIG, dtype=jnp.float32, stacked=True)
    rows = [(0, p) for p in range(45)]
    logits, _ = model.step(model.empty(), rows, params=stacked)
    check(whole, rows, logits)


@pytest.mark.parametrize("n", [1, 50])
def test_routed_experts(n):
    """Against a loop over rows; experts of another device add nothing."""
    rng = np.random.default_rng(0)
    experts, width, hidden, per_row = 5, 8, 16, 3
    weights = [
        rng.standard_normal(s).astype(np.float32)
        for s in ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
    ]
    x = rng.standard_normal((n, hidden)).astype(np.float32)
    chosen = np.stack([rng.permutation(experts + 2)[:per_row] - 1 for _ in range(n)])
    scale = rng.uniform(size=(n, per_row)).astype(np.float32)
    expected = np.zeros((n, hidden))
    for row in range(n):
        for e, factor in zip(chosen[row], scale[row], strict=True):
            if 0 <= e < experts:
                gate, up, down = (w[e].astype(np.float64) for w in weights)
                g = gate @ x[row]
                expected[row] += factor * (down @ (g / (1 + np.exp(-g)) * (up @ x[row])))
    got = jax.jit(routed)(Mlp(*weights), x, chosen.astype(np.int32), scale)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_temporaries_do_not_grow_with_the_cache(stacked):
    from examples.deepseek_v32.params import param_shapes

    config = tiny_config(num_hidden_layers=4)
    options = Options()
    params = param_shapes(config, jnp.bfloat16, stacked=stacked)
    n = 8
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows = Rows(i32((n,)), i32((n,)), i32((n,)), i32((8, 16)))
    sizes = []
    for blocks in (64, 4096):
        cache = cache_shapes(config, blocks, 64, options)
        compiled = (
            jax.jit(forward, static_argnums=(4, 5), donate_argnums=1)
            .lower(params, cache, rows, i32((n,)), config, options)
            .compile()
        )
        memory = compiled.memory_analysis()
        sizes.append(memory.temp_size_in_bytes)
        cache_bytes = sum(np.prod(s.shape) * s.dtype.itemsize for s in cache)
        assert memory.alias_size_in_bytes == cache_bytes
    assert sizes[1] <= sizes[0] + (1 << 20)
