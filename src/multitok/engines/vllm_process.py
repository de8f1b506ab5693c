"""What comes first in vLLM's processes: they go when the scheduler goes, and they leave word of why they failed.

vLLM's engine core doesn't notice the death of the process that started it; and of a failure, its processes tell the one
that started them only that there was one, and write the rest into the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_SUFFIX = ".reason"
_LONGEST_REASON = 1000
# Each kind of process by its first function.
_CORE, _COORDINATOR, _WORKER = "core", "coordinator", "worker"
# What vLLM logs, with the exception, when it ends one of them; other exceptions that it logs it survives.
_FATAL = (
    "EngineCore failed to start.",
    "EngineCore encountered a fatal error.",
    "WorkerProc failed to start.",
    "WorkerProc failed.",
)
# Those functions as vLLM has them; filled in the process that calls `adopt_processes`.
_originals: dict[str, Callable[..., None]] = {}


def set_environment(directory: str) -> None:
    """Set what vLLM and its processes read from the environment, where the user has not set it.

    Parameters
    ----------
    directory : str
        Where its sockets go.
    """
    os.environ["VLLM_RPC_BASE_PATH"] = directory
    defaults = {
        # A fork would copy this process's sockets and threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # --start-timeout is the limit.
        "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def adopt_processes(directory: str) -> None:
    """Have vLLM start the processes that it starts from here by way of this module.

    Parameters
    ----------
    directory : str
        Where a process that fails says why.
    """
    _adopt((_CORE, _COORDINATOR), directory)


def _adopt(entries: tuple[str, ...], directory: str) -> None:
    for entry in entries:
        owner, name = _find(entry)
        _originals.setdefault(entry, getattr(owner, name))
        setattr(owner, name, staticmethod(partial(_begin, entry, directory, os.getpid())))


def reason_of_failure(directory: str) -> str | None:
    """Return why one of vLLM's processes failed; None when none has said."""
    reasons = sorted(Path(directory).glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
    return reasons[0].read_text(encoding="utf-8") if reasons else None


def _begin(entry: str, directory: str, parent_pid: int, *args: Any, **kwargs: Any) -> None:
    """Run in the new process."""
    # Ctrl-C reaches the whole group of processes, and this one has to go last.
    os.setpgrp()
    # The launcher's children ignore it; vLLM ends its processes with it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent_pid)
    original = _originals.get(entry)
    if original is None:
        original = getattr(*_find(entry))
    # Not a handler: vLLM sets those anew.
    logging.getLogger(original.__module__).addFilter(_LastWords(directory))
    if entry == _CORE:
        _adopt((_WORKER,), directory)
    original(*args, **kwargs)


class _LastWords(logging.Filter):
    """Lets all through, and keeps the exception that ends the process."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._path = Path(directory) / str(os.getpid())

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.msg in _FATAL:
            with contextlib.suppress(OSError):
                self._path.write_text(f"{type(error).__name__}: {error}"[:_LONGEST_REASON], encoding="utf-8")
                self._path.rename(self._path.with_suffix(_SUFFIX))
        return True


def _die_with(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def _find(entry: str) -> tuple[Any, str]:
    """Return the class and the name of a first function; each process imports no more than it needs."""
    if entry == _CORE:
        from vllm.v1.engine.core import EngineCoreProc

        return EngineCoreProc, "run_engine_core"
    if entry == _COORDINATOR:
        from vllm.v1.engine.coordinator import DPCoordinatorProc

        return DPCoordinatorProc, "run_coordinator"
    from vllm.v1.executor.multiproc_executor import WorkerProc

    return WorkerProc, "worker_main"
