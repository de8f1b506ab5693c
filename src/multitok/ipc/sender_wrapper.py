"""SenderWrapper: the one way from an owner to the schedulers, which stamps the owner on whatever passes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from multitok.messages.base import BaseBatchReq, BaseReq
from multitok.messages.codec import encode_frame
from multitok.messages.prefix_hashes import prefix_hashes
from multitok.messages.to_scheduler import (
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedGenerateReqInput,
    ToScheduler,
    header_of,
)

Request = ToScheduler | BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput


class FrameSender(Protocol):
    """Takes the frames of one message; does not block.

    Raises ``zmq.Again`` when the peer doesn't read.
    """

    def send_frames(self, frames: Sequence[bytes | bytearray]) -> None:
        """Send header and payload of each child."""
        ...


def attach_multi_http_worker_info(address: str, message: BaseReq | BaseBatchReq) -> None:
    """Stamp the owner on a message, and on each child of a batch.

    Parameters
    ----------
    address : str
        The owner's address.
    message : BaseReq or BaseBatchReq
        Changed in place.

    Raises
    ------
    TypeError
        For anything else: it could not be answered.
    """
    if isinstance(message, BaseReq):
        message.http_worker_ipc = address
    elif isinstance(message, BaseBatchReq):
        message.http_worker_ipcs = [address] * len(message.numbers)
        for child in getattr(message, "batch", ()):
            child.http_worker_ipc = address
    else:
        raise TypeError(f"{type(message).__name__} carries no owner")


class SenderWrapper:
    """Wraps the socket towards the scheduler.

    Parameters
    ----------
    socket : FrameSender
        Socket to the router, or in single mode the rank dispatcher.
    address : str
        The owner's address.
    start_token : bytes
        Mark of this start.
    ranks : sequence of sequence of int
        The ranks of each model. A user's id has its rank, whoever owns it: that rank sees when it is taken.
    hash_prefixes : bool
        Headers carry the hash chains of prompts where a model has several ranks.
    """

    def __init__(
        self,
        socket: FrameSender,
        address: str,
        start_token: bytes,
        ranks: Sequence[Sequence[int]] = ((0,),),
        hash_prefixes: bool = False,
    ) -> None:
        self._ranks = ranks
        self._hash_prefixes = hash_prefixes
        self._socket = socket
        self._address = address
        self._start_token = start_token

    def send(self, message: Request, given_id: bool = False) -> None:
        """Stamp and send a message; a batch goes out as one message with a header and payload per child.

        Parameters
        ----------
        message : message
            Changed in place.
        given_id : bool
            Its id is the user's, and may be in use: it goes to the rank that knows of it.

        Raises
        ------
        zmq.Again
            The peer doesn't read; nothing was sent.
        """
        attach_multi_http_worker_info(self._address, message)
        children = message.batch if isinstance(message, BaseBatchReq) else [message]
        frames: list[bytearray] = []
        prompt = hashes = None
        for child in children:
            header = header_of(child)
            ranks = self._ranks[header.model]
            if given_id and (rid := getattr(child, "rid", None)) is not None:
                header.rank = ranks[zlib.crc32(rid.encode()) % len(ranks)]
            if self._hash_prefixes and len(ranks) > 1 and isinstance(child, TokenizedGenerateReqInput):
                if child.input_ids is not prompt:
                    # The choices of a prompt have it in common.
                    prompt, hashes = child.input_ids, prefix_hashes(child.input_ids)
                header.prefix_hashes = hashes
            frames += (encode_frame(self._start_token, header), encode_frame(self._start_token, child))
        self._socket.send_frames(frames)
