"""From the name in `model:` to a local folder of config, safetensors and tokenizer.

Owns what the names mean: `smollm2`, `tiny` and `tiny:<sizes>`, a folder, a hub id (`org/name` or `org/name@revision`).
Invariant: a returned folder holds a `config.json`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from actors.models import smollm2
from actors.models.store import ModelStore, default_cache_dir
from actors.models.tiny import TinySpec, write_tiny
from cpd_ray.errors import ModelUnavailable

log = logging.getLogger(__name__)

_HUB_SIZES = ["config.json", "generation_config.json"]
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve(model: str, cache_dir: Path | None = None, *, weights: bool = True) -> Path:
    """The model's folder, made or fetched when it isn't there yet; without `weights`, of a hub model only what tells its sizes. Raises
    ModelUnavailable, or ConfigError for a bad `tiny` spec."""
    store = ModelStore(cache_dir or default_cache_dir(os.environ))
    if model == "smollm2":
        return store.ensure(smollm2.FOLDER, smollm2.RECIPE, smollm2.write_smollm2)
    if model == "tiny" or model.startswith("tiny:"):
        spec = TinySpec.parse(model)
        return store.ensure(spec.folder, spec.recipe, lambda folder: write_tiny(spec, folder))
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable("the model folder holds no config.json; point `model` at a folder saved by transformers")
        return path.resolve()
    if path.is_absolute() or model.startswith(("./", "../", "~")):
        raise ModelUnavailable("the model folder does not exist; point `model` at a folder saved by transformers")
    return _from_hub(model, _HUB_FILES if weights else _HUB_SIZES)


def _from_hub(model: str, files: list[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repository, _, revision = model.partition("@")
    advice = "use `smollm2`, `tiny`, or a local folder instead"
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except HFValidationError as error:
        raise ModelUnavailable(f"{model!r} is neither a known model, nor a folder, nor a hub id (org/name); {advice}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError, ConnectionError) as error:
        log.info("hub download of %s failed: %s", model, error)
        raise ModelUnavailable(f"{model!r} is not in the local hub cache and the model hub can't be reached; {advice}") from error
    except HfHubHTTPError as error:
        log.info("hub download of %s failed: %s", model, error)
        status = error.response.status_code
        hint = f"check the name, and HF_TOKEN for a gated model; or {advice}"
        raise ModelUnavailable(f"the model hub answers {status} for {model!r}: {hint}") from error
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"the hub's {model!r} holds no config.json: it is no transformers model; {advice}")
    return folder
