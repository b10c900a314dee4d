from __future__ import annotations

import os
import struct
import subprocess
import sys
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd_ray.errors import InvalidRequest
from cpd_ray.ids import KEY_BYTES, BlockKey
from cpd_ray.tokens import pack, unpack
from kv.fingerprint import Field, fingerprint
from kv.keys import block_keys, extend, root_key

ROOT = root_key(model="m", revision="r", dtype="bfloat16", block_size=4)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def by_definition(root: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    keys, key = [], root
    for i in range(len(tokens) // block_size):
        key = sha256(key + struct.pack(f"<{block_size}I", *tokens[i * block_size : (i + 1) * block_size])).digest()[:KEY_BYTES]
        keys.append(key)
    return keys


@given(token_lists, st.integers(1, 9))
def test_keys_follow_the_definition(tokens: list[int], block_size: int) -> None:
    assert block_keys(ROOT, pack(tokens), block_size) == by_definition(ROOT, tokens, block_size)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 7, 8, 9])
def test_only_full_blocks_have_keys(count: int) -> None:
    assert len(block_keys(ROOT, pack(range(count)), 4)) == count // 4


@given(token_lists)
def test_any_buffer_of_the_same_tokens_has_the_same_keys(tokens: list[int]) -> None:
    buffer = pack(tokens)
    expected = block_keys(ROOT, buffer, 4)
    assert block_keys(ROOT, memoryview(buffer), 4) == expected
    assert block_keys(ROOT, unpack(buffer), 4) == expected
    assert block_keys(ROOT, memoryview(bytearray(buffer)), 4) == expected


@given(token_lists, st.integers(0, 40), st.integers(1, 9))
def test_a_chain_can_be_continued_anywhere(tokens: list[int], known: int, block_size: int) -> None:
    whole = block_keys(ROOT, pack(tokens), block_size)
    known = min(known, len(whole))
    assert whole[:known] + extend(ROOT, whole[:known], unpack(pack(tokens)), block_size) == whole


def test_a_chain_cannot_be_longer_than_its_tokens() -> None:
    keys = block_keys(ROOT, pack(range(8)), 4)
    with pytest.raises(ValueError, match="2 keys"):
        extend(ROOT, keys, pack(range(7)), 4)


@given(token_lists.filter(bool), st.data())
def test_a_changed_token_changes_its_block_and_all_after(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[place] ^= 1
    before, after = block_keys(ROOT, pack(tokens), 4), block_keys(ROOT, pack(changed), 4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < place // 4 for i in range(len(before))]


@pytest.mark.parametrize("nbytes", [1, 2, 3, 17])
def test_a_part_of_a_token_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidRequest):
        block_keys(ROOT, bytes(nbytes), 4)


FIELDS: dict[str, list[Field]] = {
    "model": ["m", "m2", ""],
    "revision": ["r", "", None],
    "dtype": ["bfloat16", "float32"],
    "block_size": [4, 64],
    "adapter": [None, "", "a"],
    "salt": [None, "", "a", "\ud800", "0"],
    "layout_version": [1, 2],
}


def test_every_field_separates_and_none_is_not_empty() -> None:
    default: dict[str, Field] = {name: values[0] for name, values in FIELDS.items()}
    variants = [default] + [{**default, name: value} for name, values in FIELDS.items() for value in values[1:]]
    roots = [root_key(**variant) for variant in variants]  # type: ignore[arg-type]
    assert len(set(roots)) == len(roots)
    assert all(len(root) == KEY_BYTES for root in roots)


few = st.sampled_from(["", "a", "b", "ab", "0"])
fields = st.dictionaries(few, few | st.none() | st.integers(-1, 1), max_size=2)


@given(few, fields, few, fields)
def test_fingerprints_are_equal_only_for_equal_fields(
    domain: str, some: dict[str, Field], other: str, others: dict[str, Field]
) -> None:
    same = (domain, list(some.items())) == (other, list(others.items()))
    assert (fingerprint(domain, some) == fingerprint(other, others)) == same
    assert fingerprint(domain, some) == fingerprint(domain, dict(some))


def test_fields_cannot_run_into_one_another() -> None:
    assert fingerprint("d", {"a": "bc", "d": "e"}) != fingerprint("d", {"ab": "c", "d": "e"})
    assert fingerprint("d", {"a": "b", "c": "d"}) != fingerprint("d", {"a": "bcd"})
    assert fingerprint("d", {"a": "1"}) != fingerprint("d", {"a": 1})


PRINT_LAST_KEY = """
from cpd_ray.tokens import pack
from kv.keys import block_keys, root_key
root = root_key(model="m", revision=None, dtype="float32", block_size=4, salt="s")
print(block_keys(root, pack(range(9)), 4)[-1].hex())
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_keys_are_the_same_in_every_process(seed: str) -> None:
    """Whatever seed Python's own hash has there."""
    program = [sys.executable, "-c", PRINT_LAST_KEY]
    printed = subprocess.run(program, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout
    here = block_keys(root_key(model="m", revision=None, dtype="float32", block_size=4, salt="s"), pack(range(9)), 4)
    assert printed.strip() == here[-1].hex()


def test_keys_are_fixed_for_good() -> None:
    """A change of these would silently turn every cache cold: it needs a new layout version."""
    root = root_key(model="m", revision=None, dtype="float32", block_size=4, layout_version=1)
    assert root.hex() == "8c2aa38f3b167ff894707c4fc8cb3f22"
    assert [key.hex() for key in block_keys(BlockKey(root), pack(range(8)), 4)] == [
        "130015eb7fb8397f485b44ed61bad76e",
        "673795d8bc0cb455245f69c271bc9f4e",
    ]
