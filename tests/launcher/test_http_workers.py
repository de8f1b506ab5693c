from __future__ import annotations

import os
import secrets
import signal
import socket

import msgspec
import pytest

from multitok.config import OptionError
from multitok.launcher.http_workers import HttpWorkers
from multitok.launcher.load_board import LoadBoard, most_workers, worker_slots
from multitok.launcher.shared_memory import block_name
from multitok.launcher.timers import Timers
from multitok.launcher.worker_changes import WorkerChanges
from multitok.messages.to_child import Drain, Fork, ToChild
from multitok.messages.to_launcher import Forked


class Pool:
    """HTTP workers whose fork server is played by the test; their processes do nothing."""

    def __init__(self, family, count):
        self.family = family
        self.block = LoadBoard.create(block_name(secrets.token_hex(4), "board"), 1, 1, count)
        self.board = LoadBoard(self.block.name, 1, 1, count)
        self.http_socket = socket.socket()
        self.timers = Timers()
        self.started = []
        self.ends = []
        self.workers = HttpWorkers(
            count,
            family.children,
            self.board,
            self.http_socket,
            self.timers,
            drain_timeout=7.0,
            exit_timeout=1.0,
            on_made=self.started.append,
        )
        self.problem = None
        self.changes = WorkerChanges(self.workers, count > 1, self.check)
        self.fork_server = family.add("fork_server")
        self.workers.make_all()

    def check(self):
        if self.problem is not None:
            raise OptionError(self.problem)

    def orders(self):
        """What the fork server was told to make, with the new worker's end of its channel."""
        orders = []
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self.family._ends[self.fork_server], 65536, 4)
            except BlockingIOError:
                return orders
            order = msgspec.msgpack.decode(packet, type=ToChild)
            assert isinstance(order, Fork)
            os.close(fds[1])
            orders.append((order, socket.socket(fileno=fds[0])))
            self.ends.append(orders[-1][1])

    def make(self):
        """Make what was ordered; returns the new workers, ready."""
        made = []
        for order, theirs in self.orders():
            pid = self.family.process()
            self.workers.made(Forked(order.index, order.life, pid))
            worker = next(child for child in self.family.children.all() if child.pid == pid)
            self.family.take(worker, theirs)
            assert worker.slot == order.slot
            made.append(worker)
        for worker in made:
            worker.ready_at = 0.0
            self.board.set_life("tokenizer_worker", worker.slot, worker.life, index=worker.index)
            self.workers.became_ready(worker)
            self.changes.became_ready(worker.index)
        return made

    def bury(self, worker):
        self.family.end(worker)
        self.workers.buried(worker)

    def close(self):
        for sock in (self.http_socket, *self.ends):
            sock.close()
        for order in self.workers._orders.values():
            order.ours.close()
            order.theirs.close()
        self.block.remove()


@pytest.fixture
def make_pool(family):
    pools = []

    def make(count):
        pools.append(Pool(family, count))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def names(workers):
    return [(worker.index, worker.life) for worker in workers]


def test_each_replacement_is_ready_before_its_old_worker_drains_and_the_next_is_made(family, make_pool):
    pool = make_pool(3)
    old = pool.make()
    assert names(old) == [(1, 1), (2, 1), (3, 1)]
    pool.changes.ask(signal.SIGHUP)
    for number, worker in enumerate(old, start=1):
        assert not worker.draining
        assert names(pool.make()) == [(number, 2)]
        assert worker.draining
        assert family.told(worker) == [Drain(7.0, rolling=True)]
    assert pool.orders() == []
    assert sorted(names(pool.started)) == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


def test_a_draining_worker_is_no_measure_for_those_that_accept(make_pool):
    pool = make_pool(1)
    (old,) = pool.make()
    pool.changes.ask(signal.SIGHUP)
    (new,) = pool.make()
    pool.board.slot("tokenizer_worker", new.slot).set_connections(9)
    pool.board.slot("tokenizer_worker", old.slot).set_connections(1)
    assert pool.board.lowest_connections() == 9
    assert pool.board.figures("tokenizer_worker", 1)["life"] == 2


def test_what_is_asked_meanwhile_waits(make_pool):
    pool = make_pool(2)
    pool.make()
    for number in (signal.SIGHUP, signal.SIGTTIN, signal.SIGHUP, signal.SIGTTOU):
        pool.changes.ask(number)
    made = []
    while new := pool.make():
        made += names(new)
    assert made == [(1, 2), (2, 2), (3, 1), (1, 3), (2, 3), (3, 2)]
    assert pool.workers.wanted == {1, 2}


