"""What keeps the server from starting, and what it says then."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from reference import MODEL
from server import DEATH_S, SIMULATED, START_S, Server, engine_args, eventually, free_port, port_is_free, workers


def _fails(status: int, message: str, *options: str) -> Server:
    """Check that a server with these options doesn't start, and leaves nothing behind."""
    port = free_port()
    with Server(*options, "--port", str(port), wait=False, errors=True) as server:
        assert server.wait(START_S) == status, server.log
        server.wait_for_line(message)
        assert "Traceback" not in server.log
    assert port_is_free(port)
    return server


def test_model_that_does_not_exist() -> None:
    _fails(2, "no/such/place", "--model", "no/such/place/model.gguf")


def test_file_that_is_no_model(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF is what it says and no more")
    _fails(2, "broken.gguf", "--model", str(broken))


def test_model_that_the_engine_can_not_load(tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    _fails(2, "half", "--model", str(folder))


def test_engine_that_does_not_exist() -> None:
    _fails(2, "'warp'.*simulated", "--engine", "warp")


def test_option_that_the_engine_does_not_have() -> None:
    server = _fails(2, "no option speed.*step_ms", *SIMULATED, *engine_args(speed=9), *workers(3))
    # Once, and not once per rank and process.
    assert server.log.count("no option speed") == 1


def test_option_that_is_no_pair() -> None:
    _fails(2, "KEY=VALUE", *SIMULATED, "--engine-arg", "step_ms")


def test_value_that_the_engine_can_not_use() -> None:
    _fails(2, "must be a number", *SIMULATED, *engine_args(step_ms="fast"))


def test_engine_that_fails_in_loading_is_quoted() -> None:
    _fails(2, r"scheduler:\d: .*id 99999999", *SIMULATED, *engine_args(ids=99999999), "--data-parallel-size", "2")


def test_option_out_of_range() -> None:
    _fails(2, "tokenizer-worker-num", "--tokenizer-worker-num", "0")


def test_context_longer_than_the_model_has() -> None:
    _fails(2, "context length 99999 is above the model's 8192", *SIMULATED, "--context-length", "99999")


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Server(*SIMULATED, "--port", str(port), wait=False, errors=True) as server:
            assert server.wait(START_S) == 1
            server.wait_for_line(rf"can't listen on 127\.0\.0\.1 port {port}: Address already in use")
            assert "Traceback" not in server.log


def test_parts_that_are_late_are_named() -> None:
    server = _fails(
        1, "not ready after 2 s: .*scheduler:0", *SIMULATED, *engine_args(load_s=60), "--start-timeout", "2"
    )
    assert "does not exit" not in server.log


@pytest.mark.parametrize("part", ["scheduler:0", "detokenizer:0", "router"])
def test_part_that_dies_while_starting_ends_the_start(part: str) -> None:
    port = free_port()
    options = [*SIMULATED, *engine_args(load_s=60), *workers(2), "--port", str(port)]
    with Server(*options, wait=False, errors=True) as server:
        eventually(lambda: server.pid_of(part), START_S, f"{part} has begun")
        server.kill(part)
        assert server.wait(DEATH_S) == 1
        server.wait_for_line(rf"ERROR .*launcher .*{part} \(pid \d+\) died of SIGKILL")
    assert port_is_free(port)


def test_address_that_others_reach_is_warned_of_unless_there_is_a_key() -> None:
    for key in ([], ["--api-key", "open-sesame"]):
        for host in ("0.0.0.0", "127.0.0.1"):
            with Server(*SIMULATED, "--host", host, *key, wait=False) as server:
                server.wait_for_line("is ready after")
                warned = "listening on 0.0.0.0, which others can reach, without --api-key" in server.log
                assert warned == (host == "0.0.0.0" and not key)


def test_keys_are_neither_logged_nor_shown() -> None:
    keys = ["--api-key", "open-sesame", "--admin-api-key", "abracadabra"]
    with Server(*SIMULATED, *keys, "--log-level", "debug") as server:
        info = server.http.get("/server_info", headers={"authorization": "Bearer abracadabra"})
        assert info.json()["server_args"]["api_key"] == ["(hidden)"]
        assert info.json()["server_args"]["admin_api_key"] == "(hidden)"
        for key in ("open-sesame", "abracadabra"):
            assert key not in info.text
            assert key not in server.log


def test_nobody_can_connect_before_the_engine_is_loaded() -> None:
    port = free_port()
    with Server(*SIMULATED, *engine_args(load_s=1), "--port", str(port), wait=False) as server:
        server.wait_for_line("simulated engine")
        server.port = port
        assert not server.accepts()
        server.wait_until_ready()
        assert server.http.get("/ready").status_code == 200


def test_port_can_be_used_again_at_once() -> None:
    port = free_port()
    for _ in range(2):
        with Server(*SIMULATED, "--port", str(port)) as server:
            server.openai.completions.create(model=MODEL, prompt="again", max_tokens=2)


@pytest.mark.parametrize("options", [["--help"], ["--no-such-option"]])
def test_help_and_unknown_options_start_nothing(options: list[str]) -> None:
    with Server(*options, wait=False, errors=True) as server:
        assert server.wait() == (0 if options == ["--help"] else 2)
        server.wait_for_line("usage: multitok")
