"""What is fuzzed: properties that hypothesis draws for in the short pass, and atheris steers in the long one."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
from batch_rows import draw_row, draw_shared, put_together, values
from http_double import INFO, DoubleManager
from hypothesis import given
from hypothesis import strategies as st

from hostile import ALL_VALUES, REQUESTS, Field, fields
from multitok.config import ServerArgs
from multitok.detokenizer.incremental import TextDecoder
from multitok.detokenizer.step import DetokenizerStep
from multitok.http.body_route import TakesLong
from multitok.http.decode import decode_body
from multitok.http.errors import error_body
from multitok.http.server import hot_routes
from multitok.messages.base import BaseBatchReq, FinishReason
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.columns import Columns, Group, columns_of
from multitok.messages.split import check_columns, handle_output_by_index, split_by_owner
from multitok.messages.to_child import ToChild
from multitok.messages.to_detokenizer import (
    BatchEmbeddingOutput,
    BatchIdentity,
    BatchTokenIDOutput,
    OutputExtras,
    ToDetokenizer,
)
from multitok.messages.to_launcher import ToLauncher
from multitok.messages.to_scheduler import DecodeParams, Header, ToScheduler
from multitok.messages.to_tokenizer import BatchStrOutput, ToTokenizer
from multitok.tokenizer.requests import RequestError
from parts import VOCAB_SIZE, byte_tokenizer

TOKEN = b"12345678"
UNIONS: list[Any] = [ToScheduler, ToDetokenizer, ToTokenizer, ToLauncher, ToChild, Header, BatchIdentity]
LONGEST_ERROR = 4000

_tags = list(range(40))
_plain = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats()),
        *(st.text(max_size=5), st.binary(max_size=9)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=12), st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=30,
)


@st.composite
def _mutated(draw: Any, frames: st.SearchStrategy[bytes]) -> bytes:
    """A frame with some bytes changed, left out or put in."""
    frame = bytearray(draw(frames))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(frame)))
        match draw(st.integers(0, 3)):
            case 0:
                frame[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del frame[at : at + draw(st.integers(1, 9))]
            case 2:
                frame[at:at] = draw(st.binary(min_size=1, max_size=9))
            case _:
                del frame[at:]
    return bytes(frame)


def _members(union: Any) -> list[type[msgspec.Struct]]:
    return list(getattr(union, "__args__", (union,)))


@functools.cache
def _message_frames(union: Any) -> st.SearchStrategy[bytes]:
    """Valid messages, and lists of anything that begin with a tag as messages do."""
    batches = [kind for kind in _members(union) if issubclass(kind, BaseBatchReq) and kind is not BatchIdentity]
    shaped = st.tuples(st.sampled_from(_tags), st.lists(_plain, max_size=30)).map(lambda pair: [pair[0], *pair[1]])
    kinds: list[st.SearchStrategy[Any]] = [shaped.map(msgspec.msgpack.encode)]
    kinds += [batch_of(kind).map(msgspec.msgpack.encode) for kind in batches]
    return st.one_of(kinds)


@st.composite
def batch_of(draw: Any, kind: type[Any], most: int = 4) -> Any:
    """A valid batch of one to `most` rows."""

    class _Data:
        def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
            return draw(strategy)

    fill = draw(st.sampled_from([0.0, 0.3, 1.0]))
    shared = draw_shared(_Data(), kind, fill)
    return put_together([draw_row(_Data(), kind, shared, fill) for _ in range(draw(st.integers(1, most)))])


@given(st.data())
def message_decoder(data: st.DataObject) -> None:
    """Any frame is a message that can be encoded again, or a `DecodeError`."""
    union = data.draw(st.sampled_from(UNIONS))
    payload = data.draw(st.binary(max_size=60) | _mutated(_message_frames(union)))
    decoder: FrameDecoder[Any] = FrameDecoder(TOKEN, union)
    frame = TOKEN + payload
    assert decoder.is_ours(frame)
    try:
        message = decoder.decode(frame)
    except msgspec.DecodeError:
        return
    again = decoder.decode(bytes(encode_frame(TOKEN, message)))
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(message)


def _mutate_columns(data: st.DataObject, group: Any, path: str = "") -> None:
    """Give some columns other lengths, or the values of other rows."""
    for name, column in columns_of(type(group)).items():
        value = getattr(group, name)
        if value is None or not data.draw(st.booleans()):
            continue
        if isinstance(column, Group):
            _mutate_columns(data, value)
        elif isinstance(column, Columns):
            setattr(group, name, {key: _other_length(data, rows) for key, rows in value.items()})
        elif isinstance(value, list):
            setattr(group, name, _other_length(data, value))
        elif isinstance(value, bytes):
            setattr(group, name, value[: data.draw(st.integers(0, len(value)))] + data.draw(st.binary(max_size=5)))
    if isinstance(lengths := getattr(group, "output_lengths", None), list) and lengths and data.draw(st.booleans()):
        lengths[0] = data.draw(st.sampled_from([-1, 0, 2**31, -(2**31), 2**63 - 1]))


def _other_length(data: st.DataObject, column: list[Any]) -> list[Any]:
    kept = column[: data.draw(st.integers(0, len(column)))]
    return kept + kept[: data.draw(st.integers(0, 2))]


@given(st.data())
def splitter(data: st.DataObject) -> None:
    """A batch whose columns agree splits into rows that agree; of any other the check or the split says so."""
    kind = data.draw(st.sampled_from([BatchTokenIDOutput, BatchStrOutput, BatchEmbeddingOutput]))
    batch = data.draw(batch_of(kind))
    _mutate_columns(data, batch)
    try:
        check_columns(batch)
    except ValueError:
        sound = False
    else:
        sound = True
    try:
        parts = split_by_owner(batch)
        rows = [handle_output_by_index(batch, i) for i in range(len(batch.numbers))]
    except ValueError:
        assert not sound
        return
    if sound:
        for part in (*rows, *(part for _, part in parts)):
            check_columns(part)
        assert sum(len(part.numbers) for _, part in parts) == len(batch.numbers)
        assert [row.numbers for row in rows] == [[number] for number in batch.numbers]


_decoder = TextDecoder.from_tokenizer(byte_tokenizer())
_ids = st.integers(0, VOCAB_SIZE - 1) | st.integers(0, VOCAB_SIZE + 2) | st.integers(-(2**31), 2**31 - 1)
_decode_params = st.builds(
    DecodeParams,
    prompt_tail=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4).map(lambda ids: array("i", ids).tobytes()),
    stop=st.none() | st.lists(st.sampled_from(["a", "ab", "é", "\ufffd", "aaa"]), min_size=1, max_size=3),
    skip_special_tokens=st.booleans(),
    min_new_tokens=st.integers(0, 3),
    stream=st.booleans(),
)
_finish = st.builds(
    FinishReason,
    st.sampled_from(["stop", "length", "abort", "error"]),
    st.none() | st.integers(0, 300) | st.text(max_size=2),
)


@st.composite
def _step_of(draw: Any) -> BatchTokenIDOutput:
    rows = draw(st.integers(1, 4))
    several = draw(st.booleans())
    lengths = [draw(st.integers(0, 3)) if several else 1 for _ in range(rows)]
    ids = [draw(_ids) for _ in range(sum(lengths))]

    def column(values_: st.SearchStrategy[Any]) -> list[Any] | None:
        cells = [draw(st.none() | values_) for _ in range(rows)]
        return None if cells.count(None) == rows else cells

    logprobs = st.lists(st.floats(-5, 0), max_size=3)
    extras = OutputExtras(output_token_logprobs=column(logprobs)) if draw(st.booleans()) else None
    return BatchTokenIDOutput(
        numbers=[draw(st.integers(1, 5)) for _ in range(rows)],
        http_worker_ipcs=[draw(st.sampled_from(["w1.1", "w2.1", None])) for _ in range(rows)],
        output_ids=array("i", ids).tobytes(),
        output_lengths=lengths if several else None,
        first_indexes=[draw(st.integers(0, 6)) for _ in range(rows)],
        decode_params=column(_decode_params),
        finished_reasons=column(_finish),
        cached_tokens=column(st.integers(0, 5)),
        completion_tokens=column(st.integers(0, 5)),
        extras=None if extras == OutputExtras() else extras,
    )


@given(st.lists(_step_of(), min_size=1, max_size=8))
def detokenizer_step(steps: list[BatchTokenIDOutput]) -> None:
    """Whatever ids, rows and lives come: the step goes on, and what it says has columns that agree."""
    step = DetokenizerStep([_decoder])
    for batch in steps:
        check_columns(batch)
        numbers = set(batch.numbers)
        output = step(batch)
        if output is not None:
            check_columns(output)
            assert set(output.numbers) <= numbers
            for _, part in split_by_owner(output):
                msgspec.msgpack.encode(part)


class _Exchange:
    """What a route reads of an exchange."""

    tenant = 0
    request_id: str | None = None
    id_is_given = False

    def __init__(self, body: bytes, header: bytes | None) -> None:
        self.body = bytearray(body)
        self._header = header

    def header(self, name: bytes) -> bytes | None:
        return self._header


_limits = ServerArgs()
_routes = hot_routes(DoubleManager(), _limits)
_embedding_route = hot_routes(DoubleManager(msgspec.structs.replace(INFO, task="embed", embedding_size=4)), _limits)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
).map(msgspec.json.encode)
_texts = st.sampled_from(list(ALL_VALUES.values()))
_all_fields = {path: list(fields(path)) for path in REQUESTS}


@functools.cache
def _typed(kind: Any) -> st.SearchStrategy[bytes]:
    """Values of a field's type."""
    return st.builds(msgspec.json.encode, values(kind))


