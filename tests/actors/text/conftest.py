"""Small tokenizers of each kind that decoder-only models use, trained here on the spot: same input, same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from actors.text.segments import _PATTERNS

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\nThen it sleeps; 12345 sheep count it.\n",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\r\n",
    "user assistant system Hello, world! What's the answer? I'll say 42.\n",
    "日本語のテキストと中文文本还有 emoji 👍🏽 and naïve café Ünïcödé.\n",
    "a!\n \n.b!\n \n.c!\n \n.\n\n\n  \n",
    "Zürich <b>html</b> | [INST] & {json: [1, 2, 3]}\n",
] * 4
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _byte_level(pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def gpt2_prefix_space() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def digits() -> Tokenizer:
    return _byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    )


def llama3() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(_PATTERNS[0]), "isolated")
    tokenizer = _byte_level(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
    bos = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[bos])
    return tokenizer


def qwen() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(_PATTERNS[1]), "isolated")
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return _byte_level(pre, normalizers.NFC())


def _sentencepiece(prepend_scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", *SPECIALS, *byte_tokens], limit_alphabet=80, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # the trainer adds byte tokens as special ones; models have them as plain vocabulary
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


def metaspace_first() -> Tokenizer:
    return _sentencepiece("first")


def metaspace_always() -> Tokenizer:
    return _sentencepiece("always")


def llama2_legacy() -> Tokenizer:
    tokenizer = _sentencepiece("first")
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = None
    state["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    return Tokenizer.from_str(json.dumps(state))


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def awkward() -> Tokenizer:
    """Added tokens that overlap, contain each other, swallow spaces or are searched in normalised text."""
    tokenizer = gpt2()
    tokenizer.add_special_tokens(
        [
            AddedToken("<|im_start|>user", special=True, normalized=False),
            AddedToken("x<|im_end|>", special=True, normalized=False),
            AddedToken("<|r|>", special=True, normalized=False, rstrip=True),
            AddedToken("<|w|>", special=True, normalized=False, single_word=True),
            AddedToken("<|b", special=True, normalized=False),
            AddedToken("<|b<|im_end|>", special=True, normalized=False),
            AddedToken("|>", special=False, normalized=False),
            AddedToken("p<|im", special=False, normalized=True),
            AddedToken("sheep", special=False, normalized=True),
            AddedToken("  ", special=False, normalized=True),
        ]
    )
    return tokenizer


def left_strip() -> Tokenizer:
    tokenizer = gpt2()
    tokenizer.add_special_tokens([AddedToken("<|l|>", special=True, normalized=False, lstrip=True)])
    tokenizer.add_tokens([AddedToken("Then", normalized=True, lstrip=True, single_word=True)])
    return tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    f.__name__: f
    for f in (
        gpt2, gpt2_prefix_space, digits, llama3, qwen, metaspace_first, metaspace_always, llama2_legacy, unigram, awkward, left_strip,
    )
}  # fmt: skip


@pytest.fixture(scope="session")
def builders() -> dict[str, Callable[[], Tokenizer]]:
    return BUILDERS


@pytest.fixture(scope="session", params=sorted(BUILDERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind in turn."""
    return BUILDERS[request.param]()


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model folder's text files, as transformers reads them too."""

    def make(name: str, *, template: str | None = CHATML, config: dict[str, object] | None = None) -> Path:
        folder = tmp_path_factory.mktemp(name)
        BUILDERS[name]().save(str(folder / "tokenizer.json"))
        written = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
        if template is not None:
            written["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps({**written, **(config or {})}))
        return folder

    return make


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return gpt2()
