"""The harness finds what it is there to find."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from chaos.answer import Answer, compare
from chaos.killer import Event
from chaos.ledger import Entry, LedgerWriter, Totals, read_ledger
from chaos.leftovers import Holding, Snapshot, excess
from chaos.plan import ROLES, SIGNALS, plan
from chaos.verdict import MUST_BE_0, Counts, judge, times_by_kind

_DUE = "one river after the other, and never the same one"
_WORKER = Event(kind="tokenizer_worker KILL", name="tokenizer_worker:2", address="w2.1", at=10.0, detected=10.1)
_SCHEDULER = Event(kind="scheduler KILL", name="scheduler:0", at=10.0, detected=10.1, recovered=11.0)
_WORKER.recovered, _WORKER.successor = 10.5, "w2.2"


def _entry(**fields: Any) -> Entry:
    return Entry(
        **{"number": 1, "kind": "chat", "worker": "w2.1", "fresh": True, "begun": 9.0, "ended": 10.05, **fields}
    )


def _counted(entry: Entry, *events: Event) -> set[str]:
    counts = judge([entry], Totals(sent=1), events).counts
    return {name for name in Counts.__struct_fields__ if getattr(counts, name)} - {"sent"}


def test_text_that_goes_on_with_an_earlier_part_is_doubled() -> None:
    assert compare([_DUE[:20] + _DUE[5:]], [_DUE], True)[0] == "doubled"
    assert compare([_DUE + _DUE[-15:]], [_DUE], True)[0] == "doubled"


@pytest.mark.parametrize("got", [_DUE[:-1], _DUE[:10] + _DUE[11:], "x" + _DUE, _DUE + "x"])
def test_other_text_is_wrong(got: str) -> None:
    assert compare([got], [_DUE], True)[0] == "wrong"


def test_beginning_is_right_only_where_the_rest_did_not_come() -> None:
    assert compare([_DUE[:5]], [_DUE], False)[0] == "prefix"
    assert compare([_DUE[:5]], [_DUE], True)[0] == "wrong"
    assert compare([_DUE[:5] + "?"], [_DUE], False)[0] == "wrong"


def test_connection_that_breaks_with_its_worker_is_explained() -> None:
    assert _counted(_entry(outcome="broken"), _WORKER) == {"broken_with_worker"}


@pytest.mark.parametrize("entry", [{"worker": "w1.1"}, {"worker": "w2.2"}, {"ended": 9.5}], ids=str)
def test_connection_that_breaks_without_its_worker_is_lost(entry: dict[str, Any]) -> None:
    assert _counted(_entry(outcome="broken", **entry), _WORKER) == {"lost"}


def test_request_without_an_end_is_lost_whatever_died() -> None:
    assert _counted(_entry(outcome="silent", ended=70.0), _WORKER, _SCHEDULER) == {"lost"}


def test_request_that_nobody_wrote_down_is_lost() -> None:
    assert judge([], Totals(sent=1), []).counts.lost == 1


def test_error_in_a_stream_is_explained_by_a_scheduler_that_died_under_it() -> None:
    assert _counted(_entry(outcome="error", status=200, first=9.5), _SCHEDULER) == {"failed_with_scheduler"}
    assert _counted(_entry(outcome="error", status=200, first=9.5), _WORKER) == {"unexplained"}
    assert _counted(_entry(outcome="error", status=200, first=9.5, ended=9.8), _SCHEDULER) == {"unexplained"}


def test_refusal_must_say_when_to_come_back_and_have_a_reason() -> None:
    refused: dict[str, Any] = {"outcome": "refused", "status": 503, "begun": 10.2, "ended": 10.3}
    assert _counted(_entry(**refused, retry_after=True), _SCHEDULER) == {"refused"}
    assert _counted(_entry(**refused), _SCHEDULER) == {"unexplained"}
    assert _counted(_entry(**refused, retry_after=True), _WORKER) == {"unexplained"}
    # It was taken before the scheduler died.
    assert _counted(_entry(**{**refused, "begun": 9.0}, retry_after=True), _SCHEDULER) == {"failed_with_scheduler"}


def test_wrong_and_doubled_text_counts_whatever_else_happened() -> None:
    assert _counted(_entry(outcome="broken", text="wrong"), _WORKER) == {"mismatched"}
    assert _counted(_entry(outcome="complete", text="doubled")) == {"doubled"}
    assert _counted(_entry(outcome="complete", text="right", ends=1)) == {"doubled"}


def test_each_request_is_counted_once() -> None:
    outcomes = ("complete", "refused", "error", "broken", "left", "silent")
    entries = [
        _entry(outcome=outcome, text=text, status=status)
        for outcome, text, status in itertools.product(
            outcomes, ("right", "prefix", "doubled", "wrong"), (200, 503, 500)
        )
    ]
    counts = judge(entries, Totals(sent=len(entries)), [_WORKER, _SCHEDULER]).counts
    assert sum(getattr(counts, name) for name in Counts.__struct_fields__ if name != "sent") == len(entries)


def test_every_fault_is_told_in_words() -> None:
    entries = [_entry(outcome="silent"), _entry(outcome="error", message="odd"), _entry(outcome="left", text="wrong")]
    verdict = judge(entries, Totals(sent=3), [])
    assert len(verdict.faults) == sum(getattr(verdict.counts, name) for name in MUST_BE_0) == 3


def test_times_are_those_of_the_clients() -> None:
    entries = [
        _entry(outcome="broken", first=9.5, last=9.9, ended=10.3),
        _entry(
            outcome="complete", text="right", worker="w1.1", first=9.5, last=12.0, ended=12.0, pause=0.7, pause_at=9.9
        ),
        _entry(outcome="complete", text="right", worker="w1.1", begun=10.2, first=10.3, last=12.0, ended=12.0),
        _entry(outcome="complete", text="right", worker="w2.2", begun=10.6, first=10.8, last=12.0, ended=12.0),
    ]
    times = times_by_kind(entries, [_WORKER], judge(entries, Totals(sent=4), [_WORKER]))[_WORKER.kind]
    assert times.detected == [0.1]
    assert times.replaced == [0.4]
    assert times.answered == [0.7]
    assert times.told == [0.2]
    assert times.paused == [0.7]
    assert times.streams == [2]
    assert times.ended == [1]


def test_stream_is_taken_apart() -> None:
    answer = Answer(2, stream=True)
    answer.take_head(200, False)
    whole = b"".join(
        b"data: %b\n\n" % event
        for event in (
            b'{"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}',
            b'{"choices": [{"index": 1, "text": "c", "finish_reason": "length"}]}',
            b'{"choices": [{"index": 0, "delta": {"content": "d"}, "finish_reason": "length"}]}',
            b'{"choices": [], "usage": {"completion_tokens": 4}}',
            b"[DONE]",
        )
    )
    for byte in whole:
        answer.take_body(bytes([byte]))
    answer.take_end()
    assert answer.texts == ["ad", "bc"]
    assert answer.tokens == 4
    assert answer.ended_well
    assert answer.excess_ends == 0
    answer.take_body(b'data: {"choices": [{"index": 0, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n')
    assert answer.excess_ends == 4


def test_ledger_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "ledger")
    writer.add(_entry(outcome="left"))
    writer.totals.sent = 1
    writer.close()
    assert read_ledger(tmp_path / "ledger") == ([_entry(outcome="left")], Totals(sent=1))


def test_plan_is_decided_by_its_seed() -> None:
    def first(seed: int) -> list[Any]:
        return list(itertools.islice(plan(seed, ROLES, list(SIGNALS), ["pair", "hup"]), 50))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_what_was_not_there_before_is_left_over() -> None:
    before = Snapshot({"router": [Holding({"socket": 5}, 3, 50.0)]}, ["board"], [], 0)
    after = Snapshot(
        {"router": [Holding({"socket": 7, "file": 0}, 4, 60.0), Holding({}, 1, 9.0)]}, ["board", "board"], ["w1.1"], 1
    )
    assert len(excess(before, after)) == 6
    assert excess(before, before) == []