@st.composite
def _bodies(draw: Any, path: str) -> bytes:
    field: Field = draw(st.sampled_from(_all_fields[path]))
    body = field.body(draw(_json | _texts | _typed(field.type)))
    return bytes(draw(_mutated(st.just(body)))) if len(body) < 2000 and draw(st.booleans()) else body


@given(st.data())
def request_parser(data: st.DataObject) -> None:
    """Any body is a request, or is refused with a status and words for the client."""
    path = data.draw(st.sampled_from(list(REQUESTS)))
    body = data.draw(st.binary(max_size=60) | _bodies(path))
    header = data.draw(st.none() | st.binary(max_size=300))
    try:
        _read(path, body, header)
    except TakesLong:
        pass
    except RequestError as error:
        assert error.status in (400, 404), error
        assert error.message
        assert len(error_body(error)) < LONGEST_ERROR


def _read(path: str, body: bytes, header: bytes | None) -> None:
    routes: dict[str, Any] = _embedding_route if path == "/v1/embeddings" else _routes
    if path in routes:
        assert callable(routes[path].read(_Exchange(body, header), False))
    else:
        decode_body(_decoders[path], body)


_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    path: msgspec.json.Decoder(kind) for path, (kind, _) in REQUESTS.items()
}
TARGETS: dict[str, Callable[[], None]] = {
    target.__name__: target for target in (message_decoder, splitter, detokenizer_step, request_parser)
}
