"""Reusing the tokens of parts gives exactly what tokenising anew gives: for each kind of tokenizer, over chats and hostile text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from actors.text.segments import LINE_PART_CHARS, Segmenter

ATOMS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<|im_", "start|>", "<|r|>", "<|w|>", "<|b", "|>", "<|l|>", "<unk>",
    "x<|im_end|>", "<0x41>", "\n", "\n\n", " \n", "\r\n", "\n ", "  ", " ", "\t", "\u00a0", "\u2028", "\x1c", "\x85", "\x00", "▁", "Ġ",
    "The quick brown fox.\nThen it sleeps", "sheep", "Then", "12345", "5\nB", "!\nA", ".\n\nA", "é\nA", "e\u0301", "\u0301", "A\u030a",
    "日本語", "👍🏽", "\u2019s", "'s", "'LL", "ﬃ", "\u017f", "\ufffd", "word " * 30, "line of text.\n" * 40, "a" * 300, "=" * 100,
]  # fmt: skip
hostile = st.lists(st.one_of(st.sampled_from(ATOMS), st.text(max_size=20)), max_size=40).map("".join)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def in_parts(tokenizer: Tokenizer, segmenter: Segmenter, text: str) -> list[int]:
    return [i for part in segmenter.cut(text) for i in whole(tokenizer, part)]


@settings(max_examples=100)
@given(text=hostile, min_part=st.integers(1, 40), line_part=st.integers(3, 80))
@example(text="x  <|l|> y<|w|>z <|w|> y<|w|> <|r|> \n\nA", min_part=1, line_part=3)
@example(text="x<|b<|im_end|> y", min_part=1, line_part=3)
@example(text="sheep<|im_start|>user<|im_end|>x<|im_end|>|>p<|im_end|>", min_part=1, line_part=3)
@example(text="!\n \n.!\n !\n\nA.\n\tB!\n\u0301C !\nA", min_part=1, line_part=3)
@example(text="", min_part=64, line_part=2048)
def test_parts_tokenise_as_the_whole(tokenizer: Tokenizer, text: str, min_part: int, line_part: int) -> None:
    """With parts much shorter than in use, so that each place that allows a cut is cut at."""
    segmenter = Segmenter(tokenizer, min_part_chars=min_part, line_part_chars=line_part)
    assert "".join(segmenter.cut(text)) == text
    assert in_parts(tokenizer, segmenter, text) == whole(tokenizer, text)


@settings(max_examples=100)
@given(first=hostile, second=hostile)
def test_a_longer_text_has_its_prefix_s_cuts(tokenizer: Tokenizer, first: str, second: str) -> None:
    min_part, line_part, longest_token = 8, 30, 16
    segmenter = Segmenter(tokenizer, min_part_chars=min_part, line_part_chars=line_part)
    short, long = segmenter.cut(first), segmenter.cut(first + second)
    reach = len(first) - line_part - min_part - longest_token
    ends, settled = 0, 0
    for part in short[:-1]:
        ends += len(part)
        settled += ends <= reach
    assert short[:settled] == long[:settled]


def test_chats_and_documents_are_cut_where_the_pipeline_is_known(builders: Mapping[str, Callable[[], Tokenizer]]) -> None:
    document = "Some words of a line.\nAnd its next line, " * 400
    chat = ("<|im_start|>user\n" + "a question " * 20 + "<|im_end|>\n") * 10
    for name, build in builders.items():
        segmenter = Segmenter(build())
        by_lines = len(segmenter.cut(document)) - 1
        in_lines = name in ("gpt2", "digits", "llama3", "qwen", "awkward")
        assert by_lines == (len(document) // (LINE_PART_CHARS + 41) if in_lines else 0), name
        assert len(segmenter.cut(chat)) >= 10, name


def changed(tokenizer: Tokenizer, *path: str, to: object) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    inner = state
    for key in path[:-1]:
        inner = inner[int(key) if key.isdigit() else key]
    inner[path[-1]] = to
    return Tokenizer.from_str(json.dumps(state))


def test_what_is_not_proven_is_not_cut(builders: Mapping[str, Callable[[], Tokenizer]]) -> None:
    document = "Some words of a line.\nAnd its next line, " * 400
    llama3 = builders["llama3"]()
    assert len(Segmenter(llama3).cut(document)) > 1
    unproven = [
        changed(llama3, "pre_tokenizer", "pretokenizers", "0", "pattern", to={"Regex": r"[\s\S]{1,7}"}),
        changed(llama3, "pre_tokenizer", "pretokenizers", "0", "behavior", to="MergedWithNext"),
        changed(llama3, "normalizer", to={"type": "Lowercase"}),
        changed(builders["gpt2"](), "pre_tokenizer", "use_regex", to=False),
    ]
    assert [Segmenter(t).cut(document) for t in unproven] == [[document]] * len(unproven)
    random_merges = changed(llama3, "model", "dropout", to=0.5)
    assert Segmenter(random_merges).cut("<|im_start|>" * 100 + document) == ["<|im_start|>" * 100 + document]
