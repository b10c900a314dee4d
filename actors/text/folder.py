"""A model folder's text side: what `tokenizer.json`, `tokenizer_config.json`, the templates and `generation_config.json` say.

Owns the reading. Encodes and renders nothing. Invariant: a `TextFolder` is complete: whoever holds one needs the disk no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpd_ray.errors import ModelUnavailable

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TextFolder:
    """`tokenizer`: the text of tokenizer.json. `special_tokens`: by their names in chat templates (`bos_token`, ...). `templates`: chat
    templates by name, `default` among them when there is any. `eos_token_ids`: from the generation or model configuration, if they say."""

    tokenizer: str
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    eos_token_ids: tuple[int, ...]


def read_folder(folder: Path) -> TextFolder:
    """Read the files; raises ModelUnavailable, naming the file, when one is missing that is needed or can't be understood."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnavailable(
            "the model folder has no tokenizer.json; load it once with transformers and save_pretrained() it", param="model"
        )
    config = _read_object(folder / "tokenizer_config.json")
    return TextFolder(
        tokenizer=_read_text(path),
        special_tokens=_special_tokens(config),
        templates=_templates(folder, config),
        eos_token_ids=_eos_ids(folder),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"the model's {path.name} can't be read ({type(error).__name__})", param="model") from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelUnavailable(f"the model's {path.name} is no JSON", param="model") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"the model's {path.name} is no JSON object", param="model")
    return content


def _content(token: Any) -> str | None:
    """A special token is written as its text, or as an object with its text in `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: text for name in _SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        found |= {str(name): text for name, token in extra.items() if (text := _content(token)) is not None}
    return found


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    written = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(written, str):
        templates["default"] = written
    elif isinstance(written, list):
        entries = [e for e in written if isinstance(e, dict)]
        templates |= {str(e["name"]): str(e["template"]) for e in entries if "name" in e and "template" in e}
    if (single := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(single)
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = _read_text(extra)
    return templates


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        ids = _read_object(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)
    return ()
