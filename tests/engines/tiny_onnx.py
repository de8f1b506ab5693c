"""Writes an ONNX file by hand, as the `onnx` package is no dependency: ``last_hidden_state = table[input_ids]``."""

from pathlib import Path

import numpy as np

FLOAT, INT64 = 1, 7


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _value_info(name: str, kind: int, *dims: str) -> bytes:
    shape = b"".join(_bytes(1, _bytes(2, dim)) for dim in dims)
    return _bytes(1, name) + _bytes(2, _bytes(1, _number(1, kind) + _bytes(2, shape)))


def write_lookup_model(file: Path, table: np.ndarray) -> None:
    node = b"".join(
        [
            _bytes(1, "table"),
            _bytes(1, "input_ids"),
            _bytes(2, "last_hidden_state"),
            _bytes(3, "n"),
            _bytes(4, "Gather"),
        ]
    )
    dims = b"".join(_number(1, size) for size in table.shape)
    tensor = dims + _number(2, FLOAT) + _bytes(8, "table") + _bytes(9, table.astype("<f4").tobytes())
    graph = b"".join(
        [
            _bytes(1, node),
            _bytes(2, "lookup"),
            _bytes(5, tensor),
            _bytes(11, _value_info("input_ids", INT64, "batch", "length")),
            _bytes(11, _value_info("attention_mask", INT64, "batch", "length")),
            _bytes(12, _value_info("last_hidden_state", FLOAT, "batch", "length", "size")),
        ]
    )
    opset = _bytes(1, "") + _number(2, 13)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_number(1, 8) + _bytes(7, graph) + _bytes(8, opset))
