"""A chat as the model wants to read it: the model folder's own Jinja templates, in a sandbox.

Owns rendering only. Templates come from the model folder, never from a client. Invariant: `render` gives what transformers'
`apply_chat_template(tokenize=False)` gives for the same messages, and touches nothing outside its arguments but the calendar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from cpd_ray.errors import InvalidRequest, ModelUnavailable

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given. `variables`: further names for the template (`enable_thinking`, ...)."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplates:
    """The folder's templates, compiled once. Raises ModelUnavailable for one that is no Jinja."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = _environment(now)
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(text) for name, text in templates.items()}
        except jinja2.TemplateError as error:
            raise ModelUnavailable("the model's chat template is no valid Jinja template", param="model") from error

    def render(self, chat: Chat) -> str:
        """The chat as text. Raises InvalidRequest when the model has no template, or its template refuses the messages."""
        if not chat.messages:
            raise InvalidRequest("messages must hold at least one message", param="messages")
        if reserved := set(chat.variables) & {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens}:
            raise InvalidRequest(f"chat_template_kwargs must not set {min(reserved)}", param="chat_template_kwargs")
        template = self._choose(chat)
        variables: dict[str, Any] = {
            **self._special_tokens,
            **chat.variables,
            "messages": [_tidy(message) for message in chat.messages],
            "tools": [dict(tool) for tool in chat.tools] or None,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            return template.render(variables)
        except _Refusal as refusal:
            reason = str(refusal)[:_MAX_REASON_CHARS]
            raise InvalidRequest(f"the model's chat template refuses these messages: {reason}", param="messages") from refusal
        except Exception as error:
            # a template is a program over the client's data: whatever it trips over is the data's fault, not ours
            raise InvalidRequest("the model's chat template can't render these messages", param="messages") from error

    def _choose(self, chat: Chat) -> jinja2.Template:
        names = ("tool_use", "default") if chat.tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")


def _tidy(message: Mapping[str, Any]) -> dict[str, Any]:
    """Absent instead of null, and reasoning under each name that templates read it by: as transformers prepares messages."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    if reasoning is not None:
        present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
    return present


class _Refusal(jinja2.TemplateError):
    """A template called raise_exception."""


def _environment(now: Callable[[], datetime]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: Any) -> None:
        raise _Refusal(str(message))

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    pair = (separators[0], separators[1]) if separators else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore names, which could shadow Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}")
        super().__setitem__(name, value)


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns from; for us it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)
