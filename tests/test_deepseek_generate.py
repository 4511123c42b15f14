"""Generation: the same text however it is batched; sampling; the command line and its errors."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from examples.deepseek_v32 import __main__ as command_line
from examples.deepseek_v32.generate import Engine
from examples.deepseek_v32.mesh import param_specs
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.params import param_shapes
from examples.deepseek_v32.random_checkpoint import tiny_config, write_random_checkpoint
from examples.deepseek_v32.sampling import Sampling, is_in_nucleus, sample
from examples.deepseek_v32.scheduler import Limits
from examples.deepseek_v32.weights import load_params

CONFIG = tiny_config(num_hidden_layers=2, vocab_size=320, eos_token_ids=())
LIMITS = Limits(
    num_blocks=24, block_size=8, max_length=64, lines=3, prefill_rows=12, draft_tokens=3
)
"""Steps of 12 rows, with prompt tokens or without: one compiled shape."""
NEW_TOKENS = 10
PROMPTS = [list(range(10, 47)), [5, 6, 7] * 4, [300]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("generate")
    write_random_checkpoint(path, CONFIG, seed=5)
    return path


@pytest.fixture(scope="module")
def engine(folder):
    params = load_params(folder, CONFIG, dtype=jnp.float32)
    options = Options(dtype=jnp.float32)
    return lambda sampling=None: Engine(params, CONFIG, LIMITS, options, sampling)


def test_batch_is_the_same_as_alone(engine):
    together = engine().generate(PROMPTS, NEW_TOKENS)
    assert [len(tokens) for tokens in together] == [NEW_TOKENS] * 3
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert engine().generate([prompt], NEW_TOKENS) == [expected]


def test_a_later_call_shares_blocks_and_continues(engine):
    one = engine()
    (first,) = one.generate([PROMPTS[0]], NEW_TOKENS)
    rows = one.statistics.prompt_rows
    (again,) = one.generate([PROMPTS[0]], NEW_TOKENS)
    assert again == first
    assert one.schedulers[0].allocator.available == LIMITS.num_blocks
    # The second prompt's four full blocks of 37 tokens were there: one step, five rows of prompt.
    assert one.statistics.prompt_rows - rows <= 8
    longer = [*PROMPTS[0], *first[:5]]
    (rest,) = one.generate([longer], 5)
    assert rest == first[5:]


def propose(truth):
    """A drafter that knows the text: two right tokens, then a wrong one."""

    def draft(request):
        done = len(request.generated)
        left = request.max_new_tokens - done - 1
        right = truth[request.number][done : done + 2]
        return [*right, 319][:left]

    return draft


def test_drafts_are_accepted_and_change_nothing(engine):
    one = engine()
    one.schedulers[0]._draft = lambda request: []
    plain = one.generate(PROMPTS, NEW_TOKENS)
    one = engine()
    one.schedulers[0]._draft = propose(plain)
    assert one.generate(PROMPTS, NEW_TOKENS) == plain
    statistics = one.statistics
    assert statistics.generated == 3 * NEW_TOKENS
    assert statistics.drafted > statistics.accepted > statistics.drafted / 2


def test_sampled_text_depends_on_the_seed_alone(engine):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3)
    text = engine(sampling).generate(PROMPTS[:2], 6)
    one = engine(sampling)
    one.schedulers[0]._draft = propose(text)
    assert one.generate(PROMPTS[:2], 6) == text
    assert one.statistics.accepted > 0


def test_end_token_ends(engine, folder):
    (greedy,) = engine().generate([PROMPTS[1]], NEW_TOKENS)
    one = engine()
    one.schedulers[0].finish = lambda plan, sampled, _end, finish=one.schedulers[0].finish: finish(
        plan, sampled, (greedy[2],)
    )
    (text,) = one.generate([PROMPTS[1]], NEW_TOKENS)
    assert text == greedy[: greedy.index(greedy[2]) + 1]


def test_nothing_runs_after_an_error(engine):
    one = engine()
    for prompts, message in (
        ([[1, 2], []], "prompt 1 is empty"),
        ([[1], [1] * 60], "prompt 1 is too long"),
        ([[1], [320]], "prompt 1 holds 320"),
        ([[-1]], "prompt 0 holds -1"),
    ):
        with pytest.raises(ValueError, match=message):
            one.generate(prompts, NEW_TOKENS)
    assert one.statistics.steps == 0
    assert not one.schedulers[0].is_busy


# --- The kernel, and a mesh ---


@pytest.mark.slow
def test_kernel_generates_the_same(folder):
    """Every attention of every layer by the kernel's machine code, on the simulator."""
    params = load_params(folder, CONFIG)
    limits = Limits(num_blocks=8, block_size=8, max_length=32, lines=2, prefill_rows=8)
    texts = []
    for implementation in ("kernel", "reference"):
        options = Options(implementation=implementation)
        engine = Engine(params, CONFIG, limits, options)
        texts.append(engine.generate([list(range(40, 52)), [7, 8, 9]], 4))
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["--scan-layers", "--quiet"])
def test_mesh_generates_the_same(folder, layers):
    """Two data groups of two devices each against one device, in processes of their own."""
    arguments = [sys.executable, "-m", "examples.deepseek_v32", str(folder), "--quiet", layers]
    arguments += ["--dtype", "float32", "--prefill-rows", "8", "--max-new-tokens", "6"]
    arguments += ["--ids", "5,6,7,8,9,10,11", "--ids", "40,41", "--ids", "99,98,97"]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    texts = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for command in (arguments, [*arguments, "--mesh", "2,2"])
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 3


