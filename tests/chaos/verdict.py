"""Judges a ledger beside what was done to the server: what is explained by a death, and what must not be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from chaos.killer import Event
from chaos.ledger import Entry, Totals

# Between a client's clock and the killer's: what was sent so shortly before a kill may have come after it.
_SLACK_S = 0.1
# After a part is up again, until what waited in its queue is through.
_AFTER_S = 2.0
# Refusals that tell the client to come again.
_BUSY = (429, 503)


class Counts(msgspec.Struct, kw_only=True):
    """What became of the requests; the lower half must be 0.

    Attributes
    ----------
    sent, answered, left : int
        In all; complete and right; given up by the client.
    refused : int
        503 or 429 with Retry-After, while something was down.
    broken_with_worker : int
        On a connection to a worker that was killed.
    failed_with_scheduler : int
        Told so, when a scheduler died; with --resume-generation it must be 0.
    unconnected : int
        Connections that broke before a request was sent, since a worker was killed.
    lost : int
        Without an answer: nothing within the deadline, or broken with no worker's death to explain it.
    doubled : int
        With more than one end, or a part of the text twice.
    mismatched : int
        Text that is not the reference, or for those that ended early not its beginning.
    unexplained : int
        Errors and refusals that no death explains, and refusals without Retry-After.
    turned_away : int
        Connections that the port refused.
    """

    sent: int = 0
    answered: int = 0
    left: int = 0
    refused: int = 0
    broken_with_worker: int = 0
    failed_with_scheduler: int = 0
    unconnected: int = 0
    lost: int = 0
    doubled: int = 0
    mismatched: int = 0
    unexplained: int = 0
    turned_away: int = 0


MUST_BE_0 = ("lost", "doubled", "mismatched", "unexplained", "turned_away")


class Verdict(msgspec.Struct):
    """Counts, and of everything that must not be, an example or more in words.

    Attributes
    ----------
    explained_by : dict of int to int
        Number of an event to the requests that it ended.
    last_error : dict of int to float
        Number of an event to the seconds from its detection until the last of them knew.
    """

    counts: Counts
    faults: list[str]
    explained_by: dict[int, int]
    last_error: dict[int, float]


def judge(entries: Sequence[Entry], totals: Totals, events: Sequence[Event]) -> Verdict:
    """Judge a ledger.

    Parameters
    ----------
    entries : sequence of Entry
        The client's.
    totals : Totals
        Its own count.
    events : sequence of Event
        What was done to the server.
    """
    verdict = Verdict(Counts(sent=totals.sent, turned_away=totals.turned_away), [], {}, {})
    counts = verdict.counts
    workers = {event.address: i for i, event in enumerate(events) if event.address}
    if len(entries) != totals.sent:
        counts.lost += totals.sent - len(entries)
        verdict.faults.append(f"{totals.sent} requests were sent, but {len(entries)} were written down")
    for entry in entries:
        if entry.text == "wrong":
            _fault(verdict, "mismatched", entry)
        elif entry.text == "doubled" or entry.ends:
            _fault(verdict, "doubled", entry)
        elif entry.outcome == "complete":
            counts.answered += 1
        elif entry.outcome == "left":
            counts.left += 1
        elif entry.outcome == "broken" and _explains(event := workers.get(entry.worker), entry, events):
            assert event is not None
            counts.broken_with_worker += 1
            _explain(verdict, event, entry, events)
        elif entry.outcome in ("broken", "silent"):
            _fault(verdict, "lost", entry)
        elif (event := _scheduler_of(entry, events)) is not None:
            counts.failed_with_scheduler += 1
            _explain(verdict, event, entry, events)
        elif entry.outcome == "refused" and entry.status in _BUSY and entry.retry_after and _is_down(entry, events):
            counts.refused += 1
        else:
            _fault(verdict, "unexplained", entry)
    for begun, ended in totals.unconnected_at:
        if any(event.address and event.at < ended + _SLACK_S and begun < event.over for event in events):
            counts.unconnected += 1
        else:
            counts.lost += 1
            verdict.faults.append(f"lost: a connection of {begun:.2f} to {ended:.2f} that no death explains")
    return verdict


def _explains(event: int | None, entry: Entry, events: Sequence[Event]) -> bool:
    return event is not None and entry.ended > events[event].at - _SLACK_S


def _scheduler_of(entry: Entry, events: Sequence[Event]) -> int | None:
    """Return the scheduler's death that a failed request was alive at, if there is one.

    A refusal before any output counts only if the request had certainly been taken before the death.
    """
    for i, event in enumerate(events):
        if (
            event.role == "scheduler"
            and event.at - _SLACK_S < entry.ended < event.over + _AFTER_S
            and entry.begun < (event.at - _SLACK_S if entry.outcome == "refused" else event.over)
        ):
            return i
    return None


def _is_down(entry: Entry, events: Iterable[Event]) -> bool:
    return any(
        event.role in ("scheduler", "router") and event.at - _SLACK_S < entry.ended < event.over + _AFTER_S
        for event in events
    )


def _explain(verdict: Verdict, event: int, entry: Entry, events: Sequence[Event]) -> None:
    verdict.explained_by[event] = verdict.explained_by.get(event, 0) + 1
    detected = events[event].detected or events[event].at
    verdict.last_error[event] = max(verdict.last_error.get(event, 0.0), entry.ended - detected)


def _fault(verdict: Verdict, kind: str, entry: Entry) -> None:
    setattr(verdict.counts, kind, getattr(verdict.counts, kind) + 1)
    what = entry.detail or entry.message or f"status {entry.status}"
    verdict.faults.append(
        f"{kind}: request {entry.number} ({entry.kind}) on {entry.worker}, {entry.begun:.2f} to {entry.ended:.2f}: "
        f"{entry.outcome}, {what}"
    )


# Times


class Times(msgspec.Struct, kw_only=True):
    """What a kill of one kind costs, in seconds; each a list with a figure per kill that has one.

    Attributes
    ----------
    detected : list of float
        Kill to the launcher's word.
    replaced : list of float
        Detection until the replacement is ready.
    answered : list of float
        Detection until the first text of a request that was sent after it: to the replacement, of an HTTP worker.
    told : list of float
        Detection until the last client of a request that it ended knew.
    paused : list of float
        Longest pause in a stream that went on.
    streams : list of int
        Requests with some text before the kill, and something to come after it.
    ended : list of int
        Requests that it ended.
    """

    detected: list[float] = []
    replaced: list[float] = []
    answered: list[float] = []
    told: list[float] = []
    paused: list[float] = []
    streams: list[int] = []
    ended: list[int] = []


def times_by_kind(entries: Sequence[Entry], events: Sequence[Event], verdict: Verdict) -> dict[str, Times]:
    """Measure each kind of kill on the clients' side."""
    begun = sorted((e for e in entries if e.first is not None), key=lambda e: e.begun)
    found: dict[str, Times] = {}
    for i, event in enumerate(events):
        times = found.setdefault(event.kind, Times())
        detected = event.detected or event.at
        times.detected.append(round(detected - event.at, 3))
        if event.recovered is not None:
            times.replaced.append(round(event.recovered - detected, 3))
        after = [
            e.first for e in begun if e.begun > detected and e.first is not None and event.successor in ("", e.worker)
        ]
        if after:
            times.answered.append(round(min(after) - detected, 3))
        open_then = [e for e in begun if e.first is not None and e.first < event.at < e.ended]
        times.streams.append(len(open_then))
        if event.name:
            times.ended.append(verdict.explained_by.get(i, 0))
        if i in verdict.last_error:
            times.told.append(round(verdict.last_error[i], 3))
        pauses = [
            e.pause for e in open_then if e.outcome == "complete" and event.at - e.pause < e.pause_at < event.over
        ]
        if pauses:
            times.paused.append(round(max(pauses), 3))
    return found
