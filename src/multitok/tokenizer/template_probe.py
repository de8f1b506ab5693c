"""Conversations on which the fast template engine has to print what the reference prints, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_TEXTS = [
    *("Hi", "", " \n spaced \t\n", "<b>&amp;\"'</b> {{ x }} {% y %}", "a\n\nb\r\nc\\n"),
    "Üñí 世界 👩‍🚀\u00a0\u2028e\u0301",
]
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a <city> & \"more\"",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "é, e.g. 'Köln'", "enum": ["a", "b"]},
                "days": {"type": ["integer", "string"], "default": 3},
                "where": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
            },
            "required": ["city"],
        },
        "strict": True,
    },
}  # fmt: skip
_CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": 2}},
}
_TEXT_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
_KWARGS: list[dict[str, Any]] = [
    *({"enable_thinking": on, "thinking": on} for on in (True, False)),
    {"reasoning_effort": "high", "date_string": "26 Jul 2024", "custom_tools": [_TOOL], "builtin_tools": ["search"]},
    {"tools_in_user_message": False, "add_vision_id": False, "preserve_thinking": True},
]


def _turn(role: str, content: object = None, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more} if content is not None else {"role": role, **more}


def _conversations() -> Iterator[list[dict[str, Any]]]:
    system, user, answer = _turn("system", "Be brief. "), _turn("user", "Hi"), _turn("assistant", " Hello!\n")
    yield from ([], [user], [system], [answer], [system, user], [user, answer], [user, answer, user], [system, system])
    yield from ([user, user], [user, system, user], [system, user, answer, user, answer, user], [answer, user])
    yield [_turn("developer", "Rules"), user, answer, user]
    yield from ([_turn("user", text), _turn("assistant", text), _turn("user", text)] for text in _TEXTS)
    yield from ([_turn("system", text), user] for text in _TEXTS)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two\n"}]
    yield from ([_turn("user", parts)], [_turn("system", parts), _turn("user", parts), _turn("assistant", parts), user])
    yield [_turn("user", [])]
    for call in (_CALL, _TEXT_CALL):
        calling, result = _turn("assistant", tool_calls=[call]), _turn("tool", "22 °C", tool_call_id=call["id"])
        yield [user, calling]
        yield [system, user, calling, result, _turn("assistant", "It's warm."), user]
        yield [user, _turn("assistant", "Let me see.", tool_calls=[call, call]), result, result]
        yield [user, _turn("assistant", "", tool_calls=[call]), {**result, "name": "get_weather"}, user]
        yield [user, calling, _turn("tool", '{"a": 1}'), calling, _turn("ipython", "x")]
    yield [user, _turn("assistant", "<think>\nhm\n</think>\n\nYes."), user, _turn("assistant", "<think>a</think>b")]
    yield [user, _turn("assistant", "Yes.", reasoning_content="hm\n", reasoning="hm", thinking="hm"), user]
    yield [user, _turn("assistant", "", reasoning_content="", tool_calls=[]), user]
    yield from ([_turn("user")], [user, _turn("assistant")], [{"content": "no role"}], [_turn("nobody", "x")])
    yield [_turn("user", "a", name="Ann"), _turn("assistant", "b", name="bot", prefix=True)]


def first_difference(reference: Callable[..., str | None], fast: Callable[..., str | None]) -> str | None:
    """Return the first conversation that the two render differently, in words; None when there is none.

    Parameters
    ----------
    reference, fast : callable
        Take messages, and as keywords what `ChatTemplate.render` takes; return None where they refuse.
    """
    for number, messages in enumerate(_conversations()):
        for options in _options(number):
            expected, got = reference(messages, **options), fast(messages, **options)
            # Once more: between the two the clock may have gone on.
            if expected != got and (expected := reference(messages, **options)) != fast(messages, **options):
                return f"{messages!r:.300} with {options!r:.200} gives {got!r:.300} in place of {expected!r:.300}"
    return None


def _options(number: int) -> Iterator[dict[str, Any]]:
    yield {"add_generation_prompt": True}
    # All of them with all conversations would take a third of a second.
    rarer: list[dict[str, Any]] = [
        *({"add_generation_prompt": False}, {"continue_final_message": True}, {"tools": [_TOOL]}, {"tools": []}),
        {
            "tools": [_TOOL["function"], _TOOL],
            "documents": [{"title": "t", "text": "d"}],
            "add_generation_prompt": True,
        },
        *({**kwargs, "add_generation_prompt": True} for kwargs in _KWARGS),
        *({**kwargs, "tools": [_TOOL]} for kwargs in _KWARGS),
    ]
    yield from (options for i, options in enumerate(rarer) if (number + i) % 5 == 0)