def test_replacements_wait_for_a_place_on_the_board(make_pool):
    pool = make_pool(2)
    workers = pool.make()
    while len(workers) < worker_slots(2):
        pool.changes.ask(signal.SIGHUP)
        while new := pool.make():
            workers += new
    assert len(workers) == worker_slots(2)
    assert len({worker.slot for worker in workers}) == worker_slots(2)
    pool.changes.ask(signal.SIGHUP)
    assert pool.orders() == []
    pool.bury(workers[0])
    (new,) = pool.make()
    assert (new.index, new.slot) == (1, workers[0].slot)
    assert pool.orders() == []


def test_a_worker_that_was_retired_while_it_waited_keeps_no_place_from_the_next(make_pool):
    pool = make_pool(2)
    workers = pool.make()
    while len(workers) < worker_slots(2):
        pool.changes.ask(signal.SIGHUP)
        while new := pool.make():
            workers += new
    # Number 2 dies, its place goes to number 3, and it waits for the next one.
    pool.changes.ask(signal.SIGTTIN)
    pool.bury(workers[-1])
    pool.workers.make(2)
    assert names(pool.make()) == [(3, 1)]
    for _ in range(2):
        pool.changes.ask(signal.SIGTTOU)
    assert pool.workers.wanted == {1}
    pool.changes.ask(signal.SIGHUP)
    pool.bury(workers[0])
    assert [worker.index for worker in pool.make()] == [1]


def test_there_are_never_more_workers_than_the_board_allows_nor_less_than_one(make_pool):
    pool = make_pool(2)
    pool.make()
    for _ in range(most_workers(2)):
        pool.changes.ask(signal.SIGTTIN)
        pool.make()
    assert pool.workers.wanted == set(range(1, most_workers(2) + 1))
    for _ in range(most_workers(2)):
        pool.changes.ask(signal.SIGTTOU)
    assert pool.workers.wanted == {1}


def test_an_added_worker_that_cannot_start_is_given_up(make_pool):
    pool = make_pool(2)
    pool.make()
    pool.changes.ask(signal.SIGTTIN)
    assert [order.index for order, _ in pool.orders()] == [3]
    assert pool.changes.can_do_without(3)
    pool.changes.give_up(3, "it was not to be")
    assert pool.workers.wanted == {1, 2}


def test_a_replacement_that_cannot_start_leaves_the_old_worker_and_the_rest_alone(make_pool):
    pool = make_pool(2)
    old = pool.make()
    pool.changes.ask(signal.SIGHUP)
    pool.orders()
    assert pool.changes.can_do_without(1)
    assert not pool.changes.can_do_without(2)
    pool.changes.give_up(1, "it was not to be")
    assert pool.orders() == []
    assert not any(worker.draining for worker in old)
    pool.changes.ask(signal.SIGTTOU)
    assert pool.workers.wanted == {1}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTTIN])
def test_no_worker_is_made_while_its_files_can_not_be_read(make_pool, caplog, number):
    pool = make_pool(2)
    old = pool.make()
    pool.problem = "--ssl-certfile: can't read it"
    for _ in range(2):
        pool.changes.ask(number)
    # Others are carried out.
    pool.changes.ask(signal.SIGTTOU)
    assert pool.orders() == []
    assert pool.workers.wanted == {1}
    assert not old[0].draining
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert all(error.startswith(number.name) and error.endswith(": " + pool.problem) for error in errors)
    pool.problem = None
    pool.changes.ask(number)
    assert len(pool.make()) == 1


def test_workers_that_a_dead_fork_server_was_to_make_are_ordered_anew(family, make_pool):
    pool = make_pool(2)
    pool.orders()
    pool.workers.fork_server_died()
    family.end(pool.fork_server)
    pool.fork_server = family.add("fork_server")
    # `make_all` and `fork_server_died` told a fork server that was ready; this one has to say so.
    pool.workers.fork_server_is_ready(pool.fork_server)
    assert names(pool.make()) == [(1, 2), (2, 2)]


def test_a_worker_that_is_made_too_late_is_ended(make_pool):
    pool = make_pool(2)
    pool.workers.close()
    for order, theirs in pool.orders():
        pid = pool.family.process()
        pool.workers.made(Forked(order.index, order.life, pid))
        worker = next(child for child in pool.family.children.all() if child.pid == pid)
        pool.family.take(worker, theirs)
        assert pool.family.children.reap(worker) == "died of SIGKILL"
    assert pool.started == []


def test_a_retired_worker_that_does_not_exit_is_killed(make_pool, monkeypatch):
    pool = make_pool(2)
    old, _ = pool.make()
    now = 1000.0
    monkeypatch.setattr("multitok.launcher.timers.time.monotonic", lambda: now)
    pool.changes.ask(signal.SIGHUP)
    pool.make()
    now += 7.9
    pool.timers.run_due()
    assert pool.timers.seconds_left() == pytest.approx(0.1)
    now += 0.2
    pool.timers.run_due()
    assert pool.family.children.reap(old) == "died of SIGKILL"
