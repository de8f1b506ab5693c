"""How long is the event loop held by bodies, and by answers, of very many small things?"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from multitok.bench.target import Target
from scenarios.context import Context, Result
from scenarios.health import polled, post

# Below the largest that is taken by default.
_BODY_BYTES = 27_000_000
_ROUNDS = 5
_QUIET_S = 2.0
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
# Less than the context of the harness's model.
_MOST_IDS = 250_000
_MESSAGE = '{"role":"user","content":"hi"}'
_HEAD = f'{{"messages":[{_MESSAGE}],"max_tokens":4,'
_TURN = '{"max_tokens":4,"messages":['
_CALL = '{"type":"function","function":{"name":"f","arguments":"{}"}}'
_PART = '{"type":"text","text":"a"}'
_WORDS = "It was a bright cold day in April, and the clocks were striking thirteen.\\n"
_KEY = '"%07d":1'

# Path, and what makes the body: 27 MB are made when they are sent.
Case = tuple[str, Callable[[], bytes]]


def run(context: Context) -> Result:
    """Send each kind of body a few times, and ask for /health meanwhile."""
    rounds = max(1, round(_ROUNDS * context.scale))
    with context.serve() as server:
        # The first that asks for log probabilities, or for the text of ids, waits for the tables of the decoder.
        post(server.target, _CHAT, (_HEAD + '"logprobs":true}').encode())
        quiet, _ = polled(server.target, lambda: time.sleep(_QUIET_S), from_due=False)
        figures: Result = {"/health alone, longest wait, ms": round(1000 * max(quiet), 1)}
        for name, (path, body) in CASES.items():
            figures[name] = measure(server.target, path, body(), rounds)
    return figures


def measure(target: Target, path: str, body: bytes, rounds: int) -> Result:
    """Return what one request gets, and how long /health waits at most beside it.

    The round in which that was the least counts: what holds the loop does so in each, and other work only adds to it.
    """
    waits: list[float] = []
    answers: list[tuple[int, float]] = []
    for _ in range(rounds):
        times, _ = polled(target, lambda: answers.append(post(target, path, body)), from_due=False)
        waits.append(1000 * max(times))
    return {
        "status": answers[0][0],
        "answer after, s": min(took for _, took in answers),
        "longest wait for /health, ms": round(min(waits), 1),
    }


def _many(path: str, before: str, item: str, after: str, count: int | None = None) -> Case:
    """Return a body of one item again and again, as large as it may be or with so many."""

    def make() -> bytes:
        room = _BODY_BYTES - len(before) - len(after)
        number = room // (len(item % 0 if item is _KEY else item) + 1) if count is None else count
        items = [item % i for i in range(number)] if item is _KEY else [item] * number
        return (before + ",".join(items) + after).encode()

    return path, make


def _ids(path: str, before: str, item: str, count: int | None = None) -> Case:
    return _many(path, "{" + before + ":[", item, "]}", count)


def _texts(count: int, words: str) -> Case:
    """Return a conversation of so many equal messages, together as large as a body may be."""

    def make() -> bytes:
        content = words * (_BODY_BYTES // count // len(words.encode()))
        return _many(_CHAT, _TURN, f'{{"role":"user","content":"{content}"}}', "]}", count)[1]()

    return _CHAT, make


def _one(before: str, text: str, after: str) -> Case:
    """Return a body with one long thing in it."""

    def make() -> bytes:
        return (before + text * (_BODY_BYTES // len(text)) + after).encode()

    return _CHAT, make


def _fields(path: str, **fields: Any) -> Case:
    return path, lambda: json.dumps(fields).encode()


def _logprobs(n: int, tokens: int) -> Case:
    messages = [{"role": "user", "content": "hi"}]
    return _fields(_CHAT, messages=messages, n=n, logprobs=True, top_logprobs=20, max_tokens=tokens)


CASES: dict[str, Case] = {
    "logit_bias": _many(_CHAT, _HEAD + '"logit_bias":{', _KEY, "}}"),
    "unknown fields": _many(_CHAT, _HEAD, _KEY, "}"),
    "an unknown field of lists": _many(_CHAT, _HEAD + '"unknown":[', "[]", "]}"),
    "metadata": _many(_CHAT, _HEAD + '"metadata":{', _KEY, "}}"),
    "tools": _many(_CHAT, _HEAD + '"tools":[', '{"type":"function"}', "]}"),
    "stop": _many(_CHAT, _HEAD + '"stop":[', '"a"', "]}"),
    "stop_token_ids": _many(_CHAT, _HEAD + '"stop_token_ids":[', "1", "]}"),
    "chat_template_kwargs": _many(_CHAT, _HEAD + '"chat_template_kwargs":{', _KEY, "}}"),
    "a schema": _many(
        _CHAT, _HEAD + '"response_format":{"type":"json_schema","json_schema":{"schema":{"a":[', "{}", "]}}}}"
    ),
    "messages": _many(_CHAT, _TURN, _MESSAGE, "]}"),
    "content parts": _many(_CHAT, _TURN + '{"role":"user","content":[', _PART, "]}]}"),
    "tool_calls": _many(_CHAT, _TURN + '{"role":"assistant","tool_calls":[', _CALL, "]}]}"),
    "empty tool_calls": _many(_CHAT, _TURN + '{"role":"assistant","tool_calls":[', "{}", "]}]}"),
    "in the arguments of a call": _one(
        _TURN + '{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":[', "1,", '1]}"}}]}]}'
    ),
    "40,000 messages": _many(_CHAT, _TURN, _MESSAGE, "]}", 40_000),
    "40,000 content parts": _many(_CHAT, _TURN + '{"role":"user","content":[', _PART, "]}]}", 40_000),
    "20,000 tool_calls": _many(_CHAT, _TURN + '{"role":"assistant","tool_calls":[', _CALL, "]}]}", 20_000),
    "prompts": _many(_TEXT, '{"prompt":[', '"a"', "]}"),
    "2,048 prompts": _many(_TEXT, '{"max_tokens":1,"prompt":[', '"a"', "]}", 2048),
    "13 million ids": _ids(_TEXT, '"prompt"', "1"),
    "4 million ids": _ids(_TEXT, '"prompt"', "12345"),
    "250,000 ids": _ids(_TEXT, '"max_tokens":4,"prompt"', "12345", _MOST_IDS),
    "2,048 prompts of 2,000 ids": _ids(_TEXT, '"max_tokens":1,"prompt"', "[" + ",".join(["12345"] * 2000) + "]", 2048),
    "prompts of an id": _ids(_TEXT, '"prompt"', "[1]"),
    "input_ids of /generate": _ids("/generate", '"input_ids"', "1"),
    "input of /v1/embeddings": _ids("/v1/embeddings", '"input"', "1"),
    "tokens of /detokenize": _ids("/detokenize", '"tokens"', "1"),
    "1,048,576 tokens of /detokenize": _ids("/detokenize", '"tokens"', "12345", 1 << 20),
    "prompts of /tokenize": _many("/tokenize", '{"prompt":[', '"a"', "]}"),
    "1,000,000 characters of /tokenize": _many("/tokenize", '{"prompt":"', "a b c d e", '"}', 100_000),
    "unknown fields of /abort_request": _many("/abort_request", '{"rid":"x",', _KEY, "}"),
    "a text": _texts(1, _WORDS),
    "a text of escapes": _texts(1, "\\n"),
    "a text of Han": _texts(1, "漢字"),
    "3 texts": _texts(3, _WORDS),
    "20,000 texts": _texts(20_000, _WORDS),
    "a long name": _one('{"messages":[{"role":"user","', "k", '":1}]}'),
    "a long stop string": _one(_HEAD + '"stop":"', "\\n", '"}'),
    "spaces": _one('{"messages":', " ", "[]}"),
    "a long number": _one('{"messages":', "1", "}"),
    "quotes": _one('{"messages":', '"', "}"),
    "brackets": _one("", "[", ""),
    "n 97, 20 logprobs, 1,000 tokens": _logprobs(97, 1000),
    "the same as a completion": _fields(_TEXT, prompt="a", n=97, logprobs=20, max_tokens=1000),
    "the same of /generate": _fields(
        "/generate",
        text="a",
        sampling_params={"n": 97, "max_new_tokens": 1000},
        return_logprob=True,
        top_logprobs_num=20,
    ),
    "20 logprobs, 8,000 tokens": _logprobs(1, 8000),
    "n 2,048": _fields(_TEXT, prompt="a", n=2048, max_tokens=4),
    "return_token_ids of 250,000 ids": _ids(
        _TEXT, '"return_token_ids":true,"max_tokens":1,"prompt"', "12345", _MOST_IDS
    ),
    "echo of 250,000 ids": _ids(_TEXT, '"echo":true,"max_tokens":1,"prompt"', "12345", _MOST_IDS),
}
