"""One step: a batch of ids becomes a batch of text. Both detokenizer loops and an owner that decodes itself call it."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter

from multitok.detokenizer.incremental import DecodeState, TextDecoder
from multitok.detokenizer.stop_strings import StopMatcher
from multitok.messages.base import FinishReason
from multitok.messages.lives import DeadLives
from multitok.messages.numbers import owner_of
from multitok.messages.split import concatenate, handle_output_by_index, take_rows
from multitok.messages.to_detokenizer import BatchTokenIDOutput, OutputExtras, TokenOutput
from multitok.messages.to_scheduler import DecodeParams
from multitok.messages.to_tokenizer import BatchStrOutput

_log = logging.getLogger(__name__)
_PASSED_ON = TokenOutput.__struct_fields__
_passed_on = attrgetter(*_PASSED_ON)
_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


class _Request:
    """A running request's text."""

    __slots__ = ("decode", "held_ids", "held_rows", "held_texts", "life", "min_new_tokens", "rank", "stops", "stream")

    def __init__(self, decoder: TextDecoder, params: DecodeParams, rank: int, life: int) -> None:
        self.rank = rank
        self.life = life
        self.decode: DecodeState = decoder.start(array("i", params.prompt_tail), params.skip_special_tokens)
        self.stops = StopMatcher(params.stop) if params.stop else None
        self.min_new_tokens = params.min_new_tokens
        self.stream = params.stream
        # What a request that is not streamed has said so far: ids, text, and rows that say more than these.
        self.held_ids = bytearray()
        self.held_texts: list[str] = []
        self.held_rows: list[TokenOutput] = []

    def push(self, ids: array[int], first_index: int) -> tuple[str, int | None, str | None]:
        """Return the text of new ids, and where a stop string ended it: after how many of the ids, and which."""
        if self.stops is None:
            return (self.decode.push(ids[0]) if len(ids) == 1 else self.decode.push_many(ids)), None, None
        text = ""
        for i, token_id in enumerate(ids):
            delta = self.decode.push(token_id)
            if first_index + i + 1 < self.min_new_tokens:
                text += self.stops.skip(delta)
                continue
            delta, matched = self.stops.push(delta)
            text += delta
            if matched is not None:
                return text, i + 1, matched
        return text, None, None

    def rebuild(self, ids: bytes, text_length: int | None) -> None:
        """Take the ids before the next row, whose text the owner has.

        Raises
        ------
        ValueError
            That text is not what these ids decode to.
        """
        text, _, matched = self.push(array("i", ids), 0)
        if matched is not None or (self.stream and len(text) != text_length):
            raise ValueError("the text so far could not be made again")

    def flush(self) -> tuple[str, str | None]:
        """Return the text that was held back, and the stop string in it."""
        text = self.decode.flush()
        if self.stops is None:
            return text, None
        text, matched = self.stops.push(text)
        return (text if matched is not None else text + self.stops.flush()), matched


