from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

import multitok
from multitok.messages import protocol, to_detokenizer, to_scheduler
from multitok.messages.base import BaseBatchReq
from multitok.messages.codec import START_TOKEN_SIZE, FrameDecoder, encode_frame
from multitok.messages.columns import Rows
from multitok.messages.sampling import Grammar, SamplingParams
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchIdentity, BatchTokenIDOutput, ToDetokenizer
from multitok.messages.to_scheduler import (
    AbortReq,
    AckReq,
    DecodeParams,
    GetInternalStateReq,
    Header,
    Kind,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    ToScheduler,
    header_of,
)

TOKEN = b"our-mark"
GENERATE = TokenizedGenerateReqInput(
    number=2**64 - 1,
    http_worker_ipc="w3.2",
    rid="chat-1",
    input_ids=b"\x01\x00\x00\x00\x02\x00\x00\x00",
    sampling_params=SamplingParams(
        max_new_tokens=7,
        temperature=0.5,
        stop_token_ids=[3, 4],
        logit_bias={5: -1.5},
        grammar=Grammar("json_schema", '{"type": "object"}'),
    ),
    decode_params=DecodeParams(b"\x02\x00\x00\x00", ["\n", "🦜"], False, 2, False),
    detokenizer=1,
    model=2,
    priority=-3,
)
EMBEDDING = TokenizedEmbeddingReqInput(number=4, http_worker_ipc="w1.1", input_ids=b"\x09\x00\x00\x00", priority=1)


@pytest.mark.parametrize(
    "message",
    [
        GENERATE,
        EMBEDDING,
        AbortReq(number=5, http_worker_ipc="w1.1"),
        AckReq(numbers=[1, 2**63]),
        GetInternalStateReq(number=9, http_worker_ipc="w1.1"),
    ],
)
def test_a_frame_gives_back_its_message(message):
    decoder: FrameDecoder[ToScheduler] = FrameDecoder(TOKEN, ToScheduler)
    frame = bytes(encode_frame(TOKEN, message))
    assert frame[:START_TOKEN_SIZE] == TOKEN
    assert decoder.is_ours(frame)
    assert decoder.decode(frame) == message


def test_the_header_says_what_routing_needs():
    assert header_of(GENERATE) == Header(
        Kind.GENERATE,
        2**64 - 1,
        "w3.2",
        model=2,
        detokenizer=1,
        prompt_length=2,
        token_limit=7,
        priority=-3,
    )
    assert header_of(EMBEDDING) == Header(Kind.EMBEDDING, 4, "w1.1", prompt_length=1, priority=1)
    assert header_of(AbortReq(number=5, http_worker_ipc="w1.1")) == Header(Kind.ABORT, 5, "w1.1")
    assert header_of(AckReq()).kind == Kind.ACK
    assert header_of(GetInternalStateReq()).kind == Kind.CONTROL


def test_every_message_to_a_scheduler_has_a_kind():
    assert set(to_scheduler.KIND_OF) == set(ToScheduler.__args__)


@pytest.mark.parametrize("frame", [b"", b"our-mar", b"not-ours", b"not-ours" + encode_frame(TOKEN, EMBEDDING)[8:]])
def test_a_frame_of_another_start_is_dropped_and_counted(frame, caplog):
    decoder: FrameDecoder[ToScheduler] = FrameDecoder(TOKEN, ToScheduler)
    with caplog.at_level(logging.WARNING):
        assert not decoder.is_ours(frame)
    assert decoder.foreign == 1
    assert "not of this start (1 so far)" in caplog.text


def test_many_foreign_frames_are_logged_ever_more_rarely(caplog):
    decoder: FrameDecoder[ToScheduler] = FrameDecoder(TOKEN, ToScheduler)
    for _ in range(100):
        decoder.is_ours(b"not-ours")
    assert decoder.foreign == 100
    assert len(caplog.records) == 7


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"hello",
        msgspec.msgpack.encode([99, 1]),
        msgspec.msgpack.encode([1, "no number"]),
        msgspec.msgpack.encode([1, 1, "w1.1", None, b"", None]),
        bytes(encode_frame(b"", EMBEDDING)[8:-1]),
        b"\x92\x03\xa2\xff\xff",  # invalid UTF-8
        b"\x94\x03\x01\xa1w" + b"\x91" * 3_000_000 + b"\xc0",  # nested past any sense, for any Python
        b"\x97\x04\x01\xa1w\x90" + b"\x91" * 3_000_000 + b"\xc0",
    ],
)
def test_a_payload_of_the_wrong_type_is_a_decode_error(payload):
    decoder: FrameDecoder[ToScheduler] = FrameDecoder(TOKEN, ToScheduler)
    with pytest.raises(msgspec.DecodeError):
        decoder.decode(TOKEN + payload)


