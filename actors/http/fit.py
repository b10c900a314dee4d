"""Whether a request fits the model: ids inside the vocabulary, prompt and answer inside the context.

Owns these rules for any face. Counts no text. Invariant: an answer's room is at least one token, and never more than the context leaves.
"""

from __future__ import annotations

from actors.http.face import ModelCard
from actors.http.schemas import ChatBody, GenerationBody
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import ContextLengthExceeded, InvalidRequest
from cpd_ray.types import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16


def check_ids(buffer: bytes, card: ModelCard, param: str) -> None:
    """Raises InvalidRequest for an empty prompt and for ids that the model has no embedding for."""
    ids = token_buffers.unpack(buffer)
    if not ids:
        raise InvalidRequest(f"{param} must hold at least one token", param=param)
    if max(ids) >= card.vocab_size:
        raise InvalidRequest(f"{param} has a token id outside the model's vocabulary of {card.vocab_size}", param=param)


def check_named_ids(sampling: SamplingParams, card: ModelCard) -> None:
    """Raises InvalidRequest for stop tokens and biases that are outside the vocabulary."""
    for param, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", [i for i, _ in sampling.logit_bias])):
        if ids and max(ids) >= card.vocab_size:
            raise InvalidRequest(f"{param} has a token id outside the model's vocabulary of {card.vocab_size}", param=param)


def answer_room(body: GenerationBody, prompt_tokens: int, card: ModelCard, param: str) -> int:
    """How many tokens the answer may have; raises ContextLengthExceeded, about the field that the prompt came in."""
    room = card.max_model_len - prompt_tokens
    wanted = wanted_tokens(body)
    if room < 1 or (wanted is not None and wanted > room):
        asked = "" if wanted is None else f" and {wanted} tokens of answer were asked for"
        raise ContextLengthExceeded(
            f"the model's context is {card.max_model_len} tokens, but the prompt has {prompt_tokens}{asked}", param=param
        )
    if wanted is not None:
        return wanted
    return room if isinstance(body, ChatBody) else min(room, max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0))


def wanted_tokens(body: GenerationBody) -> int | None:
    """max_tokens by either of its names; raises InvalidRequest when they disagree."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is not None and wanted < 1:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidRequest(f"{name} must be at least 1", param=name)
    return wanted
