"""Signals to the launcher, as its loop sees them."""

from __future__ import annotations

import selectors
import signal
import socket
from collections.abc import Callable

_END = (signal.SIGTERM, signal.SIGINT)
_CHANGE = (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU)


class Signals:
    """Collects signals; the loop wakes up for each.

    Attributes
    ----------
    to_end : list of Signals
        SIGTERM and SIGINT, in order: the first drains, any other ends at once.
    """

    def __init__(self) -> None:
        self.to_end: list[signal.Signals] = []
        self._to_change: list[signal.Signals] = []
        self._reader, self._writer = socket.socketpair()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Begin to collect; what the loop finds in the key's data is to be called."""
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for numbers, received in ((_END, self.to_end), (_CHANGE, self._to_change)):
            for number in numbers:
                signal.signal(number, _appender(received))
        selector.register(self._reader, selectors.EVENT_READ, lambda: self._reader.recv(4096))

    def take_changes(self) -> list[signal.Signals]:
        """Return the SIGHUP, SIGTTIN and SIGTTOU that have come since the last call, in order."""
        taken = self._to_change[:]
        del self._to_change[: len(taken)]
        return taken


def _appender(received: list[signal.Signals]) -> Callable[[int, object], None]:
    return lambda number, _: received.append(signal.Signals(number))
