"""Chat templates render what Hugging Face's apply_chat_template renders, in a sandbox."""

import contextlib
import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multitok.tokenizer.chat_template import ChatTemplate
from multitok.tokenizer.errors import ChatTemplateError, TemplateError
from multitok.tokenizer.model_files import resolve_model

DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> ChatTemplate:
    files = resolve_model(None, None, tmp_path_factory.mktemp("cache"))
    return ChatTemplate(files.chat_template, files.bos_token, files.eos_token)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_smollm2_adds_its_default_system_prompt(smollm2):
    assert smollm2.render([user("Hi")]) == (DEFAULT_SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_smollm2_renders_every_turn(smollm2):
    messages = [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello!"), user(" again \n")]
    assert smollm2.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n again \n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_generation_prompt(smollm2):
    assert smollm2.render([user("Hi")], add_generation_prompt=False).endswith("Hi<|im_end|>\n")


def test_final_message_is_left_open(smollm2):
    text = smollm2.render([user("Count"), assistant("one, two, ")], continue_final_message=True)
    assert text == DEFAULT_SYSTEM + "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\none, two, "


def test_final_message_is_left_open_where_the_template_strips():
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", None, None)
    assert template.render([user("a"), assistant(" b ")], continue_final_message=True) == "[a][b"


@pytest.fixture(scope="module")
def bracketed() -> ChatTemplate:
    return ChatTemplate("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}", None, None)


@given(st.text(min_size=1), st.text(min_size=1))
def test_continuing_gives_the_beginning_of_the_closed_text(bracketed, first, last):
    template = bracketed
    messages = [user(first), assistant(last)]
    closed = template.render(messages, add_generation_prompt=False)
    assert template.render(messages, continue_final_message=True) == closed[:-1]


@pytest.mark.parametrize("messages", [[], [{"role": "assistant"}], [assistant(None)]])
def test_nothing_to_continue_is_an_error(smollm2, messages):
    with pytest.raises(ChatTemplateError, match="needs a last message with text"):
        smollm2.render(messages, continue_final_message=True)


def test_a_template_that_drops_the_final_message_is_an_error():
    template = ChatTemplate("{{ messages[0].content }}", None, None)
    with pytest.raises(ChatTemplateError, match="leaves out the text of the last message"):
        template.render([user("a"), assistant("b")], continue_final_message=True)


def test_messages_are_not_changed():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", None, None)
    messages = [user([{"type": "text", "text": "a"}]), assistant("b")]
    template.render(messages, continue_final_message=True)
    assert messages == [user([{"type": "text", "text": "a"}]), assistant("b")]


def test_special_tokens_and_variables_of_the_template():
    template = ChatTemplate(
        "{{ bos_token }}{{ thinking }}{{ tools | length }}{{ documents[0].text }}{{ eos_token }}", "<s>", "</s>"
    )
    assert template.render([], thinking="on", tools=[{}], documents=[{"text": "d"}]) == "<s>on1d</s>"


def test_tojson_escapes_no_html_and_keeps_unicode():
    template = ChatTemplate(
        "{{ tools | tojson }}|{{ tools | tojson(indent=1) }}|{{ tools | tojson(sort_keys=true) }}", None, None
    )
    tools = [{"b": "<é'&>", "a": None}]
    assert template.render([], tools=tools) == (
        '[{"b": "<é\'&>", "a": null}]|[\n {\n  "b": "<é\'&>",\n  "a": null\n }\n]|[{"a": null, "b": "<é\'&>"}]'
    )


def test_blocks_are_trimmed_and_loop_controls_work():
    source = """
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% if m.role == 'stop' %}{% break %}{% endif %}
    {% generation %}<{{ m.content }}>{% endgeneration %}

{% endfor %}
"""
    messages = [user("a"), {"role": "skip", "content": "b"}, user("c"), {"role": "stop", "content": "d"}]
    assert ChatTemplate(source, None, None).render(messages) == "\n<a>\n<c>\n"


def test_strftime_now_is_local_time():
    template = ChatTemplate("{{ strftime_now('%Y') }}", None, None)
    assert template.render([]) in {str(datetime.datetime.now().year - lag) for lag in (0, 1)}


def test_the_templates_own_refusal_reaches_the_client():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", None, None)
    with pytest.raises(ChatTemplateError, match=r"^roles must alternate$"):
        template.render([user("a")])


def test_messages_that_the_template_cannot_handle():
    template = ChatTemplate("{{ messages[0]['content'] + 'x' }}{{ messages[1].name.first }}", None, None)
    with pytest.raises(ChatTemplateError, match="can't render these messages"):
        template.render([user({"a": 1}), user("b")])
    with pytest.raises(ChatTemplateError, match="misses something"):
        template.render([user("a"), user("b")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}{{ ''.__class__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_refuses(source):
    template = ChatTemplate(source, None, None)
    with pytest.raises(ChatTemplateError):
        template.render([user("x")])


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ tojson }}", "{{ '{0.__class__}'.format(1) }}"])
def test_the_sandbox_prints_nothing_for(source):
    assert ChatTemplate(source, None, None).render([]) == ""


def test_text_of_messages_is_never_run(smollm2):
    assert "{{ 7 * 7 }}{% raw %}" in smollm2.render([user("{{ 7 * 7 }}{% raw %}")])


def test_reserved_names_cannot_be_set_by_a_request(smollm2):
    with pytest.raises(ChatTemplateError, match="must not set bos_token, messages"):
        smollm2.render([user("a")], **{"messages": [], "bos_token": "x"})


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for m in messages %}", "{% nosuchtag %}", "{{ a | nofilter }}"]
)
def test_a_template_that_does_not_compile(source):
    with pytest.raises(TemplateError, match="not valid, line 1: "):
        ChatTemplate(source, None, None)


def test_null_fields_count_as_absent():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls is defined }}{% endfor %}", None, None
    )
    assert template.render([{"role": "assistant", "content": None, "tool_calls": None}]) == "False"


