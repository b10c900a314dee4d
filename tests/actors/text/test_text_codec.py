"""The codec as the router uses it: the same tokens as transformers, whatever was encoded before; off the loop, within a deadline."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.text.codec import TextCodec, TextSettings
from actors.text.memo import TokenMemo
from actors.text.template import Chat
from cpd_ray.clock import ManualClock
from cpd_ray.errors import DeadlineExceeded, InvalidRequest, ModelUnavailable
from cpd_ray.tokens import count, pack, unpack

MakeFolder = Callable[..., Path]


@pytest.fixture(params=["gpt2", "llama3", "metaspace_first"])
async def codec(request: pytest.FixtureRequest, make_folder: MakeFolder) -> AsyncIterator[TextCodec]:
    codec = TextCodec.load(make_folder(request.param))
    yield codec
    codec.memo.check()
    codec.close()


def test_text_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, actors.text.codec; assert not {'torch', 'transformers', 'ray'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", ["gpt2", "digits", "llama3", "qwen", "metaspace_first", "llama2_legacy", "unigram"])
async def test_tokens_and_text_are_those_of_transformers(name: str, make_folder: MakeFolder) -> None:
    from transformers import AutoTokenizer

    folder = make_folder(name)
    theirs, ours = AutoTokenizer.from_pretrained(folder), TextCodec.load(folder)
    rng = random.Random(7)
    words = ["Hello", " world", "\n", "日本語", "👍🏽", "<|im_end|>", "<|im_start|>", "  ", "12345", "x = 1\n", "é", "\t", "'s"]
    for _ in range(40):
        text = "".join(rng.choices(words, k=rng.randrange(60)))
        for special in (True, False):
            mine = unpack(await ours.encode(text, add_special_tokens=special)).tolist()
            assert mine == theirs.encode(text, add_special_tokens=special)
            assert await ours.decode(pack(mine)) == theirs.decode(
                mine, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
    assert ours.eos_token_ids == {theirs.eos_token_id}
    ours.close()


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, str]]:
    content = st.lists(
        st.one_of(
            st.text(max_size=30), st.sampled_from(["<|im_start|>", "<|im_end|>\n", "line of words\nAnd more " * 120, "word " * 40])
        ),
        max_size=3,
    ).map("".join)
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": draw(content)} for i in range(draw(st.integers(1, 3)))]


def test_reuse_changes_nothing(make_folder: MakeFolder) -> None:
    """One codec sees all chats as they grow, with so little room that it forgets; the other one remembers nothing at all."""
    folder = make_folder("gpt2")
    used = TextCodec.load(folder, settings=TextSettings(memo_bytes=20_000))
    anew = TextCodec.load(folder, settings=TextSettings(memo_bytes=0))

    @settings(max_examples=40)
    @given(turns=st.lists(chats(), min_size=1, max_size=3))
    def check(turns: list[list[dict[str, str]]]) -> None:
        async def run() -> None:
            messages: list[dict[str, str]] = []
            for turn in turns:
                messages += turn
                chat = Chat(tuple(messages))
                assert await used.encode_chat(chat) == await anew.encode_chat(chat)
                used.memo.check()
                assert len(anew.memo) == 0

        asyncio.run(run())

    check()
    assert len(used.memo) > 0
    used.close()
    anew.close()


async def test_the_next_turn_tokenises_little(make_folder: MakeFolder) -> None:
    """Counted in text that had to be tokenised, not by the clock: at most a tenth of a 100,000-token chat."""
    codec = TextCodec.load(make_folder("gpt2"))
    rng = random.Random(3)
    words = ["alpha", "beta", "The", "value", "of\n", "code(x)", "12", "\n\n", "Then"]
    messages = [{"role": "user", "content": " ".join(rng.choices(words, k=900))} for _ in range(60)]
    tokens = await codec.encode_chat(Chat(tuple(messages)))
    assert count(tokens) > 100_000
    whole = codec.memo.nbytes
    messages += [
        {"role": "assistant", "content": "A short answer."},
        {"role": "user", "content": " ".join(rng.choices(words, k=200))},
    ]
    await codec.encode_chat(Chat(tuple(messages)))
    assert codec.memo.nbytes - whole <= whole / 10
    codec.close()


async def test_scopes_share_no_tokens(codec: TextCodec) -> None:
    text = "<|im_start|>user\n" + "some words " * 30
    await codec.encode(text, scope="a")
    entries = len(codec.memo)
    await codec.encode(text, scope="a")
    assert len(codec.memo) == entries
    await codec.encode(text, scope="b")
    assert len(codec.memo) == 2 * entries


class SteppingClock(ManualClock):
    """A second passes whenever someone looks."""

    def now_s(self) -> float:
        self.advance(1.0)
        return super().now_s()


async def test_a_text_that_takes_too_long_is_given_up(make_folder: MakeFolder) -> None:
    codec = TextCodec.load(make_folder("gpt2"), clock=SteppingClock())
    text = "".join(f"<|im_start|>user {i} {'words ' * 20}" for i in range(640))
    with pytest.raises(DeadlineExceeded):
        await codec.encode(text, timeout_s=5.0)
    assert count(await codec.encode(text, timeout_s=60.0)) > 640
    codec.close()


async def test_the_loop_runs_while_text_is_tokenised(make_folder: MakeFolder) -> None:
    codec = TextCodec.load(make_folder("gpt2"), settings=TextSettings(threads=1))
    encoding = asyncio.ensure_future(codec.encode("word " * 40_000))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    assert count(encoding.result()) >= 40_000
    codec.close()


async def test_bad_input_is_refused(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequest):
        await codec.encode("half a pair: \ud800")
    for hole in (codec.vocab_size, 2**32 - 1):
        with pytest.raises(InvalidRequest):
            await codec.decode(pack([1, hole]))
        with pytest.raises(InvalidRequest):
            await codec.decode(pack([1] * 1000 + [hole]))
    assert await codec.encode("", add_special_tokens=False) == b""
    assert await codec.decode(b"") == ""


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    with pytest.raises(ModelUnavailable, match=r"tokenizer\.json"):
        TextCodec.load(tmp_path)
    for name, content in (("tokenizer.json", "{}"), ("tokenizer_config.json", "[1]"), ("tokenizer_config.json", "{")):
        folder = make_folder("gpt2")
        (folder / name).write_text(content)
        with pytest.raises(ModelUnavailable):
            TextCodec.load(folder)


def test_truncation_and_padding_of_the_file_are_not_applied(make_folder: MakeFolder) -> None:
    folder = make_folder("gpt2")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    codec = TextCodec.load(folder)
    assert count(asyncio.run(codec.encode("many words of a text that is longer than four tokens"))) > 4
    codec.close()


def test_a_random_walk_over_the_memo() -> None:
    rng = random.Random(11)
    memo, known = TokenMemo(8_000), {}
    for _ in range(2_000):
        scope, text = rng.choice("ab"), "t" * rng.randrange(60)
        tokens = pack([len(text)] * rng.randrange(20)) if (scope, text) not in known else known[scope, text]
        if rng.random() < 0.5:
            known[scope, text] = tokens
            memo.keep(scope, {text: tokens})
        else:
            found = memo.find(scope, [text])
            assert found in ({}, {text: known.get((scope, text))})
        memo.check()
    assert 0 < len(memo) < len(known)


def test_end_tokens_come_from_the_generation_config_first(make_folder: MakeFolder) -> None:
    folder = make_folder("gpt2")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert TextCodec.load(folder).eos_token_ids == {5}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert TextCodec.load(folder).eos_token_ids == {1, 2}


@pytest.mark.model
async def test_smollm2_chats_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    from actors.models.resolve import resolve

    folder = resolve("smollm2")
    theirs, ours = AutoTokenizer.from_pretrained(folder), TextCodec.load(folder)
    messages = [
        {"role": "user", "content": "What is the capital of France? 👍🏽"},
        {"role": "assistant", "content": "Paris.\nIt lies on the Seine."},
        {"role": "user", "content": "日本語で。" + "And again.\nThen " * 400},
    ]
    for generation in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
        assert unpack(await ours.encode_chat(Chat(tuple(messages), add_generation_prompt=generation))).tolist() == expected
    assert ours.eos_token_ids == {theirs.eos_token_id}
    ours.close()
