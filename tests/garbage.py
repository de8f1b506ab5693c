"""Messages as a foreign process, an old one or a damaged one may send them to any address."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from multitok.messages.base import FinishReason
from multitok.messages.codec import encode_frame
from multitok.messages.to_child import Ping
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, OutputExtras, RefusedReq
from multitok.messages.to_scheduler import DecodeParams, Header, LiveReq
from multitok.messages.to_tokenizer import BatchStrOutput, LiveReqOutput
from parts import pack

ARRAYS = [bytes([0x90 + length]) for length in range(16)]


def legal_messages() -> list[Any]:
    """One of each kind that an owner or a detokenizer may see, none of them for a live request."""
    finish = FinishReason("length")
    fields: dict[str, Any] = {"output_ids": pack([65]), "first_indexes": [0], "finished_reasons": [finish]}
    return [
        BatchTokenIDOutput(
            numbers=[5],
            http_worker_ipcs=["w9.9"],
            decode_params=[DecodeParams(stop=["a"])],
            extras=OutputExtras(decode_ids=[pack([66])], read_offsets=[1], output_token_logprobs=[[-1.0]]),
            **fields,
        ),
        BatchStrOutput(numbers=[6], http_worker_ipcs=["w9.9"], output_strs=["A"], **fields),
        BatchEmbeddingOutput(
            numbers=[7], http_worker_ipcs=["w9.9"], embeddings=[b"1234"], finished_reasons=[finish], prompt_tokens=[1]
        ),
        RefusedReq(number=8, http_worker_ipc="w9.9", status=503, message="full"),
        LiveReqOutput(number=1, http_worker_ipc="w9.9", rank=3, life=1, known=[1]),
        LiveReq(upto=1, numbers=[1], token_counts=[1], text_lengths=[1]),
        Header(1, 1, "w9.9"),
        Ping(),
    ]


def damaged(value: Any, chance: random.Random) -> Any:
    """A decoded message with some values exchanged for others."""
    if isinstance(value, list) and value and chance.random() < 0.8:
        changed = [damaged(item, chance) if chance.random() < 0.4 else item for item in value]
        return changed[: chance.randrange(len(changed) + 1)] if chance.random() < 0.2 else changed
    others = (
        None,
        0,
        -1,
        2**63,
        1.5,
        "",
        "x" * 100,
        b"",
        b"abc",
        [],
        [[]],
        {},
        True,
        float("nan"),
        [None] * 3,
        ["w1.1"],
    )
    return chance.choice(others)


def garbage(token: bytes, seed: int) -> Iterator[list[bytes]]:
    """Messages of one and more frames, as a foreign process, an old one or a damaged one may send them."""
    chance = random.Random(seed)
    frames = [bytes(encode_frame(token, message)) for message in legal_messages()]
    yield [b""]
    yield [b"", b""]
    yield [token]
    yield [token, token]
    yield [token[:4]]
    yield [b"\0" * 8 + frames[0][8:]]
    yield [pickle.dumps(legal_messages()[0].numbers)]
    yield [token + pickle.dumps(frames)]
    yield [token + b"\x91" * 100_000]
    yield [token + b"\xdd\xff\xff\xff\xff"]
    yield [token + b"\xc6\xff\xff\xff\xff"]
    yield [b"x"] * 10_000
    yield [token] * 10_000
    yield [b"garbage", *frames]
    for _ in range(400):
        frame = chance.choice(frames)
        match chance.randrange(4):
            case 0:
                yield [chance.randbytes(chance.randrange(40))]
            case 1:
                yield [frame[: chance.randrange(len(frame))]]
            case 2:
                spoilt = bytearray(frame)
                for _ in range(chance.randrange(1, 4)):
                    spoilt[chance.randrange(8, len(spoilt))] = chance.randrange(256)
                yield [bytes(spoilt), *chance.sample(frames, chance.randrange(3))]
            case _:
                yield [token + msgspec.msgpack.encode(damaged(msgspec.msgpack.decode(frame[8:]), chance))]


def is_harmless(frames: list[bytes], token: bytes) -> bool:
    """Whether it isn't, by chance, the launcher's word that it is time to stop, which is obeyed."""
    # An array of any length whose first element is the tag of `Stop` or `LauncherExited`; more elements are no matter.
    frame = frames[0].removeprefix(token)
    return frame == frames[0] or not (frame[:1] in ARRAYS and frame[1:2] in (b"\x05", b"\x07"))
