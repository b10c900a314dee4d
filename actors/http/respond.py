"""Running a job and putting its answers together, whole or as a stream of chunks.

Owns the order of what is sent. Decides nothing about the request. Invariant: streamed or not, the same pieces in the same order make up the
same answer, and the tokens of an answer are counted for its tenant even when it breaks off.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from actors.http.answer import Answer, Piece, ShownToken
from actors.http.face import Face
from actors.http.jobs import Job
from actors.http.rates import TenantRates
from actors.http.shapes import Finished, Json, Shape, trace_json, usage
from actors.http.sse import DONE, event, merged


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """`usage_at_end`: a last chunk with the usage; `usage_always`: every chunk has it so far; `trace`: the last chunk has `cpd`."""

    usage_at_end: bool = False
    usage_always: bool = False
    trace: bool = False


@dataclass(slots=True)
class _Gathered:
    text: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    last: Piece | None = None


class Responder:
    """`created` goes into every object: seconds since 1970."""

    def __init__(self, face: Face, rates: TenantRates) -> None:
        self._face = face
        self._rates = rates

    async def whole(self, job: Job, shape: Shape, *, created: int, trace: bool) -> Json:
        """The whole response object."""
        answers = [Answer(self._face, choice, job.style) for choice in job.choices]
        gathered = [_Gathered() for _ in answers]
        with self._counted(job, answers):
            async with contextlib.aclosing(merged([a.pieces() for a in answers])) as pieces:
                async for number, piece in pieces:
                    gathered[number].text.append(piece.text)
                    gathered[number].tokens.extend(piece.tokens)
                    gathered[number].last = piece
        choices = [shape.whole(_finished(a, g), a.choice.echo) for a, g in zip(answers, gathered, strict=True)]
        response = {**self._head(job, shape.whole_object, created), "choices": choices, "usage": usage(job, answers)}
        return self._traced(response, job, answers) if trace else response

    async def events(self, job: Job, shape: Shape, *, created: int, style: StreamStyle) -> AsyncGenerator[bytes, None]:
        """The response as framed events, `[DONE]` last."""
        async with contextlib.aclosing(self.chunks(job, shape, created=created, style=style)) as chunks:
            async for sent in chunks:
                yield event(sent)
        yield DONE

    async def chunks(self, job: Job, shape: Shape, *, created: int, style: StreamStyle) -> AsyncGenerator[Json, None]:
        """The response as chunk objects."""
        answers = [Answer(self._face, choice, job.style) for choice in job.choices]
        head = self._head(job, shape.chunk_object, created)
        opened: set[int] = set()
        running = len(answers)

        def chunk(choice: Json) -> Json:
            if style.usage_always:
                return {**head, "choices": [choice], "usage": usage(job, answers)}
            return {**head, "choices": [choice], "usage": None} if style.usage_at_end else {**head, "choices": [choice]}

        with self._counted(job, answers):
            async with contextlib.aclosing(merged([a.pieces() for a in answers])) as pieces:
                async for number, piece in pieces:
                    choice = answers[number].choice
                    if number not in opened:
                        opened.add(number)
                        opening = shape.opening(choice.index, choice.echo)
                        if opening is not None:
                            yield chunk(opening)
                    running -= piece.finish_reason is not None
                    sent = chunk(shape.piece(choice.index, piece, choice.echo))
                    last = not running and not style.usage_at_end
                    yield self._traced(sent, job, answers) if last and style.trace else sent
        if style.usage_at_end:
            counted = {**head, "choices": [], "usage": usage(job, answers)}
            yield self._traced(counted, job, answers) if style.trace else counted

    @contextlib.contextmanager
    def _counted(self, job: Job, answers: list[Answer]) -> Iterator[None]:
        try:
            yield
        finally:
            self._rates.spend_tokens(job.tenant, sum(a.completion_tokens for a in answers))

    @staticmethod
    def _head(job: Job, kind: str, created: int) -> dict[str, Any]:
        return {"id": job.id, "object": kind, "created": created, "model": job.model}

    @staticmethod
    def _traced(response: Json, job: Job, answers: list[Answer]) -> Json:
        traced = trace_json(job, answers)
        return response if traced is None else {**response, "cpd": traced}


def _finished(answer: Answer, gathered: _Gathered) -> Finished:
    last = gathered.last
    assert last is not None and last.finish_reason is not None, "an answer ended without its last piece"
    return Finished(answer.choice.index, "".join(gathered.text), tuple(gathered.tokens), last.finish_reason, last.stop_reason)
