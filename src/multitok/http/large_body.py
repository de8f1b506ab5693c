"""Decoding of large bodies piece by piece, so that no single call holds the interpreter's lock for long.

Decoding 27 MB of JSON is one call of 40 to 70 ms, and the event loop, in whatever thread the call runs, waits for its
end. What makes a body large is nearly always one text. So the strings that may be long are taken out, at the price of
finding their ends (8 ms for 27 MB), and decoded in pieces; what remains is small, and decoded and checked as usual.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

# A string of this many bytes takes about 0.5 ms.
PIECE = 1 << 18
# What holds text; any other string is left where it is, for its own checks.
_TEXT_FIELDS = frozenset({"content", "text", "prompt", "input"})
# An escape, or a pair of them for one character, has at most this many bytes.
_LONGEST_ESCAPE = 12

_object: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects: msgspec.json.Decoder[list[dict[str, msgspec.Raw]]] = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_array: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_string: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)


class LongTexts:
    """The long texts of one body: taken out before it is decoded, put back afterwards.

    Parameters
    ----------
    body : bytes or bytearray
        JSON.

    Attributes
    ----------
    rest : bytes
        The body with a mark in place of each long text.

    Raises
    ------
    msgspec.DecodeError, RecursionError
        The body is not JSON.
    """

    def __init__(self, body: bytes | bytearray) -> None:
        # Not to be guessed: a client's own text is never taken for a mark.
        self._mark = secrets.token_hex(16)
        self._texts: dict[str, str] = {}
        self.rest = self._without_texts(memoryview(body), False)

    def put_back(self, value: Any) -> Any:
        """Return what `rest` was decoded to, with the texts in place of their marks."""
        if not self._texts:
            return value
        if isinstance(value, str):
            return self._texts.get(value, value)
        if isinstance(value, list):
            return [self.put_back(item) for item in value]
        if isinstance(value, dict):
            return {key: self.put_back(item) for key, item in value.items()}
        if isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                setattr(value, name, self.put_back(getattr(value, name)))
        return value

    def _without_texts(self, value: memoryview, is_text: bool) -> bytes:
        if len(value) <= PIECE:
            return bytes(value)
        first = chr(value[0])
        if first == "{":
            return self._object(_object.decode(value))
        if first == "[" and (item := bytes(value[1:64]).lstrip()[:1]) in (b"{", b'"'):
            try:
                # Each look at the whole takes its time: one for messages and what is in them.
                items = [self._object(fields) for fields in _objects.decode(value)] if item == b"{" else None
            except msgspec.ValidationError:
                items = None
            # A list of numbers would be made into millions of objects.
            if items is None:
                items = [self._without_texts(memoryview(raw), is_text) for raw in _array.decode(value)]
            return b"[" + b",".join(items) + b"]"
        if first == '"' and is_text:
            mark = f"{self._mark}{len(self._texts)}"
            self._texts[mark] = _decode_string(value[1:-1])
            return msgspec.json.encode(mark)
        return bytes(value)

    def _object(self, fields: dict[str, msgspec.Raw]) -> bytes:
        members = [
            msgspec.json.encode(key) + b":" + self._without_texts(memoryview(value), key in _TEXT_FIELDS)
            for key, value in fields.items()
        ]
        return b"{" + b",".join(members) + b"}"


def _decode_string(content: memoryview) -> str:
    """Decode what stands between the quotes of a JSON string."""
    parts: list[str] = []
    start = 0
    while start < len(content):
        end = _cut(content, start)
        parts.append(_string.decode(b'"%b"' % bytes(content[start:end])))
        start = end
    return "".join(parts)


def _cut(content: memoryview, start: int) -> int:
    """Return where a piece can end without cutting a character or an escape."""
    latest = start + PIECE
    if latest >= len(content):
        return len(content)
    window = bytes(content[latest - 4 * _LONGEST_ESCAPE : latest + 6])
    for i in range(4 * _LONGEST_ESCAPE, _LONGEST_ESCAPE, -1):
        if window[i] == 0x5C:
            # A backslash behind none begins an escape; one for the second half of a pair belongs to the one before.
            if window[i - 1] != 0x5C and window[i : i + 3].lower() != b"\\ud":
                return latest - 4 * _LONGEST_ESCAPE + i
        elif 0x5C not in window[i - _LONGEST_ESCAPE : i] and not 0x80 <= window[i] < 0xC0:
            return latest - 4 * _LONGEST_ESCAPE + i
    return len(content)
