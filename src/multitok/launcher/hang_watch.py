"""Finds children that hang: stopped by a signal, or silent for longer than they said."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from multitok.launcher.child_process import STOPPED, ChildProcess
from multitok.launcher.load_board import LoadBoard

CHECK_S = 1.0
_SILENT = "has been silent for too long"
_LATE = "does not become ready"


class HangWatch:
    """Looks at every child once per `CHECK_S`; one that hangs in two rounds running counts as dead.

    Loading is no silence: a child says something for the first time when it is about to be ready.

    Parameters
    ----------
    board : LoadBoard
        On which children say that they go round.
    start_timeout : float
        Seconds that a child gets to become ready.
    now : float
        Time, in seconds.
    """

    def __init__(self, board: LoadBoard, start_timeout: float, now: float) -> None:
        self._board = board
        self._start_timeout = start_timeout
        self._due = now + CHECK_S
        self._suspects: dict[int, str] = {}

    def find_hung(self, children: Iterable[ChildProcess], now: float) -> list[tuple[ChildProcess, str]]:
        """Return the children that hang, and how, in words.

        Parameters
        ----------
        children : iterable of ChildProcess
            All.
        now : float
            Time, in seconds.
        """
        late, self._due = now - self._due, now + CHECK_S
        if late > CHECK_S:
            # Whatever kept this process from going round (Ctrl-Z, a frozen container) has kept the children, too.
            self._suspects = {}
            return []
        before, self._suspects = self._suspects, {}
        for child in children:
            if _is_stopped(child.pid):
                self._suspects[child.pid] = STOPPED
            elif not child.ready:
                if now - child.started_at > self._start_timeout:
                    self._suspects[child.pid] = _LATE
            elif self._board.is_overdue(child.role, child.slot):
                self._suspects[child.pid] = _SILENT
        return [(c, self._suspects[c.pid]) for c in children if c.pid in before and c.pid in self._suspects]


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False
    # The command's name, which may hold anything, is in parentheses. A debugger's stop is a small t.
    return stat.rpartition(b")")[2].split()[0] == b"T"
