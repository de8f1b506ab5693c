"""Decoding by table, for the decoders that nearly every model has.

A table is built once per tokenizer and ``skip_special_tokens``; a state holds a reference to it and what is open.
An id that shows nothing (a hole, a skipped special token) is as if it were not there, also inside a byte run.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import NamedTuple

from multitok.detokenizer.decode_state import REPLACEMENT, DecodeState, check_ids, outside
from multitok.detokenizer.vocabulary import Vocabulary


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's printable stand-ins: most of Latin-1 is itself, the other 68 bytes follow from U+0100 on.
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()

# Rust's u8::from_str_radix takes a plus sign too.
_BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>\Z")


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes that a token of a byte-level vocabulary stands for.

    Parameters
    ----------
    token : str
        The token as in the vocabulary.

    Returns
    -------
    bytes
        Byte by byte from the alphabet; if a single character is not of it, the token's own UTF-8, as an added token
        like ``<|end of text|>`` is.
    """
    try:
        return bytes(map(BYTE_ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()


def byte_of_token(token: str) -> int | None:
    """Return the byte of a byte-fallback token such as ``<0x0A>``.

    Parameters
    ----------
    token : str
        The token as in the vocabulary.

    Returns
    -------
    int or None
        None for every other token.
    """
    match = _BYTE_TOKEN.match(token)
    return None if match is None else int(match[1], 16)


class ByteLevelTable(NamedTuple):
    """What a byte-level vocabulary stands for.

    Attributes
    ----------
    texts : list of (str or None)
        Text of each id whose bytes are whole characters; None for the others.
    datas : list of bytes
        Bytes of each id.
    """

    texts: list[str | None]
    datas: list[bytes]

    @classmethod
    def build(cls, vocabulary: Vocabulary) -> ByteLevelTable:
        """Build the table that shows special tokens."""
        datas = [b"" if token is None else byte_level_bytes(token) for token in vocabulary.tokens]
        return cls([_text_or_none(data) for data in datas], datas)

    def without(self, ids: frozenset[int]) -> ByteLevelTable:
        """Return the table in which some ids show nothing."""
        texts, datas = self.texts.copy(), self.datas.copy()
        for i in ids:
            texts[i], datas[i] = "", b""
        return ByteLevelTable(texts, datas)


def _text_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class ByteLevelState(DecodeState):
    """Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2): at most three bytes are ever held.

    The reference decodes all bytes at once and puts one U+FFFD for each maximal part that begins a character; the
    codec's incremental decoder with ``replace`` does the same and keeps what may still become a character.

    Parameters
    ----------
    table : ByteLevelTable
        The vocabulary.
    """

    __slots__ = ("_datas", "_open", "_size", "_texts")

    def __init__(self, table: ByteLevelTable) -> None:
        self._texts, self._datas = table
        self._size = len(self._texts)
        self._open = b""

    def push(self, token_id: int) -> str:
        """Take one id; see `DecodeState.push`."""
        if not 0 <= token_id < self._size:
            raise outside(token_id, self._size)
        if not self._open:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self._take(self._datas[token_id])

    def push_many(self, ids: Sequence[int]) -> str:
        """Take several ids; see `DecodeState.push_many`."""
        check_ids(ids, self._size)
        datas = self._datas
        return self._take(b"".join([datas[i] for i in ids]))

    def flush(self) -> str:
        """Return what is still held; see `DecodeState.flush`."""
        held, self._open = self._open, b""
        return held.decode(errors="replace")

    def _take(self, data: bytes) -> str:
        data = self._open + data
        text, used = utf_8_decode(data, "replace", False)
        self._open = data[used:]
        return text


# Text of a plain token, the byte of a byte token, or None for an id that shows nothing.
FallbackEntry = str | int | None


def build_fallback_table(vocabulary: Vocabulary) -> list[FallbackEntry]:
    """Build the table of a vocabulary with byte tokens.

    Parameters
    ----------
    vocabulary : Vocabulary
        Tokens as they reach the byte-fallback stage.

    Returns
    -------
    list
        One entry per id.
    """
    table: list[FallbackEntry] = list(vocabulary.tokens)
    for i, token in enumerate(vocabulary.tokens):
        if token is not None and len(token) == 6 and (byte := byte_of_token(token)) is not None:
            table[i] = byte
    return table


class ByteFallbackState(DecodeState):
    """SentencePiece vocabularies with byte tokens (Llama 2, Mistral, Gemma).

    The reference looks at each unbroken run of byte tokens as a whole: text if it is UTF-8, otherwise one U+FFFD per
    byte. So a run is held until a plain token ends it, or until it holds a byte that no further one can mend.

    Parameters
    ----------
    table : list of FallbackEntry
        The vocabulary.
    strip : str
        Character that is taken from the start of the whole text.
    strip_count : int
        How many of them at most.
    """

    __slots__ = ("_bad", "_busy", "_open", "_run", "_run_bytes", "_size", "_strip", "_strip_count", "_table")

    def __init__(self, table: list[FallbackEntry], strip: str = "", strip_count: int = 0) -> None:
        self._table = table
        self._size = len(table)
        self._strip = strip
        self._strip_count = strip_count
        # The open run: its whole characters, the bytes of the one that is open, and the number of bytes altogether.
        self._run: list[str] = []
        self._open = b""
        self._run_bytes = 0
        # The run can't become UTF-8 any more; nothing of it is held.
        self._bad = False
        # One flag for the fast path: a run is open, or the start of the text is still to be stripped.
        self._busy = strip_count > 0

    def push(self, token_id: int) -> str:
        """Take one id; see `DecodeState.push`."""
        if not 0 <= token_id < self._size:
            raise outside(token_id, self._size)
        entry = self._table[token_id]
        if not self._busy and type(entry) is str:
            return entry
        return self._take(entry)

    def push_many(self, ids: Sequence[int]) -> str:
        """Take several ids; see `DecodeState.push_many`."""
        check_ids(ids, self._size)
        push = self.push
        return "".join([push(i) for i in ids])

    def flush(self) -> str:
        """Return what is still held; see `DecodeState.flush`."""
        return self._stripped(self._end_run())

    def _take(self, entry: FallbackEntry) -> str:
        if entry is None:
            return ""
        text = self._take_byte(entry) if isinstance(entry, int) else self._end_run() + entry
        text = self._stripped(text)
        self._busy = bool(self._run_bytes or self._bad or self._strip_count)
        return text

    def _take_byte(self, byte: int) -> str:
        if self._bad:
            return REPLACEMENT
        self._run_bytes += 1
        self._open += bytes((byte,))
        try:
            character, used = utf_8_decode(self._open, "strict", False)
        except UnicodeDecodeError:
            shown = REPLACEMENT * self._run_bytes
            self._end_run()
            self._bad = True
            return shown
        if used:
            self._run.append(character)
            self._open = b""
        return ""

    def _end_run(self) -> str:
        if not self._run_bytes:
            self._bad = False
            return ""
        text = REPLACEMENT * self._run_bytes if self._open else "".join(self._run)
        self._run, self._open, self._run_bytes = [], b"", 0
        return text

    def _stripped(self, text: str) -> str:
        while text and self._strip_count:
            if not text.startswith(self._strip):
                self._strip_count = 0
                break
            text = text[1:]
            self._strip_count -= 1
        return text


class PositionalState(DecodeState):
    """Decoders that make text of one token and of whether it is the first (WordPiece, Metaspace, none at all).

    Parameters
    ----------
    first : list of (str or None)
        Text of each id as the first of the text; None for one that shows nothing and leaves the next to be first.
    other : list of (str or None)
        Text of each id further on.
    """

    __slots__ = ("_other", "_size", "_table")

    def __init__(self, first: list[str | None], other: list[str | None]) -> None:
        self._table = first
        self._other = other
        self._size = len(first)

    def push(self, token_id: int) -> str:
        """Take one id; see `DecodeState.push`."""
        if not 0 <= token_id < self._size:
            raise outside(token_id, self._size)
        text = self._table[token_id]
        if text is None:
            return ""
        self._table = self._other
        return text

    def push_many(self, ids: Sequence[int]) -> str:
        """Take several ids; see `DecodeState.push_many`."""
        check_ids(ids, self._size)
        push = self.push
        return "".join([push(i) for i in ids])

    def flush(self) -> str:
        """Return what is still held: nothing ever is."""
        return ""
