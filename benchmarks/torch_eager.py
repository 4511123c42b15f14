"""Sparse MLA as one writes it in eager PyTorch: the yardstick of benchmarks/op.py.

Two versions: gather the selected records and dequantise those, or dequantise the whole cache and
gather from that. Rows are taken in chunks, so that the
gathered values stay within a few hundred megabytes.
"""

import torch

LATENT_DIM = 512
CHUNK_BYTES = 1 << 29


def dequantise(records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., 576] of records [..., 656] uint8."""
    codes = records[..., :512].contiguous().view(torch.float8_e4m3fn).to(dtype)
    scales = records[..., 512:528].contiguous().view(torch.float32).to(dtype)
    latent = codes.unflatten(-1, (4, 128)) * scales[..., None]
    rope = records[..., 528:].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat([latent.flatten(-2), rope], -1)


def _attend(
    q: torch.Tensor, values: torch.Tensor, valid: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (q.to(values.dtype) @ values.mT).float() * softmax_scale
    logits = logits.masked_fill(~valid[:, None, :], -torch.inf)
    lse = logits.logsumexp(-1)
    p = (logits - lse[..., None]).exp().nan_to_num(0.0).to(values.dtype)
    return (p @ values[..., :LATENT_DIM]).to(torch.bfloat16), lse


def sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype,
    predequantise: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [n, H, 576] bfloat16 over records kv [rows, 656] uint8.

    Row i attends ``kv[indices[i, :lengths[i]]]``; ``dtype`` is that of the matrix products.
    """
    n, width = indices.shape
    source = dequantise(kv, dtype) if predequantise else kv
    entry = torch.arange(width, device=q.device)
    valid = (entry < lengths[:, None]) & (indices >= 0) & (indices < len(kv))
    slots = torch.where(valid, indices, 0).long()
    chunk = max(1, CHUNK_BYTES // (width * 576 * dtype.itemsize))
    outs, lses = [], []
    for begin in range(0, n, chunk):
        rows = slice(begin, begin + chunk)
        longest = int(lengths[rows].max())
        gathered = source[slots[rows, :longest]]
        values = gathered if predequantise else dequantise(gathered, dtype)
        out, lse = _attend(q[rows], values, valid[rows, :longest], softmax_scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