def test_mesh_specs_fit_the_parameters():
    """Every split axis is divisible, and only the split parameters are split."""
    config = tiny_config()
    for stacked in (False, True):
        shapes = param_shapes(config, jnp.bfloat16, stacked=stacked)
        specs = param_specs(config, stacked=stacked)
        split = set()
        for (path, shape), spec in zip(
            jax.tree_util.tree_leaves_with_path(shapes),
            jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec)),
            strict=True,
        ):
            for size, axis in zip(shape.shape, spec, strict=False):
                if axis is not None:
                    assert size % 4 == 0
                    split.add(path[-1].name)
        assert split == {"q_b", "w_uk", "w_uv", "o", "gate", "up", "down", "lm_head"}


# --- Sampling ---


def test_greedy_takes_the_largest():
    logits = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    zeros = np.zeros(4, np.int32)
    np.testing.assert_array_equal(sample(logits, zeros, zeros, Sampling()), logits.argmax(1))


def test_sampling_follows_the_probabilities():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    n = 4000
    logits = np.tile(np.log(probabilities).astype(np.float32), (n, 1))
    numbers = np.arange(n, dtype=np.int32)
    draw = jax.jit(sample, static_argnums=3)
    counts = np.bincount(draw(logits, numbers, numbers * 7, Sampling(1.0)), minlength=4) / n
    np.testing.assert_allclose(counts, probabilities, atol=0.03)
    counts = np.bincount(draw(logits, numbers, numbers, Sampling(1.0, top_p=0.75)), minlength=4) / n
    np.testing.assert_allclose(counts, [0.625, 0.375, 0, 0], atol=0.03)
    cold = np.bincount(draw(logits, numbers, numbers, Sampling(0.5)), minlength=4) / n
    np.testing.assert_allclose(cold, probabilities**2 / np.sum(probabilities**2), atol=0.03)


def test_nucleus():
    logits = np.log(np.array([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]], np.float32))
    inside = np.asarray(is_in_nucleus(jnp.asarray(logits), 0.6))
    np.testing.assert_array_equal(inside, [[False, True, True, False], [True] * 4])
    assert np.asarray(is_in_nucleus(jnp.asarray(logits), 1e-6))[0].tolist() == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5)]
)
def test_bad_sampling(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


# --- Command line ---


def test_help_names_every_group(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for word in ("prompts:", "sampling:", "computation:", "sizes:", "examples:", "--mesh"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["--ids", "1,x"], "--ids takes numbers"),
        (["--ids", "1,999"], "holds 999"),
        (["--ids", "1", "--max-new-tokens", "8192"], "prompt too long"),
        (["--ids", "1", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--ids", "1", "--temperature", "-1"], "temperature"),
        (["--ids", "1,2,3", "--cache-tokens", "10", "--max-new-tokens", "70"], "cache holds 64"),
        (["--prompt-file", "/nowhere"], "/nowhere"),
        (["--ids", "1", "--mesh", "2"], "--mesh takes DATA,TENSOR"),
        (["--ids", "1", "--mesh", "64,64"], "needs 4096 devices"),
    ],
)
def test_command_line_errors(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(command_line, "load_params", lambda *_, **__: pytest.fail("loaded"))
    assert command_line.main([str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_command_line_checkpoint_errors(folder, tmp_path, capsys):
    assert command_line.main([str(tmp_path), "text"]) == 2
    assert "no config.json" in capsys.readouterr().err
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert command_line.main([str(tmp_path), "text"]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err
    assert command_line.main([str(tmp_path), "--ids", "1"]) == 2
    assert "no model.safetensors.index.json" in capsys.readouterr().err
    for name in ("model.safetensors.index.json", *(p.name for p in folder.glob("*.safetensors"))):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(values | {"hidden_size": 64}))
    assert command_line.main([str(tmp_path), "--ids", "1"]) == 2
    assert "does not fit config.json" in capsys.readouterr().err


def test_command_line_generates(folder, capsys, engine):
    """Text in, text out, the same as the engine's; sizes that give the shape compiled above."""
    prompt = "hello hello hello"
    sizes = ["--prefill-rows", "12", "--block-size", "8", "--dtype", "float32"]
    ids = command_line.main([str(folder), prompt, "--max-new-tokens", "4", "--quiet", *sizes])
    assert ids == 0
    printed = capsys.readouterr().out
    from examples.deepseek_v32.random_checkpoint import byte_tokenizer

    tokenizer = byte_tokenizer()
    expected = engine().generate([[0, *tokenizer.encode(prompt).ids]], 4)[0]
    assert printed == tokenizer.decode(expected) + "\n"
