from __future__ import annotations

import importlib
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import multitok.messages
from multitok.ipc.sender_wrapper import SenderWrapper, attach_multi_http_worker_info
from multitok.messages.base import BaseBatchReq, BaseReq, FinishReason
from multitok.messages.codec import FrameDecoder
from multitok.messages.prefix_hashes import prefix_hashes
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_child import Stop
from multitok.messages.to_scheduler import (
    AbortReq,
    AckReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    Header,
    Kind,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    ToScheduler,
)

TOKEN = b"our-mark"


def all_messages(base: type) -> Iterator[type]:
    """Every message type under a base, in any module of messages."""
    for module in pkgutil.iter_modules(multitok.messages.__path__):
        importlib.import_module(f"multitok.messages.{module.name}")
    for child in base.__subclasses__():
        if child.__module__.startswith("multitok.messages."):
            yield child
            yield from all_messages(child)


REQUESTS = sorted(set(all_messages(BaseReq)), key=lambda t: t.__name__)
BATCHES = sorted(set(all_messages(BaseBatchReq)), key=lambda t: t.__name__)


def made(message_type: type[msgspec.Struct], rows: int = 2) -> Any:
    """A message of a type, with its required fields filled in by their types."""
    hints = typing.get_type_hints(message_type)
    required = [f.name for f in msgspec.structs.fields(message_type) if f.required]
    return message_type(**{name: some_value(hints[name], rows) for name in required})


def some_value(kind: Any, rows: int) -> Any:
    if typing.get_origin(kind) is list:
        return [some_value(typing.get_args(kind)[0], rows) for _ in range(rows)]
    if kind is SamplingParams:
        return SamplingParams(max_new_tokens=1)
    if kind is FinishReason:
        return FinishReason("stop")
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return made(kind, rows)
    return kind()


def children_of(batch: BaseBatchReq) -> list[BaseReq]:
    return getattr(batch, "batch", [])


def test_introspection_finds_the_messages():
    assert {AbortReq, AckReq, TokenizedGenerateReqInput, TokenizedEmbeddingReqInput} <= set(REQUESTS)
    assert {BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput} <= set(BATCHES)


@pytest.mark.parametrize("message_type", REQUESTS)
def test_every_request_gets_its_owner(message_type):
    message = made(message_type)
    assert message.http_worker_ipc is None
    attach_multi_http_worker_info("w2.1", message)
    assert message.http_worker_ipc == "w2.1"


@pytest.mark.parametrize("message_type", BATCHES)
def test_every_batch_and_each_of_its_children_gets_its_owner(message_type):
    batch = made(message_type, rows=3)
    attach_multi_http_worker_info("w2.1", batch)
    assert batch.http_worker_ipcs == ["w2.1"] * 3
    if "batch" in message_type.__struct_fields__:
        assert len(batch.batch) == 3
    assert all(child.http_worker_ipc == "w2.1" for child in children_of(batch))


@pytest.mark.parametrize("message", [Stop(), None, {"http_worker_ipc": None}, SamplingParams(max_new_tokens=1)])
def test_what_carries_no_owner_is_a_type_error(message):
    with pytest.raises(TypeError, match=f"{type(message).__name__} carries no owner"):
        attach_multi_http_worker_info("w2.1", message)


class RecordingSocket:
    """The other side of the wrapper: keeps the frames of each message."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    def send_frames(self, frames: Any) -> None:
        self.sent.append([bytes(frame) for frame in frames])


def sent_pairs(message: Any) -> list[tuple[Header, Any]]:
    socket = RecordingSocket()
    SenderWrapper(socket, "w2.1", TOKEN).send(message)
    (frames,) = socket.sent
    headers: FrameDecoder[Header] = FrameDecoder(TOKEN, Header)
    payloads: FrameDecoder[ToScheduler] = FrameDecoder(TOKEN, ToScheduler)
    assert all(headers.is_ours(frame) for frame in frames)
    pairs = zip(frames[::2], frames[1::2], strict=True)
    return [(headers.decode(header), payloads.decode(payload)) for header, payload in pairs]


@pytest.mark.parametrize("message_type", ToScheduler.__args__)
def test_a_message_goes_out_as_one_pair_of_frames_with_its_owner(message_type):
    message = made(message_type)
    ((header, payload),) = sent_pairs(message)
    assert header.owner == payload.http_worker_ipc == "w2.1"
    assert payload == message


def test_a_batch_goes_out_as_one_message_with_a_pair_of_frames_per_child():
    children = [
        TokenizedGenerateReqInput(
            number=number, input_ids=b"\1\0\0\0" * number, sampling_params=SamplingParams(max_new_tokens=number)
        )
        for number in (5, 6, 7)
    ]
    pairs = sent_pairs(BatchTokenizedGenerateReqInput(numbers=[5, 6, 7], batch=children))
    assert [payload.number for _, payload in pairs] == [5, 6, 7]
    for header, payload in pairs:
        assert header == Header(
            Kind.GENERATE, payload.number, "w2.1", prompt_length=payload.number, token_limit=payload.number
        )
        assert payload.http_worker_ipc == "w2.1"


@pytest.mark.parametrize("wanted", [True, False])
def test_headers_carry_the_hashes_of_prompts_where_they_are_wanted(wanted):
    prompts = [bytes(4 * 600), bytes(4 * 600), b"\1\0\0\0" * 600, b"\1\0\0\0"]
    children = [
        TokenizedGenerateReqInput(number=number, input_ids=prompt, sampling_params=SamplingParams(max_new_tokens=1))
        for number, prompt in enumerate(prompts)
    ]
    socket = RecordingSocket()
    message = BatchTokenizedGenerateReqInput(numbers=[0, 1, 2, 3], batch=children)
    SenderWrapper(socket, "w2.1", TOKEN, ranks=[[0, 1]], hash_prefixes=wanted).send(message)
    headers: FrameDecoder[Header] = FrameDecoder(TOKEN, Header)
    sent = [headers.decode(frame).prefix_hashes for frame in socket.sent[0][::2]]
    assert sent == [prefix_hashes(prompt) if wanted else None for prompt in prompts]
    assert sent[3] is None


def test_what_carries_no_owner_is_not_sent():
    socket = RecordingSocket()
    with pytest.raises(TypeError):
        SenderWrapper(socket, "w2.1", TOKEN).send(Stop())
    assert socket.sent == []
