"""A body's sampling fields as `SamplingParams`.

Owns the defaults and the spellings that clients use (`top_k` -1 for all, string keys in `logit_bias`). Invariant: an absent field gets the
default of `SamplingParams` itself.
"""

from __future__ import annotations

from typing import Any

from actors.http.schemas import GenerationBody
from cpd_ray.errors import InvalidRequest
from cpd_ray.types import MAX_LOGIT_BIAS, SamplingParams

_PLAIN = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos",
)  # fmt: skip


def sampling_params(body: GenerationBody, logprobs: int | None, *, max_tokens: int, choice: int) -> SamplingParams:
    """For the `choice`-th answer to a prompt: with a seed given, each answer has its own. Raises InvalidRequest, naming the field."""
    given: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.seed is not None:
        given["seed"] = _seed(body.seed, choice)
    if body.stop_token_ids:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


def _seed(seed: int, choice: int) -> int:
    if not -(2**63) <= seed < 2**63:
        raise InvalidRequest("seed must be a 64-bit integer", param="seed")
    return (seed + choice + 2**63) % 2**64 - 2**63


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias must be at most {MAX_LOGIT_BIAS} entries", param="logit_bias")
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest("logit_bias must have token ids as keys", param="logit_bias")
        pairs.append((int(key), value))
    return tuple(sorted(pairs))
