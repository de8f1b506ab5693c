"""A child doesn't outlive the launcher: the kernel's signal, beside the channel that ends with it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent exits: the HTTP workers, see `fork_server`.

    Raises
    ------
    OSError
        prctl failed.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_itself_when_parent_died(parent_pid: int, death_signal: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies.

    Parameters
    ----------
    parent_pid : int
        The launcher.
    death_signal : Signals
        SIGKILL where a step may keep Python from handling any other; SIGCONT is the only other one that reaches a
        process which is stopped, or about to be.

    Raises
    ------
    OSError
        prctl failed.
    SystemExit
        The parent is gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
