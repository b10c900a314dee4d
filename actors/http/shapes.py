"""What answers look like on the wire: OpenAI's completion and chat objects, whole and in chunks, and our `cpd` object.

Owns the dictionaries. Knows no transport. Invariant: the chunks of a streamed answer, put together, are the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.http.answer import Answer, Piece, ShownToken
from actors.http.jobs import Job
from actors.text.codec import TextCodec
from cpd_ray.types import CachedTokens, RequestTrace

Json = dict[str, Any]
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity: a token that can't be sampled gets this, as in OpenAI's answers."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole answer."""

    index: int
    text: str
    tokens: tuple[ShownToken, ...]
    finish_reason: str
    stop_reason: str | int | None


class Shape(Protocol):
    """One kind of response. `opening`: what a stream says of a choice before its first piece, if anything."""

    prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, answer: Finished, echo: str) -> Json: ...
    def opening(self, index: int, echo: str) -> Json | None: ...
    def piece(self, index: int, piece: Piece, echo: str) -> Json: ...


class CompletionShape:
    """`logprobs`: how many likeliest tokens were asked for; None for no log probabilities."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, codec: TextCodec, logprobs: int | None) -> None:
        self._codec = codec
        self._logprobs = logprobs

    def whole(self, answer: Finished, echo: str) -> Json:
        ended = Piece(echo + answer.text, answer.tokens, answer.finish_reason, answer.stop_reason)
        return self.piece(answer.index, ended, echo)

    def opening(self, index: int, echo: str) -> Json | None:
        return self.piece(index, Piece(echo), "") if echo else None

    def piece(self, index: int, piece: Piece, echo: str) -> Json:
        logprobs = None if self._logprobs is None else self._lists(piece.tokens, len(echo))
        return {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _lists(self, tokens: Sequence[ShownToken], offset: int) -> Json:
        return {
            "text_offset": [offset + t.start for t in tokens],
            "token_logprobs": [_floor(t.logprobs.chosen) for t in tokens],
            "tokens": [self._name(t.token) for t in tokens],
            "top_logprobs": [
                {self._name(i): _floor(p) for i, p in (*t.logprobs.top, (t.token, t.logprobs.chosen))} for t in tokens
            ],
        }

    def _name(self, token: int) -> str:
        """A token's text; one that is part of a character is spelt in bytes, so that no two look alike."""
        data = self._codec.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


class ChatShape:
    """`logprobs` as for completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, codec: TextCodec, logprobs: int | None) -> None:
        self._codec = codec
        self._logprobs = logprobs

    def whole(self, answer: Finished, echo: str) -> Json:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._content(answer.tokens),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def opening(self, index: int, echo: str) -> Json | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, piece: Piece, echo: str) -> Json:
        choice: Json = {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._content(piece.tokens) if piece.tokens else None,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return choice

    def _content(self, tokens: Sequence[ShownToken]) -> Json | None:
        if self._logprobs is None:
            return None
        return {"content": [self._token(t) for t in tokens], "refusal": None}

    def _token(self, shown: ShownToken) -> Json:
        top = [self._named(i, p) for i, p in shown.logprobs.top[: self._logprobs]]
        return {**self._named(shown.token, shown.logprobs.chosen), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> Json:
        data = self._codec.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": _floor(logprob), "bytes": list(data)}


def _floor(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def usage(job: Job, answers: Iterable[Answer]) -> Json:
    """OpenAI's usage of a whole request. Each prompt counts once; its cached tokens are those of its first answer."""
    answers = list(answers)
    first = {a.choice.prompt: a.cached for a in reversed(answers)}
    completion = sum(a.completion_tokens for a in answers)
    counts: Json = {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": job.prompt_tokens + completion,
    }
    known = [cached.total for cached in first.values() if cached is not None]
    if len(known) == len(first):
        counts["prompt_tokens_details"] = {"cached_tokens": sum(known)}
    return counts


def cached_json(cached: CachedTokens) -> Json:
    return {"pool": cached.pool, "node": cached.node, "cluster": cached.cluster}


def trace_json(job: Job, answers: Sequence[Answer]) -> Json | None:
    """The `cpd` object: the first answer's trace, and each one's under `requests` when there are several."""
    traces = [_one_trace(job, a.trace, a.choice.request.request_id) for a in answers if a.trace is not None]
    if not traces:
        return None
    return {**traces[0], "requests": traces} if len(answers) > 1 else traces[0]


def _one_trace(job: Job, trace: RequestTrace, request_id: str) -> Json:
    return {
        "request_id": request_id,
        "route": trace.route,
        "reason": trace.reason,
        "workers": list(trace.workers),
        "cached_tokens": cached_json(trace.cached),
        "phases_s": {"tokenize": job.tokenize_s, **trace.phases_s},
        "predicted_ttft_s": trace.predicted_ttft_s,
        "actual_ttft_s": trace.actual_ttft_s,
        "attempts": trace.attempts,
    }
