"""Where a text can be cut so that tokenising the parts and joining them is tokenising the whole.

Owns the proof obligations, one for each kind of cut; tokenises nothing. Invariant: a cut depends only on the text to its left and
on the few characters around it, so texts with a common prefix have common cuts in it (but for the last).

Cut before an added token. Tokenizers first split the raw text at its added tokens, leftmost and longest first, and then treat
what lies between them each for itself; so nothing crosses such a token. The part begins with the token, so that what follows it is not
at the start of a text (where SentencePiece-like tokenizers put a space). Not every added token will do: those that reach to their left
(`lstrip`, `single_word`) or are searched in normalised text do not.

Cut inside a line break, between `\\n` after a printable ASCII character and an ASCII letter, for the byte-level pipelines whose
split patterns are known (`_PATTERNS`). None of their alternatives reaches from a newline to a letter, none looks back, and the only look-ahead,
`\\s+(?!\\S)`, matches the single newline's span alike at the text's end (where `\\s+(?!\\S)` takes it) and before a letter (where `\\s+` does).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

MIN_PART_CHARS = 64
LINE_PART_CHARS = 2048

_LINE_BREAK = re.compile(r"[!-~]\n(?=[A-Za-z])")
_PATTERNS = (
    # Llama 3's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Qwen's: the same, digits one by one
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # GPT-2's, which ByteLevel applies itself with use_regex
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)


class Segmenter:
    """Cuts texts for one tokenizer, about which nothing may be known: then texts stay whole.

    `min_part_chars`: nearer than this to the last cut no added token is cut at, since parts would cost more than they save.
    `line_part_chars`: a part longer than this is cut at the next line break that allows it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, min_part_chars: int = MIN_PART_CHARS, line_part_chars: int = LINE_PART_CHARS
    ) -> None:
        self._min_part_chars = min_part_chars
        self._line_part_chars = line_part_chars
        added = list(tokenizer.get_added_tokens_decoder().values())
        raw = [token for token in added if not token.normalized and token.content]
        deterministic = _is_deterministic(_state(tokenizer.model))
        self._cut_tokens = frozenset(t.content for t in raw if _may_cut_before(t)) if deterministic else frozenset[str]()
        # alternatives longest first: leftmost-longest, as tokenizers search
        longest_first = sorted({t.content for t in raw}, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first))) if self._cut_tokens else None
        self._lines = (
            deterministic
            and not any(t.lstrip or "\n" in t.content for t in added)
            and _normalises_locally(_state(tokenizer.normalizer))
            and _splits_lines(_state(tokenizer.pre_tokenizer))
        )

    def cut(self, text: str) -> list[str]:
        """The parts of `text`, in order; joined they are `text`. At least one."""
        cuts = [0, *self._cuts(text), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(cuts)]

    def _cuts(self, text: str) -> Iterator[int]:
        start = 0
        for at in self._token_cuts(text):
            if at - start < self._min_part_chars:
                continue
            for line in self._line_cuts(text, start, at):
                yield line
                start = line
            if at - start >= self._min_part_chars:
                yield at
                start = at
        yield from self._line_cuts(text, start, len(text))

    def _token_cuts(self, text: str) -> Iterator[int]:
        if self._added is not None:
            for found in self._added.finditer(text):
                if found[0] in self._cut_tokens:
                    yield found.start()

    def _line_cuts(self, text: str, start: int, end: int) -> Iterator[int]:
        while self._lines and end - start > self._line_part_chars:
            found = _LINE_BREAK.search(text, start + self._line_part_chars - 2, end)
            if found is None:
                return
            start = found.end()
            yield start


def _state(part: Any) -> Mapping[str, Any]:
    """A tokenizer part's own description, without a model's vocabulary."""
    if part is None:
        return {"type": "None"}
    state = json.loads(part.__getstate__())
    assert isinstance(state, dict)
    return state


def _is_deterministic(model: Mapping[str, Any]) -> bool:
    return model["type"] in ("BPE", "Unigram", "WordPiece", "WordLevel") and not model.get("dropout")


def _may_cut_before(token: AddedToken) -> bool:
    return not (token.lstrip or token.single_word or token.content[0].isspace())


def _steps(state: Mapping[str, Any], inner: str) -> list[Mapping[str, Any]]:
    return [step for part in state[inner] for step in _steps(part, inner)] if state["type"] == "Sequence" else [state]


def _normalises_locally(normaliser: Mapping[str, Any]) -> bool:
    """Neither a newline nor an ASCII letter composes with what is before it."""
    return all(step["type"] in ("None", "NFC") for step in _steps(normaliser, "normalizers"))


def _splits_lines(pre_tokenizer: Mapping[str, Any]) -> bool:
    splits = False
    for step in _steps(pre_tokenizer, "pretokenizers"):
        if step["type"] == "ByteLevel":
            if step["add_prefix_space"]:
                return False
            splits = splits or step["use_regex"]
        elif step["type"] == "Split":
            if step["pattern"].get("Regex") not in _PATTERNS or step["behavior"] != "Isolated" or step["invert"]:
                return False
            splits = True
        elif step["type"] != "Digits":
            return False
    return splits
