"""What an operator does while the server runs holds in every process, and in the next life of each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from reference import MODEL, echo_text
from server import DEATH_S, LEAVE_S, SIMULATED, STOP_S, Server, engine_args, eventually, workers

PROMPT = "a tale of two cities and one harbour"
_LONG: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8000}
_SLOW = [*SIMULATED, *engine_args(step_ms=5)]
_PARTS = ["--detokenizer-worker-num", "2", "--data-parallel-size", "2"]


def operate(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body, timeout=STOP_S)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def everybody(server: Server) -> list[str]:
    return sorted(["launcher", *(name.removeprefix("multitok::") for name in server.titles())])


class Probes:
    """Requests of a few tokens, each on a connection of its own that nobody has used."""

    def __init__(self, server: Server, count: int) -> None:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._sockets = [socket.create_connection(("127.0.0.1", server.port), timeout=STOP_S) for _ in range(count)]
        for sock in self._sockets:
            sock.sendall((head + body).encode())

    def answered(self) -> int:
        return len(select.select(self._sockets, [], [], 0)[0])

    def texts(self) -> set[str]:
        texts = set()
        for sock in self._sockets:
            with sock, sock.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            texts.add(json.loads(body)["choices"][0]["text"])
        return texts


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*_SLOW, *workers(4), *_PARTS) as server:
        yield server


@pytest.fixture
def shared(server: Server) -> Iterator[Server]:
    """Four workers, two ranks, two detokenizers; nothing is paused and nothing runs."""
    yield server
    operate(server.http, "/continue_generation")
    server.wait_until_idle()


def test_nothing_slips_through_a_hundred_pauses_and_nothing_hangs_after_them(shared: Server) -> None:
    clients = [shared.connection() for _ in range(8)]
    for i in range(100):
        operate(clients[i % 8], "/pause_generation", mode="abort")
        held = Probes(shared, 64)
        # Every one of them has reached a scheduler, which keeps it.
        shared.wait_for_load(0, waiting=64)
        assert held.answered() == 0
        operate(clients[(i + 3) % 8], "/continue_generation")
        assert held.texts() == {echo_text(PROMPT, 2)}


@pytest.mark.parametrize("http_workers", [1, 4])
def test_pause_can_be_the_very_first_request(http_workers: int) -> None:
    with Server(*_SLOW, *workers(http_workers), wait=False) as server:
        # Not even the others are ready.
        server.wait_until_ready()
        answer = operate(server.http, "/pause_generation", mode="wait")
        assert answer["done"] == everybody(server)
        held = Probes(server, 8)
        server.wait_for_load(0, waiting=8)
        assert held.answered() == 0
        assert server.http.get("/health_generate").status_code == 503
        assert server.http.get("/ready").status_code == 200
        operate(server.http, "/continue_generation")
        assert held.texts() == {echo_text(PROMPT, 2)}


def test_two_pauses_at_once_get_two_answers(shared: Server) -> None:
    stream = shared.openai.completions.create(**{**_LONG, "max_tokens": 100}, stream=True)
    next(stream)
    with ThreadPoolExecutor(2) as callers, shared.connection_to(1) as one, shared.connection_to(2) as two:
        waiting = [callers.submit(operate, client, "/pause_generation", mode="wait") for client in (one, two)]
        *_, last = stream
        answers = [future.result() for future in waiting]
    assert last.choices[0].finish_reason == "length"
    assert {answer["epoch"] for answer in answers} == {max(answer["epoch"] for answer in answers) - i for i in range(2)}
    assert answers[0]["done"] == answers[1]["done"] == everybody(shared)


def test_pause_that_keeps_lets_streams_go_on_where_they_were(shared: Server) -> None:
    stream = shared.openai.completions.create(**{**_LONG, "max_tokens": 200}, stream=True)
    text = next(stream).choices[0].text
    operate(shared.http, "/pause_generation", mode="keep")
    shared.wait_for_load(1)
    operate(shared.http, "/continue_generation")
    assert text + "".join(chunk.choices[0].text for chunk in stream) == echo_text(PROMPT, 200)


def test_pause_that_aborts_ends_what_runs(shared: Server) -> None:
    stream = shared.openai.completions.create(**_LONG, stream=True)
    next(stream)
    assert operate(shared.http, "/pause_generation")["aborted"] == 1
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"


def test_limits_of_time_count_during_a_pause(shared: Server) -> None:
    operate(shared.http, "/pause_generation", mode="wait")
    answer = shared.http.post("/v1/completions", json={"prompt": PROMPT, "timeout": 0.1})
    assert answer.status_code == 504


def test_requests_are_refused_during_a_pause_where_that_is_wanted() -> None:
    with Server(*_SLOW, *workers(2), "--when-paused", "refuse") as server:
        operate(server.http, "/pause_generation", mode="wait")
        for _ in range(8):
            answer = server.connection().post("/v1/completions", json={"prompt": PROMPT})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        operate(server.http, "/continue_generation")
        assert server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)


@pytest.mark.parametrize("http_workers", [1, 4])
def test_adapter_that_one_worker_has_loaded_is_used_through_all(http_workers: int, tmp_path: Path) -> None:
    with Server(*_SLOW, *workers(http_workers), *_PARTS) as server, contextlib.ExitStack() as connections:
        clients = [connections.enter_context(server.connection_to(i + 1)) for i in range(http_workers)]
        loaded = operate(clients[0], "/load_lora_adapter", lora_name="poet", lora_path=str(tmp_path))
        assert loaded["loaded_adapters"] == {"poet": str(tmp_path)}
        plain = list(range(100, 104))
        body: dict[str, Any] = {"prompt": plain, "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
        for i in range(40):
            client = clients[i % http_workers]
            answer = client.post("/v1/completions", json={"model": "poet", **body}).json()
            assert (answer["model"], answer["choices"][0]["token_ids"]) == ("poet", plain[::-1])
            names = [model["id"] for model in client.get("/v1/models").json()["data"]]
            assert names == [MODEL, "poet"]
        # Every next life has it: of ranks before their first request, of workers too.
        for part in ("scheduler:0", "tokenizer_worker:1"):
            server.wait_for_replacement(part, server.kill(part))
        again = server.connection()
        for _ in range(4):
            answer = again.post(
                "/generate",
                json={"input_ids": plain, "lora_path": "poet", "sampling_params": {"max_new_tokens": 4}},
            ).json()
            assert answer["output_ids"] == plain[::-1]
        nothing = again.post("/load_lora_adapter", json={"lora_name": "b", "lora_path": str(tmp_path / "b")})
        assert nothing.status_code == 400
        assert "scheduler:0: there is nothing at" in nothing.json()["error"]["message"]
        operate(again, "/unload_lora_adapter", lora_name="poet")
        for client in (again, *clients[1:]):
            assert client.post("/v1/completions", json={"model": "poet", **body}).status_code == 404
            assert client.post("/v1/completions", json={"model": "b", **body}).status_code == 404


def test_requests_are_aborted_by_prefix_through_a_worker_that_does_not_own_them(shared: Server) -> None:
    with contextlib.ExitStack() as connections:
        streams = {}
        for worker, name in enumerate(("batch-1", "batch-2", "else"), start=1):
            api = shared.openai_over(connections.enter_context(shared.connection_to(worker)))
            streams[name] = api.completions.create(**_LONG, stream=True, extra_body={"request_id": name})
            next(streams[name])
        other = connections.enter_context(shared.connection_to(4))
        assert operate(other, "/abort_request", rid_prefix="batch-")["aborted"] == 2
        for name in ("batch-1", "batch-2"):
            assert [chunk.choices[0].finish_reason for chunk in streams[name]][-1] == "abort"
        assert operate(other, "/abort_request", rid="els")["aborted"] == 0
        assert operate(other, "/abort_request", rid="else")["aborted"] == 1
        shared.wait_until_idle(LEAVE_S)


PARTS = ["scheduler:0", "detokenizer:0", "router", "fork_server", "tokenizer_worker:1"]


@pytest.mark.parametrize("http_workers", [1, 2])
def test_log_level_holds_in_every_process_and_in_the_next_life_of_each(http_workers: int) -> None:
    with Server(*_SLOW, *workers(http_workers)) as server:
        answer = operate(server.http, "/configure_logging", log_level="debug")
        assert answer["done"] == everybody(server)
        said = r"DEBUG   {} +control state: epoch 1, log level debug"
        for part in everybody(server):
            server.wait_for_line(said.format(part))
        for part in [part for part in PARTS if part in everybody(server)]:
            seen = len(server.log.splitlines())
            server.wait_for_replacement(part, server.kill(part))
            server.wait_for_line(said.format(part), begin=seen)
        operate(server.connection(), "/configure_logging", log_level="warning")
        seen = len(server.log.splitlines())
        operate(server.connection(), "/freeze_gc")
        assert not re.search("DEBUG|INFO", "\n".join(server.log.splitlines()[seen:]))


@pytest.mark.parametrize("http_workers", [1, 2])
def test_pause_outlives_every_process(http_workers: int) -> None:
    with Server(*_SLOW, *workers(http_workers), *_PARTS) as server:
        operate(server.http, "/pause_generation", mode="wait")
        for part in [part for part in PARTS if part in everybody(server)]:
            server.wait_for_replacement(part, server.kill(part))
        server.http = server.connection()
        state = server.http.get("/admin/state").json()
        assert state["control"]["paused"] == "wait"
        assert {figures["epoch"] for figures in state["processes"].values()} == {1}
        held = Probes(server, 8)
        server.wait_for_load(0, waiting=8)
        assert held.answered() == 0
        operate(server.http, "/continue_generation")
        assert held.texts() == {echo_text(PROMPT, 2)}


def test_pause_holds_in_a_rolling_restart_of_the_only_worker() -> None:
    with Server(*_SLOW) as server:
        operate(server.http, "/pause_generation", mode="wait")
        server.send_signal(signal.SIGHUP)
        server.wait_for_line("every HTTP worker is replaced")
        with server.connection_to(1, life=2) as client:
            assert client.get("/admin/state").json()["control"]["paused"] == "wait"
            operate(client, "/continue_generation")


def test_parts_that_do_not_answer_are_named() -> None:
    with Server(*_SLOW, *workers(2)) as server, server.connection_to(1) as client:
        stopped = sorted({*PARTS, "tokenizer_worker:2"} - {"tokenizer_worker:1"})
        titles = server.titles()
        for part in stopped:
            os.kill(titles[f"multitok::{part}"], signal.SIGSTOP)
        answer = client.post("/pause_generation", json={"mode": "wait", "timeout": 0.2})
        assert answer.status_code == 504
        message = f"operation 1 (pause) was not done in time by {', '.join(stopped)}"
        assert answer.json()["error"]["message"] == message
        # They are killed for that, and their next lives are paused.
        for part in stopped:
            server.wait_for_replacement(part, titles[f"multitok::{part}"])
        eventually(lambda: _epochs(client) == {1}, DEATH_S, "everybody has the state")
        held = Probes(server, 2)
        server.wait_for_load(0, waiting=2)
        operate(client, "/continue_generation")
        assert held.texts() == {echo_text(PROMPT, 2)}


def _epochs(client: httpx.Client) -> set[int]:
    return {figures.get("epoch", -1) for figures in client.get("/admin/state").json()["processes"].values()}


def test_part_that_dies_during_an_operation_does_not_hold_it_up() -> None:
    with Server(*_SLOW, *workers(2)) as server, server.connection_to(1) as client, ThreadPoolExecutor(1) as caller:
        pid = server.pid_of("detokenizer:0")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waiting = caller.submit(operate, client, "/pause_generation", mode="wait")
        server.wait_for_line("operation 1: pause")
        os.kill(pid, signal.SIGKILL)
        answer = waiting.result(STOP_S)
        assert answer["died"] == ["detokenizer:0"]
        server.wait_for_line(r"detokenizer:0 .* is ready, life 2")


def test_new_weights_are_loaded_by_every_rank_and_by_their_next_lives(tmp_path: Path) -> None:
    with Server(*_SLOW, *workers(2), *_PARTS) as server:
        operate(server.http, "/update_weights_from_disk", model_path=str(tmp_path), weight_version="v2")
        control = server.http.get("/server_info").json()["control"]
        assert control["weights"] == {MODEL: {"path": str(tmp_path), "version": "v2"}}
        for rank in ("scheduler:0", "scheduler:1"):
            server.wait_for_line(rf"{rank} .*did as if: UpdateWeights\(path='{tmp_path}', version='v2'")
            seen = len(server.log.splitlines())
            server.wait_for_replacement(rank, server.kill(rank))
            server.wait_for_line(rf"{rank} .*did as if: UpdateWeights\(path='{tmp_path}', version='v2'", begin=seen)
        wrong = server.http.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "none")})
        assert wrong.status_code == 400
        assert server.http.get("/server_info").json()["control"]["weights"] == control["weights"]
        assert server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)


def test_any_worker_describes_every_process(shared: Server) -> None:
    stream = shared.openai.completions.create(**_LONG, stream=True)
    next(stream)
    with shared.connection_to(2) as client:

        def described() -> dict[str, Any] | None:
            processes: dict[str, Any] = client.get("/admin/state").json()["processes"]
            owners = [f for f in processes.values() if f["role"] == "tokenizer_worker"]
            ranks = [f for f in processes.values() if f["role"] == "scheduler"]
            found = all(sum(f["requests"] for f in group) == 1 for group in (owners, ranks))
            return processes if found and sum(f["tokens"] for f in ranks) > 0 else None

        processes = eventually(described, STOP_S, "the request is seen")
        for name, figures in processes.items():
            title = name if ":" in name and figures["role"] not in ("router", "fork_server") else figures["role"]
            pid = shared.pid if title == "launcher:0" else shared.pid_of(title)
            assert figures["pid"] == pid
            assert figures["life"] >= 1
            assert figures["uptime_s"] > 0
            assert figures["cpu_s"] > 0
            assert figures["rss_bytes"] > 10_000_000
        assert {figures["role"] for figures in processes.values()} == {
            *("launcher", "scheduler", "detokenizer", "router", "fork_server", "tokenizer_worker")
        }
        info = client.get("/server_info").json()
        assert info["engine"]["operations"]
        assert info["version"]
    stream.close()


def test_operations_need_the_admin_key_where_there_is_one() -> None:
    keys = ["--api-key", "client", "--admin-api-key", "chief"]
    with Server(*_SLOW, *workers(2), *keys, api_key="chief") as server:
        operate(server.http, "/pause_generation", mode="wait")
        for path in ("/continue_generation", "/flush_cache", "/freeze_gc"):
            answer = server.http.post(path, json={}, headers={"authorization": "Bearer client"})
            assert answer.status_code == 403
        assert server.http.get("/admin/state").json()["control"]["paused"] == "wait"
        operate(server.http, "/continue_generation")
