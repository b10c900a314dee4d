"""Counter-based randomness: noise is a pure function of (seed, output index, token id).

So a token's draw depends neither on the batch nor on what ran before, and an answer resumed elsewhere continues alike. The
generator is SplitMix64 (Steele, Lea, Flood 2014: additive Weyl sequence, then a 64-bit finaliser). Invariant: no state.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def stream(seed: int, output_index: int) -> int:
    """The 64-bit start of the noise for one output position."""
    return _mix((_mix((seed + _WEYL) & _MASK) + (output_index + 1) * _WEYL) & _MASK)


def seed_of(name: str) -> int:
    """A seed for a request that came without one; equal names give equal seeds in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def uniform(start: int, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in (0, 1), one for each counter (>= 0) of the stream `start`."""
    x = (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_WEYL) + np.uint64(start)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def gumbel(start: int, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise: the largest of log-weight + noise is a draw in proportion to the weights."""
    return -np.log(-np.log(uniform(start, counters)))
