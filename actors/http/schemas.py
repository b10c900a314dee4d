"""Request bodies, field by field: OpenAI's, vLLM's extra ones, and our own.

Owns their shape and the table of what is refused by name. Knows no limits and no model. Invariant: a field is used, or has no influence on
the answer, or is refused with its name; null always means absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import from_json

from actors.http.errors import from_validation
from actors.http.messages import check_messages, check_tools
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import InvalidRequest
from cpd_ray.types import Tier

REFUSED: Mapping[str, tuple[Any, ...]] = {
    # name: the values that ask for nothing
    "suffix": ("",), "best_of": (), "prompt_logprobs": (), "truncate_prompt_tokens": (), "prompt_embeds": (), "allowed_token_ids": ([],),
    "bad_words": ([],), "logits_processors": ([],), "use_beam_search": (False,), "length_penalty": (1, 1.0), "early_stopping": (False,),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "guided_decoding_backend": (), "spaces_between_special_tokens": (True,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "kv_transfer_params": (), "chat_template": (), "documents": ([],),
    "continue_final_message": (False,), "mm_processor_kwargs": ({},), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,), "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (),
    "web_search_options": (), "thinking_token_budget": (), "vllm_xargs": ({},),
}  # fmt: skip


def _prompts(value: Any) -> tuple[str | bytes, ...]:
    """A prompt as string, list of strings, token ids or list of token ids; ids become buffers."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of those; not empty")
    if type(value[0]) is int:
        return (token_ids(value),)
    return tuple(item if isinstance(item, str) else token_ids(item) for item in value)


def token_ids(value: Any) -> bytes:
    """A JSON list of token ids as a buffer; raises ValueError for anything else."""
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise ValueError("token ids must be a list of integers")
    try:
        return token_buffers.pack(value)
    except InvalidRequest as error:
        raise ValueError(error.message) from error


def _stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompts = Annotated[
    tuple[str | bytes, ...],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                _IDS,
                {"type": "array", "minItems": 1, "items": _IDS},
            ]
        }
    ),
]
TokenIds = Annotated[bytes, BeforeValidator(token_ids), WithJsonSchema(_IDS)]
Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Messages = Annotated[
    tuple[dict[str, Any], ...],
    BeforeValidator(check_messages),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"type": "string"},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["type", "text"],
                                    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
                                },
                            },
                            {"type": "null"},
                        ]
                    },
                },
            },
        }
    ),
]
Tools = Annotated[
    tuple[dict[str, Any], ...], BeforeValidator(check_tools), WithJsonSchema({"type": "array", "items": {"type": "object"}})
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: changes no answer


class GenerationBody(Body):
    """What completions and chat have in common."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    # accepted without effect on the answer
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionBody(GenerationBody):
    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None


class ChatBody(GenerationBody):
    messages: Messages
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """vLLM's: a prompt, or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: TokenIds


class WarmFields(BaseModel):
    """`ttl_s`: for so many seconds the context stays cached, within the pin budget."""

    ttl_s: Annotated[float, Field(gt=0)] = 600.0


class WarmCompletionBody(CompletionBody, WarmFields):
    """The body of a completion to come, so that its prompt is warm by then."""


class WarmChatBody(ChatBody, WarmFields):
    """The body of a chat to come: the messages that its later turns will begin with."""


class ResetBody(BaseModel):
    """Which tiers to drop; all when absent."""

    model_config = ConfigDict(strict=False, extra="forbid", frozen=True)

    tiers: frozenset[Tier] | None = None


B = TypeVar("B", bound=BaseModel)


def parse_body(data: bytes, kind: type[B], chat_kind: type[B] | None = None) -> B:
    """A body of this kind, or of the other one when it has messages; raises InvalidRequest that names the field."""
    try:
        content = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from error
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    if chat_kind is not None and content.get("messages") is not None:
        kind = chat_kind
    fields = {name: value for name, value in content.items() if value is not None and _is_field(kind, name, value, content)}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from error


def _is_field(kind: type[BaseModel], name: str, value: Any, content: Mapping[str, Any]) -> bool:
    """False for what asks for nothing; raises InvalidRequest for what asks for something that is not to be had."""
    if name in kind.model_fields:
        return True
    if name in REFUSED:
        asks_nothing = any(type(value) is type(inert) and value == inert for inert in REFUSED[name])
        if asks_nothing or (name == "best_of" and value == (content.get("n") or 1)):
            return False
        raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
    raise InvalidRequest(f"{name[:100]} is not a known field", param=name[:100], code="unknown_parameter")
