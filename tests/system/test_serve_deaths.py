"""Any process may be killed at any time: it is replaced, the others live on, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from processes import open_files, state, threads
from reference import MODEL, echo_text
from server import DEATH_S, FACTOR, SIMULATED, STOP_S, Server, engine_args, eventually, port_is_free, workers

from multitok.launcher.restart_policy import CRASH_LIMIT

PROMPT = "a tale of two cities and one harbour"
_SLOW = [*SIMULATED, *engine_args(step_ms=5)]
_BROKEN = (openai.APIError, httpx.HTTPError)


def _stream(api: openai.OpenAI, tokens: int) -> Any:
    stream = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=tokens, stream=True)
    return next(stream).choices[0].text, stream


def _rest(begun: Any) -> str:
    first, stream = begun
    return first + "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.parametrize("http_workers", [1, 4])
@pytest.mark.parametrize("running", [False, True], ids=["idle", "streaming"])
def test_everything_ends_with_a_killed_launcher(http_workers: int, running: bool) -> None:
    parts = ["--detokenizer-worker-num", "2", "--data-parallel-size", "2"]
    with Server(*_SLOW, *workers(http_workers), *parts, errors=True) as server:
        streams = [_stream(server.openai, 8000)[1] for _ in range(4)] if running else []
        server.send_signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        server.wait_for_children(DEATH_S)
        server.check_nothing_left()
        assert port_is_free(server.port)
        for stream in streams:
            with pytest.raises(_BROKEN):
                for _ in stream:
                    pass


def test_everything_ends_with_a_launcher_that_is_killed_while_starting() -> None:
    with Server(*SIMULATED, *engine_args(load_s=60), *workers(2), wait=False, errors=True) as server:
        server.wait_for_line("simulated engine")
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.wait_for_children(DEATH_S)


def test_killed_worker_is_replaced_and_nobody_else_notices() -> None:
    with Server(*_SLOW, *workers(4), "--detokenizer-worker-num", "2") as server:
        with server.connection_to(2) as doomed, server.connection_to(1) as other, server.connection_to(3) as third:
            lost = [_stream(server.openai_over(doomed), 8000)]
            others = [_stream(server.openai_over(client), 600) for client in (other, third)]
            server.wait_for_load(3)
            server.kill("tokenizer_worker:2")
            with pytest.raises(_BROKEN):
                _rest(lost[0])
            # Its request is ended in the engine, where 8000 tokens would take 40 s.
            eventually(lambda: server.load()[0] <= 2, DEATH_S, "the dead worker's request is gone")
            figures = eventually(
                lambda: (f := server.processes()["tokenizer_worker:2"])["life"] == 2 and f, DEATH_S, "a replacement"
            )
            assert figures["load"] <= 1
            for begun in others:
                assert _rest(begun) == echo_text(PROMPT, 600)
        with server.connection_to(2, life=2) as replaced:
            answer = server.openai_over(replaced).completions.create(model=MODEL, prompt=PROMPT, max_tokens=30)
            assert answer.choices[0].text == echo_text(PROMPT, 30)
        server.wait_until_idle()
        server.wait_for_line(r"tokenizer_worker:2 \(pid \d+\) died of SIGKILL; starting its life 2")


def test_only_worker_is_replaced_too() -> None:
    with Server(*_SLOW) as server:
        begun = _stream(server.openai, 8000)
        server.kill("tokenizer_worker:1")
        with pytest.raises(_BROKEN):
            _rest(begun)
        # The socket is the launcher's, so that meanwhile clients wait and are not refused.
        assert server.connection().get("/server_info").json()["worker"]["address"] == "w1.2"
        server.wait_until_idle(DEATH_S)
        assert _rest(_stream(server.openai, 20)) == echo_text(PROMPT, 20)


def test_worker_can_be_killed_again_and_again() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        for life in range(2, 6):
            server.kill("tokenizer_worker:1")
            with server.connection_to(2) as other:
                eventually(
                    lambda client=other, life=life: (
                        client.get("/server_info").json()["processes"]["tokenizer_worker:1"]["life"] == life
                    ),
                    DEATH_S,
                    f"life {life}",
                )
            with server.connection_to(1, life=life) as client:
                assert _rest(_stream(server.openai_over(client), 20)) == echo_text(PROMPT, 20)


def test_worker_that_keeps_crashing_ends_the_server() -> None:
    with Server(*_SLOW, errors=True) as server:
        for life in range(1, CRASH_LIMIT + 2):
            pid = eventually(lambda: server.pid_of("tokenizer_worker:1"), 2 * DEATH_S, f"life {life}")
            assert server.connection().get("/health").status_code == 200
            os.kill(pid, signal.SIGABRT)
            eventually(lambda pid=pid: pid not in server.titles().values(), DEATH_S, "its end")
        assert server.wait() == 1
        server.wait_for_line("ERROR .*tokenizer_worker:1 keeps dying: .*6 times in a row.* died of SIGABRT; stopping")
        assert port_is_free(server.port)


def test_fork_server_is_replaced_and_workers_live_on() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        begun = _stream(server.openai, 300)
        pid = server.kill("fork_server")
        eventually(lambda: server.titles().get("multitok::fork_server", pid) != pid, DEATH_S, "a replacement")
        assert _rest(begun) == echo_text(PROMPT, 300)
        server.kill("tokenizer_worker:1")
        with server.connection_to(2) as other:
            eventually(
                lambda: other.get("/server_info").json()["processes"]["tokenizer_worker:1"]["life"] == 2,
                DEATH_S,
                "a worker from the new fork server",
            )


@pytest.mark.parametrize("part", ["fork_server", "tokenizer_worker:1"])
def test_replacement_that_is_killed_at_once_is_replaced_too(part: str) -> None:
    with Server(*_SLOW, *workers(2)) as server:
        name = f"multitok::{part}"
        with server.connection_to(2) as other:
            begun = _stream(server.openai_over(other), 300)
            killed = {server.kill(part)}
            for _ in range(2):
                pid = eventually(lambda: {server.titles().get(name)} - killed - {None}, DEATH_S, "a replacement").pop()
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            assert _rest(begun) == echo_text(PROMPT, 300)
            if part == "fork_server":
                server.kill("tokenizer_worker:1")
            eventually(
                lambda: other.get("/server_info").json()["processes"]["tokenizer_worker:1"]["life"] > 1,
                DEATH_S,
                "a worker that lives",
            )


def test_worker_that_dies_while_there_is_no_fork_server_is_replaced() -> None:
    with Server(*_SLOW, *workers(2)) as server:
        server.kill("fork_server")
        server.kill("tokenizer_worker:1")
        with server.connection_to(2) as other:
            eventually(
                lambda: other.get("/server_info").json()["processes"]["tokenizer_worker:1"]["life"] > 1,
                DEATH_S,
                "a worker from the new fork server",
            )


# For all tests that leave them as they were.
@pytest.fixture(scope="module")
def one_worker() -> Iterator[Server]:
    with Server(*_SLOW) as server:
        yield server


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Server]:
    with Server(*_SLOW, *workers(2), "--detokenizer-worker-num", "2") as server:
        yield server


PARTS = [
    *(("one_worker", part) for part in ("scheduler:0", "detokenizer:0", "tokenizer_worker:1")),
    *(
        ("two_workers", part)
        for part in ("scheduler:0", "detokenizer:1", "router", "fork_server", "tokenizer_worker:2")
    ),
]


@pytest.mark.parametrize(("servers", "part"), PARTS)
@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSTOP])
def test_part_is_replaced_and_no_other_process_is(
    request: pytest.FixtureRequest, servers: str, part: str, number: signal.Signals
) -> None:
    kept: Server = request.getfixturevalue(servers)

    def life() -> dict[str, int]:
        return kept.processes()[part if ":" in part else f"{part}:0"]

    # Its own title and line on the board; the fork server has none.
    last = life()["life"] if part != "fork_server" else 0
    before = kept.titles()
    old = before[f"multitok::{part}"]
    begun = time.monotonic()
    os.kill(old, number)
    new = kept.wait_for_replacement(part, old)
    # A stopped one counts as dead after two looks, a second apart.
    assert time.monotonic() - begun < (DEATH_S if number == signal.SIGABRT else DEATH_S + FACTOR * 2)
    assert kept.titles() == before | {f"multitok::{part}": new}
    ending = "died of SIGABRT" if number == signal.SIGABRT else r"is stopped \(state T\); killed"
    kept.wait_for_line(rf"WARNING launcher .*{part} \(pid {old}\) {ending}")
    kept.wait_until_served()
    # Twice as many as detokenizers: each of these has its turn.
    for _ in range(4):
        assert _rest(_stream(kept.openai, 20)) == echo_text(PROMPT, 20)
    kept.wait_until_idle()
    if part != "fork_server":
        assert life()["life"] == last + 1
        assert life()["pid"] == new


def test_not_ready_while_no_scheduler_is_up() -> None:
    with Server(*SIMULATED, *engine_args(load_s=1), *workers(2)) as server:
        old = server.kill("scheduler:0")
        eventually(lambda: server.http.get("/ready").status_code == 503, DEATH_S, "not ready")
        assert server.http.get("/health").status_code == 200
        server.wait_for_replacement("scheduler:0", old)
        eventually(lambda: server.http.get("/ready").status_code == 200, DEATH_S, "ready again")


def test_ready_while_one_of_two_schedulers_is_up() -> None:
    with Server(*SIMULATED, *engine_args(load_s=1), "--data-parallel-size", "2") as server:
        old = server.kill("scheduler:1")
        server.wait_for_line(r"scheduler:1 .*died of SIGKILL; starting its life 2")
        assert server.http.get("/ready").status_code == 200
        server.wait_for_replacement("scheduler:1", old)


def test_scheduler_whose_step_does_not_end_is_replaced() -> None:
    with Server(*SIMULATED, *engine_args(step_ms=100_000), "--step-timeout", "1") as server:
        old = server.pid_of("scheduler:0")
        assert old is not None
        connection = server.begin("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "stream": True})
        server.wait_for_replacement("scheduler:0", old, 4 * DEATH_S)
        server.wait_for_line(rf"WARNING launcher .*scheduler:0 \(pid {old}\) has been silent for too long; killed")
        connection.close()


def test_slow_loading_is_no_silence() -> None:
    with Server(*SIMULATED, *engine_args(load_s=4), "--hang-timeout", "1.5") as server:
        assert server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
        assert "killed" not in server.log


def test_engine_that_keeps_failing_ends_the_server_with_its_own_words() -> None:
    with Server(*SIMULATED, *engine_args(crash_after_steps=20), *workers(2), errors=True) as server:
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                try:
                    server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8000, timeout=1)
                except _BROKEN:
                    continue

        client = threading.Thread(target=ask)
        client.start()
        try:
            assert server.wait() == 1
        finally:
            ended.set()
            client.join(STOP_S)
        server.wait_for_line(r"scheduler:0 .*simulated crash at step 20.*; starting its life 3 in 0\.5 s")
        server.wait_for_line("ERROR .*launcher .*scheduler:0 keeps dying: .*simulated crash at step 20.*; stopping")
        assert port_is_free(server.port)


def test_scheduler_that_can_not_load_again_ends_the_server_with_its_status(tmp_path: Path) -> None:
    replay = tmp_path / "replay.json"
    replay.write_text("[1, 2, 3]")
    with Server(*SIMULATED, *engine_args(replay=replay), errors=True) as server:
        replay.unlink()
        server.kill("scheduler:0")
        assert server.wait() == 2
        server.wait_for_line(r"ERROR .*scheduler:0 keeps dying: .*replay\.json can't be read.*; stopping")


@pytest.mark.parametrize("part", ["scheduler:0", "detokenizer:0", "router", "fork_server", "tokenizer_worker:1"])
def test_stopped_process_does_not_outlive_the_launcher(part: str) -> None:
    with Server(*_SLOW, *workers(2), errors=True) as server:
        pid = server.pid_of(part)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: state(pid) == "T", DEATH_S, "it is stopped")
        server.send_signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        server.wait_for_children(DEATH_S)
        server.check_nothing_left()


def test_processes_that_are_all_stopped_do_not_outlive_the_launcher() -> None:
    with Server(*_SLOW, *workers(2), errors=True) as server:
        # The launcher first: it must not see the others, nor do anything about them.
        server.send_signal(signal.SIGSTOP)
        eventually(lambda: state(server.pid) == "T", DEATH_S, "it is stopped")
        for pid in server.titles().values():
            os.kill(pid, signal.SIGSTOP)
        for pid in server.titles().values():
            eventually(lambda pid=pid: state(pid) == "T", DEATH_S, "it is stopped")
        server.send_signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        server.wait_for_children(DEATH_S)
        server.check_nothing_left()


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("http_workers", [1, 4])
def test_nothing_is_left_of_many_killed_workers(kills: int, http_workers: int) -> None:
    with Server(*_SLOW, *workers(http_workers), "--detokenizer-worker-num", "2") as server:
        others = {name: pid for name, pid in server.titles().items() if "worker" not in name} | {"launcher": server.pid}
        _use_every_worker(server, http_workers)
        before = _holdings(server, others)
        for _ in range(kills):
            server.wait_for_replacement("tokenizer_worker:1", server.kill("tokenizer_worker:1"))
        _use_every_worker(server, http_workers, lives={1: kills + 1})
        server.wait_until_idle()
        eventually(lambda: _holdings(server, others) == before, DEATH_S, f"{before}, but {_holdings(server, others)}")
        assert {name: server.titles().get(name) for name in others if name != "launcher"} == {
            name: pid for name, pid in others.items() if name != "launcher"
        }
        (runtime_dir,) = server.directory.iterdir()
        addresses = {path.name for path in runtime_dir.iterdir() if path.name.startswith("w")}
        assert addresses == {f"w1.{kills + 1}"} | {f"w{k}.1" for k in range(2, http_workers + 1)}
        assert len(server.blocks()) == 5


def _use_every_worker(server: Server, count: int, lives: dict[int, int] | None = None) -> None:
    """Let every worker have opened whatever it needs: it has asked for both detokenizers."""
    for k in range(1, count + 1):
        with server.connection_to(k, life=(lives or {}).get(k, 1)) as client:
            for _ in range(2):
                # Not streamed: who does not read a stream to its very end needs a new connection, to any worker.
                answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20}).json()
                assert answer["choices"][0]["text"] == echo_text(PROMPT, 20)


def _holdings(server: Server, processes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Descriptors and threads of each process."""
    return {name: (open_files(pid), threads(pid)) for name, pid in processes.items()}
