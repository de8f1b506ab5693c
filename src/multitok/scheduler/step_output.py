"""A step's output as columns: one batch per destination."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from multitok.engines.base import EngineOutput
from multitok.messages.base import FinishReason
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, OutputExtras
from multitok.scheduler.request import ScheduledRequest

Row = tuple[ScheduledRequest, EngineOutput]


def token_batch(rows: list[Row], rank: int, life: int, now: float) -> BatchTokenIDOutput:
    """Return the columns of one destination, in canonical form, and add the new ids to their requests.

    Parameters
    ----------
    rows : list of Row
        Requests with what the step made for them; at least one.
    rank, life : int
        The scheduler, and which life of it.
    now : float
        Seconds of CLOCK_MONOTONIC.
    """
    ids: array[int] = array("i")
    numbers: list[int] = []
    owners: list[str | None] = []
    first_indexes: list[int] = []
    lengths: list[int] = []
    starting = finishing = False
    extras = OutputExtras()
    for request, output in rows:
        new_ids = output.output_ids
        numbers.append(request.number)
        owners.append(request.owner)
        first_indexes.append(len(request.output_ids))
        lengths.append(len(new_ids))
        ids.extend(new_ids)
        request.output_ids.extend(new_ids)
        if request.decode_params is not None:
            starting = True
            request.first_token = request.first_token or now
        if output.finish is not None:
            finishing = True
        if output.logprobs is not None:
            extras.output_token_logprobs = []
            request.keep_logprobs(output)
        if output.top_logprobs is not None:
            extras.output_top_logprobs = []
    batch = BatchTokenIDOutput(
        numbers=numbers,
        http_worker_ipcs=owners,
        output_ids=ids.tobytes(),
        first_indexes=first_indexes,
        output_lengths=None if lengths.count(1) == len(lengths) else lengths,
        rank=rank,
        life=life,
    )
    if starting:
        _add_beginnings(batch, rows, extras)
    # Not only at the end: a stop string, found later on the way, ends a request too.
    if starting or finishing:
        batch.cached_tokens = _cached_tokens(rows)
    if finishing:
        _add_ends(batch, rows, extras, now)
    if extras.output_token_logprobs is not None:
        extras.output_token_logprobs = [output.logprobs for _, output in rows]
        batch.extras = extras
    if extras.output_top_logprobs is not None:
        extras.output_top_logprobs = [output.top_logprobs for _, output in rows]
        batch.extras = extras
    return batch


def _add_beginnings(batch: BatchTokenIDOutput, rows: list[Row], extras: OutputExtras) -> None:
    batch.decode_params = [request.decode_params for request, _ in rows]
    resumed = [request.resumed > 0 and request.decode_params is not None for request, _ in rows]
    if any(resumed):
        extras.decode_ids = [
            r.output_ids[: r.resumed].tobytes() if x else None for (r, _), x in zip(rows, resumed, strict=True)
        ]
        extras.read_offsets = [r.text_length if x else None for (r, _), x in zip(rows, resumed, strict=True)]
        batch.extras = extras
    for request, _ in rows:
        request.decode_params = None


def _cached_tokens(rows: list[Row]) -> list[int | None] | None:
    cached: list[int | None] = []
    for request, output in rows:
        if output.cached_tokens:
            # What a resumed request had generated was a part of the engine's prompt, but is none of the user's.
            request.cached_tokens = min(output.cached_tokens, request.prompt_tokens)
        cached.append(min(output.cached_tokens, request.prompt_tokens) or (None if output.finish is None else 0))
    return None if cached.count(None) == len(cached) else cached


def _add_ends(batch: BatchTokenIDOutput, rows: list[Row], extras: OutputExtras, now: float) -> None:
    ended = [output.finish is not None for _, output in rows]
    batch.finished_reasons = [output.finish for _, output in rows]
    batch.prompt_tokens = [r.prompt_tokens if end else None for (r, _), end in zip(rows, ended, strict=True)]
    batch.completion_tokens = [len(r.output_ids) if end else None for (r, _), end in zip(rows, ended, strict=True)]
    extras.time_stats = [r.time_stats(now) if end else None for (r, _), end in zip(rows, ended, strict=True)]
    extras.customized_info = customized_columns([output for _, output in rows])
    batch.extras = extras
    for request, output in rows:
        if output.finish is not None:
            request.last, request.finished = output, now


def customized_columns(outputs: Sequence[EngineOutput | None]) -> dict[str, list[Any]] | None:
    """Return as columns what the engine adds to the rows of a batch; None is a row that says nothing."""
    infos = [{} if output is None else output.customized_info or {} for output in outputs]
    names = sorted({name for info in infos for name in info})
    return {name: [info.get(name) for info in infos] for name in names} or None


def embedding_batch(rows: list[Row], rank: int, now: float | None) -> BatchEmbeddingOutput:
    """Return the embeddings of one destination as columns; every row of an embedding request is its last.

    Parameters
    ----------
    rows : list of Row
        Requests with what the step made for them, or with their last words, to be said once more.
    rank : int
        The scheduler.
    now : float or None
        Seconds of CLOCK_MONOTONIC; None when they ended earlier.
    """
    embeddings = [output.embedding for _, output in rows]
    if now is not None:
        for request, output in rows:
            request.last, request.finished = output, now
    return BatchEmbeddingOutput(
        numbers=[request.number for request, _ in rows],
        http_worker_ipcs=[request.owner for request, _ in rows],
        embeddings=embeddings if any(embeddings) else None,
        finished_reasons=[output.finish or FinishReason("stop") for _, output in rows],
        prompt_tokens=[request.prompt_tokens for request, _ in rows],
        rank=rank,
        extras=OutputExtras(time_stats=[request.time_stats(request.finished) for request, _ in rows]),
    )
