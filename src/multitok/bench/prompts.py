"""Prompts of exact token counts, cut from a text that comes with Python."""

from __future__ import annotations

import random
from typing import Protocol

from multitok.bench.requests import PLACEHOLDER, SPECIMEN
from multitok.bench.target import BenchError, Target

# Rough for English and most vocabularies; only the first guess where there is a tokenizer to ask.
_CHARS_PER_TOKEN = 4.3
_TRIES = 16
_FILLER = " a"
# A prompt's number as it is counted.
_FRONT = f"{SPECIMEN} "
_FILLED_LEAST = 4


class Counter(Protocol):
    """Counts tokens of a text, without special tokens around it."""

    exact: bool

    def count(self, text: str) -> int:
        """Return the number of tokens."""
        ...


class ServerCounter:
    """Asks the server's own ``/tokenize``, which multitok, SGLang and vLLM have in the same form."""

    exact = True

    def __init__(self, target: Target, model: str) -> None:
        self._target = target
        self._model = model

    def count(self, text: str) -> int:
        """Return the number of tokens; raises `BenchError` when the server doesn't say."""
        answer = self._target.call("/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": False})
        count = answer.get("count")
        if not isinstance(count, int):
            raise BenchError(f"{self._target.url}/tokenize gives no count")
        return count


class ApproximateCounter:
    """Guesses by the number of characters."""

    exact = False

    def count(self, text: str) -> int:
        """Return about the number of tokens."""
        return max(1, round(len(text) / _CHARS_PER_TOKEN))


def find_counter(target: Target, model: str) -> Counter:
    """Return the server's tokenizer where it can be asked, else a guess."""
    counter = ServerCounter(target, model)
    try:
        counter.count("one two")
    except BenchError:
        return ApproximateCounter()
    return counter


def source_text() -> str:
    """Return some 700 kB of English technical prose, with code in it: CPython's help topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class PromptMaker:
    """Cuts prompts.

    Parameters
    ----------
    counter : Counter
        Of the tokenizer that they are for.
    seed : int
        Of the places where they are cut.
    """

    def __init__(self, counter: Counter, seed: int = 1234) -> None:
        self._counter = counter
        self._random = random.Random(seed)
        self._text = source_text()

    def text(self, tokens: int) -> str:
        """Return a text of so many tokens."""
        return self._cut(tokens, "")

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt."""
        return self._counter.count(_FRONT) + 1

    def prompt(self, tokens: int) -> str:
        """Return a text of so many tokens that begins with `PLACEHOLDER` (counted as the number it stands for)."""
        return f"{PLACEHOLDER} {self._cut(tokens, _FRONT)}"

    def _cut(self, tokens: int, front: str) -> str:
        source = self._text
        room = self._counter.count(front) if front else 0
        if tokens <= room:
            raise BenchError(
                f"the prompt is too short: the number that makes it unique takes {room} tokens; ask for more tokens"
            )
        start = source.index(" ", self._random.randrange(len(source) // 2)) + 1
        size = int((tokens - room) * _CHARS_PER_TOKEN)
        while len(source) - start < size * 2:
            source += source
        body = source[start : start + max(size, 1)].rstrip()
        shorter, missing = "", tokens
        for _ in range(_TRIES):
            off = tokens - self._counter.count(front + body)
            if off == 0 or not self._counter.exact:
                return body
            if 0 < off < missing:
                shorter, missing = body, off
                # Where no cut gives the count, a few short words more do.
                padded = body + _FILLER * off
                if off <= max(_FILLED_LEAST, tokens // 100) and self._counter.count(front + padded) == tokens:
                    return padded
            per_token = size / max(tokens - room - off, 1)
            size = max(1, size + round(off * per_token) + (0 if off > 0 else -1))
            body = source[start : start + size].rstrip()
        return shorter + _FILLER * missing
