"""The paged cache: records and index keys on the device, blocks and their sharing on the host.

All layers stand in one buffer, a layer's blocks behind those of the layer before: block ``b`` of
layer ``l`` is block ``l * num_blocks + b``. Carried whole through a scan over layers and donated,
it is written in place; a cache passed layer by layer would be copied.
"""

import hashlib
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.deepseek_v32.config import INDEX_DIM, LATENT_DIM, ROPE_DIM, Config
from examples.deepseek_v32.options import Options
from jax_sparse_mla import write_index_keys, write_records
from jax_sparse_mla.index_keys import PACKED_KEY_BYTES

RECORD_BYTES = 656


class Cache(NamedTuple):
    """Device buffers (or their shapes); donate them to every step."""

    records: Any  # [layers * num_blocks, block_size, 656] uint8, or [..., 576] bfloat16
    index_keys: Any  # [layers * num_blocks, block_size, 128] bfloat16, or [..., 132] uint8


def cache_shapes(config: Config, num_blocks: int, block_size: int, options: Options) -> Cache:
    """Shapes and dtypes of a cache, `jax.ShapeDtypeStruct` in the place of each buffer.

    Args:
      config: the model's.
      num_blocks: blocks of a layer.
      block_size: tokens of a block.
      options: their two formats count.
    """
    lead = (config.num_hidden_layers * num_blocks, block_size)
    records = ((*lead, RECORD_BYTES), jnp.uint8)
    if options.record_format == "bf16":
        records = ((*lead, LATENT_DIM + ROPE_DIM), jnp.bfloat16)
    keys = ((*lead, INDEX_DIM), jnp.bfloat16)
    if options.index_format == "fp8":
        keys = ((*lead, PACKED_KEY_BYTES), jnp.uint8)
    return Cache(jax.ShapeDtypeStruct(*records), jax.ShapeDtypeStruct(*keys))


def write_tokens(
    cache: Cache, slots: jax.Array, latent: jax.Array, rope: jax.Array, index_keys: jax.Array
) -> Cache:
    """Write a step's tokens into their slots of one layer.

    Args:
      cache: donated by the caller's jit.
      slots: ``[n]`` int32 within the whole buffer; -1 writes nothing.
      latent: ``[n, 512]``, normalised.
      rope: ``[n, 64]``, rotated.
      index_keys: ``[n, 128]``, rotated.
    """
    if cache.records.dtype == jnp.uint8:
        records = write_records(cache.records, slots, latent, rope)
    else:
        flat = cache.records.reshape(-1, cache.records.shape[-1])
        rows = jnp.concatenate([latent, rope], axis=-1).astype(flat.dtype)
        # A scatter wraps -1 to the last slot even when it drops what is out of bounds.
        safe = jnp.where(slots < 0, flat.shape[0], slots)
        records = flat.at[safe].set(rows, mode="drop").reshape(cache.records.shape)
    return Cache(records, write_index_keys(cache.index_keys, slots, index_keys))


class OutOfBlocks(Exception):
    """All blocks are in use."""


class BlockAllocator:
    """Hands out a cache's blocks and shares those of common prefixes.

    A full block is known by its tokens and all tokens before it. Blocks that nobody uses any more
    keep their contents until they are needed for something else, the longest unused first.
    """

    def __init__(self, num_blocks: int, block_size: int):
        """Make all blocks free.

        Args:
          num_blocks: blocks of a layer.
          block_size: tokens of a block.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._users = [0] * num_blocks
        self._by_prefix: dict[bytes, int] = {}
        self._prefix_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._unused)

    def share(self, tokens: list[int]) -> list[int]:
        """Take a reference to the known blocks of a prefix.

        Args:
          tokens: a request's tokens; only full blocks are shared.

        Returns:
          The blocks of the longest known prefix, in order.
        """
        blocks = []
        for prefix in _prefixes(tokens, self.block_size):
            block = self._by_prefix.get(prefix)
            if block is None:
                break
            self._unused.pop(block, None)
            self._users[block] += 1
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Take blocks for new tokens.

        Raises:
          OutOfBlocks: fewer are available; nothing was taken.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.available} available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._unused.popitem(last=False)
            del self._by_prefix[self._prefix_of.pop(block)]
        self._users[block] = 1
        return block

    def publish(self, tokens: list[int], blocks: list[int]) -> None:
        """Make a request's full blocks known, so that others can share them.

        Args:
          tokens: those whose records are written, or are written in the step being planned.
          blocks: the request's blocks.
        """
        for prefix, block in zip(_prefixes(tokens, self.block_size), blocks, strict=False):
            if prefix not in self._by_prefix and block not in self._prefix_of:
                self._by_prefix[prefix] = block
                self._prefix_of[block] = prefix

    def release(self, blocks: list[int]) -> None:
        """Give a request's references back."""
        # The last blocks first: a prefix outlives its continuations.
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._prefix_of:
                    self._unused[block] = None
                else:
                    self._free.append(block)


def _prefixes(tokens: list[int], block_size: int) -> list[bytes]:
    """A digest of each full block's tokens and all before."""
    digests, digest = [], b""
    for end in range(block_size, len(tokens) + 1, block_size):
        block = np.asarray(tokens[end - block_size : end], "<i8").tobytes()
        digest = hashlib.sha256(digest + block).digest()
        digests.append(digest)
    return digests
