"""Agreement with transformers' DeepseekV32ForCausalLM, from a recording and live."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from examples.deepseek_v32 import attention, oracle, rope
from examples.deepseek_v32.random_checkpoint import write_random_checkpoint

FIXTURE = Path(__file__).parent / "fixtures" / "deepseek_v32_tiny.npz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("oracle")
    write_random_checkpoint(path, oracle.oracle_config(), seed=oracle.SEED)
    return path


@pytest.fixture(scope="module")
def recordings():
    return oracle.load_fixture(FIXTURE)


def subject(folder, recording, record_format, config=None):
    config = config or oracle.oracle_config()
    return oracle.Subject(folder, config, recording.tokens, record_format=record_format)


@pytest.mark.parametrize("record_format", ["bf16", "fp8"])
def test_agrees_with_recording(folder, recordings, record_format):
    recording = recordings[record_format]
    model = subject(folder, recording, record_format)
    assert max(oracle.compare_layers(model, recording)) < oracle.LAYER_TOLERANCE
    assert oracle.compare_logits(model, recording) < oracle.LOGITS_TOLERANCE
    if record_format == "bf16":
        assert oracle.compare_selections(model, recording) > 0.99


def test_fp8_index_keys_select_nearly_the_same(folder, recordings):
    """With e4m3 keys behind a Hadamard rotation."""
    recording = recordings["bf16"]
    model = oracle.Subject(folder, oracle.oracle_config(), recording.tokens, index_format="fp8")
    assert 0.95 < oracle.compare_selections(model, recording) < 1


@pytest.mark.parametrize("fault", ["interleaved", "no relu"])
def test_comparison_sees_wrong_indexers(folder, recordings, monkeypatch, fault):
    if fault == "interleaved":
        monkeypatch.setattr(rope, "rotate_halves", rope.rotate_interleaved)
    else:
        monkeypatch.setattr("jax.nn.relu", lambda x: x)
    recording = recordings["bf16"]
    assert oracle.compare_selections(subject(folder, recording, "bf16"), recording) < 0.97


def test_comparison_sees_wrong_temperature(folder, recordings):
    config = oracle.oracle_config()
    yarn = dataclasses.replace(config.yarn, mscale=1.5, mscale_all_dim=1.5)
    recording = recordings["bf16"]
    model = subject(folder, recording, "bf16", dataclasses.replace(config, yarn=yarn))
    x, selected = recording.hidden[0], jnp.asarray(recording.selected[0])
    update = np.asarray(model.layer(0, jnp.asarray(x), selected)) - x
    error = oracle.relative(update, recording.hidden[1] - x)
    assert error > 3 * oracle.LAYER_TOLERANCE


def test_fixture_has_rows_that_choose(recordings):
    """Most rows see more tokens than they select: otherwise the indexer would not matter."""
    for recording in recordings.values():
        n, k = recording.selected.shape[1:]
        assert n > 2 * k
        assert np.all(recording.selected <= np.arange(n)[:, None])


@pytest.mark.slow
def test_agrees_live(folder, recordings):
    pytest.importorskip("transformers", reason="needs the `oracle` extra")
    config = oracle.oracle_config()
    for record_format, recorded in recordings.items():
        live = oracle.record(folder, config, record_format)
        np.testing.assert_allclose(live.logits, recorded.logits, atol=1e-2)
        model = subject(folder, live, record_format)
        assert max(oracle.compare_layers(model, live)) < oracle.LAYER_TOLERANCE
        assert oracle.compare_logits(model, live) < oracle.LOGITS_TOLERANCE


def test_norms():
    x = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32) * 3 + 1
    got = attention.layer_norm(jnp.asarray(x), jnp.ones(50), jnp.zeros(50))
    np.testing.assert_allclose(np.mean(got, -1), 0, atol=1e-5)
    np.testing.assert_allclose(np.std(got, -1), 1, atol=1e-5)
    got = attention.rms_norm(jnp.asarray(x), 2 * jnp.ones(50), 0.0)
    np.testing.assert_allclose(np.mean(np.square(got), -1), 4, rtol=1e-5)
