"""Token ids as they travel: a buffer of little-endian uint32, never a list.

Owns the conversion both ways. Invariant: `unpack(pack(ids)) == ids` for ids in [0, 2**32).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from cpd_ray.errors import InvalidRequest

TOKEN_BYTES = 4
assert array("I").itemsize == TOKEN_BYTES and sys.byteorder == "little", "token buffers are little-endian uint32"


def pack(ids: Iterable[int]) -> bytes:
    """Ids to a buffer of 4 bytes each; raises InvalidRequest for an id outside [0, 2**32)."""
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidRequest("token ids must be integers from 0 to 4294967295", param="prompt") from error


def unpack(buffer: bytes | memoryview) -> memoryview:
    """A view of the ids (items are int), without a copy; raises InvalidRequest when the length is no multiple of 4."""
    if len(buffer) % TOKEN_BYTES:
        raise InvalidRequest(f"a token buffer of {len(buffer)} bytes is not whole", param="prompt")
    return memoryview(buffer).cast("B").cast("I")


def count(buffer: bytes | memoryview) -> int:
    """How many ids the buffer holds."""
    return len(buffer) // TOKEN_BYTES
