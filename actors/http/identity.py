"""Who asks: API keys, tenants, and the cache salt that the server derives for them.

Owns keys (hashed only) and derivation. Decides no rate and no priority. Invariant: a client can't choose its salt: two tenants never
get the same one, whatever `cache_salt` they send, and a key is compared in constant time with every record.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cpd_ray.errors import ConfigError, Unauthorized

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from. Without keys everyone is the tenant "", and may do everything."""

    tenant: str = ""
    admin: bool = True


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """`digest`: SHA-256 of the key. `admin` keys may also act on what all tenants share."""

    tenant: str
    digest: bytes
    admin: bool = False


class KeyRing:
    """Known keys. Raises ConfigError when a key stands there twice."""

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        self._records = tuple(records)
        if not self._records:
            raise ConfigError(
                "no API key is given; leave the keys out altogether to serve without them", param="http.api_keys_file"
            )
        if len({r.digest for r in self._records}) != len(self._records):
            raise ConfigError("an API key is given twice", param="http.api_keys_file")

    @classmethod
    def parse(cls, text: str) -> KeyRing:
        """From lines `tenant:sha256-hex` or `tenant:sha256-hex:admin`; blank lines and those with # are skipped. Raises ConfigError."""
        records = []
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            tenant, _, rest = line.partition(":")
            digest, _, mark = rest.partition(":")
            if not tenant.strip() or not _DIGEST.fullmatch(digest.strip()) or mark.strip() not in ("", "admin"):
                raise ConfigError(
                    f"API keys, line {number}: must be tenant:sha256-hex or tenant:sha256-hex:admin", param="http.api_keys_file"
                )
            records.append(KeyRecord(tenant.strip(), bytes.fromhex(digest.strip()), mark.strip() == "admin"))
        return cls(records)

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(r.tenant for r in self._records)

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller behind an `Authorization` header; raises Unauthorized."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is needed: Authorization: Bearer <key>", code="missing_api_key")
        digest = hash_key(key.strip())
        found: KeyRecord | None = None
        for record in self._records:  # all of them, always
            if hmac.compare_digest(record.digest, digest):
                found = record
        if found is None:
            raise Unauthorized("this API key is not known", code="invalid_api_key")
        return Caller(found.tenant, found.admin)


def hash_key(key: str) -> bytes:
    """What is kept of a key. Keys are long random strings, so a plain hash can't be searched."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def derive_salt(secret: bytes, tenant: str, client_salt: str | None) -> str | None:
    """The salt under which a tenant's prompts are cached: HMAC over tagged, length-prefixed fields. None: the cache that everyone
    shares when there are no tenants and the client asks for no separation."""
    if not tenant and client_salt is None:
        return None
    mac = hmac.new(secret, b"cpd-salt-1", hashlib.sha256)
    for tag, value in ((b"t", tenant), (b"c", client_salt)):
        data = b"" if value is None else value.encode()
        mac.update(tag + (b"0" if value is None else b"1") + len(data).to_bytes(8, "big") + data)
    return mac.hexdigest()
