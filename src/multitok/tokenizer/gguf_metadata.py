"""Reads the key-value header of a GGUF file, and nothing else of it.

The `gguf` package's reader builds numpy views of every string and every tensor, which takes two seconds for a
vocabulary of 49,000 tokens; a start needs the header only, and this takes some hundredths of one.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TypeVar, cast

from multitok.tokenizer.errors import ModelError

Value = bool | int | float | str | list["Value"]
T = TypeVar("T", bool, int, float, str)

# Type numbers of the format and their struct codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GgufMetadata:
    """Key-value header of one GGUF file.

    Parameters
    ----------
    path : Path
        A little-endian GGUF file of version 2 or 3.

    Raises
    ------
    ModelError
        When it is no such file, or is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Value] = {}
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read(data)
        except OSError as error:
            raise ModelError(f"can't read {path}: {error.strerror or error}") from error
        except (struct.error, ValueError, MemoryError, RecursionError) as error:
            raise ModelError(f"{path} is a damaged or cut off GGUF file: {error}") from error

    def get(self, key: str, kind: type[T], default: T) -> T:
        """Return the value of `key`, or `default` where it is absent or of another type."""
        value = self.values.get(key)
        return value if isinstance(value, kind) else default

    def optional_int(self, key: str) -> int | None:
        """Return the number under `key`, None where it is absent or no number."""
        value = self.values.get(key)
        return value if isinstance(value, int) else None

    def strings(self, key: str) -> list[str]:
        """Return the list of strings under `key`, empty where absent."""
        value = self.values.get(key)
        if isinstance(value, list) and (not value or isinstance(value[0], str)):
            return cast("list[str]", value)
        return []

    def numbers(self, key: str) -> list[float]:
        """Return the list of numbers under `key`, empty where absent."""
        value = self.values.get(key)
        if isinstance(value, list) and (not value or isinstance(value[0], (int, float))):
            return cast("list[float]", value)
        return []

    def _read(self, data: mmap.mmap) -> None:
        if data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is no GGUF file (it doesn't start with 'GGUF')")
        (version,) = _U32.unpack_from(data, 4)
        if version not in (2, 3):
            raise ModelError(f"{self.path} has GGUF version {version}; versions 2 and 3, little-endian, can be read")
        (count,) = _U64.unpack_from(data, 16)
        offset = 24
        for _ in range(count):
            key, offset = _string(data, offset)
            (kind,) = _U32.unpack_from(data, offset)
            self.values[key], offset = _value(data, offset + 4, kind)


def _string(data: mmap.mmap, offset: int) -> tuple[str, int]:
    (length,) = _U64.unpack_from(data, offset)
    start = offset + 8
    end = start + length
    if end > len(data):
        raise ValueError("a string reaches past its end")
    return data[start:end].decode("utf-8"), end


def _value(data: mmap.mmap, offset: int, kind: int) -> tuple[Value, int]:
    if kind == _STRING:
        return _string(data, offset)
    if kind == _ARRAY:
        (item_kind,) = _U32.unpack_from(data, offset)
        (count,) = _U64.unpack_from(data, offset + 4)
        return _items(data, offset + 12, item_kind, count)
    code = _SCALARS.get(kind)
    if code is None:
        raise ValueError(f"unknown value type {kind}")
    (value,) = struct.unpack_from("<" + code, data, offset)
    return value, offset + struct.calcsize("<" + code)


def _items(data: mmap.mmap, offset: int, kind: int, count: int) -> tuple[list[Value], int]:
    items: list[Value]
    if kind == _STRING:
        # The hot loop: two of these lists hold nearly all of the header.
        items = []
        append, unpack, size = items.append, _U64.unpack_from, len(data)
        for _ in range(count):
            (length,) = unpack(data, offset)
            start = offset + 8
            offset = start + length
            if offset > size:
                raise ValueError("a string reaches past its end")
            append(data[start:offset].decode("utf-8"))
        return items, offset
    if kind == _ARRAY:
        items = []
        for _ in range(count):
            item, offset = _value(data, offset, kind)
            items.append(item)
        return items, offset
    code = _SCALARS.get(kind)
    if code is None:
        raise ValueError(f"unknown value type {kind}")
    end = offset + count * struct.calcsize("<" + code)
    if end > len(data):
        raise ValueError("a list reaches past its end")
    if code == "?":
        return [byte != 0 for byte in data[offset:end]], end
    return cast("list[Value]", _numbers(code, data[offset:end])), end


def _numbers(code: str, data: bytes) -> list[int] | list[float]:
    return list(struct.unpack(f"<{len(data) // struct.calcsize('<' + code)}{code}", data))
