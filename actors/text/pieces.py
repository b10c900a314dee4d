"""What each token adds to the text, as bytes: so that text can be put together token by token.

Owns the two decoders that decoder-only models use: byte-level (GPT-2's alphabet) and SentencePiece-like (a space mark, bytes as
`<0x41>`). Anything else is refused. Invariant: joining the pieces of valid text's tokens and reading them as UTF-8 gives what the
tokenizer's own decoder gives, but for the one leading space that SentencePiece-like decoders drop (`drops_leading_space`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from cpd_ray.errors import InvalidRequest, ModelUnavailable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: printable Latin-1 stands for itself, the rest is numbered through from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class TokenPieces:
    """Token id -> bytes, found when first asked for and kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.ids = tokenizer.get_vocab_size(with_added_tokens=True)
        steps = _decoder_steps(tokenizer)
        self._byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._space_marks = [mark for step in steps if (mark := _space_mark(step)) is not None]
        self._byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
        self.drops_leading_space = any(_strips_leading_space(step) for step in steps)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """The token's part of the text. Raises InvalidRequest for an id that is not in the vocabulary."""
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._make(self.name_of(token))
        return piece

    def name_of(self, token: int) -> str:
        """The token as the vocabulary spells it; raises InvalidRequest for an id that is not in it."""
        name = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if name is None:
            raise InvalidRequest(f"token id {token} is not in the model's vocabulary", param="tokens")
        return name

    def holds(self, token: int) -> bool:
        """Whether the id is in the vocabulary (it may have holes)."""
        return token in self._known or self._tokenizer.id_to_token(token) is not None

    def pieces(self, tokens: Iterable[int], *, skip_special: bool) -> Iterator[bytes]:
        """Each token's bytes; none for special tokens that are skipped, and for ids that no vocabulary entry explains."""
        for token in tokens:
            hidden = (skip_special and token in self.special_ids) or not self.holds(token)
            yield b"" if hidden else self.bytes_of(token)

    def _make(self, name: str) -> bytes:
        if self._byte_level:
            letters = [_ALPHABET.get(c) for c in name]
            return name.encode() if None in letters else bytes(b for b in letters if b is not None)
        if self._byte_tokens and (found := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(found[1], 16)])
        for mark in self._space_marks:
            name = name.replace(mark, " ")
        return name.encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[Mapping[str, Any]]:
    if tokenizer.decoder is None:
        raise ModelUnavailable("the model's tokenizer has no decoder, so its answers can't be turned into text", param="model")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    for step in steps:
        known = (
            step["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace") or _space_mark(step) or _strips_leading_space(step)
        )
        if not known:
            raise ModelUnavailable(f"the model's tokenizer decodes by {step['type']}, which is not supported", param="model")
    return steps


def _space_mark(step: Mapping[str, Any]) -> str | None:
    if step["type"] == "Replace" and step.get("content") == " ":
        mark = step["pattern"].get("String")
        return str(mark) if mark is not None else None
    return str(step["replacement"]) if step["type"] == "Metaspace" else None


def _strips_leading_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return step["content"] == " " and step["start"] == 1 and step["stop"] == 0
    return step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"
