"""A digest of named fields: how everything that KV depends on becomes a few bytes.

Owns the encoding alone. Invariant: two lists of fields have equal encodings only when they are equal; None, "" and 0 all differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

Field = str | int | None


def fingerprint(domain: str, fields: Mapping[str, Field]) -> bytes:
    """SHA-256 of the domain and the fields in the order given, each tagged and length-prefixed."""
    return sha256(_field("domain", domain) + b"".join(_field(name, value) for name, value in fields.items())).digest()


def _field(name: str, value: Field) -> bytes:
    match value:
        case None:
            kind, payload = b"n", b""
        case str():
            kind, payload = b"s", value.encode("utf-8", "surrogatepass")  # JSON may carry lone surrogates
        case int():
            kind, payload = b"i", str(value).encode()
    tag = name.encode()
    return len(tag).to_bytes(4, "little") + tag + kind + len(payload).to_bytes(8, "little") + payload
