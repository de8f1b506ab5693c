"""What a server holds, while nothing is asked of it: compared before and after, a difference was left over."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
from processes import parent, pids_in

from chaos.observe import owner_address, parts_of

_PROC = Path("/proc")
_SHM = Path("/dev/shm")


class Holding(msgspec.Struct, frozen=True):
    """What one process holds: descriptors by kind, and threads."""

    descriptors: dict[str, int]
    threads: int
    rss_mb: float


class Snapshot(msgspec.Struct, frozen=True):
    """What a server holds.

    Attributes
    ----------
    processes : dict of str to list of Holding
        By name.
    blocks : list of str
        What its shared-memory blocks hold, by the last part of their names.
    addresses : list of str
        Files of its runtime directory that belong to nobody who is alive.
    zombies : int
        Ended children that were not collected.
    """

    processes: dict[str, list[Holding]]
    blocks: list[str]
    addresses: list[str]
    zombies: int


def take(directory: Path, launcher: int) -> Snapshot:
    """Look at a server.

    Parameters
    ----------
    directory : Path
        Its working directory, in which its runtime directory lies.
    launcher : int
        Its first process.
    """
    processes: dict[str, list[Holding]] = {"launcher": [_holding(launcher)]}
    alive: set[str] = set()
    for part in parts_of(directory):
        processes.setdefault(part.name, []).append(_holding(part.pid))
        alive.add(owner_address(part.pid))
    unknown = len(pids_in(directory)) - sum(map(len, processes.values()))
    if unknown:
        processes["unknown"] = [Holding({}, 0, 0.0)] * unknown
    (runtime_dir,) = directory.glob("multitok-*")
    nonce = runtime_dir.name.removeprefix("multitok-")
    return Snapshot(
        processes,
        sorted(path.name.rpartition("-")[2] for path in _SHM.glob(f"multitok-*{nonce}*")),
        sorted(path.name for path in runtime_dir.iterdir() if path.name.startswith("w") and path.name not in alive),
        sum(1 for _ in _zombies(launcher)),
    )


def excess(before: Snapshot, after: Snapshot) -> list[str]:
    """Say what there is after that there was not before; less is no fault."""
    found: list[str] = []
    for name, holdings in after.processes.items():
        known = before.processes.get(name, [])
        if len(holdings) > len(known):
            found.append(f"{len(holdings) - len(known)} process(es) {name}")
        found += [text for a, b in zip(known, holdings, strict=False) for text in _more(name, a, b)]
    found += [f"shared block {name}" for name in (Counter(after.blocks) - Counter(before.blocks)).elements()]
    found += [f"address {name}" for name in after.addresses]
    found += [f"{after.zombies} ended process(es) that nobody has collected"] if after.zombies else []
    return found


def _more(name: str, before: Holding, after: Holding) -> Iterable[str]:
    for kind, count in (Counter(after.descriptors) - Counter(before.descriptors)).items():
        yield f"{count} {kind} descriptor(s) of {name}"
    if after.threads > before.threads:
        yield f"{after.threads - before.threads} thread(s) of {name}"


def growth(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Return by how many MB the largest process of each role has become larger."""
    return {
        name: round(max(h.rss_mb for h in after.processes[name]) - max(h.rss_mb for h in holdings), 1)
        for name, holdings in before.processes.items()
        if name in after.processes
    }


def _holding(pid: int) -> Holding:
    kinds: Counter[str] = Counter()
    for fd in (_PROC / str(pid) / "fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue  # closed meanwhile
        kind = target.partition(":")[0] if ":" in target else "file"
        kinds[kind.strip("[]") if kind != "anon_inode" else target.partition(":")[2].strip("[]")] += 1
    status = (_PROC / str(pid) / "status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return Holding(dict(kinds), int(fields["Threads"]), int(fields["VmRSS"].split()[0]) / 1024)


def _zombies(launcher: int) -> Iterable[int]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state == "Z" and parent(int(entry.name)) == launcher:
                    yield int(entry.name)
            except OSError:
                continue  # gone
