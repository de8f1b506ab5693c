"""The HTTP workers: which there should be, how the fork server makes them, and where they stand on the load board."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from multitok.launcher.child_process import ChildProcess, make_channel, part_name
from multitok.launcher.children import FORK_SERVER, WORKER, Children
from multitok.launcher.load_board import LoadBoard, most_workers, worker_slots
from multitok.launcher.timers import Timers
from multitok.messages.to_child import Drain, Fork
from multitok.messages.to_launcher import Forked

_log = logging.getLogger(__name__)


class _Order(NamedTuple):
    """A worker that the fork server was, or will be, told to make: its slot, and both ends of its channel."""

    slot: int
    ours: socket.socket
    theirs: socket.socket


class HttpWorkers:
    """Makes, counts and retires HTTP workers.

    A worker has an index; it lives again and again, and each life has a slot on the load board. A new life that is
    ready retires the older ones of its index: that is how workers are replaced one by one.

    Parameters
    ----------
    count : int
        How many there are at the start.
    children : Children
        All.
    board : LoadBoard
        Of this start.
    http_socket : socket
        Each gets it.
    timers : Timers
        Of the launcher's loop.
    drain_timeout, exit_timeout : float
        Seconds that running requests of a retired worker get, and that it then has left to exit.
    on_made : callable
        Called with each new worker when its process exists.

    Attributes
    ----------
    wanted : set of int
        Indexes of the workers that there should be.
    most : int
        How many there may be.
    """

    def __init__(
        self,
        count: int,
        children: Children,
        board: LoadBoard,
        http_socket: socket.socket,
        timers: Timers,
        *,
        drain_timeout: float,
        exit_timeout: float,
        on_made: Callable[[ChildProcess], None],
    ) -> None:
        self.wanted = set(range(1, count + 1))
        self.most = most_workers(count)
        self._children = children
        self._board = board
        self._http_socket = http_socket
        self._timers = timers
        self._drain_timeout = drain_timeout
        self._exit_timeout = exit_timeout
        self._on_made = on_made
        self._lives: dict[int, int] = {}
        self._free_slots = deque(range(1, worker_slots(count) + 1))
        self._orders: dict[tuple[int, int], _Order] = {}
        # Indexes that wait for a free slot, or for their time after a death.
        self._without_slot: deque[int] = deque()
        self._postponed: set[int] = set()
        self._closed = False

    # Making

    def make_all(self) -> None:
        """Have the workers of the start made."""
        for index in sorted(self.wanted):
            self.make(index)

    def make(self, index: int) -> None:
        """Have the next life of a worker made, unless one is on its way."""
        if self._closed or index not in self.wanted or self.is_coming(index):
            return
        if not self._free_slots:
            _log.warning(
                "the load board has no place left for %s: %d workers drain; it starts when one of them has ended",
                part_name(WORKER, index),
                sum(worker.draining for worker in self._children.of(WORKER)),
            )
            self._without_slot.append(index)
            return
        life = self._lives[index] = self._lives.get(index, 0) + 1
        order = self._orders[index, life] = _Order(self._free_slots.popleft(), *make_channel())
        for fork_server in self._children.of(FORK_SERVER):
            if fork_server.ready:
                self._send(fork_server, index, life, order)

    def make_later(self, index: int, delay: float) -> None:
        """Have the next life of a worker made in so many seconds."""
        self._postponed.add(index)

        def make() -> None:
            self._postponed.discard(index)
            self.make(index)

        self._timers.call_later(delay, make)

    def fork_server_is_ready(self, fork_server: ChildProcess) -> None:
        """Send the orders that have waited for it."""
        if self._closed:
            return
        for (index, life), order in self._orders.items():
            self._send(fork_server, index, life, order)

    def fork_server_died(self) -> None:
        """Give up the workers that it may or may not have made, and order others.

        One that it has made sees its channel close, and exits; the next has a life, and so an address, of its own.
        """
        orders, self._orders = self._orders, {}
        for (index, _), order in orders.items():
            order.ours.close()
            order.theirs.close()
            self._free_slots.append(order.slot)
            self.make(index)

    def made(self, message: Forked) -> None:
        """Take a worker that the fork server has made."""
        order = self._orders.pop((message.index, message.life))
        order.theirs.close()
        worker = ChildProcess(WORKER, message.index, message.life, message.pid, order.ours, order.slot)
        self._children.watch(worker)
        if message.index in self.wanted and not self._closed:
            self._on_made(worker)
        else:
            worker.draining = True
            worker.kill()

    def _send(self, fork_server: ChildProcess, index: int, life: int, order: _Order) -> None:
        fork_server.send(Fork(index, life, order.slot), [order.theirs.fileno(), self._http_socket.fileno()])

    # Knowing

    def ordered(self) -> list[str]:
        """Return the names of the workers whose processes don't exist yet."""
        return [part_name(WORKER, index) for index, _ in self._orders]

    def is_coming(self, index: int) -> bool:
        """Whether a life of a worker is on its way that isn't ready yet."""
        return (
            index in self._postponed
            or index in self._without_slot
            or any(index == ordered for ordered, _ in self._orders)
            or any(worker.index == index and not worker.ready for worker in self._serving())
        )

    def is_up(self, index: int) -> bool:
        """Whether a life of a worker is ready and was not told to go."""
        return any(worker.index == index and worker.ready for worker in self._serving())

    def _serving(self) -> list[ChildProcess]:
        return [worker for worker in self._children.of(WORKER) if not worker.draining]

    # Retiring

    def became_ready(self, worker: ChildProcess) -> None:
        """Retire the older lives of a worker that has become ready."""
        for other in self._serving():
            if other.index == worker.index and other.life < worker.life:
                self.retire(other)

    def remove(self, index: int) -> None:
        """Want a worker no more."""
        self.wanted.discard(index)
        for worker in self._serving():
            if worker.index == index:
                self.retire(worker)

    def retire(self, worker: ChildProcess) -> None:
        """Let a worker finish what it does and go."""
        worker.draining = True
        # It takes no new connections, so those that do must not compare themselves with it.
        self._board.set_life(WORKER, worker.slot, 0)
        worker.send(Drain(self._drain_timeout, rolling=True))
        self._timers.call_later(self._drain_timeout + self._exit_timeout, lambda: self._end(worker))

    def _end(self, worker: ChildProcess) -> None:
        if worker in self._children.all():
            _log.error("%s (pid %d) does not exit; killed", worker.name, worker.pid)
            worker.kill()

    def buried(self, worker: ChildProcess) -> None:
        """Give a worker's slot to the next that waits for one."""
        self._free_slots.append(worker.slot)
        # One that is wanted no more takes no place.
        while self._free_slots and self._without_slot:
            self.make(self._without_slot.popleft())

    def close(self) -> None:
        """Make no more workers."""
        self._closed = True