STRING_TEMPLATES = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m['role'] + m['content'] | trim }}{% endfor %}",
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{{ m.content }}{% endfor %}",
]
PART_TEMPLATES = [
    "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}"
    "{% endfor %}",
    "{% for m in messages %}{% set body = m.content %}{% for c in body[0:] %}{{ c.text }}{% endfor %}{% endfor %}",
    "{% macro show(x) %}{% for c in x %}{{ c.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("source", STRING_TEMPLATES)
def test_parts_are_joined_for_a_template_that_takes_strings(source):
    template = ChatTemplate(source, None, None)
    assert template.content_format == "string"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([user(parts)]).endswith("one\ntwo")


@pytest.mark.parametrize("source", PART_TEMPLATES)
def test_parts_stay_parts_for_a_template_that_walks_over_them(source):
    template = ChatTemplate(source, None, None)
    assert template.content_format == "parts"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([user(parts)]) == "onetwo"
    assert template.render([user("one")]) == "one"


@pytest.mark.parametrize("source", [STRING_TEMPLATES[0], PART_TEMPLATES[0]])
@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"),
        ({"type": "input_audio"}, "'input_audio'"),
        ({"type": "text"}, "'text'"),
        ({"text": "x"}, "None"),
        (7, "'int'"),
    ],
)
def test_other_parts_are_refused_by_name(source, part, kind):
    with pytest.raises(ChatTemplateError, match=f"content part of type {kind} is not supported"):
        ChatTemplate(source, None, None).render([user([part])])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text"]), inner),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), json_values), max_size=4))
def test_any_json_renders_or_is_refused_as_a_client_error(smollm2, messages):
    with contextlib.suppress(ChatTemplateError):
        assert isinstance(smollm2.render(messages), str)


def test_a_message_that_only_calls_tools_has_empty_content(smollm2):
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "r"},
    ]
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nr<|im_end|>" in smollm2.render(messages)


def test_whether_a_template_keeps_the_text_is_probed(smollm2):
    assert smollm2.keeps_text
    assert not ChatTemplate("{{ messages[0].content | upper }}", None, None).keeps_text
    assert not ChatTemplate("{{ raise_exception('no') }}", None, None).keeps_text


TOOL_CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.name }}:"
    "{% if call.function.arguments is mapping %}{{ call.function.arguments | tojson }}"
    "{% else %}text {{ call.function.arguments }}{% endif %};{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city":"Köln","n":2}', '{"city": "Köln", "n": 2}'),
        ("", "{}"),
        ({"a": 1}, '{"a": 1}'),
        ('{"a": ', 'text {"a": '),
        ("[1]", "text [1]"),
        ('{"a": NaN}', 'text {"a": NaN}'),
        ("[" * 5000, "text " + "[" * 5000),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_arguments_of_tool_calls_are_objects(arguments: object, seen: str, fast: bool) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(TOOL_CALLS, None, None, fast=fast).render(messages) == f"f:{seen};"
    assert call["function"] == {"name": "f", "arguments": arguments}
