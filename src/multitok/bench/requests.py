"""What is sent: bodies with a place for a number that makes every prompt of a run unlike any other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from multitok.bench.target import PATHS, Api, Target

# Tokenizers that split digits make as many tokens of any number as of this one, so prompt lengths stay exact.
PLACEHOLDER = "@" * 12
SPECIMEN = "0" * 12


class Body:
    """One request, ready but for its number.

    Parameters
    ----------
    body : dict
        The request; `PLACEHOLDER` in its text is where the number goes, in front, so that no prefix cache can help.
    """

    __slots__ = ("after", "before", "length", "stream")

    def __init__(self, body: dict[str, Any]) -> None:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        before, mark, after = text.partition(PLACEHOLDER.encode())
        self.stream = bool(body.get("stream"))
        self.before, self.after = (before, after) if mark else (text, b"")
        self.length = len(text)

    def with_number(self, number: int) -> bytes:
        """Return the body with this number in its place."""
        return b"%b%012d%b" % (self.before, number, self.after) if self.after else self.before


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a run have in common."""

    model: str
    api: Api = "chat"
    stream: bool = True
    ignore_eos: bool = False
    usage: bool = True

    def body(self, prompt: str | Sequence[dict[str, str]], output_tokens: int) -> Body:
        """Return a request for a prompt: text, or messages."""
        body: dict[str, Any] = {"model": self.model}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        else:
            body["prompt"] = prompt
        body |= {"max_tokens": output_tokens, "temperature": 0.7, "stream": self.stream}
        if self.stream and self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return Body(body)


Session = Sequence[Body]


class Numbered:
    """Hands out sessions (requests that one client sends one after another), each with a number of its own.

    Parameters
    ----------
    sessions : sequence of sequence of Body
        Gone through again and again; numbers make them differ.
    target : Target
        Where they go.
    api : str
        Which API.
    seed : int
        Numbers of two runs with different seeds differ, so that a cache filled by one is of no use to the other.
    """

    def __init__(self, sessions: Sequence[Session], target: Target, api: Api, seed: int) -> None:
        self._sessions = sessions
        self._heads: dict[int, bytes] = {}
        self._target = target
        self._path = PATHS[api]
        self._seed = seed
        self._next = 0

    def take(self) -> Iterator[tuple[bytes, bool]]:
        """Return the next session's requests, and whether each is streamed."""
        index = self._next
        self._next += 1
        # Spread over all digits, so that numbers don't share their first ones.
        number = (self._seed * 1_000_003 + index + 1) * 7_919_999_983 % 10**12
        session = self._sessions[index % len(self._sessions)]
        return ((self._payload(body, number), body.stream) for body in session)

    def _payload(self, body: Body, number: int) -> bytes:
        head = self._heads.get(body.length)
        if head is None:
            head = self._heads[body.length] = self._target.head(self._path, body.length)
        return head + body.with_number(number)
