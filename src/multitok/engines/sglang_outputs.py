"""What SGLang's batches say about each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from multitok.engines.base import EngineOutput
from multitok.engines.sglang_requests import LiveRequest
from multitok.messages.base import FinishReason

# Columns that say something about a whole request and have no place of their own, by their names in SGLang.
_INFO_COLUMNS = (
    "cached_tokens_details",
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_correct_drafts_histogram",
)
_BAD_REQUEST = 400


def generated(batch: Any, row: int, request: LiveRequest) -> EngineOutput | None:
    """Return a row of a `BatchTokenIDOutput`; None when it says nothing.

    Raises
    ------
    ValueError
        The row is not what SGLang sends.
    IndexError
        A column is too short.
    """
    ids: list[int] = batch.output_ids[row].tolist()
    reason = batch.finished_reasons[row]
    finish = None if reason is None else finish_of(reason, ids)
    output = EngineOutput(request.number, ids, finish)
    if request.logprobs is not None and ids:
        _add_logprobs(output, batch, row, request.logprobs)
    if request.stops and not request.stops.isdisjoint(ids):
        _end_at_stop(output, request.stops)
    request.made += len(output.output_ids)
    if output.finish is not None:
        output.cached_tokens = batch.cached_tokens[row]
        output.customized_info = _info(batch, row)
    elif not output.output_ids:
        return None
    return output


def embedded(batch: Any, row: int, request: LiveRequest) -> EngineOutput:
    """Return a row of a `BatchEmbeddingOutput`; raises as `generated` does."""
    finish = finish_of(batch.finished_reasons[row] or {"type": "stop"}, [])
    output = EngineOutput(request.number, [], finish)
    if finish.type != "error":
        output.finish = FinishReason("stop")
        output.embedding = np.asarray(batch.embeddings[row], dtype=np.float32).tobytes()
    return output


def finish_of(reason: dict[str, Any], ids: Sequence[int]) -> FinishReason:
    """Return SGLang's finish reason in our words.

    Parameters
    ----------
    reason : dict
        ``BaseFinishReason.to_json()``.
    ids : sequence of int
        The last ids, for a stop that names none.
    """
    match reason.get("type"), reason.get("matched"):
        case "stop", str(words):
            # No stop string is ever sent; SGLang ends a request like this when its model made no number.
            return FinishReason("error", status=500, message=f"SGLang ended the request: {words}")
        case "stop", int(matched):
            return FinishReason("stop", matched=matched)
        case "stop", _:
            return FinishReason("stop", matched=ids[-1] if ids else None)
        case "length", _:
            return FinishReason("length")
        case "abort", _:
            status, message = reason.get("status_code"), str(reason.get("message") or "aborted")
            if not isinstance(status, int) or status < _BAD_REQUEST:
                return FinishReason("abort", message=message)
            return FinishReason("error", status=status, message=message)
    raise ValueError(f"SGLang ended a request with an unknown reason: {reason}")


def merge(first: EngineOutput, then: EngineOutput) -> None:
    """Add what a later batch says about a request to what an earlier one said."""
    first.output_ids += then.output_ids
    first.finish = then.finish
    first.cached_tokens = then.cached_tokens
    first.customized_info = then.customized_info
    if then.logprobs is not None:
        first.logprobs = (first.logprobs or []) + then.logprobs
    if then.top_logprobs is not None:
        first.top_logprobs = (first.top_logprobs or []) + then.top_logprobs


def _add_logprobs(output: EngineOutput, batch: Any, row: int, top: int) -> None:
    values = batch.output_token_logprobs_val[row]
    if len(values) != len(output.output_ids) or None in values:
        raise ValueError(f"SGLang sent {len(values)} log probabilities for {len(output.output_ids)} ids")
    output.logprobs = values
    if top:
        ids, likely = batch.output_top_logprobs_idx[row], batch.output_top_logprobs_val[row]
        output.top_logprobs = [list(zip(*position, strict=True)) for position in zip(ids, likely, strict=True)]
        if len(output.top_logprobs) != len(values):
            raise ValueError("SGLang sent likeliest ids for some positions only")


def _end_at_stop(output: EngineOutput, stops: frozenset[int]) -> None:
    end = next(i for i, token in enumerate(output.output_ids) if token in stops)
    output.finish = FinishReason("stop", matched=output.output_ids[end])
    del output.output_ids[end + 1 :]
    if output.logprobs is not None:
        del output.logprobs[end + 1 :]
    if output.top_logprobs is not None:
        del output.top_logprobs[end + 1 :]


def _info(batch: Any, row: int) -> dict[str, Any] | None:
    info = {name: column[row] for name in _INFO_COLUMNS if (column := getattr(batch, name)) and column[row] is not None}
    if batch.retraction_counts and batch.retraction_counts[row]:
        info["num_retractions"] = batch.retraction_counts[row]
    return info or None
