"""What came of one request: its choices' texts, its ends, and when the texts came."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from chaos.ledger import Text

# Enough to tell one place of a text from another.
_PROBE = 12
_SHOWN = 40


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Body).decode


class Answer:
    """Takes in one answer, piece by piece.

    Parameters
    ----------
    choices : int
        How many are due.
    stream : bool
        Whether it comes as events.

    Attributes
    ----------
    texts : list of str
        Of each choice, so far.
    finishes : list of str
        Finish reasons, in the order in which they came.
    status : int or None
        HTTP status.
    retry_after : bool
        Whether the answer says when to try again.
    error : str or None
        What the server said was wrong.
    complete : bool
        Whether HTTP says that it is all there.
    done, after_end : int
        Ends of the stream, and pieces that came after the first.
    tokens : int or None
        Output tokens by the server's count, where it says.
    first, last, pause, pause_at
        See `Entry`.
    """

    def __init__(self, choices: int, stream: bool) -> None:
        self.texts = [""] * choices
        self.finishes: list[str] = []
        self.status: int | None = None
        self.retry_after = False
        self.error: str | None = None
        self.complete = False
        self.done = self.after_end = 0
        self.tokens: int | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.pause = self.pause_at = 0.0
        self._stream = stream
        self._rest = b""

    def take_head(self, status: int, retry_after: bool) -> None:
        """Take status and headers."""
        self.status, self.retry_after = status, retry_after

    def take_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._rest += data
        if self._stream and self.status == 200:
            *events, self._rest = self._rest.split(b"\n\n")
            for event in events:
                self._take_event(event.removeprefix(b"data: "))

    def take_end(self) -> None:
        """Take HTTP's word that the body is complete."""
        self.complete = True
        if self._rest:
            self._take_json(self._rest)
            self._rest = b""

    def _take_event(self, data: bytes) -> None:
        self.after_end += bool(self.done)
        if data == b"[DONE]":
            self.done += 1
        else:
            self._take_json(data)

    def _take_json(self, data: bytes) -> None:
        body = _decode(data)
        if body.error is not None:
            self.error = body.error.message
        if body.usage is not None:
            self.tokens = body.usage.completion_tokens
        news = False
        for choice in body.choices:
            said = choice.message or choice.delta
            text = choice.text or (said.content if said is not None else None)
            if text:
                self.texts[choice.index] += text
                news = True
            if choice.finish_reason is not None:
                self.finishes.append(f"{choice.index} {choice.finish_reason}")
        if news:
            self._note_time(time.monotonic())

    def _note_time(self, now: float) -> None:
        if self.first is None:
            self.first = now
        if self.last is not None and now - self.last > self.pause:
            self.pause, self.pause_at = now - self.last, self.last
        self.last = now

    @property
    def excess_ends(self) -> int:
        """Ends beyond one per choice and one of the stream, and what came after the end."""
        twice = len(self.finishes) - len({finish.split()[0] for finish in self.finishes})
        return twice + max(0, self.done - 1) + self.after_end

    @property
    def ended_well(self) -> bool:
        """Whether every choice has ended as it should: by its limit of tokens."""
        reasons = sorted(self.finishes)
        return reasons == sorted(f"{i} length" for i in range(len(self.texts))) and bool(self.done) == self._stream


def compare(texts: Sequence[str], expected: Sequence[str], complete: bool) -> tuple[Text, str]:
    """Say what texts are beside those that were due, and where the first wrong one goes wrong.

    Parameters
    ----------
    texts, expected : sequence of str
        What came, and what should have, of each choice.
    complete : bool
        Whether all of it should be there.
    """
    for i, (got, due) in enumerate(zip(texts, expected, strict=True)):
        if got == due or (not complete and due.startswith(got)):
            continue
        at = next((k for k, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due)))
        shown = f"choice {i}, character {at}: {due[at : at + _SHOWN]!r} was due, {got[at : at + _SHOWN]!r} came"
        probe = got[at : at + _PROBE]
        # A part that came twice goes on, at the place where it went wrong, with something earlier.
        return ("doubled" if len(probe) == _PROBE and probe in due[: at + _PROBE - 1] else "wrong"), shown
    return ("right" if complete else "prefix"), ""