def test_the_identity_of_a_broken_batch_can_still_be_read():
    batch = BatchTokenIDOutput(
        numbers=[7, 8], http_worker_ipcs=["w1.1", None], output_ids=b"\x01\x00\x00\x00" * 2, first_indexes=[0, 1]
    )
    fields = msgspec.msgpack.decode(encode_frame(b"", batch)[8:])
    fields[3] = {"output_ids": "no bytes"}
    frame = TOKEN + msgspec.msgpack.encode(fields)
    with pytest.raises(msgspec.DecodeError):
        FrameDecoder(TOKEN, ToDetokenizer).decode(frame)
    identity = FrameDecoder(TOKEN, BatchIdentity).decode(frame)
    assert identity == BatchIdentity(numbers=[7, 8], http_worker_ipcs=["w1.1", None])


def test_the_identity_of_another_kind_of_batch_is_a_decode_error():
    batch = BatchEmbeddingOutput(numbers=[1], finished_reasons=[], prompt_tokens=[])
    with pytest.raises(msgspec.DecodeError):
        FrameDecoder(TOKEN, BatchIdentity).decode(bytes(encode_frame(TOKEN, batch)))


def test_columns_in_no_use_cost_one_byte_each():
    fields = {"numbers": [1], "http_worker_ipcs": ["w1.1"], "output_ids": b"\0\0\0\0", "first_indexes": [0]}
    frame = encode_frame(TOKEN, BatchTokenIDOutput(**fields))
    used = msgspec.msgpack.encode([16, *fields.values()])
    assert len(frame) == START_TOKEN_SIZE + len(used) + len(BatchTokenIDOutput.__struct_fields__) - len(fields)


class Declared(BaseBatchReq, tag=70, kw_only=True):
    first: Annotated[list[int], Rows()]


class OneFieldMore(BaseBatchReq, tag=70, kw_only=True):
    first: Annotated[list[int], Rows()]
    second: Annotated[list[int] | None, Rows()] = None


class OtherName(BaseBatchReq, tag=70, kw_only=True):
    other: Annotated[list[int], Rows()]


class OtherType(BaseBatchReq, tag=70, kw_only=True):
    first: Annotated[list[str], Rows()]


class OtherSplit(BaseBatchReq, tag=70, kw_only=True):
    first: Annotated[list[int], Rows(optional=True)]


class OtherTag(BaseBatchReq, tag=71, kw_only=True):
    first: Annotated[list[int], Rows()]


def test_the_protocol_hash_changes_with_every_declaration(monkeypatch):
    ours = protocol.protocol_hash()

    def with_message(declaration: type | None) -> str:
        if declaration is not None:
            monkeypatch.setattr(declaration, "__module__", to_detokenizer.__name__)
            monkeypatch.setattr(to_detokenizer, "Declared", declaration, raising=False)
        # The names in a declaration's annotations are looked up in its module.
        monkeypatch.setattr(to_detokenizer, "Annotated", Annotated, raising=False)
        return protocol.protocol_hash.__wrapped__()

    declarations = [None, Declared, OneFieldMore, OtherName, OtherType, OtherSplit, OtherTag]
    hashes = [with_message(declaration) for declaration in declarations]
    assert len(set(hashes)) == len(declarations)
    assert with_message(Declared) == hashes[1]
    assert hashes[0] == ours


def test_the_protocol_hash_changes_with_the_kinds(monkeypatch):
    class OtherKind(to_scheduler.IntEnum):
        GENERATE = 2
        EMBEDDING = 1

    monkeypatch.setattr(OtherKind, "__module__", to_scheduler.__name__)
    ours = protocol.protocol_hash()
    monkeypatch.setattr(to_scheduler, "Kind", OtherKind)
    assert protocol.protocol_hash.__wrapped__() != ours


def test_no_module_unpickles_or_evaluates():
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    calls = {"eval", "exec", "compile", "__import__", "send_pyobj", "recv_pyobj"}
    sources = list(Path(multitok.__file__).parent.rglob("*.py"))
    assert len(sources) > 50
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            where = f"{source}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert forbidden.isdisjoint(alias.name.partition(".")[0] for alias in node.names), where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in forbidden, where
            elif isinstance(node, ast.Call):
                called = node.func
                if isinstance(called, ast.Name):
                    assert called.id not in calls, where
                elif isinstance(called, ast.Attribute):
                    assert called.attr not in {"send_pyobj", "recv_pyobj"}, where
