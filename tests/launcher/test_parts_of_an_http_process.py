"""What an HTTP process does when the launcher says that another part has died or started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from multitok.launcher.http_process import _Parts
from multitok.messages.to_child import OwnerDied, OwnerStarted, PartDied, PartStarted


class Recorder:
    """Keeps the calls that it gets, in order with those of others."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self._name = name
        self._calls = calls

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self._calls.append((f"{self._name}.{method}", *arguments))


@pytest.fixture
def parts_of():
    calls: list[Any] = []

    def make(single: bool) -> tuple[_Parts, list[Any]]:
        results = Recorder("results", calls)
        results.recovery = Recorder("recovery", calls)
        manager: Any = SimpleNamespace(results=results)
        dispatcher: Any = Recorder("dispatcher", calls) if single else None
        return _Parts(manager, dispatcher), calls

    return make


def test_in_single_mode_nothing_goes_to_a_dead_scheduler_before_its_requests_are_seen_to(parts_of):
    parts, calls = parts_of(single=True)
    parts.follow(PartDied("scheduler", 1, 4))
    parts.follow(PartStarted("scheduler", 1, 5))
    assert calls == [
        ("dispatcher.rank_died", 1, 4),
        ("results.rank_died", 1, 4),
        ("dispatcher.rank_started", 1, 5),
        ("results.rank_started", 1, 5),
    ]


def test_where_there_is_a_router_it_speaks_for_the_schedulers(parts_of):
    parts, calls = parts_of(single=False)
    parts.follow(PartDied("scheduler", 0, 1))
    parts.follow(PartStarted("scheduler", 0, 2))
    assert calls == []
    parts.follow(PartDied("router", 0, 1))
    parts.follow(PartStarted("router", 0, 2))
    assert calls == [("recovery.router_died",), ("recovery.router_started",)]


@pytest.mark.parametrize("single", [True, False])
def test_a_new_detokenizer_is_heard_of_everywhere_and_owners_are_nobodys_business(parts_of, single):
    parts, calls = parts_of(single)
    for order in (
        PartDied("detokenizer", 1, 1),
        PartStarted("detokenizer", 1, 2),
        OwnerStarted("w2.1"),
        OwnerDied("w2.1"),
    ):
        parts.follow(order)
    assert calls == [("recovery.detokenizer_started", 1)]
