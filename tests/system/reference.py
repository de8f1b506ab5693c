"""The text that the simulated engine's answers must have, by the `tokenizers` library alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer

from multitok.tokenizer.model_files import resolve_model

MODEL = "SmolLM2-135M-Instruct"
EOS = (0, 2)


@cache
def tokenizer() -> Tokenizer:
    """Return the default model's tokenizer."""
    return Tokenizer.from_file(resolve_model(None).tokenizer_file)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def echoed(prompt: Sequence[int], count: int) -> list[int]:
    """Ids that the simulated engine answers a prompt with: the prompt, again and again."""
    source = [token for token in prompt if token not in EOS]
    return (source * (count // len(source) + 1))[:count]


def raw_text(prompt: Sequence[int], output: Sequence[int], by: Tokenizer | None = None, skip: bool = True) -> str:
    """Text of a raw completion: what the output adds to the prompt's text."""
    by = by or tokenizer()
    before = by.decode(list(prompt), skip_special_tokens=skip)
    whole = by.decode([*prompt, *output], skip_special_tokens=skip)
    assert whole.startswith(before), "the prompt ends inside a character"
    return whole[len(before) :]


def echo_text(prompt: str, count: int) -> str:
    """Text of the answer to a prompt's echo."""
    ids = ids_of(prompt)
    return raw_text(ids, echoed(ids, count))
