"""What the load asks for: unique prompts whose right answer is known, in every form of the API."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
from reference import MODEL, echo_text, echoed, ids_of, tokenizer

_WORDS = (
    *(
        "river",
        "stone",
        "7",
        "window",
        "42",
        "of the",
        "harbour",
        "green,",
        "paper;",
        "moon?",
        "gate",
        "1999",
        "größer",
    ),
    *(
        "naïve",
        "漢字",
        "日本語",
        "Привет",
        "🙂",
        "👩‍🚀",
        "e\u0301",
        "ﬁsh",
        "κόσμος",
        "שלום",
        "\n",
        "  ",
        "foo_bar()",
        "→",
    ),
)
_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
_LEAVING = 0.15
_LONGEST_STAY_S = 1.5
# Fewest tokens of a choice; and by how much its limit is lower where a request has several.
_FEWEST = 10
_SHARED = 4


class Ask(msgspec.Struct, kw_only=True):
    """One request.

    Attributes
    ----------
    kind : str
        In words.
    path : str
        Route.
    body : dict
        JSON.
    expected : list of str
        Text of each choice.
    tokens : int
        Output tokens of all choices.
    stream : bool
        Whether the answer comes as events.
    """

    kind: str
    path: str
    body: dict[str, Any]
    expected: list[str]
    tokens: int
    stream: bool

    def request(self, keep: bool) -> bytes:
        """Return the bytes of the HTTP request."""
        body = json.dumps(self.body).encode()
        close = "" if keep else "connection: close\r\n"
        head = f"POST {self.path} HTTP/1.1\r\nhost: chaos\r\n{close}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body


class Asks:
    """An endless supply.

    Parameters
    ----------
    seed : int
        Decides everything but the moment.
    longest : int
        Most tokens of an answer.
    """

    def __init__(self, seed: int, longest: int) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._longest = longest
        self._made = 0

    def next(self) -> Ask:
        """Make a request that was never made before."""
        kinds: list[Callable[[bool], Ask]] = [self._completion, self._chat, self._choices, self._list]
        kind = self._random.choices(kinds, weights=(4, 4, 1, 1))[0]
        return kind(self._random.random() < 0.7)

    def stay(self) -> float | None:
        """Return after how many seconds the next client leaves, if it does."""
        if self._random.random() >= _LEAVING:
            return None
        return self._random.choice((0.0, 0.001, 0.005, 0.02, self._random.uniform(0.0, _LONGEST_STAY_S)))

    def _prompt(self) -> str:
        self._made += 1
        words = " ".join(self._random.choices(_WORDS, k=self._random.randint(5, 60)))
        return f"Request {self._made} of load {self._seed}: {words}."

    def _tokens(self, several: bool) -> int:
        return self._random.randint(_FEWEST, max(_FEWEST, self._longest // (_SHARED if several else 1)))

    def _completion(self, stream: bool) -> Ask:
        prompt, tokens = self._prompt(), self._tokens(several=False)
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens}
        return _ask("completion", "/v1/completions", body, [echo_text(prompt, tokens)], tokens, stream)

    def _chat(self, stream: bool) -> Ask:
        prompt, tokens = self._prompt(), self._tokens(several=False)
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
        }
        return _ask("chat", "/v1/chat/completions", body, [_chat_text(prompt, tokens)], tokens, stream)

    def _choices(self, stream: bool) -> Ask:
        prompt, tokens = self._prompt(), self._tokens(several=True)
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "n": 4}
        return _ask("choices", "/v1/completions", body, [echo_text(prompt, tokens)] * 4, tokens, stream)

    def _list(self, stream: bool) -> Ask:
        prompts, tokens = [self._prompt() for _ in range(3)], self._tokens(several=True)
        texts = [echo_text(prompt, tokens) for prompt in prompts for _ in range(2)]
        ids = [ids_of(prompt) for prompt in prompts]
        body: dict[str, Any] = {"model": MODEL, "prompt": ids, "max_tokens": tokens, "n": 2}
        return _ask("list", "/v1/completions", body, texts, tokens, stream)


def _ask(kind: str, path: str, body: dict[str, Any], expected: list[str], tokens: int, stream: bool) -> Ask:
    # The real engine samples otherwise, and stops.
    body |= {"temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    name = f"{kind}, {'stream' if stream else 'whole'}"
    return Ask(kind=name, path=path, body=body, expected=expected, tokens=tokens * len(expected), stream=stream)


def _chat_text(prompt: str, tokens: int) -> str:
    rendered = f"{_SYSTEM}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer().encode(rendered, add_special_tokens=False).ids
    return tokenizer().decode(echoed(ids, tokens), skip_special_tokens=True)
