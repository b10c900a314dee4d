"""An answer's text, while its tokens arrive: whole characters only, up to the first stop string.

Owns one answer's state. Invariant: the deltas joined are the same however the tokens are grouped, and each is valid text: a
character whose bytes are spread over tokens appears when its last byte does, or as U+FFFD when that never comes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from actors.text.pieces import TokenPieces
from actors.text.stops import StopMatcher


class Detokenizer:
    """Push tokens, take text. `stopped` is the stop string that was found, if any; after that nothing more comes out.

    `min_tokens`: stop strings count only from the text of the token after that many on. The answer continues a prompt, so the
    leading space of its first word is text, unlike in a decoding of the answer alone.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
    ) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopMatcher(stops, include=include_stop)
        self._skip_special = skip_special
        self._unstoppable = min_tokens
        self.tokens = 0
        self.shown_chars = 0

    @property
    def stopped(self) -> str | None:
        return self._stops.matched

    @property
    def known_chars(self) -> int:
        """Length of the answer's text as far as it is known: what was shown, and what is held back as the head of a stop string."""
        return self.shown_chars + self._stops.held_chars

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete. Tokens after the one that completes a stop string are not looked at (nor counted)."""
        shown: list[str] = []
        for piece in self._pieces.pieces(tokens, skip_special=self._skip_special):
            if self.stopped is not None:
                break
            self.tokens += 1
            text = self._utf8.decode(piece)
            if text:
                shown.append(text if self.tokens <= self._unstoppable else self._stops.push(text))
        return self._show(shown)

    def finish(self) -> str:
        """The rest: an unfinished character as U+FFFD, and the near miss of a stop string."""
        if self.stopped is not None:
            return ""
        rest = self._utf8.decode(b"", final=True)
        shown = [self._stops.push(rest)] if rest else []
        if self.stopped is None:
            shown.append(self._stops.finish())
        return self._show(shown)

    def _show(self, shown: list[str]) -> str:
        text = "".join(shown)
        self.shown_chars += len(text)
        return text
