"""Server-sent events: the data of each, from pieces of a body that are cut anywhere."""

from __future__ import annotations

# No event is longer: a cumulative one of SGLang has some ten bytes per id, and some fifty per log probability.
_MOST_BYTES = 64 << 20


class EventTooLong(ValueError):
    """An event is too long to be one."""


class EventReader:
    """Cuts a stream into events; every event's data is one line, as all of these servers send it."""

    __slots__ = ("_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes.

        Parameters
        ----------
        piece : bytes
            What comes next of the body.

        Raises
        ------
        EventTooLong
            A line has no end.
        """
        first = piece.find(b"\n")
        if first < 0:
            self._keep(piece)
            return []
        # One event and nothing else, as in most cases.
        if first == len(piece) - 2 and not self._parts and piece.startswith(b"data:") and piece.endswith(b"\n"):
            return [piece[5:first]]
        if self._parts:
            piece = b"".join([*self._parts, piece])
            self._parts.clear()
            self._size = 0
        lines = piece.split(b"\n")
        if lines[-1]:
            self._keep(lines[-1])
        # The last one is empty, or kept.
        return [line[5:] for line in lines[:-1] if line.startswith(b"data:")]

    def _keep(self, piece: bytes) -> None:
        self._parts.append(piece)
        self._size += len(piece)
        if self._size > _MOST_BYTES:
            raise EventTooLong(f"an event of more than {_MOST_BYTES} bytes")
