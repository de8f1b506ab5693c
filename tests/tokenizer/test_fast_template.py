"""The fast template engine prints what the reference prints, or isn't used."""

import contextlib
import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multitok.tokenizer.chat_template import ChatTemplate
from multitok.tokenizer.errors import ChatTemplateError
from multitok.tokenizer.fast_template import is_plain
from multitok.tokenizer.model_files import resolve_model

# The constructs of Llama 3.1's: dates, tools as JSON, arguments walked over, slices, system text in the middle.
LLAMA_LIKE = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\\n\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {%- if tool_call.arguments is mapping %}
            {%- for arg_name, arg_val in tool_call.arguments.items() %}
                {{- arg_name + '="' ~ arg_val ~ '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
            {%- endfor %}
        {%- else %}
            {{- tool_call.arguments | tojson }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
# Mistral's: roles have to alternate, a namespace counts, tools stand before the last user message.
MISTRAL_LIKE = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- set content = message.content.content if message.content.content is defined else message.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + "}" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""
# Gemma's: parts, a prefix for the first message. And a macro, training marks, loop controls, Windows line ends.
GEMMA_LIKE = """{{ bos_token }}
{% macro show(content) -%}
    {%- if content is string -%}{{ content | trim }}{%- else -%}
        {%- for item in content -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro %}
{% for message in messages -%}\r
    {% if message.role == 'developer' %}{% continue %}{% endif %}\r
    {{ '<start_of_turn>' ~ ('model' if message['role'] == 'assistant' else message['role']) }}
    {% generation %}{{ show(message['content']) }}{%- endgeneration %}

<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""


def _smollm2() -> str:
    source = resolve_model(None).chat_template
    assert source is not None
    return source


DATA = json.loads((Path(__file__).parent / "data" / "chat_templates.json").read_text())
TEMPLATES = {
    "smollm2": _smollm2(),
    **{name: entry["template"] for name, entry in DATA.items()},
    "llama-like": LLAMA_LIKE,
    "mistral-like": MISTRAL_LIKE,
    "gemma-like": GEMMA_LIKE,
}
PAIRS = {
    name: (ChatTemplate(source, "<s>", "</s>"), ChatTemplate(source, "<s>", "</s>", fast=False))
    for name, source in TEMPLATES.items()
}
every_template = pytest.mark.parametrize("name", TEMPLATES)

texts = st.text(max_size=20) | st.sampled_from(
    [
        "",
        " a \n",
        "<think>\nx\n</think>\n\ny",
        "\x1c a\x1f",
        "\u2003x\x85",
        "İß",
        "{{ x }}",
        "'\"\\",
        "<tool_response>a",
        "\ud800",
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts | st.sampled_from(["items", "type"]), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(texts, json_values, max_size=3) | texts
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": texts, "arguments": arguments})},
    optional={"id": st.sampled_from(["abcdefghi", "x"]), "type": st.just("function")},
)
roles = st.sampled_from(["system", "user", "assistant", "tool", "ipython", "developer", "other"])
parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts), max_size=3)
turns = st.fixed_dictionaries(
    {"role": roles},
    optional={
        "content": texts | parts | st.none(),
        "tool_calls": st.lists(calls, max_size=2) | st.none(),
        "reasoning_content": texts,
        "name": texts,
        "prefix": st.booleans(),
    },
)
exchanges = st.lists(texts, max_size=6).map(
    lambda contents: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
)
options = st.fixed_dictionaries(
    {},
    optional={
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": json_values}), max_size=2),
        "enable_thinking": st.booleans(),
        "custom_tools": json_values,
        "date_string": texts,
    },
)


def outcome(template: ChatTemplate, messages, **keywords) -> tuple[str, str]:
    try:
        return "text", template.render(messages, **keywords)
    except ChatTemplateError as error:
        return "refused", str(error)


@every_template
def test_the_templates_of_real_models_are_rendered_by_the_fast_engine(name):
    fast, reference = PAIRS[name]
    assert (fast.engine, reference.engine) == ("minijinja", "jinja2")


@every_template
@settings(deadline=None)
@given(messages=st.lists(turns, max_size=5) | exchanges, keywords=options)
def test_generated_conversations_give_the_same_text_or_the_same_refusal(name, messages, keywords):
    fast, reference = PAIRS[name]
    assert outcome(fast, messages, **keywords) == outcome(reference, messages, **keywords)


@every_template
def test_texts_with_what_python_alone_takes_for_a_space(name):
    fast, reference = PAIRS[name]
    for char in map(chr, [*range(0x20), *range(0x7F, 0xA1), 0x1680, *range(0x2000, 0x2070), 0x3000, 0xFEFF]):
        for text in (f"{char}a{char}", f"{char} \n</think>{char}x", char):
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            assert outcome(fast, messages) == outcome(reference, messages)


def test_the_templates_own_refusal_reaches_the_client_in_its_words():
    fast, _ = PAIRS["mistral-like"]
    with pytest.raises(ChatTemplateError, match=r"^After the optional system message, roles must alternate"):
        fast.render([{"role": "assistant", "content": "x"}])


def test_messages_that_the_fast_engine_cannot_take_go_to_the_reference():
    fast, reference = PAIRS["smollm2"]
    for content in ("\ud800", "\x1c"):
        messages = [{"role": "user", "content": content}]
        assert fast.render(messages) == reference.render(messages)


def test_large_messages_go_to_the_reference(monkeypatch):
    fast, _ = PAIRS["smollm2"]
    messages = [{"role": "user", "content": "a"}]
    monkeypatch.setattr(ChatTemplate, "_render_reference", lambda self, variables: "by the reference")
    assert fast.render(messages, True) == "by the reference"
    assert fast.render(messages) != "by the reference"


def test_a_template_cannot_change_the_messages_of_a_request():
    messages = [{"role": "user", "content": "a", "tool_calls": [{"a": 1}]}]
    template = ChatTemplate("{{ messages[0].tool_calls.append(1) }}", None, None)
    with contextlib.suppress(ChatTemplateError):
        template.render(messages)
    assert messages == [{"role": "user", "content": "a", "tool_calls": [{"a": 1}]}]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages | e }}", "the filter e in line 1"),
        ("\n{{ 1.0 }}", "a number with a fraction in line 2"),
        ("{{ 'a' | default('x', boolean=true) }}", "a named argument of the filter default"),
        ("{{ messages is sequence }}", "the test sequence"),
        ("{{ messages[0].items is defined }}", "the attribute items"),
        ("{{ messages[0]['items'] is defined }}", "the key items"),
        ("{{ messages[0]['_x'] }}", "the key _x"),
        ("{{ messages[0].__class__ }}", "the attribute __class__"),
        ("{{ messages.append(1) }}", "the method append"),
        ("{{ messages[0].content.title() }}", "the method title"),
        ("{{ 'a'.split('') }}", "a separator that is no text"),
        ("{{ 'a'.split(sep='b') }}", "a separator that is no text|a named argument of split"),
        ("{{ messages[0](1) }}", "a call"),
        ("{{ dict(a=1) }}", "a call|the name dict"),
        ("{{ range(*[1]) }}", "a call with unpacked arguments"),
        ("{{ namespace(messages[0]) }}", "a namespace made of a value"),
        ("{% set ns = namespace(_a=1) %}", "a namespace made of a value"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "the attribute _a"),
        ("{% set ns = namespace(a=1) %}{{ ns._a }}", "the attribute _a"),
        ("{% macro f() %}{{ varargs }}{% endmacro %}", "the name varargs"),
        ("{% for a in messages recursive %}{% endfor %}", "a recursive loop"),
        ("{{ '\\x41' }}", "an escape in the string of line 1"),
        ("{% include 'x' %}", "a node Include"),
        ("{{ 4 / 2 }}", "a node Div"),
        ("{% filter upper %}x{% endfilter %}", "a node FilterBlock"),
        ("{% block x %}{% endblock %}", "a node Block"),
        ("{{ range(3) }}", r"gives '\[0, 1, 2\]' in place of 'range\(0, 3\)'"),
        ("{{ +1 }}", "a node Pos"),
    ],
)
def test_a_template_outside_of_what_was_compared_is_rendered_by_the_reference(source, reason, caplog):
    with caplog.at_level(logging.INFO):
        template = ChatTemplate(source, None, None)
    assert template.engine == "jinja2"
    assert "the chat template is rendered by jinja2, not by the faster minijinja: " in caplog.text
    assert re.search(reason, caplog.text)
    reference = ChatTemplate(source, None, None, fast=False)
    messages = [{"role": "user", "content": "hello"}]
    assert outcome(template, messages) == outcome(reference, messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(index=0, items=[]) %}{% for m in messages %}{% set ns.index = ns.index + 1 %}"
        "{% endfor %}{{ ns.index }}{{ ns.items }}",
        "{% for m in messages %}{{ loop.index }}{{ loop.previtem is defined }}{{ m.get('role', 'x') }}{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}",
        "{{ messages | map(attribute='role') | join(',') }}{{ messages[::-1] | length }}{{ 7 // 2 }}{{ -7 % 3 }}",
    ],
)
def test_what_is_inside_of_it_is_rendered_by_the_fast_engine(source):
    assert ChatTemplate(source, None, None).engine == "minijinja"


@pytest.mark.parametrize("value", ["a", 1, True, [], {}, {"a": [{"b": "c"}]}, -(2**63), "\x1b\n"])
def test_plain(value):
    assert is_plain(value)


@pytest.mark.parametrize(
    "value", [None, 1.0, 2**63, [1.5], {"a": None}, "a\x1fb", "\udfff", {"a": [{"b": "\x1c"}]}, b"x", ()]
)
def test_not_plain(value):
    assert not is_plain(value)
