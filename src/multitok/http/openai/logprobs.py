"""Log probabilities as chat completions and completions show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from multitok.http.manager import Model
from multitok.http.parts import list_parts
from multitok.tokenizer.requests import GenerateOutput

# JSON has no infinity; OpenAI's own value for a token that can't come.
_LEAST = -9999.0


class CompletionLogprobs(msgspec.Struct):
    """``logprobs`` of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


def finite(logprob: float) -> float:
    """Return a log probability that JSON can carry."""
    return logprob if logprob > _LEAST else _LEAST


def _ids(output: GenerateOutput) -> list[int]:
    return memoryview(output.output_ids).cast("i").tolist()


def _tops(output: GenerateOutput, ids: list[int], k: int) -> Iterator[Sequence[tuple[int, float]]]:
    """Likeliest ids per position; the chosen one where the engine was not asked (`sampling.with_logprobs`)."""
    if k == 0:
        return ([] for _ in ids)
    if output.top_logprobs is not None:
        return (top[:k] for top in output.top_logprobs)
    return ([pair] for pair in zip(ids, output.logprobs or [], strict=False))


def chat_logprobs(output: GenerateOutput, k: int, model: Model) -> dict[str, object] | None:
    """Make the ``logprobs`` object of a chat choice.

    Parameters
    ----------
    output : GenerateOutput
        News of the choice.
    k : int
        Likeliest ids per position.
    model : Model
        Knows the text of an id.
    """
    if output.logprobs is None:
        return None
    return {"content": list(_chat_content(output, k, model)), "refusal": None}


def chat_logprobs_parts(output: GenerateOutput, k: int, model: Model) -> Iterator[bytes]:
    """JSON of `chat_logprobs`, in parts."""
    if output.logprobs is None:
        yield b"null"
        return
    yield b'{"content":'
    yield from list_parts(_chat_content(output, k, model))
    yield b',"refusal":null}'


def _chat_content(output: GenerateOutput, k: int, model: Model) -> Iterator[dict[str, object]]:
    def entry(token_id: int, logprob: float) -> dict[str, object]:
        text, raw = model.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    ids = _ids(output)
    for token_id, logprob, top in zip(ids, output.logprobs or [], _tops(output, ids, k), strict=False):
        yield {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in top]}


def completion_logprobs(output: GenerateOutput, k: int, model: Model, offset: int) -> CompletionLogprobs | None:
    """Make the ``logprobs`` object of a completion choice.

    Parameters
    ----------
    output : GenerateOutput
        News of the choice.
    k : int
        Likeliest ids per position.
    model : Model
        Knows the text of an id.
    offset : int
        Length of the text of all tokens before.
    """
    if output.logprobs is None:
        return None
    ids = _ids(output)
    tokens = [model.token_text(token_id)[0] for token_id in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {model.token_text(token_id)[0]: finite(logprob) for token_id, logprob in top} for top in _tops(output, ids, k)
    ]
    return CompletionLogprobs(tokens, [finite(logprob) for logprob in output.logprobs], tops if k else None, offsets)


def completion_logprobs_parts(output: GenerateOutput, k: int, model: Model) -> Iterator[bytes]:
    """JSON of the whole `completion_logprobs` of a choice, in parts."""
    if output.logprobs is None:
        yield b"null"
        return
    ids = _ids(output)

    def text(token_id: int) -> str:
        return model.token_text(token_id)[0]

    yield b'{"tokens":'
    yield from list_parts(map(text, ids))
    yield b',"token_logprobs":'
    yield from list_parts(map(finite, output.logprobs))
    yield b',"top_logprobs":'
    if k:
        tops = _tops(output, ids, k)
        yield from list_parts({text(token_id): finite(logprob) for token_id, logprob in top} for top in tops)
    else:
        yield b"null"
    yield b',"text_offset":'
    yield from list_parts(accumulate((len(text(token_id)) for token_id in ids[:-1]), initial=0) if ids else ())
    yield b"}"
