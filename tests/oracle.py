"""The oracle: sparse multi-head latent attention in float64 NumPy, one row after the other.

It shares no code with the package: records are unpacked through a table of the 256 e4m3fn values
written from the format's definition, and every rule of the op is stated here once, plainly.
"""

import itertools
from typing import NamedTuple

import ml_dtypes
import numpy as np

LATENT = 512
ROPE = 64
RECORD = 656

# Bytes of NaN and of the largest finite values, to build hostile records with.
E4M3_NAN = 0x7F
E4M3_MAX = 0x7E


def _e4m3fn_table() -> np.ndarray:
    table = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = code >> 3 & 15, code & 7
        if exponent == 0:
            value = mantissa * 2.0**-9
        elif exponent == 15 and mantissa == 7:
            value = np.nan
        else:
            value = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        table[code] = sign * value
    return table


E4M3FN = _e4m3fn_table()


# -- records


def join_records(codes, scales, rope) -> np.ndarray:
    """Records [rows, 656] uint8 of codes [rows, 512] uint8, scales [rows, 4] float32, rope [rows,
    64] (to bfloat16)."""
    records = np.empty((len(codes), RECORD), np.uint8)
    records[:, :512] = codes
    records[:, 512:528] = np.ascontiguousarray(scales, np.float32).view(np.uint8)
    records[:, 528:] = np.ascontiguousarray(rope, ml_dtypes.bfloat16).view(np.uint8)
    return records


def random_records(
    rng: np.random.Generator, rows: int, *, exponents=range(-4, 3), pow2: bool = True
) -> np.ndarray:
    """Records of random finite codes whose latents have a size near 1, with mixed scales."""
    # Codes of magnitude at most 1.875 keep logits small enough that many entries carry weight.
    codes = rng.integers(0, 0x40, (rows, LATENT)) | rng.integers(0, 2, (rows, LATENT)) << 7
    scales = 2.0 ** rng.choice(np.asarray(exponents), (rows, 4))
    if not pow2:
        scales = scales * rng.uniform(0.5, 1.0, (rows, 4))
    rope = rng.standard_normal((rows, ROPE))
    return join_records(codes.astype(np.uint8), scales.astype(np.float32), rope)


def set_scale(records: np.ndarray, row: int, block: int, scale: float) -> None:
    """Overwrite one scale of one record in place."""
    begin = 512 + 4 * block
    records[row, begin : begin + 4] = np.array([scale], np.float32).view(np.uint8)


def is_pow2_scale(scale: np.ndarray) -> np.ndarray:
    """Whether each float32 is +2^k with k in -126 .. 127, or zero of either sign."""
    bits = np.ascontiguousarray(scale, np.float32).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return ((exponent >= 1) & (exponent <= 254) & (mantissa == 0)) | (bits & 0x7FFFFFFF == 0)


