"""Tokens of texts seen lately, within a byte budget, least recently used out first.

Owns the store and its accounting; what may be reused is `segments`' concern. Invariant: `nbytes` is the sum of the entries' costs
and at most the budget. Safe to call from several threads.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

_ENTRY_BYTES = 200
"""Key tuple, dictionary slot and list links of one entry, about."""


class TokenMemo:
    """(scope, text) -> token buffer. `scope` keeps tenants apart, so that nobody learns from timing what another one sent."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, scope: str, texts: Iterable[str]) -> dict[str, bytes]:
        """The tokens of those texts that are known."""
        found: dict[str, bytes] = {}
        with self._lock:
            for text in texts:
                key = (scope, text)
                tokens = self._entries.get(key)
                if tokens is not None:
                    self._entries.move_to_end(key)
                    found[text] = tokens
        return found

    def keep(self, scope: str, tokens: Mapping[str, bytes]) -> None:
        """Remember these; drops the least recently used ones beyond the budget."""
        with self._lock:
            for text, buffer in tokens.items():
                key = (scope, text)
                if key not in self._entries:
                    self.nbytes += _cost(key, buffer)
                    self._entries[key] = buffer
                self._entries.move_to_end(key)
            while self.nbytes > self._budget_bytes:
                key, buffer = self._entries.popitem(last=False)
                self.nbytes -= _cost(key, buffer)

    def check(self) -> None:
        """Asserts the invariant."""
        with self._lock:
            assert self.nbytes == sum(_cost(key, buffer) for key, buffer in self._entries.items())
            assert self.nbytes <= self._budget_bytes


def _cost(key: tuple[str, str], tokens: bytes) -> int:
    return sys.getsizeof(key[1]) + sys.getsizeof(tokens) + _ENTRY_BYTES
