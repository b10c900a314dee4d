"""One answer on its way out: token chunks in, text with its log probabilities out, and what is known of its cost.

Owns one choice's reading of `Face.generate`. Knows no response shape. Invariant: the pieces' texts joined are the answer, and the
tokens' bytes joined are that text, however chunks were grouped; after the end nothing is left running for it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from actors.http.face import Face
from actors.http.jobs import Choice, TextStyle
from cpd_ray.errors import Unavailable
from cpd_ray.types import CachedTokens, FinishReason, RequestTrace, TokenChunk, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text is out. `start`: where in the answer that begins, in characters."""

    token: int
    start: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the answer. `finish_reason` is set on the last one; `stop_reason`: the stop string or stop token id that ended it."""

    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Answer:
    """Iterate `pieces()` once. `completion_tokens`, `cached` and `trace` are what is known so far; `cached` is None until the face tells."""

    def __init__(self, face: Face, choice: Choice, style: TextStyle) -> None:
        self.choice = choice
        self.completion_tokens = 0
        self.cached: CachedTokens | None = None
        self.trace: RequestTrace | None = None
        self._face = face
        self._style = style
        sampling = choice.request.sampling
        self._ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else face.codec.eos_token_ids)
        self._text = face.codec.detokenizer(
            style.stops, include_stop=style.include_stop, min_tokens=sampling.min_tokens, skip_special=style.skip_special
        )
        self._waiting: deque[tuple[int, ShownToken]] = deque()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Raises what the face raises. Closing it, or a stop string, closes the face's generator."""
        async with contextlib.aclosing(self._face.generate(self.choice.request)) as chunks:
            async for chunk in chunks:
                piece = self._take(chunk)
                if piece.text or piece.tokens or piece.finish_reason:
                    yield piece
                if piece.finish_reason:
                    return
        raise Unavailable("the answer broke off")

    def _take(self, chunk: TokenChunk) -> Piece:
        if chunk.usage is not None:
            self.cached = chunk.usage.cached
        if chunk.trace is not None:
            self.trace = chunk.trace
        if chunk.finish_reason is FinishReason.ABORT:
            raise Unavailable("the request was aborted")
        shown: list[str] = []
        stop_token: int | None = None
        for i, token in enumerate(chunk.tokens):
            self.completion_tokens += 1
            ended = chunk.finish_reason is FinishReason.STOP and i == len(chunk.tokens) - 1 and token in self._ends
            if ended:
                stop_token = token
                if not self._style.include_stop:
                    break
            shown.append(self._push(token, chunk.logprobs[i] if i < len(chunk.logprobs) else None))
            if self._text.stopped is not None:
                return self._last("".join(shown), "stop", self._text.stopped)
        text = "".join(shown)
        if chunk.finish_reason is None:
            return Piece(text, self._release(final=False))
        text += self._text.finish()
        if self._text.stopped is not None:
            return self._last(text, "stop", self._text.stopped)
        named = stop_token if stop_token in self.choice.request.sampling.stop_token_ids else None
        return self._last(text, str(chunk.finish_reason), named)

    def _push(self, token: int, logprobs: TokenLogprobs | None) -> str:
        start = self._text.known_chars
        text = self._text.push((token,))
        hidden = self._style.skip_special and self._face.codec.is_special(token)
        if self._style.logprobs is not None and logprobs is not None and not hidden:
            # a token that only begins a character is out when that character is
            end = max(start + 1, self._text.known_chars)
            self._waiting.append((end, ShownToken(token, start, logprobs)))
        return text

    def _last(self, text: str, finish_reason: str, stop_reason: str | int | None) -> Piece:
        return Piece(text, self._release(final=True), finish_reason, stop_reason)

    def _release(self, *, final: bool) -> tuple[ShownToken, ...]:
        """Tokens whose text is out by now; at the end also those cut within, and none that lies behind a stop string."""
        out = []
        while self._waiting:
            end, shown = self._waiting[0]
            cut = final and (self._text.stopped is None or shown.start < self._text.shown_chars)
            if end > self._text.shown_chars and not cut:
                break
            self._waiting.popleft()
            out.append(shown)
        return tuple(out)