class DetokenizerStep:
    """Turns batches of ids into batches of text; holds the state of running requests.

    Parameters
    ----------
    decoders : sequence of TextDecoder
        Of each rank that of its model.
    life : int
        Which life of its process this is. In a later one rows may come of requests that began in an earlier one: they
        are skipped, since their owners ask for rows that rebuild the state.

    Attributes
    ----------
    owners : set of (str or None)
        Owners of the rows that came, as long as they live. One alone: no batch needs to be split.
    """

    def __init__(self, decoders: Sequence[TextDecoder], life: int = 1) -> None:
        self._decoders = decoders
        self.owners: set[str | None] = set()
        self._dead_owners: set[str | None] = set()
        self._dead_lives = DeadLives()
        self._expects_strays = life > 1
        self._requests: dict[int, _Request] = {}
        # Those that are streamed and have no stop strings: a step does no more for them than push an id each.
        self._plain: dict[int, Callable[[int], str]] = {}
        # Requests that have ended here, by a stop string or an error, until the last word of the rank, and of its life,
        # that has them.
        self._tombstones: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return how many requests have state here."""
        return len(self._requests) + len(self._tombstones)

    def __call__(self, batch: BatchTokenIDOutput) -> BatchStrOutput | None:  # noqa: PLR0912, PLR0915  (runs per token)
        """Decode a batch.

        Parameters
        ----------
        batch : BatchTokenIDOutput
            New ids of one step.

        Returns
        -------
        BatchStrOutput or None
            Text for the owners; None when there is nothing to tell them.
        """
        if self._dead_lives.has(batch.rank, batch.life):
            return None
        ids = array("i", batch.output_ids)
        lengths = batch.output_lengths
        ends = None if lengths is None else list(accumulate(lengths))
        decode_params, finished = batch.decode_params, batch.finished_reasons
        requests, plain, size = self._requests, self._plain, self._decoders[batch.rank].size
        decode_ids = None if decode_params is None else _take_decode_ids(batch)
        texts: list[str] = []
        kept: list[int] = []
        changed: list[BatchStrOutput] = []
        for i, number in enumerate(batch.numbers):
            finish = None if finished is None else finished[i]
            if decode_params is not None and (params := decode_params[i]) is not None:
                failed = self._begin(batch, i, params, None if decode_ids is None else decode_ids[i])
                if failed is not None:
                    changed.append(failed)
                    continue
            if finish is None and lengths is None and number in plain and 0 <= ids[i] < size:
                texts.append(plain[number](ids[i]))
                kept.append(i)
                continue
            request = requests.get(number)
            if request is None:
                if (row := self._without_state(batch, i, finish)) is not None:
                    changed.append(row)
                continue
            row_ids = ids[i : i + 1] if ends is None or lengths is None else ids[ends[i] - lengths[i] : ends[i]]
            # The id that ended the request is counted but is no part of its text.
            unseen = 1 if finish is not None and finish.matched is not None and row_ids else 0
            try:
                text, cut, matched = request.push(
                    row_ids[: len(row_ids) - unseen] if unseen else row_ids, batch.first_indexes[i]
                )
                if finish is not None and matched is None:
                    rest, matched = request.flush()
                    text += rest
            except Exception as error:
                _log.exception("request %d: its ids can't be decoded", number)
                changed.append(_joined(request, _failed(batch, i, error)))
                self._forget(number, finish, batch)
                continue
            if matched is not None:
                row = _with_text(handle_output_by_index(batch, i), [text])
                changed.append(_joined(request, _cut(row, cut, FinishReason("stop", matched))))
                self._forget(number, finish, batch)
            elif request.stream:
                texts.append(text)
                kept.append(i)
                if finish is not None:
                    self._remove(number)
            elif finish is None:
                _hold(request, batch, i, row_ids, text)
            else:
                changed.append(_joined(request, _with_text(handle_output_by_index(batch, i), [text])))
                self._remove(number)
        return self._assemble(batch, texts, kept, changed)

    def check_rank(self, rank: int) -> None:
        """Refuse a rank that there isn't.

        Raises
        ------
        ValueError
            Nothing is known of it.
        """
        if not 0 <= rank < len(self._decoders):
            raise ValueError(f"there is no rank {rank}")

    def rank_died(self, rank: int, life: int) -> None:
        """Forget what a dead life of a scheduler, or one before it, had begun; its last word will not come."""
        if not self._dead_lives.add(rank, life):
            return
        self._expects_strays = True
        for number in [n for n, request in self._requests.items() if request.rank == rank and request.life <= life]:
            self._remove(number)
        self._tombstones = {number: its for number, its in self._tombstones.items() if its[0] != rank or its[1] > life}

    def owner_died(self, address: str) -> None:
        """Forget the requests of an owner that is gone."""
        self.owners.discard(address)
        self._dead_owners.add(address)
        for number in [number for number in self._requests if owner_of(number) == address]:
            self._remove(number)
        self._tombstones = {number: its for number, its in self._tombstones.items() if owner_of(number) != address}

    def _begin(
        self, batch: BatchTokenIDOutput, i: int, params: DecodeParams, decode_ids: bytes | None
    ) -> BatchStrOutput | None:
        """Make a request's state, at its beginning or anew; returns what its owner is told if that can't be done."""
        number = batch.numbers[i]
        owner = _owner(batch, i)
        if owner in self._dead_owners:
            return None
        self.owners.add(owner)
        self._tombstones.pop(number, None)
        # Whatever there was of it: this row begins it anew.
        self._remove(number)
        try:
            request = _Request(self._decoders[batch.rank], params, batch.rank, batch.life)
            if decode_ids is not None:
                offsets = None if batch.extras is None else batch.extras.read_offsets
                request.rebuild(decode_ids, None if offsets is None else offsets[i])
        except Exception as error:
            _log.exception("request %d can't be begun", number)
            self._forget(number, None if batch.finished_reasons is None else batch.finished_reasons[i], batch)
            return _failed(batch, i, error)
        self._requests[number] = request
        if request.stream and request.stops is None:
            self._plain[number] = request.decode.push
        return None

    def _remove(self, number: int) -> None:
        self._requests.pop(number, None)
        self._plain.pop(number, None)

    def _assemble(
        self, batch: BatchTokenIDOutput, texts: list[str], kept: list[int], changed: list[BatchStrOutput]
    ) -> BatchStrOutput | None:
        if kept and len(kept) == len(batch.numbers):
            return _with_text(batch, texts)
        parts = changed
        if kept:
            parts = [_with_text(take_rows(batch, kept), texts), *changed]
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def _without_state(self, batch: BatchTokenIDOutput, i: int, finish: FinishReason | None) -> BatchStrOutput | None:
        """Return what the owner is told of a row whose request has no state here."""
        number = batch.numbers[i]
        owner = _owner(batch, i)
        if owner in self._dead_owners:
            return None
        if number in self._tombstones:
            if finish is not None:
                del self._tombstones[number]
            return None
        # What an aborted request or a failed one has to say is no more than that.
        if self._expects_strays and (finish is None or finish.type not in ("abort", "error")):
            return None
        if finish is None:
            _log.error("request %d: ids came without the beginning of the request", number)
            self._tombstones[number] = batch.rank, batch.life
            finish = FinishReason("error", None, 500, "the beginning of the answer was lost")
        self.owners.add(owner)
        # A refusal, or the end of a request that was aborted before its first id.
        return _cut(_with_text(handle_output_by_index(batch, i), [""]), 0, finish)

    def _forget(self, number: int, finish: FinishReason | None, batch: BatchTokenIDOutput) -> None:
        self._remove(number)
        if finish is None:
            self._tombstones[number] = batch.rank, batch.life


def _take_decode_ids(batch: BatchTokenIDOutput) -> list[bytes | None] | None:
    """Take a column out of a batch that owners don't need: they know these ids."""
    if batch.extras is None:
        return None
    decode_ids, batch.extras.decode_ids = batch.extras.decode_ids, None
    return decode_ids


