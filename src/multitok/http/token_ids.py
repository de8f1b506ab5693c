"""Token ids of a large body: cut out of it as text, and made into packed int32 when they are known to fit."""

from __future__ import annotations

from array import array

import msgspec

from multitok.http.errors import invalid

# So much of a list's text takes less than a millisecond.
_PIECE = 1 << 16

_decoder: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[int])


class TokenIds:
    """A list of ids that have not been looked at: what stands between its brackets.

    Stands in a decoded body where a long list of ids was. A million of them as numbers of Python's would hold the
    interpreter's lock wherever they are made, looked through or given up.

    Parameters
    ----------
    content : memoryview
        JSON without brackets in it.
    """

    __slots__ = ("_content", "_count")

    def __init__(self, content: memoryview) -> None:
        self._content = content
        starts = range(0, len(content), _PIECE)
        self._count = 1 + sum(bytes(content[start : start + _PIECE]).count(b",") for start in starts)

    def __len__(self) -> int:
        """Return how many ids there are, if they are ids."""
        return self._count

    def pack(self, vocab_size: int, param: str) -> bytes:
        """Return the ids as packed int32.

        Parameters
        ----------
        vocab_size : int
            Size of the vocabulary.
        param : str
            Field for the error.

        Raises
        ------
        RequestError
            400: they are no ids, or one is outside the vocabulary.
        """
        packed = bytearray()
        start = 0
        while start < len(self._content):
            piece = bytes(self._content[start : start + _PIECE])
            if start + _PIECE < len(self._content):
                piece, comma, _ = piece.rpartition(b",")
                if not comma:
                    # A number, or a gap, of so many characters.
                    raise _no_ids(param)
            packed += self._pack_piece(piece, vocab_size, param)
            start += len(piece) + 1
        if len(packed) != 4 * self._count:
            # Nothing between two commas, or behind the last one.
            raise _no_ids(param)
        return bytes(packed)

    @staticmethod
    def _pack_piece(piece: bytes, vocab_size: int, param: str) -> bytes:
        try:
            ids = _decoder.decode(b"[%b]" % piece)
        except (msgspec.DecodeError, ValueError):
            raise _no_ids(param) from None
        return pack_ids(ids, vocab_size, param) if ids else b""


def pack_ids(ids: list[int] | TokenIds, vocab_size: int, param: str) -> bytes:
    """Pack ids as int32 after a check against the vocabulary.

    Parameters
    ----------
    ids : list of int, or TokenIds
        As the client gave them; at least one.
    vocab_size : int
        Size of the vocabulary.
    param : str
        Field for the error.

    Raises
    ------
    RequestError
        When an id is outside the vocabulary.
    """
    if isinstance(ids, TokenIds):
        return ids.pack(vocab_size, param)
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(param, f"token id {bad} is outside the vocabulary of {vocab_size} ids")
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Unpack int32 ids."""
    return memoryview(packed).cast("i").tolist()


def _no_ids(param: str) -> Exception:
    return invalid(param, "must hold token ids, which are integers")
