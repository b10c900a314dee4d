"""What the engine accepts: the model's shape and the refusal of requests that can't run on it.

Owns the checks alone. Invariant: a request that passes can be computed to its end by a pool that it has to itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.engine.interface import EngineRequest
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import ContextLengthExceeded, InvalidRequest
from cpd_ray.ids import KEY_BYTES


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of the model and its pool the bookkeeping must know. `max_model_len`: tokens of prompt and answer."""

    block_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()


def check_request(request: EngineRequest, shape: EngineShape, total_blocks: int) -> None:
    """Raises InvalidRequest naming the field, or ContextLengthExceeded for what the model or an empty pool of `total_blocks` can't hold."""
    known = _check_tokens(request, shape)
    if len(request.root) != KEY_BYTES or len(request.keys) != known // shape.block_size:
        raise InvalidRequest(f"{len(request.keys)} block keys do not fit a prompt of {known} tokens", param="keys")
    if request.sample and request.max_new_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    _check_ids(tuple(token for token, _ in request.sampling.logit_bias), "logit_bias", shape)
    _check_ids(request.sampling.stop_token_ids, "stop_token_ids", shape)
    longest = known + (request.max_new_tokens if request.sample else 0)
    if longest > shape.max_model_len:
        raise ContextLengthExceeded(
            f"the model takes {shape.max_model_len} tokens; the prompt has {known} and {longest - known} more are asked for"
        )
    # the last token's KV is never computed
    blocks = -(-(longest - request.sample) // shape.block_size)
    if blocks > total_blocks:
        raise ContextLengthExceeded(f"{longest} tokens of prompt and answer need {blocks} KV blocks; a worker has {total_blocks}")


def _check_tokens(request: EngineRequest, shape: EngineShape) -> int:
    ids = token_buffers.unpack(request.tokens)
    if not ids:
        raise InvalidRequest("the prompt must hold at least one token", param="prompt")
    largest = int(np.frombuffer(request.tokens, dtype=np.uint32).max())
    if largest >= shape.vocab_size:
        raise InvalidRequest(f"token id {largest} is outside the vocabulary of {shape.vocab_size}", param="prompt")
    if not 1 <= request.prompt_tokens <= len(ids):
        raise InvalidRequest(f"{request.prompt_tokens} prompt tokens of {len(ids)} known ones", param="prompt_tokens")
    if request.may_fetch_blocks < 0:
        raise InvalidRequest("may_fetch_blocks can't be negative", param="may_fetch_blocks")
    return len(ids)


def _check_ids(ids: tuple[int, ...], param: str, shape: EngineShape) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < shape.vocab_size:
        raise InvalidRequest(f"{param} has a token id outside the vocabulary of {shape.vocab_size}", param=param)
