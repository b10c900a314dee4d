"""The names of block contents: chained SHA-256 over token ids, started from a digest of all else that KV depends on.

    key_i = SHA-256(key_{i-1} || tokens of block i as little-endian uint32)[:KEY_BYTES],  key_{-1} = root_key(...)

Owns that definition alone; never Python's `hash()`. Invariant: equal keys mean equal KV, whatever process, tensor-parallel size
or route computed it; prompts that differ in model, adapter or salt share no key.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from cpd_ray.errors import InvalidRequest
from cpd_ray.ids import KEY_BYTES, BlockKey
from cpd_ray.tokens import TOKEN_BYTES
from kv.fingerprint import Field, fingerprint
from kv.layout import LAYOUT_VERSION


def root_key(
    *,
    model: str,
    revision: str | None,
    dtype: str,
    block_size: int,
    adapter: str | None = None,
    salt: str | None = None,
    layout_version: int = LAYOUT_VERSION,
) -> BlockKey:
    """The key before the first block. `adapter` names a fine-tuning, `salt` separates tenants; absent and empty are not the same."""
    fields: dict[str, Field] = {
        "model": model,
        "revision": revision,
        "dtype": dtype,
        "block_size": block_size,
        "layout_version": layout_version,
        "adapter": adapter,
        "salt": salt,
    }
    return BlockKey(fingerprint("cpd-ray block key root", fields)[:KEY_BYTES])


def block_keys(root: BlockKey, tokens: bytes | memoryview, block_size: int) -> list[BlockKey]:
    """The keys of the full blocks of `tokens` (a uint32 buffer, whatever its item format), the first one after `root`. Raises
    InvalidRequest when the buffer is no whole number of tokens."""
    assert block_size > 0 and len(root) == KEY_BYTES, "block keys need a root key and a block size"
    data = memoryview(tokens).cast("B").tobytes()  # slices of bytes are the quickest to join and hash
    if len(data) % TOKEN_BYTES:
        raise InvalidRequest(f"a token buffer of {len(data)} bytes is not whole", param="prompt")
    block_bytes = block_size * TOKEN_BYTES
    keys: list[BlockKey] = []
    key = root
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        key = BlockKey(sha256(key + data[start : start + block_bytes]).digest()[:KEY_BYTES])
        keys.append(key)
    return keys


def extend(root: BlockKey, keys: Sequence[BlockKey], tokens: bytes | memoryview, block_size: int) -> list[BlockKey]:
    """The keys of the full blocks of `tokens` after those that `keys` names: what a sequence that has grown appends. Raises
    ValueError when `keys` names more blocks than `tokens` fills."""
    view = memoryview(tokens).cast("B")
    named_bytes = len(keys) * block_size * TOKEN_BYTES
    if named_bytes > len(view):
        raise ValueError(f"{len(keys)} keys of {block_size}-token blocks for {len(view) // TOKEN_BYTES} tokens")
    return block_keys(keys[-1] if keys else root, view[named_bytes:], block_size)
