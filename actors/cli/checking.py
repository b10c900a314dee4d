"""What is wrong with a configuration file, and what it comes to, without a cluster.

Owns the look at a whole file: each application's arguments, the knobs of its deployments, and whether its applications fit each other and the
model. What is right for one application is `cpd_ray.config`'s. Invariant: all problems are found in one go, each named by its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from actors.models.facts import ModelFacts, model_facts
from actors.models.resolve import resolve
from actors.names import Names
from cpd_ray.config import CPDConfig, RuntimeConfig, check_model, load, load_runtime
from cpd_ray.errors import ConfigError, CPDError
from cpd_ray.types import Role
from kv.layout import BlockLayout

KV, SYSTEM = "serve_app:build_kv", "serve_app:build"
SHARED = ("model.id", "model.revision", "model.dtype", "cache.block_tokens")
"""What the two applications of a system must agree on: blocks of one are no use to the other else."""


@dataclass(frozen=True, slots=True)
class CheckedApplication:
    """An application of ours. `runtime`: the router's knobs; `model`: its model's facts, when it was asked for them."""

    name: str
    import_path: str
    config: CPDConfig
    runtime: RuntimeConfig
    model: ModelFacts | None = None

    @property
    def is_system(self) -> bool:
        """Router and workers, not the caches."""
        return self.import_path == SYSTEM

    @property
    def bytes_per_token(self) -> int | None:
        """Of KV."""
        if self.model is None:
            return None
        facts, config = self.model, self.config
        return BlockLayout(
            facts.layers, facts.kv_heads, config.cache.block_tokens, facts.head_dim, config.model.dtype
        ).bytes_per_token


@dataclass(frozen=True, slots=True)
class Checked:
    """`others`: applications of the file that are not ours, and are left alone. `problems`: one line each."""

    file: Path
    applications: tuple[CheckedApplication, ...]
    others: tuple[str, ...]
    problems: tuple[str, ...]


FactsOf = Callable[[CPDConfig], ModelFacts]


def check_file(file: Path, *, with_model: bool = True, facts_of: FactsOf | None = None) -> Checked:
    """Raises ConfigError only for what is no configuration file at all. `facts_of`: where the model's sizes come from."""
    content = _read(file)
    problems = _serve_problems(content)
    ours: list[CheckedApplication] = []
    others: list[str] = []
    for number, application in enumerate(content["applications"]):
        if not isinstance(application, Mapping) or application.get("import_path") not in (KV, SYSTEM):
            others.append(str(application.get("name", number)) if isinstance(application, Mapping) else str(number))
            continue
        found = _application(application, f"applications.{number}", problems)
        if found is not None:
            ours.append(found)
    if not ours and not problems:
        problems.append(f"applications: none has the import_path {SYSTEM} or {KV}: nothing here is for this project")
    _check_pairs(ours, problems)
    if with_model:
        ours = [_with_model(app, facts_of or facts_without_weights, problems) for app in ours]
    return Checked(file, tuple(ours), tuple(others), tuple(problems))


def facts_without_weights(config: CPDConfig) -> ModelFacts:
    """The model's sizes from what is on this machine, else from the hub's config.json alone. Raises ModelUnavailable, ConfigError."""
    name = config.model.id if config.model.revision is None else f"{config.model.id}@{config.model.revision}"
    return model_facts(resolve(name, Path(config.model.cache_dir) if config.model.cache_dir else None, weights=False))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"the configuration file {file} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("applications"), list) or not content["applications"]:
        raise ConfigError(f"{file} names no applications: it needs a list `applications`, each with `name` and `import_path`")
    return content


def _serve_problems(content: Mapping[str, Any]) -> list[str]:
    """What Serve itself would refuse."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    from cpd_ray.config import explain

    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        return explain(error).split("; ")
    return []


def _lines(where: str, error: CPDError) -> list[str]:
    """An error's parts, each with the path of where it was found."""
    return [f"{where}{line}" for line in error.message.split("; ")]


def _application(application: Mapping[str, Any], where: str, problems: list[str]) -> CheckedApplication | None:
    runtime = _check_deployments(application, where, problems)
    try:
        config = load(_mapping(application.get("args")))
    except ConfigError as error:
        problems += _lines(f"{where}.args.", error)
        return None
    path, name = str(application["import_path"]), str(application.get("name", "default"))
    names = Names(config.name)
    expected = names.app if path == SYSTEM else names.kv_app
    if name != expected:
        problems.append(f"{where}.name: {name} would not be found by its other half; args.name {config.name} goes with {expected}")
    return CheckedApplication(name, path, config, runtime or config.runtime)


def _mapping(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError("must be a mapping of keys")
    return value


def _check_deployments(application: Mapping[str, Any], where: str, problems: list[str]) -> RuntimeConfig | None:
    """The router's knobs, if the file has any."""
    names, found = Names("any"), None
    tuned = {names.router, *(names.worker(role) for role in Role)}
    known = tuned if application["import_path"] == SYSTEM else {names.kv_cache, names.directory}
    for number, deployment in enumerate(application.get("deployments") or []):
        name = deployment.get("name") if isinstance(deployment, Mapping) else None
        if name not in known:
            problems.append(
                f"{where}.deployments.{number}.name: {name!r} is no deployment of this application; there are {_listed(known)}"
            )
            continue
        try:
            runtime = load_runtime(_mapping(deployment.get("user_config") if name in tuned else None))
            found = runtime if name == names.router and deployment.get("user_config") is not None else found
        except ConfigError as error:
            problems += _lines(f"{where}.deployments.{number}.user_config.", error)
    return found


def _check_pairs(applications: list[CheckedApplication], problems: list[str]) -> None:
    """Whether the applications of one system agree on what they share."""
    caches = {app.config.name: app.config for app in applications if not app.is_system}
    for app in applications:
        other = caches.get(app.config.name)
        if not app.is_system or other is None:
            continue
        for path in SHARED:
            mine, theirs = _at(app.config, path), _at(other, path)
            if mine != theirs:
                kv_app = Names(app.config.name).kv_app
                problems.append(
                    f"{path}: {mine} in application {app.name}, but {theirs} in {kv_app}: the cache would never be used"
                )


def _at(config: CPDConfig, path: str) -> Any:
    section, _, key = path.partition(".")
    return getattr(getattr(config, section), key)


def _with_model(app: CheckedApplication, facts_of: FactsOf, problems: list[str]) -> CheckedApplication:
    try:
        facts = facts_of(app.config)
        check_model(app.config, facts)
    except CPDError as error:
        problems += _lines(f"application {app.name}: ", error)
        return app
    return replace(app, model=facts)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
