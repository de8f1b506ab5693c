"""Bounds of what a request may hold that have no option: sizes of nested values, grammars, answers with details."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multitok.http.errors import invalid
from multitok.messages.sampling import SamplingParams

MAX_STOP_LENGTH = 1024
MAX_STOP_CHARACTERS = 4 * 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_TEMPLATE_CHARACTERS = 64 * 1024
MAX_NESTED = 64
# An entry of a log probability takes up to 200 bytes in memory, and 50 in the answer.
MAX_ANSWER_LOGPROBS = 2 * 1024 * 1024
# Each choice is a request of its own inside, with its own copy of all; so much takes about 20 ms to write.
MAX_COPIED = 32 * 1024 * 1024
_BIAS_BYTES = 12


def check_nested(param: str, root: Any, characters: int, depth: int = MAX_NESTED) -> None:
    """Check the size of a value of any shape.

    Parameters
    ----------
    param : str
        Field for the error.
    root : object
        What JSON decoded to.
    characters : int
        Most characters in all texts and keys together; an item of a list or an object counts as one.
    depth : int
        Most levels.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    size = 0
    level = [root]
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                size += len(value) + sum(map(len, value))
                below.extend(value.values())
            elif isinstance(value, list):
                size += len(value)
                below.extend(value)
            elif isinstance(value, str):
                size += len(value)
            if size > characters:
                raise invalid(param, f"is larger than {characters} characters")
        if not below:
            return
        level = below
    raise invalid(param, f"is nested deeper than {depth} levels")


def check_grammar_text(param: str, text: str) -> None:
    """Check a regular expression or a grammar."""
    if not text:
        raise invalid(param, "must not be empty")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise invalid(param, f"is longer than {MAX_GRAMMAR_CHARACTERS} characters")


def check_logprobs(param: str, choices: int, top: int, tokens: int, *, stream: bool, max_choices: int) -> None:
    """Refuse to list more log probabilities than one step, or one answer, can hold.

    Parameters
    ----------
    param : str
        Field for the error.
    choices : int
        Choices of all prompts.
    top : int
        Likeliest ids per position.
    tokens : int
        Most output ids of a choice.
    stream : bool
        Each step's are sent at once.
    max_choices : int
        Most choices of a request.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    if choices == 1:
        return
    per_step = choices * (1 + top)
    if per_step > max_choices:
        raise invalid(
            param, f"{choices} choices make {per_step} log probabilities per token; at most {max_choices} are allowed"
        )
    if not stream and per_step * tokens > MAX_ANSWER_LOGPROBS:
        raise invalid(
            param,
            f"{choices} choices of up to {tokens} tokens make {per_step * tokens} log probabilities in one answer;"
            f" at most {MAX_ANSWER_LOGPROBS} are allowed: set a smaller token limit, or stream",
        )


def check_copies(param: str, prompts: Sequence[str | bytes], n: int, params: SamplingParams, stop: list[str]) -> None:
    """Refuse many choices of what is large.

    Parameters
    ----------
    param : str
        Field for the error.
    prompts : sequence of (str or bytes)
        The prompts.
    n : int
        Choices of each.
    params : SamplingParams
        Of all choices.
    stop : list of str
        Stop strings of all choices.

    Raises
    ------
    RequestError
        400 that names the field.
    """
    choices = n * len(prompts)
    if choices == 1:
        return
    each = sum(map(len, stop)) + _BIAS_BYTES * len(params.logit_bias or ())
    if params.grammar is not None:
        each += len(params.grammar.text)
    size = (n - 1) * sum(map(len, prompts)) + (choices - 1) * each
    if size > MAX_COPIED:
        raise invalid(param, f"{choices} choices are too many for such long prompts, stop strings or grammars")
