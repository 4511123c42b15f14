"""Rotary embedding: angles by hand, both layouts, relative positions."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v32 import rope
from examples.deepseek_v32.config import Config
from examples.deepseek_v32.random_checkpoint import tiny_config


def test_yarn_frequencies():
    """The released model: fast pairs keep their angle, slow ones are divided by 40."""
    plain = rope.inverse_frequencies(Config(yarn=None))
    yarn = rope.inverse_frequencies(Config())
    np.testing.assert_allclose(plain, 10000.0 ** -(np.arange(32) / 32), rtol=1e-6)
    # Turns within 4096 tokens: 32 at pair 10.5, one at pair 22.5; the ramp runs from 10 to 23.
    np.testing.assert_allclose(yarn[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(yarn[23:], plain[23:] / 40, rtol=1e-6)
    blend = (16 - 10) / 13
    assert math.isclose(yarn[16], plain[16] * (1 - blend + blend / 40), rel_tol=1e-6)


@pytest.mark.parametrize("rotate", [rope.rotate_interleaved, rope.rotate_halves])
def test_scores_depend_on_distance_only(rotate):
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    config = tiny_config()

    def score(a, b):
        cos, sin = rope.rotation(config, jnp.array([a, b]))
        q, k = np.asarray(rotate(jnp.asarray(x), cos, sin))
        return q @ k

    assert math.isclose(score(0, 0), x[0] @ x[1], rel_tol=1e-5)
    assert math.isclose(score(1007, 1000), score(7, 0), rel_tol=1e-3)
    assert abs(score(7, 0) - score(0, 0)) > 1e-2


def test_layouts():
    """Pair 1 turns by its angle, in its own two places of either layout, others stay."""
    config = tiny_config(yarn=None)
    cos, sin = rope.rotation(config, jnp.array([3]))
    angle = 3 * 10000.0 ** (-1 / 32)
    for rotate, first, second in ((rope.rotate_interleaved, 2, 3), (rope.rotate_halves, 1, 33)):
        x = np.zeros((1, 2, 64), np.float32)
        x[0, :, first] = 1
        got = np.asarray(rotate(jnp.asarray(x), cos, sin))
        expected = np.zeros_like(x)
        expected[0, :, first], expected[0, :, second] = math.cos(angle), math.sin(angle)
        np.testing.assert_allclose(got, expected, atol=1e-6)
