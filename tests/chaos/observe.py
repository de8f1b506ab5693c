"""What is known of a running server from outside: its processes by name, their addresses, and what they say of life."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path
from typing import NamedTuple

from processes import listening_unix, pids_in, socket_inodes, title

_PREFIX = "multitok::"
_PATIENCE_S = 0.5


class Part(NamedTuple):
    """A child: its role and index as in its title, and its process."""

    name: str
    pid: int

    @property
    def role(self) -> str:
        """Its role alone."""
        return self.name.partition(":")[0]


def parts_of(directory: Path) -> list[Part]:
    """Return the children of the server that runs in a directory; in an order that does not depend on their ids."""
    found: list[Part] = []
    for pid in pids_in(directory):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = title(pid)
            if name.startswith(_PREFIX):
                found.append(Part(name.removeprefix(_PREFIX), pid))
    return sorted(found)


def owner_address(pid: int) -> str:
    """Return the address on which an HTTP worker receives results; empty when it has none yet, or is gone."""
    paths = listening_unix()
    try:
        inodes = socket_inodes(pid)
    except OSError:
        return ""
    names = [Path(paths[inode]).name for inode in inodes if paths.get(inode)]
    return next((name for name in names if name.startswith("w")), "")


class Watch:
    """Asks /server_info again and again, whoever dies meanwhile.

    Parameters
    ----------
    port : int
        The server's.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def figures(self) -> dict[str, dict[str, int]] | None:
        """Return life and load of each process; None when nobody answers at the moment."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE_S)
        try:
            self._connection.request("GET", "/server_info")
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            self.close()
            return None
        if answer.status != http.client.OK:
            return None
        processes: dict[str, dict[str, int]] = json.loads(body)["processes"]
        return processes

    def close(self) -> None:
        """Give up the connection; the next question opens one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
