"""Chat templates render as transformers renders them, and what they trip over is the client's error."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from actors.text.template import Chat, ChatTemplates
from cpd_ray.errors import InvalidRequest, ModelUnavailable

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
EACH, END = "{% for m in messages %}", "{% endfor %}"
TEMPLATES = {
    "chatml": EACH + "{{ '<|' + m['role'] + '|>' + m['content'] }}\n" + END + "{% if add_generation_prompt %}A:{% endif %}",
    "trimmed": "{%- for m in messages %}\n    {%- if loop.first %}\n{{ bos_token }}\n    {%- endif %}\n"
    "{{ m.content | trim }}{{ eos_token }}\n{%- endfor %}\n",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% else %}no tools{% endif %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}",
    "calls": EACH + "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endif %}{{ m.content }}" + END,
    "loops": EACH
    + "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% if loop.index > 1 %}{% break %}{% endif %}"
    + END,
    "generation": EACH + "{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x is defined }}" + END,
    "namespace": "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}" + END + "{{ ns.n }}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}{{ messages[-1].content }}",
    "reasoning": EACH + "[{{ m.reasoning_content }}|{{ m.thinking }}]" + END,
    "sorted": "{{ messages | tojson(sort_keys=True) }} {{ dict(a=1) | tojson }}",
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " You are é <b>kind</b> "},
    {"role": "user", "content": "Hi 👍", "name": None},
    {
        "role": "assistant",
        "content": "x",
        "reasoning": "because",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("tools", [False, True])
def test_rendering_is_that_of_transformers(name: str, tools: bool) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import render_jinja_template

    assert PreTrainedTokenizerFast is not None
    given = TOOLS if tools else None
    present = [{k: v for k, v in m.items() if v is not None} for m in CHAT]
    expected, _ = render_jinja_template(
        [present], tools=given, chat_template=TEMPLATES[name], add_generation_prompt=True, enable_thinking=False, **SPECIAL
    )
    templates = ChatTemplates({"default": TEMPLATES[name]}, SPECIAL)
    chat = Chat(tuple(CHAT), tuple(given or ()), add_generation_prompt=True, variables={"enable_thinking": False})
    assert templates.render(chat) == expected[0]


def render(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    return ChatTemplates({"default": template}, SPECIAL, now=lambda: datetime(2026, 2, 3)).render(
        Chat(messages or ({"role": "user", "content": "x"},), variables=variables)
    )


def test_the_calendar_is_an_argument() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"


def test_a_template_s_refusal_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate ' + 'x' * 1000) }}")
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].absent.deeper }}",
        "{{ 'a' + 1 }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ 1 / 0 }}",
        "{{ {}['k'] + 'x' }}",
    ],
)
def test_what_a_template_trips_over_says_nothing_of_it(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(template)
    assert caught.value.message == "the model's chat template can't render these messages"


def test_variables_can_t_replace_what_the_template_relies_on() -> None:
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(InvalidRequest, match=name):
            render("{{ messages }}", **{name: "x"})


def test_the_tool_template_is_taken_for_tools_only() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    message = ({"role": "user", "content": "x"},)
    assert (templates.render(Chat(message)), templates.render(Chat(message, tuple(TOOLS)))) == ("plain", "tools")


def test_no_template_and_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplates({}, {}).render(Chat(({"role": "user", "content": "x"},)))
    with pytest.raises(InvalidRequest, match="at least one"):
        ChatTemplates({"default": "x"}, {}).render(Chat(()))


def test_a_broken_template_is_the_model_s_fault() -> None:
    with pytest.raises(ModelUnavailable):
        ChatTemplates({"default": "{% for %}"}, {})
