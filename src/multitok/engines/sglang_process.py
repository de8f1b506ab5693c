"""What runs in each of SGLang's scheduler processes: its own function, tied to the parent's life."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


class SchedulerProcess:
    """Stands in for SGLang's ``run_scheduler_process``, and calls it.

    Parameters
    ----------
    failure_file : str
        Where the traceback of a scheduler that fails is written: SGLang logs it, and tells its parent nothing.
    """

    def __init__(self, failure_file: str) -> None:
        self._failure_file = failure_file

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled before the arguments, whose import takes SGLang half a minute: from here on no one is left behind.
        self.__dict__.update(state)
        _end_with_parent()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the scheduler until it ends."""
        from sglang.srt.managers import scheduler

        logging.getLogger(scheduler.__name__).addHandler(_FailureWriter(self._failure_file))
        scheduler.run_scheduler_process(*args, **kwargs)


class _FailureWriter(logging.Handler):
    def __init__(self, file: str) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        Path(self._file).write_text(record.getMessage(), encoding="utf-8")


def failure_of(failure_file: Path) -> str | None:
    """Return the last line of the traceback that a scheduler left; None when it left none."""
    try:
        lines = failure_file.read_text(encoding="utf-8").strip().splitlines()
    except OSError:
        return None
    return lines[-1].strip() if lines else None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent.pid:
        raise SystemExit(1)
