"""Frames: 8 bytes that mark this start, then msgpack. Derived from the declarations, with nothing per message type."""

from __future__ import annotations

import logging
from typing import Any, Generic, TypeVar

import msgspec

START_TOKEN_SIZE = 8

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_log = logging.getLogger(__name__)


def encode_frame(start_token: bytes, message: Any) -> bytearray:
    """Return the frame of a message.

    Parameters
    ----------
    start_token : bytes
        `START_TOKEN_SIZE` bytes.
    message : msgspec.Struct
        The message.
    """
    frame = bytearray(start_token)
    _encoder.encode_into(message, frame, START_TOKEN_SIZE)
    return frame


class FrameDecoder(Generic[_T]):
    """Decodes frames of one type, or of a union of tagged types.

    Parameters
    ----------
    start_token : bytes
        Mark of this start.
    message_type : type
        What the frames hold.

    Attributes
    ----------
    foreign : int
        Frames that were not of this start; they are dropped and counted here.
    """

    def __init__(self, start_token: bytes, message_type: Any) -> None:
        self._start_token = start_token
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(message_type)
        self.foreign = 0

    def is_ours(self, frame: bytes) -> bool:
        """Whether a frame is of this start; counts it when it isn't, and logs the 1st, 2nd, 4th, 8th, ..."""
        if frame[:START_TOKEN_SIZE] == self._start_token:
            return True
        self.foreign += 1
        if self.foreign & (self.foreign - 1) == 0:
            _log.warning("dropped a frame that is not of this start (%d so far)", self.foreign)
        return False

    def decode(self, frame: bytes) -> _T:
        """Decode a frame that `is_ours`.

        Raises
        ------
        msgspec.DecodeError
            The frame doesn't hold a message of this type.
        """
        try:
            return self._decoder.decode(memoryview(frame)[START_TOKEN_SIZE:])
        except RecursionError as error:
            # Nested too deep: damaged like any other, and not worth the process.
            raise msgspec.DecodeError(str(error)) from error
