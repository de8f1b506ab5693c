"""What /proc says about processes and sockets."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

_PROC = Path("/proc")
_TCP_LISTEN = "0A"
# Flag of a unix socket that listens, in /proc/net/unix.
_ACCEPTING = 0x10000


def pids_in(directory: Path) -> set[int]:
    """Processes whose working directory this is: those of one server, its launcher included."""
    found: set[int] = set()
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                where = os.readlink(entry / "cwd")
            except OSError:
                continue  # gone, or a zombie
            if where.removesuffix(" (deleted)") == str(directory):
                found.add(int(entry.name))
    return found


def title(pid: int) -> str:
    return (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()


def parent(pid: int) -> int:
    # The command's name, which may hold anything, is in parentheses.
    return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def state(pid: int) -> str:
    """The letter of /proc/PID/stat: R, S, T, ..."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]


def open_files(pid: int) -> int:
    """How many descriptors a process has."""
    return len(list((_PROC / str(pid) / "fd").iterdir()))


def threads(pid: int) -> int:
    """How many threads a process has."""
    return len(list((_PROC / str(pid) / "task").iterdir()))


def socket_inodes(pid: int) -> Counter[int]:
    """Sockets that a process holds, and by how many descriptors."""
    inodes: Counter[int] = Counter()
    for fd in (_PROC / str(pid) / "fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))
        except OSError:
            continue
        if match:
            inodes[int(match[1])] += 1
    return inodes


def listening_tcp() -> dict[int, int]:
    """Port by inode of every TCP socket that listens."""
    ports: dict[int, int] = {}
    for name in ("tcp", "tcp6"):
        for line in (_PROC / "net" / name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _TCP_LISTEN:
                ports[int(fields[9])] = int(fields[1].rpartition(":")[2], 16)
    return ports


def listening_unix() -> dict[int, str]:
    """Path by inode of every unix socket that listens and has a path."""
    paths: dict[int, str] = {}
    for line in (_PROC / "net" / "unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTING:
            paths[int(fields[6])] = fields[7] if len(fields) > 7 else ""
    return paths
