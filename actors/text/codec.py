"""Text to tokens and back, for one model: what the router uses.

Owns the tokenizer, its executor and the memory of tokens of known text. Invariant: what `encode` gives depends on its arguments
alone, never on what was encoded before: reuse is by parts that tokenise the same wherever they stand (`segments`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from actors.text.detokenize import Detokenizer
from actors.text.folder import TextFolder, read_folder
from actors.text.memo import TokenMemo
from actors.text.pieces import TokenPieces
from actors.text.segments import Segmenter
from actors.text.template import Chat, ChatTemplates
from cpd_ray import tokens as token_buffers
from cpd_ray.clock import Clock, SystemClock
from cpd_ray.errors import DeadlineExceeded, InvalidRequest, ModelUnavailable

T = TypeVar("T")

_PARTS_PER_CALL = 64
"""So many parts are tokenised between two looks at the deadline."""
_INLINE_TOKENS = 256
"""Fewer tokens than this are turned into text at once: the trip to another thread would take longer."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """`memo_bytes`: budget for tokens of known text. `timeout_s`: for one text, waiting for a thread included."""

    threads: int = 2
    memo_bytes: int = 64 * 2**20
    timeout_s: float = 30.0


class TextCodec:
    """One per router process; `close` it. Its coroutines run their work off the event loop."""

    def __init__(self, folder: TextFolder, *, settings: TextSettings | None = None, clock: Clock | None = None) -> None:
        self._settings = settings or TextSettings()
        self._clock = clock or SystemClock()
        self._tokenizer = _build_tokenizer(folder.tokenizer)
        self._pieces = TokenPieces(self._tokenizer)
        self._templates = ChatTemplates(folder.templates, folder.special_tokens)
        self._segmenter = Segmenter(self._tokenizer)
        self.memo = TokenMemo(self._settings.memo_bytes)
        self._front, self._back = _frame(self._tokenizer)
        self._executor = ThreadPoolExecutor(self._settings.threads, thread_name_prefix="text")
        eos = self._tokenizer.token_to_id(folder.special_tokens.get("eos_token", ""))
        self.eos_token_ids = frozenset(folder.eos_token_ids or (() if eos is None else (eos,)))

    @classmethod
    def load(cls, path: str | Path, *, settings: TextSettings | None = None, clock: Clock | None = None) -> TextCodec:
        """From a model folder; raises ModelUnavailable when it has no tokenizer that can be used."""
        return cls(read_folder(Path(path)), settings=settings, clock=clock)

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included. The model's own may be larger (padded)."""
        return self._pieces.ids

    async def encode(self, text: str, *, add_special_tokens: bool = True, scope: str = "", timeout_s: float | None = None) -> bytes:
        """Tokens of `text` (uint32 buffer). `scope`: texts known in another scope are not reused. Raises DeadlineExceeded."""
        return await self._off_loop(lambda deadline_s: self._encode(text, add_special_tokens, scope, deadline_s), timeout_s)

    async def encode_chat(self, chat: Chat, *, scope: str = "", timeout_s: float | None = None) -> bytes:
        """Tokens of a chat as the model's template renders it, which writes the special tokens itself."""

        def work(deadline_s: float) -> bytes:
            return self._encode(self._templates.render(chat), False, scope, deadline_s)

        return await self._off_loop(work, timeout_s)

    async def render(self, chat: Chat) -> str:
        """The chat as text."""
        return await self._off_loop(lambda _: self._templates.render(chat), None)

    async def decode(self, tokens: bytes, *, skip_special_tokens: bool = False) -> str:
        """Text of a token buffer; raises InvalidRequest for an id outside the vocabulary."""
        if token_buffers.count(tokens) <= _INLINE_TOKENS:
            return self._decode(tokens, skip_special_tokens)
        return await self._off_loop(lambda _: self._decode(tokens, skip_special_tokens), None)

    def detokenizer(
        self, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0, skip_special: bool = True
    ) -> Detokenizer:
        """For one answer."""
        return Detokenizer(self._pieces, stops, include_stop=include_stop, min_tokens=min_tokens, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The token's part of the text; empty for an id that the vocabulary does not explain."""
        return self._pieces.bytes_of(token) if self._pieces.holds(token) else b""

    def token_name(self, token: int) -> str:
        """The token as the vocabulary spells it; raises InvalidRequest for an id that is not in it."""
        return self._pieces.name_of(token)

    def is_special(self, token: int) -> bool:
        """Whether the token is one that answers don't show."""
        return token in self._pieces.special_ids

    def close(self) -> None:
        """Ends the threads; work under way runs to its deadline."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _off_loop(self, work: Callable[[float], T], timeout_s: float | None) -> T:
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        deadline_s = self._clock.now_s() + limit_s
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, deadline_s)
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError as error:
            raise DeadlineExceeded("the prompt could not be tokenised in time") from error

    def _encode(self, text: str, add_special_tokens: bool, scope: str, deadline_s: float) -> bytes:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("text must be valid Unicode (it holds half of a surrogate pair)", param="prompt") from error
        parts = self._segmenter.cut(text)
        known = self.memo.find(scope, parts)
        missing = [part for part in dict.fromkeys(parts) if part not in known]
        fresh: dict[str, bytes] = {}
        for i in range(0, len(missing), _PARTS_PER_CALL):
            if self._clock.now_s() > deadline_s:
                raise DeadlineExceeded("the prompt could not be tokenised in time")
            batch = missing[i : i + _PARTS_PER_CALL]
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            fresh |= {part: token_buffers.pack(e.ids) for part, e in zip(batch, encodings, strict=True)}
        self.memo.keep(scope, fresh)
        known |= fresh
        tokens = b"".join(known[part] for part in parts)
        return self._front + tokens + self._back if add_special_tokens else tokens

    def _decode(self, tokens: bytes, skip_special_tokens: bool) -> str:
        ids = token_buffers.unpack(tokens).tolist()
        if any(not self._pieces.holds(i) for i in ids):
            raise InvalidRequest("a token id is not in the model's vocabulary", param="tokens")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def _build_tokenizer(text: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a file it can't read
        raise ModelUnavailable("the model's tokenizer.json can't be read by the tokenizers library", param="model") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _frame(tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """The special tokens that the post-processor puts before and after a text. Raises ModelUnavailable for one that does otherwise."""
    for probe in ("a", "b c"):
        plain = tokenizer.encode(probe, add_special_tokens=False).ids
        framed = tokenizer.encode(probe, add_special_tokens=True)
        special = framed.special_tokens_mask
        front = next((i for i, mark in enumerate(special) if not mark), len(special))
        back = front + len(plain)
        if framed.ids[front:back] != plain:
            raise ModelUnavailable("the model's tokenizer changes a text when it adds special tokens", param="model")
    return token_buffers.pack(framed.ids[:front]), token_buffers.pack(framed.ids[back:])
