"""Stop strings over text that arrives in pieces.

Owns finding them and what must be held back meanwhile. Knows no token. Invariant: however the text is cut into pieces, what is
emitted is the same: all of it up to where, read character by character, a stop string is first complete.
"""

from __future__ import annotations

from collections.abc import Sequence


def _borders(word: str) -> list[int]:
    """Knuth, Morris and Pratt's failure function: length of the longest proper border of each prefix."""
    borders = [0] * len(word)
    matched = 0
    for i in range(1, len(word)):
        while matched and word[i] != word[matched]:
            matched = borders[matched - 1]
        matched += word[i] == word[matched]
        borders[i] = matched
    return borders


class StopMatcher:
    """Feed text, take what is safe to show. After `matched` is set nothing more comes out. Linear in the text, whatever the stops."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would match everywhere")
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include
        self.matched: str | None = None

    @property
    def held_chars(self) -> int:
        """How much text is held back, since it may be the head of a stop string."""
        return len(self._held)

    def push(self, text: str) -> str:
        """More text; returns what can't be part of a stop string any more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        start = len(self._held)
        buffer = self._held + text
        for end in range(start, len(buffer)):
            hit = self._advance(buffer[end])
            if hit is not None:
                self.matched, self._held = hit, ""
                return buffer[: end + 1] if self._include else buffer[: end + 1 - len(hit)]
        keep = max(self._states)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The end of the text: what was held back was a near miss."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Move every stop's state by one character; the longest stop that is complete now, or None."""
        complete: str | None = None
        for i, (stop, borders) in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != character:
                state = borders[state - 1]
            state += stop[state] == character
            if state == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                state = borders[state - 1]
            self._states[i] = state
        return complete