def unpack_records(records: np.ndarray, scale_format: str = "pow2") -> np.ndarray:
    """Float64 [rows, 576] of records [rows, 656] uint8, or of an unquantised bfloat16 cache [rows,
    576].

    A scale the format does not allow makes its block NaN.
    """
    records = np.asarray(records)
    if records.dtype == ml_dtypes.bfloat16:
        return records.astype(np.float64)
    records = np.ascontiguousarray(records).view(np.uint8)
    scales = np.ascontiguousarray(records[:, 512:528]).view(np.float32)
    good = is_pow2_scale(scales) if scale_format == "pow2" else np.isfinite(scales)
    scales = np.where(good, scales.astype(np.float64), np.nan)
    latent = E4M3FN[records[:, :512]] * np.repeat(scales, 128, axis=1)
    rope = np.ascontiguousarray(records[:, 528:]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([latent, rope], axis=1)


# -- index rows ---


def csr_rows(indptr, indices) -> list[np.ndarray]:
    """The entries of every row of an index stream; bounds are clamped, a decreasing pair is an
    empty row."""
    bounds = np.clip(np.asarray(indptr, np.int64), 0, len(indices))
    return [np.asarray(indices)[b:e] for b, e in itertools.pairwise(bounds)]


def padded_rows(indices, lengths=None) -> list[np.ndarray]:
    """The entries of every row of a padded index array [n, w]."""
    indices = np.asarray(indices)
    width = indices.shape[1]
    lengths = np.full(len(indices), width) if lengths is None else np.clip(lengths, 0, width)
    return [row[:length] for row, length in zip(indices, lengths, strict=True)]


# -- attention ----


class Expected(NamedTuple):
    """What the op must give, in float64."""

    out: np.ndarray
    """[n, H, 512]."""
    lse: np.ndarray
    """[n, H], natural log."""
    weight: np.ndarray
    """[n, H, 512]: sum of p * |v|, the scale that the tolerance of ``out`` is relative to."""


def attention(
    q, kv, rows: list[np.ndarray], softmax_scale: float, *, scale_format="pow2"
) -> Expected:
    """Attention of q [n, H, 576] over the records of kv that each row's entries select."""
    q = np.asarray(q).astype(np.float64)
    kv = np.asarray(kv)
    kv = kv.reshape(-1, kv.shape[-1])
    n, heads, _ = q.shape
    out = np.zeros((n, heads, LATENT))
    lse = np.full((n, heads), -np.inf)
    weight = np.zeros((n, heads, LATENT))
    for i, entries in enumerate(rows):
        entries = entries.astype(np.int64)
        entries = entries[(entries >= 0) & (entries < len(kv))]
        if len(entries) == 0:
            continue
        values = unpack_records(kv[entries], scale_format)
        with np.errstate(invalid="ignore", over="ignore"):
            logits = softmax_scale * (q[i] @ values.T)
            # A query that is not finite has no meaningful answer, whatever its inner products come
            # to.
            logits[~np.isfinite(q[i]).all(axis=1)] = np.nan
            top = logits.max(axis=1, keepdims=True)
            p = np.exp(logits - top)
            total = p.sum(axis=1, keepdims=True)
            p = p / total
            out[i] = p @ values[:, :LATENT]
            weight[i] = p @ np.abs(values[:, :LATENT])
            lse[i] = (top + np.log(total))[:, 0]
    return Expected(out, lse, weight)


def apply_sink(expected: Expected, sink) -> Expected:
    """Out times sigmoid(lse - sink), 0 where lse is -inf; lse as it is."""
    with np.errstate(over="ignore", invalid="ignore"):
        factor = 1 / (1 + np.exp(np.asarray(sink, np.float64) - expected.lse))
    factor = np.where(np.isneginf(expected.lse), 0, factor)[..., None]
    return Expected(expected.out * factor, expected.lse, expected.weight * factor)


def check(out, lse, expected: Expected) -> None:
    """Raise AssertionError unless out [n, H, 512] and lse [n, H] are within the project's
    tolerances of the oracle's.

    out: absolute 1e-3 * max(1, sum p|v|) or relative 2.01 / 128, and cosine distance at most 5e-6
      for every row and head;
    lse: absolute 1e-5 or relative 8.01 / 65536. NaN and infinities must stand in exactly the same
      places.
    """
    out = np.asarray(out).astype(np.float64)
    assert out.shape == expected.out.shape, (out.shape, expected.out.shape)
    _same_nonfinite("out", out, expected.out)
    nan = np.isnan(expected.out)
    allowed = np.maximum(
        1e-3 * np.maximum(1, np.nan_to_num(expected.weight)), 2.01 / 128 * np.abs(expected.out)
    )
    error = np.abs(out - expected.out)
    bad = ~nan & (error > allowed)
    assert not bad.any(), (
        f"out: {bad.sum()} of {bad.size} values are off, first at {tuple(np.argwhere(bad)[0])}; "
        f"largest error {np.nanmax(error):.3e}"
    )
    x, y = np.where(nan, 0, out), np.where(nan, 0, expected.out)
    square = (x * x + y * y).sum(-1)
    distance = np.where(square > 0, 1 - 2 * (x * y).sum(-1) / np.where(square > 0, square, 1), 0)
    assert distance.size == 0 or distance.max() <= 5e-6, (
        f"out: cosine distance {distance.max():.3e}"
    )
    if lse is None:
        return
    lse = np.asarray(lse).astype(np.float64)
    assert lse.shape == expected.lse.shape, (lse.shape, expected.lse.shape)
    _same_nonfinite("lse", lse, expected.lse)
    finite = np.isfinite(expected.lse)
    error = np.abs(lse[finite] - expected.lse[finite])
    allowed = np.maximum(1e-5, 8.01 / 65536 * np.abs(expected.lse[finite]))
    assert (error <= allowed).all(), f"lse: largest error {error.max():.3e}"


def _same_nonfinite(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    for what, test in ("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf):
        differ = test(got) != test(expected)
        assert not differ.any(), (
            f"{name}: {what} in {test(got).sum()} places instead of {test(expected).sum()}, "
            f"first difference at {tuple(np.argwhere(differ)[0])}"
        )
