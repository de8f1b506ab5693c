"""Server-sent events."""

from __future__ import annotations

import msgspec

encode_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """Frame one event; JSON of msgspec has no line breaks, so one ``data:`` line is enough."""
    return b"data: %b\n\n" % data
