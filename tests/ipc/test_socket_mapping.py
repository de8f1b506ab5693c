from __future__ import annotations

import logging
import time

import pytest

from multitok.ipc import sockets
from multitok.ipc.socket_mapping import SocketMapping
from multitok.messages.to_detokenizer import RefusedReq, ToDetokenizer

OWNER = "w1.1"


def message(number: int) -> RefusedReq:
    return RefusedReq(number=number, status=503, message="x")


@pytest.fixture
def site(make_site):
    return make_site()


@pytest.fixture
def mapping(site):
    return site.keep(SocketMapping(site.port_args))


def test_a_socket_is_opened_on_first_use(site, mapping):
    assert len(mapping) == 0
    inbox = site.inbox(OWNER, ToDetokenizer)
    assert mapping.send_output(OWNER, message(1))
    assert OWNER in mapping
    assert inbox.next() == message(1)
    assert mapping.send_output(OWNER, message(2))
    assert inbox.next() == message(2)
    assert len(mapping) == 1


def test_each_address_gets_its_own_messages_in_order(site, mapping):
    inboxes = {address: site.inbox(address, ToDetokenizer) for address in ("w1.1", "w2.1", "w2.2")}
    for number in range(30):
        assert mapping.send_output(["w1.1", "w2.1", "w2.2"][number % 3], message(number))
    for start, inbox in enumerate(inboxes.values()):
        assert [inbox.next().number for _ in range(10)] == list(range(start, 30, 3))


def test_messages_wait_for_a_peer_that_is_not_there_yet(site, mapping):
    assert mapping.send_output(OWNER, message(1))
    assert site.inbox(OWNER, ToDetokenizer).next() == message(1)


def test_an_output_without_owner_is_logged_counted_and_skipped(mapping, caplog):
    with caplog.at_level(logging.ERROR):
        assert not mapping.send_output(None, message(1))
        assert not mapping.send_output(None, message(2))
    assert mapping.without_owner == 2
    assert len(mapping) == 0
    assert [record.getMessage() for record in caplog.records] == ["RefusedReq has no owner; skipped"] * 2


def test_second_registration_is_a_warning_and_skipped(site, mapping, caplog):
    inbox = site.inbox(OWNER, ToDetokenizer)
    mapping._register_ipc_mapping(OWNER)
    first = mapping._sockets[OWNER]
    with caplog.at_level(logging.WARNING):
        mapping._register_ipc_mapping(OWNER)
    assert mapping._sockets[OWNER] is first
    assert len(mapping) == 1
    ((_, level, text),) = caplog.record_tuples
    assert (level, text) == (logging.WARNING, "w1.1 is registered already; skipped")
    assert mapping.send_output(OWNER, message(3))
    assert inbox.next() == message(3)


def test_a_dropped_address_is_closed_and_gets_nothing_more(site, mapping):
    inbox = site.inbox(OWNER, ToDetokenizer)
    mapping.send_output(OWNER, message(1))
    assert inbox.next() == message(1)
    socket = mapping._sockets[OWNER]
    mapping.drop(OWNER)
    assert socket.closed
    assert OWNER not in mapping
    assert not mapping.send_output(OWNER, message(2))
    assert mapping.undeliverable == 1
    assert len(mapping) == 0
    # Its next life has another address, and is reached.
    next_life = site.inbox("w1.2", ToDetokenizer)
    assert mapping.send_output("w1.2", message(3))
    assert next_life.next() == message(3)
    assert inbox.is_empty()


def test_an_address_may_be_dropped_before_its_first_use(mapping):
    mapping.drop(OWNER)
    assert not mapping.send_output(OWNER, message(1))
    assert len(mapping) == 0


def test_clearing_closes_every_socket(site, mapping):
    for address in ("w1.1", "w2.1"):
        mapping.send_output(address, message(1))
    opened = list(mapping._sockets.values())
    mapping.clear_all_sockets()
    assert len(opened) == 2
    assert all(socket.closed for socket in opened)
    assert len(mapping) == 0
    inbox = site.inbox("w1.1", ToDetokenizer)
    assert mapping.send_output("w1.1", message(2))
    # What was sent before may still have been on its way.
    while inbox.next() != message(2):
        pass


def test_a_peer_that_does_not_read_holds_up_nobody(site, monkeypatch, caplog):
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 10)
    mapping = site.keep(SocketMapping(site.port_args))
    reading = site.inbox("w2.1", ToDetokenizer)
    started = time.monotonic()
    delivered = [mapping.send_output(OWNER, message(number)) for number in range(100)]
    assert time.monotonic() - started < 5
    # Nobody is there, so exactly what fits the queue was taken; the rest was counted.
    assert delivered == [True] * 10 + [False] * 90
    assert mapping.undeliverable == 90
    assert "w1.1 does not read its messages" in caplog.text
    assert mapping.send_output("w2.1", message(7))
    assert reading.next() == message(7)


def test_what_was_sent_while_the_receiver_was_dead_arrives_at_its_replacement(site, mapping):
    """The launcher owns the listening socket of a fixed address, so that connecting works while nobody is there."""
    receiver = site.ready_child("detokenizer", ["d0"])
    receiver.kill()
    assert site.ending(receiver) == "died of SIGKILL"
    for number in range(3):
        assert mapping.send_output("d0", message(number))
    replacement = site.inbox("d0", ToDetokenizer)
    assert [replacement.next() for _ in range(3)] == [message(number) for number in range(3)]


def test_what_is_no_address_is_counted_and_skipped(mapping, caplog):
    assert not mapping.send_output("x" * 200, message(1))
    assert mapping.undeliverable == 1
    assert "is no address" in caplog.text
    assert len(mapping) == 0
