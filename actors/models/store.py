"""A cache folder of prepared models: each is made once, checked on every use, and never seen half made.

Owns the folder's protocol (lock, build aside, manifest, atomic rename); knows nothing of what is built.
Invariant: a folder without a manifest whose checksums hold is not there as far as callers can see.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from cpd_ray.errors import ModelUnavailable

CACHE_VARIABLE = "CPD_RAY_CACHE"
MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """Where prepared models live: `CPD_RAY_CACHE`, else `~/.cache/cpd-ray`."""
    chosen = environment.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "cpd-ray"


def sha256_of(path: Path) -> str:
    """A file's SHA-256 as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """`recipe` says what the folder was made from; a folder made by another recipe is made anew. `files`: name -> SHA-256."""

    recipe: dict[str, Any]
    files: dict[str, str]


def _manifest_of(folder: Path, recipe: dict[str, Any]) -> Manifest:
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return Manifest(recipe, {name: sha256_of(folder / name) for name in names})


def intact(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether the folder was made by this recipe and every file still holds what was written."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return False
    if manifest.recipe != recipe or not manifest.files:
        return False
    return all((folder / name).is_file() and sha256_of(folder / name) == digest for name, digest in manifest.files.items())


class ModelStore:
    """Prepared model folders under one root. Safe against other processes that prepare the same model."""

    def __init__(self, root: Path, *, lock_timeout_s: float = 1800.0) -> None:
        self._root = root
        self._lock_timeout_s = lock_timeout_s

    def ensure(self, name: str, recipe: dict[str, Any], build: Callable[[Path], None]) -> Path:
        """The folder `name`, built by `build(empty folder)` unless an intact one is there. Raises ModelUnavailable."""
        final = self._root / name
        if intact(final, recipe):
            return final
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with FileLock(self._root / f"{name}.lock", timeout=self._lock_timeout_s):
                if not intact(final, recipe):
                    self._build(final, recipe, build)
        except Timeout as error:
            waited = f"another process has been preparing {name!r} for {self._lock_timeout_s:.0f} s"
            raise ModelUnavailable(f"{waited}; end it and try again") from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ModelUnavailable(
                f"the model cache can't be written ({reason}); set {CACHE_VARIABLE} to a folder with room"
            ) from error
        return final

    def _build(self, final: Path, recipe: dict[str, Any], build: Callable[[Path], None]) -> None:
        partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=self._root))
        try:
            build(partial)
            (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(_manifest_of(partial, recipe)), indent=1))
            partial.chmod(0o755)
            for file in partial.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
