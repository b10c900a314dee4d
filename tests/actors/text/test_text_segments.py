"""Reusing the tokens of parts gives exactly what tokenising anew gives: for each kind of tokenizer, over chats and hostile text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from actors.text.segments import LINE_PART_CHARS, MIN_PART_CHARS, Segmenter

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


@settings(max_examples=150)
@given(text=hostile)
@example("x" * 70 + "<|im_start|>" + " y" * 50 + "<|im_end|>")
@example("")
def test_parts_tokenise_as_the_whole(tokenizer: Tokenizer, text: str) -> None:
    segmenter = Segmenter(tokenizer)
    parts = segmenter.cut(text)
    assert "".join(parts) == text
    assert in_parts(tokenizer, segmenter, text) == whole(tokenizer, text)


@settings(max_examples=100)
@given(lines=st.lists(st.one_of(st.sampled_from(ATOMS), st.text(max_size=8)), min_size=1, max_size=12), data=st.data())
def test_every_cut_between_lines_holds(tokenizer: Tokenizer, lines: list[str], data: st.DataObject) -> None:
    """Long lines are cut wherever the rule allows: slide the text so that each allowed place comes up."""
    body = "".join(lines)
    pad = data.draw(st.integers(0, max(1, len(body))))
    text = "p" * (LINE_PART_CHARS - pad) + body * 3
    assert in_parts(tokenizer, Segmenter(tokenizer), text) == whole(tokenizer, text)


@settings(max_examples=60)
@given(first=hostile, second=hostile)
def test_a_longer_text_has_its_prefix_s_cuts(tokenizer: Tokenizer, first: str, second: str) -> None:
    segmenter = Segmenter(tokenizer)
    short, long = segmenter.cut(first), segmenter.cut(first + second)
    reach = len(first) - LINE_PART_CHARS - MIN_PART_CHARS - 16
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
