"""Log probabilities as chat completions and completions show them."""

from __future__ import annotations

import msgspec

from multitok.http.manager import Manager
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


def _tops(output: GenerateOutput, ids: list[int], k: int) -> list[list[tuple[int, float]]]:
    """Likeliest ids per position; the chosen one where the engine was not asked (`sampling.with_logprobs`)."""
    if k == 0:
        return [[] for _ in ids]
    if output.top_logprobs is not None:
        return [top[:k] for top in output.top_logprobs]
    return [[pair] for pair in zip(ids, output.logprobs or [], strict=False)]


def chat_logprobs(output: GenerateOutput, k: int, manager: Manager) -> dict[str, object] | None:
    """Make the ``logprobs`` object of a chat choice.

    Parameters
    ----------
    output : GenerateOutput
        News of the choice.
    k : int
        Likeliest ids per position.
    manager : Manager
        Knows the text of an id.
    """
    if output.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        text, raw = manager.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    ids = _ids(output)
    content = [
        {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in top]}
        for token_id, logprob, top in zip(ids, output.logprobs, _tops(output, ids, k), strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(output: GenerateOutput, k: int, manager: Manager, offset: int) -> CompletionLogprobs | None:
    """Make the ``logprobs`` object of a completion choice.

    Parameters
    ----------
    output : GenerateOutput
        News of the choice.
    k : int
        Likeliest ids per position.
    manager : Manager
        Knows the text of an id.
    offset : int
        Length of the text of all tokens before.
    """
    if output.logprobs is None:
        return None
    ids = _ids(output)
    tokens = [manager.token_text(token_id)[0] for token_id in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {manager.token_text(token_id)[0]: finite(logprob) for token_id, logprob in top} for top in _tops(output, ids, k)
    ]
    return CompletionLogprobs(tokens, [finite(logprob) for logprob in output.logprobs], tops if k else None, offsets)
