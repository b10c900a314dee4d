"""From a parsed body to what is to be generated: prompts tokenised, limits applied, identity attached.

Owns that one path, the same for completions, chats, plans and warming. Streams nothing. Invariant: a `Job`'s requests are valid, fit the
model's context, carry the caller's tenant and derived salt, and have ids that nobody else's request has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from actors.http.face import Face, ModelCard
from actors.http.fit import answer_room, check_ids, check_named_ids
from actors.http.identity import Caller, derive_salt
from actors.http.limits import HttpLimits, at_most, check_metadata, check_stops
from actors.http.rates import TenantRates
from actors.http.sampling import sampling_params
from actors.http.schemas import ChatBody, CompletionBody, GenerationBody
from actors.text.template import Chat
from cpd_ray import tokens as token_buffers
from cpd_ray.clock import Clock
from cpd_ray.errors import InvalidRequest, UnknownModel
from cpd_ray.ids import RequestId
from cpd_ray.types import MAX_TOP_LOGPROBS, GenerateRequest


@dataclass(frozen=True, slots=True)
class TextStyle:
    """How an answer's tokens become text. `logprobs`: None for none, else how many likeliest tokens to show."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: `prompt` is its prompt's number, `echo` the text that goes before it."""

    index: int
    prompt: int
    request: GenerateRequest
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """`tokenize_s`: seconds from the body to the tokens."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    style: TextStyle
    tenant: str
    tokenize_s: float

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counted once, however many answers it gets."""
        return sum({c.prompt: c.request.prompt_tokens for c in self.choices}.values())


@dataclass(frozen=True, slots=True)
class Asked:
    """What the HTTP request says besides its body. `id` is unique; it ends in what the client called its request, if it did."""

    id: str
    caller: Caller


class JobMaker:
    """Raises InvalidRequest and its kin before the tokenizer is asked, where the body alone tells."""

    def __init__(self, face: Face, limits: HttpLimits, rates: TenantRates, salt_secret: bytes, clock: Clock) -> None:
        self._face = face
        self._limits = limits
        self._rates = rates
        self._salt_secret = salt_secret
        self._clock = clock

    def card(self, name: str | None) -> ModelCard:
        """The model of that name, or the first one; raises UnknownModel."""
        cards = self._face.models()
        if name is None:
            return cards[0]
        found = next((card for card in cards if card.id == name), None)
        if found is None:
            raise UnknownModel(f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
        return found

    def count_request(self, caller: Caller, client_salt: str | None = None) -> str | None:
        """Count a request for its tenant, which may be one too many (Overloaded); returns the salt that keeps its cache apart."""
        self._rates.take_request(caller.tenant)
        return derive_salt(self._salt_secret, caller.tenant, client_salt)

    async def completion(self, body: CompletionBody, asked: Asked) -> Job:
        """Raises what is wrong with it."""
        at_most(len(body.prompt), self._limits.prompts, "prompt", "prompts")
        if body.echo and body.logprobs is not None:
            raise InvalidRequest("echo together with logprobs is not supported", param="echo", code="unsupported_parameter")
        style = self._style(body, body.logprobs)
        special = True if body.add_special_tokens is None else body.add_special_tokens

        async def tokenise(card: ModelCard, scope: str) -> list[tuple[bytes, str]]:
            timeout_s = self._limits.tokenize_timeout_s
            buffers = [
                prompt
                if isinstance(prompt, bytes)
                else await self._face.codec.encode(prompt, add_special_tokens=special, scope=scope, timeout_s=timeout_s)
                for prompt in body.prompt
            ]
            for buffer in buffers:
                check_ids(buffer, card, "prompt")
            if not body.echo:
                return [(buffer, "") for buffer in buffers]
            texts = [p if isinstance(p, str) else await self._face.codec.decode(p) for p in body.prompt]
            return list(zip(buffers, texts, strict=True))

        return await self._job(body, asked, style, len(body.prompt), tokenise)

    async def chat(self, body: ChatBody, asked: Asked, *, add_generation_prompt: bool = True) -> Job:
        """Raises what is wrong with it. `add_generation_prompt`: when the body does not say."""
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "tool_choice other than none and auto is not supported", param="tool_choice", code="unsupported_parameter"
            )
        chat = chat_messages(body, self._limits, add_generation_prompt=add_generation_prompt, tools=body.tool_choice != "none")
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        style = self._style(body, (body.top_logprobs or 0) if body.logprobs else None)
        if body.add_special_tokens:
            raise InvalidRequest("add_special_tokens is not supported: the template adds them", param="add_special_tokens")

        async def tokenise(card: ModelCard, scope: str) -> list[tuple[bytes, str]]:
            timeout_s = self._limits.tokenize_timeout_s
            return [(await self._face.codec.encode_chat(chat, scope=scope, timeout_s=timeout_s), "")]

        return await self._job(body, asked, style, 1, tokenise)

    def _style(self, body: GenerationBody, logprobs: int | None) -> TextStyle:
        stops = body.stop or ()
        check_stops(stops, self._limits)
        at_most(len(body.stop_token_ids or ()), self._limits.stop_token_ids, "stop_token_ids", "ids")
        at_most(logprobs or 0, MAX_TOP_LOGPROBS, "top_logprobs" if isinstance(body, ChatBody) else "logprobs", "tokens a position")
        check_metadata(body.metadata, self._limits)
        at_most(len(body.user or ""), self._limits.metadata_chars, "user", "characters")
        at_most(len(body.cache_salt or ""), self._limits.salt_chars, "cache_salt", "characters")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        return TextStyle(
            stops=stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=body.skip_special_tokens is not False,
            logprobs=logprobs,
        )

    async def _job(
        self,
        body: GenerationBody,
        asked: Asked,
        style: TextStyle,
        prompts: int,
        tokenise: Callable[[ModelCard, str], Awaitable[list[tuple[bytes, str]]]],
    ) -> Job:
        card = self.card(body.model)
        n = self._answers_a_prompt(body, prompts)
        # whatever is wrong with these, tokenising would be in vain
        check_named_ids(sampling_params(body, style.logprobs, max_tokens=card.max_model_len, choice=0), card)
        tenant = asked.caller.tenant
        salt = self.count_request(asked.caller, body.cache_salt)
        start_s = self._clock.now_s()
        tokenised = await tokenise(card, salt or "")
        tokenize_s = self._clock.now_s() - start_s
        choices = []
        for number, (tokens, echo) in enumerate(tokenised):
            room = answer_room(body, token_buffers.count(tokens), card, "messages" if isinstance(body, ChatBody) else "prompt")
            for i in range(n):
                index = number * n + i
                request = GenerateRequest(
                    RequestId(f"{asked.id}-{index}"),
                    tokens,
                    sampling_params(body, style.logprobs, max_tokens=room, choice=i),
                    salt=salt,
                    adapter=card.adapter,
                    tenant=tenant,
                    priority=-(body.priority or 0),  # clients say it as vLLM does: lower goes first
                )
                choices.append(Choice(index, number, request, echo))
        job = Job(asked.id, card.id, tuple(choices), style, tenant, tokenize_s)
        self._rates.take_tokens(tenant, job.prompt_tokens)
        return job

    def _answers_a_prompt(self, body: GenerationBody, prompts: int) -> int:
        n = 1 if body.n is None else body.n
        if n < 1:
            raise InvalidRequest("n must be at least 1", param="n")
        at_most(n, self._limits.n, "n", "answers")
        at_most(n * prompts, self._limits.choices, "n", "answers over all prompts")
        return n


class HasMessages(Protocol):
    """What of a body its chat is made from."""

    @property
    def messages(self) -> tuple[dict[str, Any], ...] | None: ...
    @property
    def tools(self) -> tuple[dict[str, Any], ...] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


def chat_messages(body: HasMessages, limits: HttpLimits, *, add_generation_prompt: bool, tools: bool = True) -> Chat:
    """The chat of a body, within the limits. `add_generation_prompt`: when the body does not say."""
    messages = body.messages or ()
    at_most(len(messages), limits.messages, "messages", "messages")
    at_most(len(body.tools or ()), limits.tools, "tools", "tools")
    return Chat(
        messages=messages,
        tools=(body.tools or ()) if tools else (),
        add_generation_prompt=add_generation_prompt if body.add_generation_prompt is None else body.add_generation_prompt,
        variables=body.chat_template_kwargs or {},
    )
