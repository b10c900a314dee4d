"""Streamed text: the same as decoding all at once, whole characters only, cut at stop strings wherever token borders fall."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from actors.text.detokenize import Detokenizer
from actors.text.pieces import TokenPieces
from actors.text.stops import StopMatcher
from cpd_ray.errors import InvalidRequest, ModelUnavailable

TEXTS = [
    "Hello, world! 42",
    " 👍🏽👨‍👩‍👧 naïve café",
    "日本語と中文",
    "\ufffd real replacement",
    "a\x00b\r\n\t",
    "e\u0301 Zürich",
    "<b>x</b> | y",
]


def continuation(tokenizer: Tokenizer, prompt: list[int], answer: list[int], *, skip_special: bool) -> str:
    """What the answer adds to the prompt's text: the library's own decoder is the oracle."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip_special)
    return tokenizer.decode(prompt + answer, skip_special_tokens=skip_special).removeprefix(before)


def stream(detokenizer: Detokenizer, groups: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


@st.composite
def groupings(draw: st.DrawFn, tokens: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=6)))
    return [tokens[a:b] for a, b in itertools.pairwise([0, *cuts, len(tokens)])]


@settings(max_examples=60)
@given(text=st.one_of(st.text(max_size=40), st.lists(st.sampled_from(TEXTS), max_size=5).map("".join)), data=st.data())
def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    skip = data.draw(st.booleans())
    prompt = tokenizer.encode("The prompt ends", add_special_tokens=False).ids
    answer = tokenizer.encode(text, add_special_tokens=False).ids
    deltas = stream(Detokenizer(TokenPieces(tokenizer), skip_special=skip), data.draw(groupings(answer)))
    assert "".join(deltas) == continuation(tokenizer, prompt, answer, skip_special=skip)
    for delta in deltas:
        delta.encode()


@settings(max_examples=60)
@given(data=st.data())
def test_any_tokens_of_a_byte_level_model_stream_as_they_decode(byte_level: Tokenizer, data: st.DataObject) -> None:
    """Broken bytes included: a model may sample any token after any other."""
    ids = data.draw(st.lists(st.integers(0, byte_level.get_vocab_size() - 1), max_size=60))
    deltas = stream(Detokenizer(TokenPieces(byte_level), skip_special=False), data.draw(groupings(ids)))
    assert "".join(deltas) == byte_level.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("character", ["👍", "語", "é", "👨‍👩‍👧"])
def test_a_character_over_several_tokens_appears_once_and_whole(byte_level: Tokenizer, character: str) -> None:
    ids = [byte_level.token_to_id(chr(letter)) for letter in byte_letters(character.encode())]
    deltas = stream(Detokenizer(TokenPieces(byte_level)), [[i] for i in ids])
    assert "".join(deltas) == character
    assert [d for d in deltas if d] == list(character)


def byte_letters(data: bytes) -> list[int]:
    from tokenizers import pre_tokenizers

    return [ord(c) for c in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(data.decode())[0][0]]


def test_an_unfinished_character_ends_as_one_replacement(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_to_id(chr(letter)) for letter in byte_letters("👍".encode())][:3]
    deltas = stream(Detokenizer(TokenPieces(byte_level)), [[i] for i in ids])
    assert deltas == ["", "", "", "\ufffd"]


def test_ids_that_the_vocabulary_lacks_show_nothing(tokenizer: Tokenizer) -> None:
    """A model's output layer may be wider than its tokenizer."""
    pieces = TokenPieces(tokenizer)
    hole = tokenizer.get_vocab_size() + 7
    assert stream(Detokenizer(pieces), [[hole, 2**32 - 1], [hole]]) == ["", "", ""]
    with pytest.raises(InvalidRequest):
        pieces.name_of(hole)


def test_other_decoders_are_refused(byte_level: Tokenizer) -> None:
    from tokenizers import decoders

    odd = Tokenizer.from_str(byte_level.to_str())
    for decoder in (decoders.WordPiece(), decoders.BPEDecoder(), decoders.Replace("x", "y"), None):
        odd.decoder = decoder
        with pytest.raises(ModelUnavailable):
            TokenPieces(odd)


# -- stop strings ----------------------------------------------------------------------------------------------------


def first_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Brute force: read character by character until some stop string is complete; the longest one then."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


SMALL = st.text(alphabet="ab\n", max_size=30)


@settings(max_examples=400)
@given(
    text=SMALL,
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4),
    cuts=st.sets(st.integers(0, 30)),
    include=st.booleans(),
)
@example(text="aabaabaaab", stops=["aabaaa", "aaab"], cuts={1, 4, 9}, include=False)
def test_stops_are_found_wherever_the_text_is_cut(text: str, stops: list[str], cuts: set[int], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    bounds = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    shown = ""
    for a, b in itertools.pairwise(bounds):
        shown += matcher.push(text[a:b])
        assert first_stop(text, stops, include)[0].startswith(shown), "text was shown that belongs to a stop string"
    shown += matcher.finish()
    assert (shown, matcher.matched) == first_stop(text, stops, include)


def test_only_a_possible_head_is_held_back() -> None:
    matcher = StopMatcher(["STOP", "\n\n"])
    assert [matcher.push(t) for t in ("so", "ST", "x\n", "ST", "O")] == ["so", "", "STx", "\n", ""]
    assert matcher.held_chars == 3
    assert matcher.finish() == "STO"


def test_a_long_stop_string_costs_linear_time() -> None:
    """Counted in steps of the automaton, not by the clock: text and stop are the worst case for naive search."""
    steps = 0

    class Counting(str):
        __slots__ = ()

        def __getitem__(self, index: object) -> str:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return super().__getitem__(index)  # type: ignore[index]

    length, size = 5_000, 250
    matcher = StopMatcher([Counting("a" * size + "b")])
    steps = 0
    for _ in range(length):
        matcher.push("a")
    assert steps <= 6 * length


@settings(max_examples=60)
@given(data=st.data())
def test_a_stopped_answer_counts_tokens_up_to_its_stop(byte_level: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.lists(st.sampled_from(["Hello", " world", "STOP", "ST", "OP", "\n", "👍", "語"]), max_size=12).map("".join))
    stops = ["STOP", "👍\n"]
    ids = byte_level.encode(text, add_special_tokens=False).ids
    minimum = data.draw(st.integers(0, 4))
    alone = Detokenizer(TokenPieces(byte_level), stops, min_tokens=minimum)
    one_by_one = "".join(stream(alone, [[i] for i in ids]))
    grouped = Detokenizer(TokenPieces(byte_level), stops, min_tokens=minimum)
    assert "".join(stream(grouped, data.draw(groupings(ids)))) == one_by_one
    assert (grouped.stopped, grouped.tokens, grouped.shown_chars) == (alone.stopped, alone.tokens, len(one_by_one))
    free = byte_level.decode(ids[:minimum])
    if not free.endswith("\ufffd"):
        assert one_by_one == free + first_stop(text[len(free) :], stops, False)[0]


def test_empty_stops_are_our_own_bug() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["", "x"])


def test_a_random_walk_of_pushes_never_shows_a_replacement_for_whole_text(byte_level: Tokenizer) -> None:
    rng = random.Random(5)
    pieces = TokenPieces(byte_level)
    for _ in range(50):
        text = "".join(rng.choice("aé語👍\n ") for _ in range(rng.randrange(40)))
        ids = byte_level.encode(text, add_special_tokens=False).ids
        shown = ""
        detokenizer = Detokenizer(pieces)
        for i in ids:
            shown += detokenizer.push([i])
            assert text.startswith(shown)
        assert shown + detokenizer.finish() == text
