"""What /proc says about a server's processes: CPU per process and thread, and memory."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_LISTEN = "0A"
_KB = 1024
# By a part of the command line; the first that is found. Process titles of multitok and SGLang name their role.
_TITLE = re.compile(r"(?:multitok|sglang)::(\w+)")
_ROLES = (
    ("stub_scheduler", "scheduler"),
    ("VLLM::EngineCore", "scheduler"),
    ("vllm-rs", "vllm-rs"),
    ("VLLM::APIServer", "api_server"),
    ("ApiServer", "api_server"),
    ("resource_tracker", "resource_tracker"),
)
ENGINE_ROLES = frozenset({"scheduler"})


class Thread(msgspec.Struct, frozen=True):
    """CPU time of the threads of one name."""

    name: str
    count: int
    cpu_s: float


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process, or what it used between two moments.

    Attributes
    ----------
    role : str
        From its title; the first process of the tree is 'launcher' where it has none.
    cpu_s : float
        User and system time.
    main_thread_cpu_s : float
        The first thread's part of it.
    rss_mb, pss_mb : float
        Memory: all that is mapped, and with shared pages divided by who shares them.
    """

    pid: int
    role: str
    cpu_s: float
    main_thread_cpu_s: float
    rss_mb: float
    pss_mb: float
    threads: list[Thread]


class _Stat(msgspec.Struct, frozen=True):
    name: str
    parent: int
    cpu_s: float


def _stat(path: Path) -> _Stat | None:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    # The name, which may hold anything, is in parentheses.
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(name, int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS)


def process_tree(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := _stat(entry / "stat")):
            children[stat.parent].append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children[pid]
    return tree


def _role(command: str, pid: int, root: int) -> str:
    for mark, role in _ROLES:
        if mark in command:
            return role
    if match := _TITLE.search(command):
        return match[1]
    return "launcher" if pid == root else "other"


def _memory_mb(pid: int) -> tuple[float, float]:
    """Return RSS and PSS; 0 where the kernel doesn't tell."""
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0.0, 0.0
    figures = {line.split()[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return round(figures.get("Rss:", 0) / _KB, 1), round(figures.get("Pss:", 0) / _KB, 1)


def snapshot(root: int) -> dict[int, Process]:
    """Return all processes of a tree as they are now, by process id."""
    found: dict[int, Process] = {}
    for pid in process_tree(root):
        directory = _PROC / str(pid)
        stat = _stat(directory / "stat")
        try:
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            tasks = [int(task) for task in os.listdir(directory / "task")]
        except OSError:
            continue
        if stat is None:
            continue
        threads = {task: each for task in tasks if (each := _stat(directory / "task" / str(task) / "stat"))}
        rss, pss = _memory_mb(pid)
        found[pid] = Process(
            pid=pid,
            role=_role(command, pid, root),
            cpu_s=stat.cpu_s,
            main_thread_cpu_s=threads[pid].cpu_s if pid in threads else 0.0,
            rss_mb=rss,
            pss_mb=pss,
            threads=_by_name([(each.name, each.cpu_s) for each in threads.values()]),
        )
    return found


def _by_name(threads: list[tuple[str, float]]) -> list[Thread]:
    sums: dict[str, list[float]] = {}
    for name, cpu in threads:
        sums.setdefault(name, []).append(cpu)
    return [Thread(name, len(each), round(sum(each), 3)) for name, each in sorted(sums.items())]


def used_between(before: dict[int, Process], after: dict[int, Process]) -> list[Process]:
    """Return what each process used from one snapshot to the next; memory is that of the second."""
    used: list[Process] = []
    for pid, process in after.items():
        earlier = before.get(pid)
        cpu = {thread.name: thread.cpu_s for thread in earlier.threads} if earlier else {}
        threads = [
            msgspec.structs.replace(thread, cpu_s=round(thread.cpu_s - cpu.get(thread.name, 0.0), 3))
            for thread in process.threads
        ]
        used.append(
            msgspec.structs.replace(
                process,
                cpu_s=round(process.cpu_s - (earlier.cpu_s if earlier else 0.0), 3),
                main_thread_cpu_s=round(process.main_thread_cpu_s - (earlier.main_thread_cpu_s if earlier else 0.0), 3),
                threads=[thread for thread in threads if thread.cpu_s > 0],
            )
        )
    return used


def cpu_by_role(processes: list[Process]) -> dict[str, float]:
    """Return the CPU time of each role."""
    sums: defaultdict[str, float] = defaultdict(float)
    for process in processes:
        sums[process.role] += process.cpu_s
    return {role: round(cpu, 3) for role, cpu in sorted(sums.items())}


def find_listener(port: int) -> int | None:
    """Return the process that listens on a port of this machine, the first of its family; None if it can't be seen."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    holders = {pid for pid in map(int, filter(str.isdigit, os.listdir(_PROC))) if inodes & _sockets(pid)}
    heads = [pid for pid in holders if (stat := _stat(_PROC / str(pid) / "stat")) and stat.parent not in holders]
    return min(heads, default=None)


def _sockets(pid: int) -> set[str]:
    directory = _PROC / str(pid) / "fd"
    links: set[str] = set()
    try:
        names = os.listdir(directory)
    except OSError:
        return links
    for name in names:
        try:
            links.add(os.readlink(directory / name))
        except OSError:
            continue
    return links
