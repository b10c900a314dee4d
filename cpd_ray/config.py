"""Configuration: one small model an owner, composed; what a YAML file, `serve deploy` arguments and tests all read.

Owns the shape, the defaults and the refusal of what can't work (`load`, `check_model`, `check_node`). Reads no environment.
Invariant: an unknown key is an error, and every refusal names the key's path and what would be right.

`runtime` holds the knobs that `user_config` may change without a restart; everything else restarts its owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cpd_ray.errors import ConfigError
from cpd_ray.types import Role

Positive = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]

FLASH_BLOCK_TOKENS = 256
"""flash-attn 2's paged kernels take blocks of a multiple of this many tokens."""
MAX_STORE_SHARE = 0.75
"""The object store spills or over-commits silently near its end, so slabs stay below this share of it."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """Which model, and how it runs. `id`: `smollm2`, `tiny[:spec]`, a local folder or a hub id. `max_model_len`: tokens of prompt + answer; the
    model's own limit when absent."""

    id: str = "smollm2"
    served_name: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_model_len: Positive | None = None
    attention: Literal["auto", "sdpa", "cpu_paged", "flash_attn", "varlen_attn", "fa4"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cache_dir: str | None = None
    threads: Positive | None = None

    @property
    def name(self) -> str:
        return self.served_name or self.id


class CacheConfig(Section):
    """`block_tokens`: tokens in a block of KV. `pool_tokens`: KV that each worker's own pool holds, when the role doesn't say."""

    block_tokens: Positive = 64
    pool_tokens: Positive = 32_768


class SlabConfig(Section):
    """A node's DRAM tier. `gib` is the slab's size; or `store_share` of the node's object store. `extent_mib`: size of one object.

    A reservation not committed within `reservation_ttl_s` is quarantined; `writer_share` of the slots is what one writer may have reserved or
    quarantined at once; `pin_share` of them may be pinned by `/v1/cpd/warm`. `cpus`: logical CPUs of the KV-cache actor.
    """

    gib: Annotated[float, Field(gt=0)] | None = None
    store_share: Annotated[float, Field(gt=0, le=MAX_STORE_SHARE)] = 0.5
    extent_mib: Positive = 256
    lease_ttl_s: PositiveSeconds = 10.0
    lease_grace_s: PositiveSeconds = 2.0
    reservation_ttl_s: PositiveSeconds = 10.0
    writer_share: Share = 0.5
    pin_share: Share = 0.25
    eviction: Literal["default", "lru", "lfu"] = "default"
    cpus: Annotated[float, Field(gt=0)] = 0.5


class TransferConfig(Section):
    """`transport`: how other nodes' slabs and workers' pools are read. `checksums`: verify every block read (slower)."""

    transport: Literal["nixl", "inprocess"] = "nixl"
    timeout_s: PositiveSeconds = 10.0
    concurrency: Positive = 4
    checksums: bool = False
    copy_after_reads: Positive = 2
    copy_share: Share = 0.25


class RoleConfig(Section):
    """One pool of workers. `replicas` 0 switches the role off; `tensor_parallel` ranks a replica; `pool_tokens` overrides `cache.pool_tokens`;
    `gpus_per_rank` 0 runs on CPU; `labels`: node labels that a replica's node must carry."""

    replicas: Annotated[int, Field(ge=0)] = 1
    tensor_parallel: Positive = 1
    data_parallel: Positive = 1
    pool_tokens: Positive | None = None
    gpus_per_rank: Annotated[float, Field(ge=0)] = 0
    cpus_per_rank: Annotated[float, Field(gt=0)] = 1
    labels: dict[str, str] = Field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.data_parallel


class RolesConfig(Section):
    pre_prefill: RoleConfig = RoleConfig()
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()

    def get(self, role: Role) -> RoleConfig:
        by_role: dict[Role, RoleConfig] = {Role.PRE_PREFILL: self.pre_prefill, Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return by_role[role]

    @model_validator(mode="after")
    def _someone_answers(self) -> RolesConfig:
        if not (self.pre_prefill.replicas or self.prefill.replicas):
            raise ValueError(
                "prefill.replicas and pre_prefill.replicas are both 0: no worker could take a prompt; set one to 1 or more"
            )
        if not self.decode.replicas:
            raise ValueError("decode.replicas is 0: no worker could stream an answer; set it to 1 or more")
        return self


class EngineConfig(Section):
    """A worker's step loop. `step_tokens`: new tokens in one step at most; a chunk of a prompt is `chunk_tokens` when others wait and up to
    `step_tokens` when alone. `order`: `shortest` remaining first with aging (`aging_s` of waiting outweigh one second of work) or `fcfs`."""

    step_tokens: Positive = 2048
    chunk_tokens: Positive = 512
    max_running: Positive = 64
    order: Literal["shortest", "fcfs"] = "shortest"
    aging_s: PositiveSeconds = 10.0

    @model_validator(mode="after")
    def _chunks_fit(self) -> EngineConfig:
        if self.chunk_tokens > self.step_tokens:
            raise ValueError(f"chunk_tokens ({self.chunk_tokens}) must be at most step_tokens ({self.step_tokens})")
        return self


class RoutingConfig(Section):
    """`policy`: `cost` (default), `threshold` (the CPD paper's) or a baseline. `threshold`: cold iff cached/total < `cold_ratio` and
    uncached >= `cold_min_uncached_tokens`. `cost`: a request leaves its own pool only for a predicted gain above `spill_after_s`.
    `bounce_tokens`: a worker that finds this many tokens fewer than believed hands the request back once."""

    policy: Literal["cost", "threshold", "round_robin", "affinity", "shared", "affinity_shared"] = "cost"
    cold_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    cold_min_uncached_tokens: Positive = 2500
    spill_after_s: Annotated[float, Field(ge=0)] = 2.0
    bounce_tokens: Positive = 1024


class AdmissionConfig(Section):
    """`max_in_flight` requests over all routers (24 as in the paper), then a queue of `max_queued`, then 429. A request waits at most
    `max_wait_s`; `aging_s` of waiting outweigh one second of predicted work; `tenant_weights`: shares under contention, 1 when absent."""

    max_in_flight: Positive = 24
    max_queued: Annotated[int, Field(ge=0)] = 256
    max_wait_s: PositiveSeconds = 120.0
    aging_s: PositiveSeconds = 10.0
    decode_wait_s: PositiveSeconds = 30.0
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)


class RuntimeConfig(Section):
    """What may change while requests run. `handover_ttl_s`: how long a prefilled request's KV waits for its decode worker."""

    routing: RoutingConfig = RoutingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    engine: EngineConfig = EngineConfig()
    handover_ttl_s: PositiveSeconds = 30.0


class HttpConfig(Section):
    """Limits before any work, and identity. `api_keys_file`: one `tenant:sha256-hex` a line; without keys every client is one tenant."""

    max_body_bytes: Positive = 8 * 1024 * 1024
    max_prompts: Positive = 32
    max_n: Positive = 16
    max_stop: Positive = 16
    request_timeout_s: PositiveSeconds = 600.0
    api_keys_file: str | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None


class CPDConfig(Section):
    """The whole. `name`: prefix of the two applications and of the cache's names, so that two can live on one cluster."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")] = "cpd"
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    slab: SlabConfig = SlabConfig()
    transfer: TransferConfig = TransferConfig()
    roles: RolesConfig = RolesConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    http: HttpConfig = HttpConfig()
    routers: Positive = 1
    router_cpus: Annotated[float, Field(gt=0)] = 0.5

    @model_validator(mode="after")
    def _combinations(self) -> CPDConfig:
        block = self.cache.block_tokens
        if self.model.attention == "flash_attn" and block % FLASH_BLOCK_TOKENS:
            raise ValueError(
                f"cache.block_tokens is {block}, but model.attention flash_attn takes a multiple of {FLASH_BLOCK_TOKENS}: "
                f"set cache.block_tokens to {-(-block // FLASH_BLOCK_TOKENS) * FLASH_BLOCK_TOKENS} or model.attention to varlen_attn"
            )
        if self.model.device == "cpu" and self.model.attention in ("flash_attn", "varlen_attn", "fa4"):
            raise ValueError(
                f"model.attention {self.model.attention} needs a GPU, but model.device is cpu: use auto, sdpa or cpu_paged"
            )
        for role in Role:
            pool = self.pool_tokens(role)
            if pool < 2 * block:
                raise ValueError(f"roles.{role}.pool_tokens is {pool}: a pool needs at least two blocks of {block} tokens")
            if self.model.max_model_len and pool < self.model.max_model_len:
                raise ValueError(
                    f"roles.{role}.pool_tokens is {pool}, less than model.max_model_len {self.model.max_model_len}: "
                    "the longest request would never fit; enlarge the pool (cache.pool_tokens) or shorten the model"
                )
        return self

    def pool_tokens(self, role: Role) -> int:
        """Tokens of KV in one `role` worker's pool."""
        return self.roles.get(role).pool_tokens or self.cache.pool_tokens

    def pool_blocks(self, role: Role) -> int:
        """Whole blocks in one `role` worker's pool."""
        return self.pool_tokens(role) // self.cache.block_tokens


class ModelShape(Protocol):
    """What of a model the configuration is checked against."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def query_heads(self) -> int: ...
    @property
    def max_position(self) -> int: ...


def load(source: Mapping[str, Any] | str | Path | None) -> CPDConfig:
    """From a mapping or a YAML file; raises ConfigError with the path of each wrong key."""
    if source is None:
        return CPDConfig()
    if isinstance(source, (str, Path)):
        source = _read_yaml(Path(source))
    try:
        return CPDConfig.model_validate(dict(source))
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def load_runtime(source: Mapping[str, Any]) -> RuntimeConfig:
    """The knobs of `user_config`; raises ConfigError with the path of each wrong key."""
    try:
        return RuntimeConfig.model_validate(dict(source))
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def explain(error: ValidationError) -> str:
    """A pydantic error as one line a wrong key: `path: what is wrong (given: ...)`."""
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"]) or "configuration"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key"
        given = "" if item["type"] in ("extra_forbidden", "value_error", "missing") else f" (given: {item['input']!r})"
        lines.append(f"{path}: {message}{given}")
    return "; ".join(lines)


def check_model(config: CPDConfig, shape: ModelShape) -> None:
    """Refuse what the model's shape does not allow; raises ConfigError."""
    for role in Role:
        tp = config.roles.get(role).tensor_parallel
        if shape.query_heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
            fitting = [n for n in range(1, shape.query_heads + 1) if _tp_fits(n, shape)]
            raise ConfigError(
                f"roles.{role}.tensor_parallel: {tp} ranks do not divide the model's {shape.query_heads} query and "
                f"{shape.kv_heads} KV heads; use one of {', '.join(map(str, fitting))}"
            )
    limit = config.model.max_model_len
    if limit and limit > shape.max_position:
        raise ConfigError(f"model.max_model_len: {limit} is more than the model's {shape.max_position} positions")


def _tp_fits(ranks: int, shape: ModelShape) -> bool:
    return shape.query_heads % ranks == 0 and max(shape.kv_heads, ranks) % min(shape.kv_heads, ranks) == 0


def slab_bytes(config: CPDConfig, object_store_bytes: int) -> int:
    """The slab's size on a node with this object store; raises ConfigError when it would take more than MAX_STORE_SHARE of it."""
    if config.slab.gib is None:
        return int(object_store_bytes * config.slab.store_share)
    wanted = int(config.slab.gib * 2**30)
    if wanted > object_store_bytes * MAX_STORE_SHARE:
        raise ConfigError(
            f"slab.gib: {config.slab.gib:g} GiB is more than {MAX_STORE_SHARE:.0%} of the node's object store "
            f"({object_store_bytes / 2**30:.2f} GiB); start Ray with a larger --object-store-memory or set slab.gib to at most "
            f"{object_store_bytes * MAX_STORE_SHARE / 2**30:.2f}"
        )
    return wanted


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"the configuration file {path.name} can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not YAML: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path.name} must hold a mapping of keys, not {type(loaded).__name__}")
    return loaded
