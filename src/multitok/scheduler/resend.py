"""What an owner has lost, or a detokenizer, is sent again: rows that rebuild a request's state where there is none."""

from __future__ import annotations

from array import array
from typing import NamedTuple, TypeVar

from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, OutputExtras
from multitok.messages.to_scheduler import LiveReq, TokenizedGenerateReqInput
from multitok.scheduler.request import ScheduledRequest
from multitok.scheduler.request_table import RequestTable
from multitok.scheduler.step_output import customized_columns, embedding_batch

_T = TypeVar("_T")


class Missing(NamedTuple):
    """A request, and how much of its output its owner has: ids, and characters of their text."""

    request: ScheduledRequest
    token_count: int
    text_length: int


def missing_of(live: LiveReq, table: RequestTable) -> list[Missing]:
    """Return what is to be sent again: those of `live.resend` that are here and have been heard of."""
    counts = dict(zip(live.numbers, zip(live.token_counts, live.text_lengths, strict=True), strict=True))
    missing: list[Missing] = []
    for number in dict.fromkeys(live.resend):
        request = table.find(number)
        if request is None or number not in counts or not request.has_been_heard_of():
            continue
        token_count, text_length = counts[number]
        missing.append(Missing(request, min(max(token_count, 0), len(request.output_ids)), text_length))
    return missing


def rebuilding_batches(
    missing: list[Missing], rank: int, life: int
) -> list[tuple[str, BatchTokenIDOutput | BatchEmbeddingOutput]]:
    """Return what is missing, a batch per destination, in canonical form.

    A row of ids makes a detokenizer's state anew (`decode_params` and `decode_ids`) and goes on to the newest id; it
    says how the request has ended, if it has.
    """
    by_destination: dict[str, list[Missing]] = {}
    for one in missing:
        by_destination.setdefault(one.request.destination, []).append(one)
    batches: list[tuple[str, BatchTokenIDOutput | BatchEmbeddingOutput]] = []
    for destination, its in by_destination.items():
        if isinstance(its[0].request.message, TokenizedGenerateReqInput):
            batches.append((destination, _token_batch(its, rank, life)))
        else:
            rows = [(one.request, one.request.last) for one in its if one.request.last is not None]
            batches.append((destination, embedding_batch(rows, rank, None)))
    return batches


def _token_batch(missing: list[Missing], rank: int, life: int) -> BatchTokenIDOutput:
    ids: array[int] = array("i")
    requests = [one.request for one in missing]
    lengths: list[int] = []
    extras = OutputExtras(
        decode_ids=[request.output_ids[:count].tobytes() for request, count, _ in missing],
        read_offsets=[one.text_length for one in missing],
    )
    for request, count, _ in missing:
        new_ids = request.output_ids[count:]
        ids.extend(new_ids)
        lengths.append(len(new_ids))
    ended = [request.last is not None for request in requests]
    cached = [r.cached_tokens or (0 if end else None) for r, end in zip(requests, ended, strict=True)]
    batch = BatchTokenIDOutput(
        numbers=[request.number for request in requests],
        http_worker_ipcs=[request.owner for request in requests],
        output_ids=ids.tobytes(),
        first_indexes=[one.token_count for one in missing],
        output_lengths=None if lengths.count(1) == len(lengths) else lengths,
        rank=rank,
        life=life,
        cached_tokens=None if cached.count(None) == len(cached) else cached,
        extras=extras,
        decode_params=[
            r.message.decode_params if isinstance(r.message, TokenizedGenerateReqInput) else None for r in requests
        ],
    )
    if any(ended):
        batch.finished_reasons = [None if r.last is None else r.last.finish for r in requests]
        batch.prompt_tokens = [r.prompt_tokens if end else None for r, end in zip(requests, ended, strict=True)]
        batch.completion_tokens = [len(r.output_ids) if end else None for r, end in zip(requests, ended, strict=True)]
        extras.customized_info = customized_columns([r.last for r in requests])
        extras.time_stats = [r.time_stats(r.finished) if end else None for r, end in zip(requests, ended, strict=True)]
    if any(request.logprobs is not None for request in requests):
        extras.output_token_logprobs = [_rest(one, one.request.logprobs) for one in missing]
    if any(request.top_logprobs is not None for request in requests):
        extras.output_top_logprobs = [_rest(one, one.request.top_logprobs) for one in missing]
    return batch


def _rest(missing: Missing, column: list[_T] | None) -> list[_T] | None:
    """Return what a column that begins with this life's first id says of the missing ids."""
    return None if column is None else column[max(0, missing.token_count - missing.request.resumed) :]
