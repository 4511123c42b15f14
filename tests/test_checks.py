"""What the op refuses, while tracing, in words that name the argument; and what it converts."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from test_attention import assert_same, queries

from jax_sparse_mla import sparse_mla_fwd


def arguments():
    rng = np.random.default_rng(0)
    return {
        "q": queries(rng, 3, 2),
        "kv_buffer": oracle.random_records(rng, 50),
        "kv_indptr": None,
        "kv_indices": rng.integers(0, 50, (3, 256)).astype(np.int32),
        "softmax_scale": 0.1,
    }


def csr(indptr_length=4, nnz=9):
    return {"kv_indptr": np.zeros(indptr_length, np.int32), "kv_indices": np.zeros(nnz, np.int32)}


Q = np.zeros((3, 2, 576), ml_dtypes.bfloat16)
KV = np.zeros((50, 656), np.uint8)

WRONG = [
    ({"q": Q.astype(np.float32)}, TypeError, r"q must be bfloat16, not float32"),
    ({"q": Q.astype(np.float16)}, TypeError, r"q must be bfloat16, not float16"),
    ({"q": Q[..., :575]}, ValueError, r"q must be \[n, H, 576\], not \[3, 2, 575\]"),
    ({"q": Q[0]}, ValueError, r"q must be \[n, H, 576\], not \[2, 576\]"),
    ({"q": (Q,)}, ValueError, r"q must be an array or the pair"),
    ({"q": (Q, Q[..., :64])}, ValueError, r"q\[0\] must be \[n, H, 512\]"),
    ({"q": (Q[..., :512], Q)}, ValueError, r"q\[1\] must be \[n, H, 64\]"),
    (
        {"q": (Q[..., :512], Q[:, :1, :64])},
        ValueError,
        r"q\[0\] and q\[1\] must have the same rows and heads, not \[3, 2, 512\] and \[3, 1, 64\]",
    ),
    ({"q": 1.0}, TypeError, r"q must be an array, not float"),
    ({"kv_buffer": KV[:, :576]}, ValueError, r"kv_buffer must be .* 576-byte records .*SGLang"),
    ({"kv_buffer": KV[:, :584]}, ValueError, r"kv_buffer must be .* 584-byte records .*FlashMLA"),
    ({"kv_buffer": KV[:, :655]}, ValueError, r"kv_buffer must be \[..., 656\].* not \[50, 655\]"),
    ({"kv_buffer": KV[0]}, ValueError, r"kv_buffer must be"),
    ({"kv_buffer": KV.astype(np.float32)}, TypeError, r"kv_buffer must be uint8.* not float32"),
    (
        {"kv_buffer": KV.view(ml_dtypes.float8_e4m3fnuz)},
        TypeError,
        r"kv_buffer must be uint8.* not float8_e4m3fnuz",
    ),
    (
        {"kv_buffer": KV.astype(ml_dtypes.bfloat16)},
        ValueError,
        r"kv_buffer of bfloat16 must be \[..., 576\]",
    ),
    (
        {"kv_indices": np.zeros((3, 4))},
        TypeError,
        r"kv_indices must be an integer array, not float64",
    ),
    (
        {"kv_indices": np.zeros((3, 4), bool)},
        TypeError,
        r"kv_indices must be an integer array, not bool",
    ),
    ({"kv_indices": np.zeros((4, 4), int)}, ValueError, r"kv_indices must be \[3, w\].*\[4, 4\]"),
    ({"kv_indices": np.zeros(4, int)}, ValueError, r"kv_indices must be \[3, w\].*kv_indptr is No"),
    (csr(5), ValueError, r"kv_indptr must be \[4\], one more than rows of q, not \[5\]"),
    (csr() | {"kv_indptr": np.zeros(4)}, TypeError, r"kv_indptr must be an integer array"),
    (csr() | {"kv_indices": np.zeros((3, 3), int)}, ValueError, r"kv_indices must be \[nnz\]"),
    (csr() | {"row_lengths": np.zeros(3, int)}, ValueError, r"row_lengths must be None"),
    ({"row_lengths": np.zeros(4, int)}, ValueError, r"row_lengths must be \[3\].* not \[4\]"),
    ({"row_lengths": np.zeros(3)}, TypeError, r"row_lengths must be an integer array"),
    ({"softmax_scale": "1"}, TypeError, r"softmax_scale must be a Python number"),
    ({"softmax_scale": True}, TypeError, r"softmax_scale must be a Python number"),
    ({"softmax_scale": float("nan")}, ValueError, r"softmax_scale must be finite"),
    ({"softmax_scale": float("inf")}, ValueError, r"softmax_scale must be finite"),
    ({"softmax_scale": 1e39}, ValueError, r"softmax_scale must be finite in float32"),
    ({"attn_sink": np.zeros(3, np.float32)}, ValueError, r"attn_sink must be \[2\].* not \[3\]"),
    ({"attn_sink": np.zeros(2, int)}, TypeError, r"attn_sink must be float32, .* not int"),
    ({"softmax_scale": -(10**400)}, ValueError, r"softmax_scale must be finite in float32"),
    ({"softmax_scale": 1e-35}, ValueError, r"softmax_scale must be 0 or at least 2\*\*-99"),
    ({"num_splits": 0}, ValueError, r"num_splits must be within 1 \.\. 4096, not 0"),
    ({"num_splits": 2**31}, ValueError, r"num_splits must be within 1 \.\. 4096, not 2147483648"),
    ({"num_splits": 1.5}, TypeError, r"num_splits must be None or a Python int, not float"),
    ({"scale_format": "e8m0"}, ValueError, r"scale_format must be one of 'pow2', 'float32'"),
    ({"implementation": "pallas"}, ValueError, r"implementation must be one of None, .*pallas"),
    (
        {"implementation": "kernel", "kv_buffer": Q.reshape(-1, 576)},
        ValueError,
        r'implementation must not be "kernel" with a bfloat16 kv_buffer',
    ),
    ({"has_invalid": None}, TypeError, r"has_invalid must be a Python bool, not NoneType"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        sparse_mla_fwd(**arguments() | change)


def test_errors_come_while_tracing():
    call = arguments()
    scale = call.pop("softmax_scale")
    with pytest.raises(ValueError, match=r"kv_buffer must be .* not \[50, 655\]"):
        jax.eval_shape(
            lambda **a: sparse_mla_fwd(**a, softmax_scale=scale),
            **call | {"kv_buffer": jax.ShapeDtypeStruct((50, 655), jnp.uint8)},
        )


def test_a_traced_scale_is_refused():
    call = arguments()
    del call["softmax_scale"]
    with pytest.raises(TypeError, match=r"softmax_scale must be a Python number, known when"):
        jax.jit(lambda s: sparse_mla_fwd(**call, softmax_scale=s))(0.1)
    with pytest.raises(TypeError, match=r"softmax_scale must be a Python number"):
        sparse_mla_fwd(**call, softmax_scale=jnp.float32(0.1))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32, np.int16, np.uint8])
def test_integers_are_converted_without_wrapping(dtype):
    """2^32 + 3 as int32 is 3, a valid slot: it must count as the masked entry it is."""
    call = arguments()
    info = np.iinfo(dtype)
    wild = [info.min, info.max, min(2**32 + 3, info.max), min(2**31 + 3, info.max)]
    entries = np.array([[1, 2, *wild]] * 3, object)
    as_int32 = np.array([[int(e) if 0 <= e < 50 else -1 for e in row] for row in entries], np.int32)
    expected = sparse_mla_fwd(**call | {"kv_indices": as_int32})
    got = sparse_mla_fwd(**call | {"kv_indices": entries.astype(dtype)})
    assert_same(got, expected)
    with jax.enable_x64(True):
        traced = jnp.asarray(entries.astype(dtype))
        assert traced.dtype == dtype
        got = sparse_mla_fwd(**call | {"kv_indices": traced})
        lengths = jnp.asarray(np.array([2, 1, info.max], dtype))
        short = sparse_mla_fwd(**call | {"kv_indices": as_int32, "row_lengths": lengths})
    assert_same(got, expected)
    assert_same(short[2], expected[2])


def test_it_works_with_64_bit_types_on():
    call = arguments()
    expected = sparse_mla_fwd(**call, return_lse=True)
    with jax.enable_x64(True):
        got = sparse_mla_fwd(**call, return_lse=True)
        stream = call["kv_indices"].reshape(-1).astype(np.int64)
        indptr = np.arange(0, 769, 256)
        flat = sparse_mla_fwd(**call | {"kv_indices": stream, "kv_indptr": indptr}, return_lse=True)
    for a, b, c in zip(expected, got, flat, strict=True):
        assert_same(a, b)
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(c, np.float32), rtol=2**-7, atol=1e-5
        )


def test_strict_promotion_and_disabled_jit():
    call = arguments()
    expected = sparse_mla_fwd(**call)
    with jax.numpy_dtype_promotion("strict"):
        jax.clear_caches()
        assert_same(sparse_mla_fwd(**call), expected)
    with jax.disable_jit():
        assert_same(sparse_mla_fwd(**call), expected)
