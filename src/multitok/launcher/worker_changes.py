"""Changes of the HTTP workers while the server runs: replacing all one by one, adding one, retiring one."""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Callable

from multitok.config import OptionError
from multitok.launcher.child_process import part_name
from multitok.launcher.children import WORKER
from multitok.launcher.http_workers import HttpWorkers

_log = logging.getLogger(__name__)


class WorkerChanges:
    """Carries out what SIGHUP, SIGTTIN and SIGTTOU ask for, one after the other.

    Parameters
    ----------
    workers : HttpWorkers
        Changed.
    multi : bool
        Whether there is a router; without one, only one worker can be in service.
    check : callable
        Raises `OptionError` for files that a new worker could not read: it would be tried again and again.
    """

    def __init__(self, workers: HttpWorkers, multi: bool, check: Callable[[], None]) -> None:
        self._workers = workers
        self._multi = multi
        self._check = check
        self._asked: deque[signal.Signals] = deque()
        # Workers that are still to be replaced, and the one whose next life is awaited.
        self._left: list[int] = []
        self._awaited: int | None = None
        self._adding = False

    def ask(self, number: signal.Signals) -> None:
        """Do what a signal says, now or when what was asked before is done."""
        self._asked.append(number)
        self._go_on()

    def is_awaited(self, index: int) -> bool:
        """Whether the next life of a worker is needed though one may be up."""
        return index == self._awaited

    def can_do_without(self, index: int) -> bool:
        """Whether the awaited life of a worker may fail: it would be one more, or an older one is up."""
        return self.is_awaited(index) and (self._adding or self._workers.is_up(index))

    def became_ready(self, index: int) -> None:
        """Go on after a worker's new life is ready."""
        if index != self._awaited:
            return
        self._awaited = None
        if self._adding:
            self._adding = False
            _log.info("%s is added; there are %d HTTP workers now", part_name(WORKER, index), len(self._workers.wanted))
        elif not self._left:
            _log.info("every HTTP worker is replaced")
        self._go_on()

    def give_up(self, index: int, reason: str) -> None:
        """Leave things as they are, because the awaited life of a worker can't start."""
        self._awaited = None
        self._left.clear()
        if self._adding:
            self._adding = False
            self._workers.remove(index)
            _log.error("%s can't be added: %s", part_name(WORKER, index), reason)
        else:
            _log.error("%s can't be replaced, and goes on as it is: %s", part_name(WORKER, index), reason)
        self._go_on()

    def _go_on(self) -> None:
        while self._awaited is None and (self._left or self._asked):
            if self._left:
                self._await(self._left.pop(0))
                continue
            match self._asked.popleft():
                case signal.SIGHUP:
                    self._replace_all()
                case signal.SIGTTIN:
                    self._add()
                case signal.SIGTTOU:
                    self._retire()

    def _replace_all(self) -> None:
        if not self._can_start("SIGHUP: no worker is replaced"):
            return
        self._left = sorted(self._workers.wanted)
        _log.info("SIGHUP: replacing %d HTTP worker(s), one after the other", len(self._left))

    def _can_start(self, otherwise: str) -> bool:
        try:
            self._check()
        except OptionError as error:
            _log.error("%s: %s", otherwise, error)
            return False
        return True

    def _await(self, index: int) -> None:
        self._awaited = index
        self._workers.make(index)

    def _add(self) -> None:
        wanted = self._workers.wanted
        if not self._multi:
            _log.warning("SIGTTIN: no worker is added: with one HTTP worker there is no router for more")
        elif len(wanted) >= self._workers.most:
            _log.warning("SIGTTIN: no worker is added: the load board has room for %d", self._workers.most)
        elif self._can_start("SIGTTIN: no worker is added"):
            index = next(i for i in range(1, len(wanted) + 2) if i not in wanted)
            wanted.add(index)
            self._adding = True
            self._await(index)

    def _retire(self) -> None:
        wanted = self._workers.wanted
        if not self._multi:
            _log.warning("SIGTTOU: no worker is retired: there is only one")
        elif len(wanted) == 1:
            _log.warning("SIGTTOU: no worker is retired: it is the last")
        else:
            index = max(wanted)
            self._workers.remove(index)
            _log.info("SIGTTOU: %s is retired; there are %d HTTP workers now", part_name(WORKER, index), len(wanted))
