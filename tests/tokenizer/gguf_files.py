"""Small GGUF files for tests: any vocabulary, or a real SentencePiece one."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

NORMAL, UNKNOWN, CONTROL = TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL
USER_DEFINED, UNUSED, BYTE = TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.BYTE


def write_gguf(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str | None = None,
    tokens: list[str],
    types: list[int],
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    name: str = "test",
    chat_template: str | None = None,
    **keys: Any,
) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(128)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_types(types)
    if merges:
        writer.add_token_merges(merges)
    if scores:
        writer.add_token_scores(scores)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in keys.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_vocabulary() -> list[str]:
    """The 256 letters of byte-level vocabularies, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def byte_level(path: Path, pre: str | None, *, merges: tuple[str, ...] = ("h e",), **keys: Any) -> Path:
    """Bytes, the merged tokens, then one control token, a user-defined one and two rows of padding."""
    tokens = [*byte_vocabulary(), *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens) + [CONTROL, USER_DEFINED, UNUSED, UNUSED]
    tokens += ["<|end|>", "<user>", "[PAD0]", "[PAD1]"]
    return write_gguf(path, pre=pre, tokens=tokens, types=types, merges=list(merges), **keys)


def sentencepiece_pieces(path: Path) -> list[tuple[str, float, int]]:
    """Text, score and type of the pieces of a SentencePiece model file."""
    pieces = []
    for field, value in _protobuf(path.read_bytes()):
        if field == 1:
            piece = dict(_protobuf(value))
            pieces.append((piece[1].decode(), struct.unpack("<f", piece[2])[0], piece.get(3, 1)))
    return pieces


def _protobuf(data: bytes) -> Iterator[tuple[int, Any]]:
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = data[offset]
            offset += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while offset < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield key >> 3, data[offset : offset + size]
        offset += size


def data_package(name: str) -> Path:
    """Folder of an installed package that only carries data; not installed is a failure of the test setup."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"tests need the package {name}: run `make test`"
    return Path(spec.submodule_search_locations[0])


def mistral_v1(path: Path, **keys: Any) -> Path:
    """A GGUF file with Mistral's first vocabulary: SentencePiece BPE with byte fallback."""
    pieces = sentencepiece_pieces(data_package("mistral_common") / "data" / "tokenizer.model.v1")
    tokens, scores, types = (list(column) for column in zip(*pieces, strict=True))
    keys = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **keys}
    return write_gguf(path, model="llama", pre="default", tokens=tokens, types=types, scores=scores, **keys)
