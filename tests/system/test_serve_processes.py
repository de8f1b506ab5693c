"""Which processes and sockets there are, and how connections spread over the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import listening_tcp, listening_unix, parent, pids_in, socket_inodes
from server import SIMULATED, Server, workers

WORKERS = 4
CONNECTIONS = 64


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*SIMULATED, *workers(WORKERS), "--detokenizer-worker-num", "2") as server:
        yield server


def test_every_part_is_a_child_of_the_launcher_with_its_own_title(server: Server) -> None:
    titles = server.titles()
    assert sorted(titles) == sorted(
        [f"multitok::tokenizer_worker:{k}" for k in range(1, WORKERS + 1)]
        + ["multitok::detokenizer:0", "multitok::detokenizer:1", "multitok::router", "multitok::scheduler:0"]
        + ["multitok::fork_server"]
    )
    assert {parent(pid) for pid in titles.values()} == {server.pid}
    assert pids_in(server.directory) == {server.pid, *titles.values()}


def test_single_mode_has_no_router(single: Server) -> None:
    assert sorted(single.titles()) == [
        f"multitok::{name}" for name in ("detokenizer:0", "fork_server", "scheduler:0", "tokenizer_worker:1")
    ]


def test_workers_share_one_listening_socket(server: Server) -> None:
    titles = server.titles()
    ports = listening_tcp()
    listening = {name: socket_inodes(pid).keys() & ports.keys() for name, pid in titles.items()}
    inodes = {frozenset(listening[f"multitok::tokenizer_worker:{k}"]) for k in range(1, WORKERS + 1)}
    assert len(inodes) == 1
    (shared,) = next(iter(inodes))
    assert ports[shared] == server.port
    # Nobody else listens, but for the launcher, which keeps the socket for workers to come.
    assert {name for name, own in listening.items() if own} == {n for n in titles if "tokenizer_worker" in n}
    assert socket_inodes(server.pid).keys() & ports.keys() == {shared}


def test_no_worker_holds_what_belongs_to_another(server: Server) -> None:
    held = {name: socket_inodes(pid) for name, pid in server.titles().items() if "tokenizer_worker" in name}
    (shared,) = {inode for own in held.values() for inode in own} & listening_tcp().keys()
    # By one descriptor: when that is closed, the worker does not listen any more.
    assert {own.pop(shared) for own in held.values()} == {1}
    everything = [inode for own in held.values() for inode in own]
    assert len(everything) == len(set(everything))


def test_fixed_addresses_are_unix_sockets_of_the_runtime_directory(server: Server) -> None:
    (runtime_dir,) = server.directory.iterdir()
    assert runtime_dir.stat().st_mode & 0o777 == 0o700
    listening = listening_unix()

    def addresses(pid: int) -> set[str]:
        paths = {listening[inode] for inode in socket_inodes(pid).keys() & listening.keys()} - {""}
        assert all(Path(path).parent == runtime_dir for path in paths)
        return {Path(path).name for path in paths}

    titles = server.titles()
    assert addresses(titles["multitok::scheduler:0"]) == {"s0"}
    assert addresses(titles["multitok::detokenizer:0"]) == {"d0"}
    assert addresses(titles["multitok::detokenizer:1"]) == {"d1"}
    assert addresses(titles["multitok::router"]) == {"router", "control"}
    for k in range(1, WORKERS + 1):
        assert addresses(titles[f"multitok::tokenizer_worker:{k}"]) == {f"w{k}.1"}
    # The launcher keeps those of fixed addresses, for replacements.
    assert addresses(server.pid) == {"s0", "d0", "d1", "router", "control"}


def test_shared_blocks_are_private(server: Server) -> None:
    blocks = server.blocks()
    assert {name.rpartition("-")[2] for name in blocks} == {
        *("server_args", "port_args", "models", "scheduler_info", "board")
    }
    assert all(Path("/dev/shm", name).stat().st_mode & 0o777 == 0o600 for name in blocks)


def test_kept_alive_connections_spread_over_the_workers(server: Server) -> None:
    clients = [httpx.Client(base_url=server.base_url, trust_env=False) for _ in range(CONNECTIONS)]
    try:
        served = Counter(client.get("/server_info").json()["worker"]["worker_id"] for client in clients)
        loads = [server.processes()[f"tokenizer_worker:{k}"]["load"] for k in range(1, WORKERS + 1)]
    finally:
        for client in clients:
            client.close()
    assert sum(served.values()) == CONNECTIONS
    assert max(served.values()) <= 1.3 * CONNECTIONS / WORKERS, served
    assert max(loads) <= 1.3 * sum(loads) / WORKERS, loads
