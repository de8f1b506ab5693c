"""Decoding of large bodies piece by piece, so that no single call holds the interpreter's lock for long.

Decoding 27 MB of JSON is one call of up to some seconds, and the event loop, in whatever thread the call runs, waits
for its end. What makes a body large is nearly always text, or token ids. So these are cut out, wherever they are long,
and decoded in pieces. What remains must be small, or is refused undecoded; it is decoded and checked as usual.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from multitok.http.errors import invalid
from multitok.http.token_ids import TokenIds
from multitok.tokenizer.requests import RequestError

# A string of this many bytes takes about 0.5 ms.
PIECE = 1 << 18
# Values of a large body, at any depth, ids in long lists and the names of fields aside: they take about 15 ms.
MOST_VALUES = 1 << 17
# What is no long text and no id: names, numbers, spaces. Takes about 15 ms, too.
MOST_REST = 1 << 24
# Shorter strings and lists of ids stay where they are: what is allowed of values is not much then. Longer than a mark.
_LONG = 64
# Fields that may hold token ids.
_ID_FIELDS = frozenset({"prompt", "input", "input_ids", "tokens"})
# An escape, or a pair of them for one character, has at most this many bytes.
_LONGEST_ESCAPE = 12

_string: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)


class LongTexts:
    """The long texts and lists of ids of one body: taken out before it is decoded, put back afterwards.

    Parameters
    ----------
    body : bytes or bytearray
        JSON.
    fields : collection of str
        Fields of the request; of those, the ones that may hold ids get `TokenIds` in place of long lists.

    Attributes
    ----------
    rest : bytes
        The body with a mark in place of each.
    values : int
        How many values that has.

    Raises
    ------
    RequestError
        400: it has more values than `MOST_VALUES`, or is larger than `MOST_REST`.
    msgspec.DecodeError
        A text is not JSON, or has no end.
    RecursionError
        It is nested too deeply.
    """

    def __init__(self, body: bytes | bytearray, fields: Collection[str] = ()) -> None:
        self._body = body
        self._view = memoryview(body)
        self._id_fields = _ID_FIELDS.intersection(fields)
        # Not to be guessed: a client's own text or number is never taken for a mark.
        self._mark = secrets.token_hex(8)
        self._first_number = secrets.randbits(60)
        self._texts: dict[str, str] = {}
        self._ids: dict[int, TokenIds] = {}
        self._pieces: list[bytes] = []
        # How far the body has been taken over into the pieces.
        self._taken = 0
        self._depth = 0
        # The decoder goes no deeper.
        self._deepest = sys.getrecursionlimit()
        # The field of the request, if one is known, in which the scan is.
        self._field = ""
        self.values = 1
        self._scan()
        self._pieces.append(bytes(self._view[self._taken :]))
        size = sum(map(len, self._pieces))
        if size > MOST_REST:
            raise RequestError(
                400, f"the body has {size} bytes beside texts and token ids; at most {MOST_REST} are allowed"
            )
        self.rest = b"".join(self._pieces)

    def put_back(self, value: Any) -> Any:
        """Return what `rest` was decoded to, with what was cut out in place of the marks."""
        if isinstance(value, str):
            return self._texts.get(value, value)
        if isinstance(value, list):
            if len(value) == 1 and type(value[0]) is int and value[0] in self._ids:
                return self._ids[value[0]]
            return [self.put_back(item) for item in value]
        if isinstance(value, dict):
            return {key: self.put_back(item) for key, item in value.items()}
        if isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                setattr(value, name, self.put_back(getattr(value, name)))
        return value

    def _scan(self) -> None:
        """Go from string to string, and look at what lies between them."""
        opening = end = 0
        for number, (begin, after) in enumerate(_strings(self._view)):
            self._between(opening, end, begin)
            opening, end = begin, after
            if number > 2 * MOST_VALUES:
                # Not JSON, or more than half of them are values.
                raise self._too_many()
        self._between(opening, end, len(self._body))

    def _between(self, opening: int, end: int, begin: int) -> None:
        """Take the string from `opening` to `end`, if there is one, and what is between it and the one at `begin`."""
        start = min(begin, end + _LONG)
        follows, values, depth = _look(bytes(self._view[end:start]))
        if not end:
            pass
        elif follows == b":":
            if self._depth == 1:
                name = bytes(self._view[opening + 1 : min(end - 1, opening + _LONG)])
                self._field = name.decode(errors="replace")
                if self._field in self._id_fields:
                    self._take_ids(end, begin)
                    return
        elif follows and end - opening > _LONG:
            mark = f"{self._mark}{len(self._texts)}"
            self._texts[mark] = _decode_string(self._view[opening + 1 : end - 1])
            self._replace(opening, end, b'"%b"' % mark.encode())
        self._add(values, depth)
        if start < begin:
            self._count(start, begin)

    def _take_ids(self, start: int, end: int) -> None:
        """Cut the long lists of numbers out of the value of a field that may have some."""
        counted = closing = start
        while (closing := self._body.find(b"]", closing, end)) >= 0:
            opening = self._body.rfind(b"[", counted, closing)
            if opening >= 0 and closing - opening > _LONG:
                self._count(counted, opening + 1)
                number = self._first_number + len(self._ids)
                self._ids[number] = TokenIds(self._view[opening + 1 : closing])
                self._replace(opening + 1, closing, b"%d" % number)
            else:
                self._count(counted, closing)
            counted = closing
            closing += 1
        self._count(counted, end)

    def _count(self, start: int, end: int) -> None:
        """Count values in a part of the body that has no strings."""
        for begin in range(start, end, PIECE):
            part = bytes(self._view[begin : min(end, begin + PIECE)])
            self._add(*_counted(part))

    def _add(self, values: int, depth: int) -> None:
        self._depth += depth
        self.values += values
        if self.values > MOST_VALUES:
            raise self._too_many()
        if self._depth > self._deepest:
            raise RecursionError

    def _too_many(self) -> RequestError:
        problem = f"a large body may have at most {MOST_VALUES} values"
        return invalid(self._field, problem) if self._depth > 1 and self._field else RequestError(400, problem)

    def _replace(self, start: int, end: int, mark: bytes) -> None:
        self._pieces += (bytes(self._view[self._taken : start]), mark)
        self._taken = end


@functools.lru_cache(256)
def _look(between: bytes) -> tuple[bytes, int, int]:
    """Return the first character between two strings that is no space, and `_counted`: it is nearly always the same."""
    return between.lstrip()[:1], *_counted(between)


def _counted(part: bytes) -> tuple[int, int]:
    """Return how many values a part without strings begins, and by how much deeper its end is."""
    opened = part.count(b"{") + part.count(b"[")
    return opened + part.count(b","), opened - part.count(b"}") - part.count(b"]")


def _strings(view: memoryview) -> Iterator[tuple[int, int]]:
    """Yield where each string of JSON begins and ends, with its quotes.

    Raises
    ------
    msgspec.DecodeError
        The last one has no end.
    """
    goes_on = False
    opening = -1
    for start in range(0, len(view), PIECE):
        piece = bytes(view[start : start + PIECE])
        if goes_on:
            # An escape was cut.
            piece = b"_" + piece[1:]
        if b"\\" in piece:
            # In this order: what is left of backslashes are beginnings of escapes.
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        goes_on = piece.endswith(b"\\")
        at = piece.find(b'"')
        while at >= 0:
            if opening < 0:
                opening = start + at
            else:
                yield opening, start + at + 1
                opening = -1
            at = piece.find(b'"', at + 1)
    if opening >= 0:
        raise msgspec.DecodeError("Input data was truncated")


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
