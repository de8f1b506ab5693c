from __future__ import annotations

import socket

import pytest

from multitok.launcher.children import Announcer
from multitok.messages.to_child import OwnerDied, OwnerStarted, PartDied, PartStarted


@pytest.fixture
def announcer(family, tmp_path):
    return Announcer(family.children, str(tmp_path))


def begin(family, announcer, role, index=0, life=1):
    """Start a child that isn't ready; what it is briefed with is the first that it is told."""
    child = family.add(role, index, life, ready=False)
    for message in announcer.briefing(role, index):
        child.send(message)
    return child


def start(family, announcer, role, index=0, life=1):
    child = begin(family, announcer, role, index, life)
    become_ready(announcer, child)
    return child


def become_ready(announcer, child):
    child.ready_at = 0.0
    announcer.became_ready(child)


def die(family, announcer, child):
    family.end(child)
    announcer.died(child)


@pytest.mark.parametrize(("role", "index"), [("scheduler", 1), ("detokenizer", 0), ("router", 0)])
def test_the_death_and_the_next_life_of_a_part_are_told_to_every_other(family, announcer, role, index):
    doomed = start(family, announcer, role, index)
    others = [start(family, announcer, "scheduler", 0), start(family, announcer, "detokenizer", 1)]
    worker = start(family, announcer, "tokenizer_worker", 1)
    fork_server = start(family, announcer, "fork_server")
    for child in (*others, worker):
        family.told(child)
    die(family, announcer, doomed)
    assert [family.told(child) for child in (*others, worker)] == [[PartDied(role, index, 1)]] * 3
    successor = begin(family, announcer, role, index, 2)
    assert family.told(worker) == []
    become_ready(announcer, successor)
    assert [family.told(child) for child in (*others, worker)] == [[PartStarted(role, index, 2)]] * 3
    assert family.told(successor) == [OwnerStarted("w1.1")]
    assert family.told(fork_server) == []


def test_a_part_that_dies_before_it_is_ready_is_told_of_once(family, announcer):
    doomed, other = start(family, announcer, "router"), start(family, announcer, "scheduler")
    die(family, announcer, doomed)
    die(family, announcer, family.add("router", life=2, ready=False))
    announcer.became_ready(family.add("router", life=3))
    assert family.told(other) == [PartDied("router", 0, 1), PartStarted("router", 0, 3)]


def test_first_lives_are_not_told(family, announcer):
    first = start(family, announcer, "scheduler")
    start(family, announcer, "router")
    assert family.told(first) == []


def test_owners_are_told_to_parts_and_their_addresses_are_removed(family, announcer, tmp_path):
    part, worker = start(family, announcer, "detokenizer"), start(family, announcer, "tokenizer_worker", 2, 5)
    other = start(family, announcer, "tokenizer_worker", 1)
    (tmp_path / "w2.5").touch()
    die(family, announcer, worker)
    assert family.told(part) == [OwnerStarted("w2.5"), OwnerStarted("w1.1"), OwnerDied("w2.5")]
    assert family.told(other) == []
    assert not (tmp_path / "w2.5").exists()


def test_a_new_life_hears_what_it_has_missed(family, announcer):
    detokenizer = start(family, announcer, "detokenizer")
    scheduler, worker = start(family, announcer, "scheduler"), start(family, announcer, "tokenizer_worker", 1)
    start(family, announcer, "tokenizer_worker", 2)
    die(family, announcer, detokenizer)
    die(family, announcer, scheduler)
    # What is on its way to the detokenizer may still name this owner.
    die(family, announcer, worker)
    new = start(family, announcer, "detokenizer", life=2)
    assert family.told(new) == [PartDied("scheduler", 0, 1), OwnerDied("w1.1"), OwnerStarted("w2.1")]
    late = start(family, announcer, "router", life=1)
    assert family.told(late) == [PartDied("scheduler", 0, 1), OwnerStarted("w2.1")]


def test_a_new_life_hears_which_lives_the_schedulers_have(family, announcer):
    router, first = start(family, announcer, "router"), start(family, announcer, "scheduler", 0)
    start(family, announcer, "scheduler", 1)
    assert announcer.scheduler_lives == [1, 1]
    die(family, announcer, router)
    die(family, announcer, first)
    second = start(family, announcer, "scheduler", 0, life=2)
    assert announcer.briefing("router", 0) == [PartStarted("scheduler", 0, 2)]
    die(family, announcer, second)
    start(family, announcer, "scheduler", 0, life=4)
    assert announcer.scheduler_lives == [4, 1]
    assert family.told(start(family, announcer, "router", life=2)) == [PartStarted("scheduler", 0, 4)]


def test_what_happens_while_a_part_loads_is_told_to_it_in_order(family, announcer):
    scheduler, worker = start(family, announcer, "scheduler"), start(family, announcer, "tokenizer_worker", 1)
    router = start(family, announcer, "router")
    die(family, announcer, router)
    loading = begin(family, announcer, "router", life=2)
    die(family, announcer, scheduler)
    die(family, announcer, worker)
    start(family, announcer, "tokenizer_worker", 1, life=2)
    start(family, announcer, "scheduler", life=2)
    told = [
        OwnerStarted("w1.1"),
        PartDied("scheduler", 0, 1),
        OwnerDied("w1.1"),
        OwnerStarted("w1.2"),
        PartStarted("scheduler", 0, 2),
    ]
    assert family.told(loading) == told
    # It dies without having been ready: the next one has to know of the same deaths.
    die(family, announcer, loading)
    assert family.told(begin(family, announcer, "router", life=3)) == [
        PartStarted("scheduler", 0, 2),
        OwnerDied("w1.1"),
        OwnerStarted("w1.2"),
    ]


def test_a_worker_that_starts_while_a_part_is_down_hears_it(family, announcer):
    scheduler = start(family, announcer, "scheduler")
    die(family, announcer, scheduler)
    worker = family.add("tokenizer_worker", 1, ready=False)
    announcer.brief_worker(worker)
    assert family.told(worker) == [PartDied("scheduler", 0, 1)]
    start(family, announcer, "scheduler", life=2)
    assert family.told(worker) == [PartStarted("scheduler", 0, 2)]


def test_a_child_that_reads_late_hears_everything_in_order(family):
    slow = family.add("router")
    slow.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sent = [OwnerDied(f"w1.{life}") for life in range(100)]
    for message in sent:
        slow.send(message)
    heard = family.told(slow)
    assert len(heard) < len(sent)
    while len(heard) < len(sent):
        slow.send_rest()
        heard += family.told(slow)
    assert heard == sent