def _owner(batch: BatchTokenIDOutput, i: int) -> str | None:
    return None if batch.http_worker_ipcs is None else batch.http_worker_ipcs[i]


def _failed(batch: BatchTokenIDOutput, i: int, error: Exception) -> BatchStrOutput:
    row = _with_text(handle_output_by_index(batch, i), [""])
    return _cut(row, 0, FinishReason("error", None, 500, str(error)))


def _with_text(batch: BatchTokenIDOutput, texts: list[str]) -> BatchStrOutput:
    return BatchStrOutput(output_strs=texts, **dict(zip(_PASSED_ON, _passed_on(batch), strict=True)))


def _cut(row: BatchStrOutput, length: int | None, finish: FinishReason) -> BatchStrOutput:
    """End a batch of one row after `length` of its ids (None: all)."""
    row.finished_reasons = [finish]
    if length is not None:
        row.output_ids = row.output_ids[: length * 4]
        row.output_lengths = None if length == 1 else [length]
        if row.extras is not None:
            _cut_logprobs(row.extras, length)
    row.completion_tokens = [row.first_indexes[0] + len(row.output_ids) // 4]
    return row


def _cut_logprobs(extras: OutputExtras, length: int) -> None:
    for name in _PER_TOKEN:
        column = getattr(extras, name)
        if column is not None and column[0] is not None:
            setattr(extras, name, [column[0][:length]])


def _hold(request: _Request, batch: BatchTokenIDOutput, i: int, ids: array[int], text: str) -> None:
    """Keep a row of a request that is not streamed until its end."""
    request.held_ids += ids.tobytes()
    request.held_texts.append(text)
    if batch.extras is not None or batch.cached_tokens is not None:
        row = handle_output_by_index(batch, i)
        if row.extras is not None or row.cached_tokens is not None:
            request.held_rows.append(row)


def _joined(request: _Request, last: BatchStrOutput) -> BatchStrOutput:
    """Return all rows of a request as one row, which has the last one's end."""
    if not request.held_texts:
        return last
    last.first_indexes = [last.first_indexes[0] - len(request.held_ids) // 4]
    last.output_ids = bytes(request.held_ids) + last.output_ids
    last.output_strs = ["".join(request.held_texts) + last.output_strs[0]]
    length = len(last.output_ids) // 4
    last.output_lengths = None if length == 1 else [length]
    rows: list[TokenOutput] = [*request.held_rows, last]
    # Counted once, in the row that an engine knows it in: usually the first, or the last; the others may say 0.
    counted = [row.cached_tokens for row in rows if row.cached_tokens is not None]
    last.cached_tokens = max(counted, key=lambda column: column[0] or 0, default=None)
    with_extras = [row.extras for row in rows if row.extras is not None]
    if with_extras:
        last.extras = _joined_extras(with_extras)
    return last


def _joined_extras(rows: list[OutputExtras]) -> OutputExtras:
    """Return what is per token one after the other, and of everything else the last that was said."""
    joined = OutputExtras()
    for name in OutputExtras.__struct_fields__:
        columns = [column for row in rows if (column := getattr(row, name)) is not None]
        if not columns:
            continue
        if name in _PER_TOKEN:
            setattr(joined, name, [[entry for column in columns for entry in column[0]]])
        elif isinstance(columns[-1], dict):
            setattr(joined, name, {key: value for column in columns for key, value in column.items()})
        else:
            setattr(joined, name, columns[-1])
    return joined
