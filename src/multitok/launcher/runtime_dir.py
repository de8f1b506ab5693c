"""The private directory of one start: unix sockets, and a lock that tells whether anybody is still there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from multitok.launcher.shared_memory import remove_abandoned_blocks, remove_blocks_of

_PREFIX = "multitok-"
_LOCK = "lock"
# sun_path holds 107 characters; addresses are short.
_LONGEST_PATH = 107 - len("/detokenizer.99")
_REAP_INTERVAL_S = 0.01


class RuntimeDir:
    """A directory that this process holds.

    Parameters
    ----------
    path : str
        An existing one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.nonce = Path(path).name.removeprefix(_PREFIX)
        self._fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    @classmethod
    def create(cls) -> RuntimeDir:
        """Make one, under TMPDIR where the path is short enough for a unix socket, else under /tmp."""
        nonce = secrets.token_hex(4)
        parent = tempfile.gettempdir()
        if len(os.path.join(parent, _PREFIX + nonce)) > _LONGEST_PATH:
            parent = "/tmp"
        path = os.path.join(parent, _PREFIX + nonce)
        os.mkdir(path, 0o700)
        created = cls(path)
        # Another start, cleaning up, may have found the lock before it was held.
        if not os.fstat(created._fd).st_nlink:
            os.close(created._fd)
            return cls.create()
        return created

    def remove(self) -> None:
        """Remove it and the start's shared blocks; the others are gone, or about to be killed."""
        remove_blocks_of(self.nonce)
        shutil.rmtree(self.path, ignore_errors=True)

    def leave(self, timeout: float) -> None:
        """Let go of it when the launcher is dead: wait until the other children are gone too, then remove it.

        Parameters
        ----------
        timeout : float
            Seconds; a child that hangs longer leaves the cleaning to the next start.
        """
        os.close(self._fd)
        deadline = time.monotonic() + timeout
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(os.path.join(self.path, _LOCK), os.O_RDWR)
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(_REAP_INTERVAL_S)  # a lock can't be waited for with a time limit
                else:
                    return self.remove()


def remove_abandoned() -> None:
    """Remove what starts that were killed with all their children have left behind."""
    remove_abandoned_blocks()
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for path in Path(parent).glob(f"{_PREFIX}*/{_LOCK}"):
            try:
                fd = os.open(path, os.O_RDWR)
            except OSError:
                continue  # another user's, or just gone
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            except BlockingIOError:
                pass  # held
            finally:
                os.close(fd)
