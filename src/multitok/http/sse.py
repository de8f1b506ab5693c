"""Server-sent events."""

from __future__ import annotations

import msgspec

encode_json = msgspec.json.Encoder().encode

PREFIX = b"data: "
SUFFIX = b"\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """Frame one event; JSON of msgspec has no line breaks, so one ``data:`` line is enough."""
    return b"data: %b\n\n" % data


def json_bytes(value: object) -> bytes:
    """Encode a piece of a frame."""
    return encode_json(value)
