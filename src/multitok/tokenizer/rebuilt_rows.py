"""Rows that were sent again: what the owner has of them already is cut off."""

from __future__ import annotations

from collections.abc import Mapping

from multitok.messages.base import FinishReason
from multitok.messages.to_tokenizer import BatchStrOutput
from multitok.tokenizer.call import SubRequest

_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def cut_known_beginnings(batch: BatchStrOutput, requests: Mapping[int, SubRequest]) -> None:
    """Let the rows that say what text came before them begin where their requests are, in place.

    Ids are cut by their count, text by its length. A row that begins later than its request is, or after other text,
    stays as it is: something is missing before it.

    Parameters
    ----------
    batch : BatchStrOutput
        With `extras.read_offsets`.
    requests : mapping of int to SubRequest
        The running requests, by number.
    """
    extras = batch.extras
    offsets = None if extras is None else extras.read_offsets
    if extras is None or offsets is None:
        return
    lengths = batch.output_lengths or [1] * len(batch.numbers)
    ids: list[bytes] = []
    end = 0
    for i, (number, offset) in enumerate(zip(batch.numbers, offsets, strict=True)):
        start, end = end, end + 4 * lengths[i]
        row_ids = batch.output_ids[start:end]
        request = requests.get(number)
        if request is not None and offset is not None:
            # Where it runs now.
            request.rank, request.life = batch.rank, batch.life
            known = len(request.output_ids) // 4 - batch.first_indexes[i]
            known_text = request.text_length - offset
            # Failures have no text, whatever was there before.
            if known > 0 and known_text >= 0 and not _failed(batch, i):
                row_ids = row_ids[4 * known :]
                batch.first_indexes[i] += min(known, lengths[i])
                batch.output_strs[i] = batch.output_strs[i][known_text:]
                for name in _PER_TOKEN:
                    column = getattr(extras, name)
                    if column is not None and i < len(column) and column[i] is not None:
                        column[i] = column[i][known:]
        ids.append(row_ids)
    batch.output_ids = b"".join(ids)
    batch.output_lengths = [len(row_ids) // 4 for row_ids in ids]


def _failed(batch: BatchStrOutput, i: int) -> bool:
    finish: FinishReason | None = None if batch.finished_reasons is None else batch.finished_reasons[i]
    return finish is not None and finish.type == "error"
