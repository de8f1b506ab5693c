"""The client's ledger: what became of each request, as its client saw it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

# complete: an answer with its proper end. refused: another status than 200. error: an error in place of the rest of an
# answer. broken: the connection ended first. left: the client went away. silent: nothing came within the deadline.
Outcome = Literal["complete", "refused", "error", "broken", "left", "silent"]
# What the texts are, next to the reference: right, a beginning of it, with a part twice, or something else.
Text = Literal["right", "prefix", "doubled", "wrong"]


class Entry(msgspec.Struct, kw_only=True):
    """One request; times are of `time.monotonic`, which all processes of a machine share.

    Attributes
    ----------
    number : int
        Which request of this load.
    kind : str
        What was asked for.
    worker : str
        Address of the worker's life at the other end, as it said before the request; empty if it had no time to.
    fresh : bool
        Whether the connection was opened for this request.
    begun, ended : float
        When it was sent, and when nothing more was to come.
    first, last : float or None
        When the first and the last text came.
    pause, pause_at : float
        Longest time between two pieces of text, and when it began.
    status : int or None
        HTTP status, if one came.
    retry_after : bool
        Whether the answer says when to try again.
    message : str
        What the server or the connection said was wrong.
    text : str
        See `Text`.
    ends : int
        Ends that came in excess of one per choice, and anything that came after the end.
    detail : str
        For a text that is wrong: where, what was due and what came.
    """

    number: int
    kind: str
    worker: str
    fresh: bool
    begun: float
    ended: float = 0.0
    first: float | None = None
    last: float | None = None
    pause: float = 0.0
    pause_at: float = 0.0
    outcome: Outcome = "silent"
    status: int | None = None
    retry_after: bool = False
    message: str = ""
    text: Text = "prefix"
    ends: int = 0
    detail: str = ""


class Totals(msgspec.Struct, kw_only=True):
    """What a load says at its end, beside its entries.

    Attributes
    ----------
    sent : int
        Requests sent; the ledger must have as many.
    unconnected : int
        Connections that ended before their worker had said who it is: no request was sent on them.
    unconnected_at : list of (float, float)
        When each was begun and when it ended.
    turned_away : int
        Connections that were refused by the port.
    """

    sent: int = 0
    unconnected: int = 0
    unconnected_at: list[tuple[float, float]] = []
    turned_away: int = 0


class LedgerWriter:
    """Appends entries to a file, one JSON a line; the last line is the `Totals`.

    Parameters
    ----------
    path : Path
        A new file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self.totals = Totals()

    def add(self, entry: Entry) -> None:
        """Put down an entry."""
        self._file.write(msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        """Put down the totals."""
        self._file.write(msgspec.json.encode(self.totals) + b"\n")
        self._file.close()


def read_ledger(path: Path) -> tuple[list[Entry], Totals]:
    """Read a ledger."""
    *lines, last = _lines(path)
    decoder = msgspec.json.Decoder(Entry)
    return [decoder.decode(line) for line in lines], msgspec.json.decode(last, type=Totals)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file
