"""Chat messages and tools as clients send them, turned into what chat templates read.

Owns their shape. Renders nothing. Invariant: what comes out is plain JSON data; content is text, and arguments of tool calls are objects.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json


def check_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Raises ValueError, saying which message is wrong."""
    if not isinstance(value, list):
        raise ValueError("must be a list of messages")
    if not value:
        raise ValueError("must hold at least one message")
    return tuple(_message(item, i) for i, item in enumerate(value))


ROLES = ("system", "developer", "user", "assistant", "tool")


def check_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Raises ValueError for what is no list of functions."""
    if not isinstance(value, list):
        raise ValueError("must be a list of tools")
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {i} must be an object with type function and a function that has a name")
    return tuple(value)


def _message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"message {index} must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"message {index}: role must be one of {', '.join(ROLES)}")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise ValueError(f"message {index}: {name} is not supported")
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise ValueError(f"message {index} must have content")
    prepared = {name: value for name, value in message.items() if name != "annotations" and value is not None}
    if content is not None:
        prepared["content"] = _text(content, index)
    if calls is not None:
        prepared["tool_calls"] = _tool_calls(calls, index)
    return prepared


def _text(content: Any, index: int) -> str:
    """Text parts are joined by newlines: most templates take a string only."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"message {index}: content must be a string or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            named = kind if isinstance(kind, str) and kind.isidentifier() and len(kind) <= 40 else "without a known type"
            raise ValueError(f"message {index}: content parts of type text only, not {named}")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"message {index}: a text part must have text")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Clients send arguments as JSON in a string; templates write objects."""
    if not isinstance(calls, list):
        raise ValueError(f"message {index}: tool_calls must be a list")
    prepared = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"message {index}: a tool call must have a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = from_json(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise ValueError(f"message {index}: the arguments of a tool call are no JSON") from error
        prepared.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return prepared
