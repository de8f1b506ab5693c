"""Keys and certificates in every worker; what can't be used ends the start."""

from __future__ import annotations

import signal
import socket
import ssl
import sys
from pathlib import Path

import httpx
import pytest
from reference import MODEL, echo_text
from server import DEATH_S, SIMULATED, START_S, STOP_S, Server, engine_args, eventually, port_is_free, workers

sys.path.append(str(Path(__file__).parents[1] / "http"))
from certificates import Certificates

PROMPT = "once upon a time in a land far away"
_FAST = [*SIMULATED, *engine_args(step_ms=2)]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def _with_tls(certificates: Certificates) -> list[str]:
    return ["--ssl-certfile", certificates.certfile, "--ssl-keyfile", certificates.keyfile]


def test_keys_and_tls_in_each_of_four_workers(certificates: Certificates, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-from-file\n")
    options = [
        *_FAST,
        *workers(4),
        "--api-key",
        "sk-client",
        "--api-key-file",
        str(keys),
        "--admin-api-key",
        "sk-admin",
    ]
    with Server(
        *options, *_with_tls(certificates), api_key="sk-admin", authority=certificates.authority_file
    ) as server:
        for worker in range(1, 5):
            with server.connection_to(worker) as client:
                for method, path, body in (
                    ("POST", "/v1/chat/completions", {"messages": []}),
                    ("POST", "/tokenize", {"prompt": "a"}),
                    ("GET", "/server_info", None),
                    ("GET", "/nothing", None),
                ):
                    for key in ("", "Bearer sk-", "Bearer sk-from-fil"):
                        answer = client.request(method, path, json=body, headers={"authorization": key})
                        assert answer.status_code == 401
                        assert answer.headers["www-authenticate"] == "Bearer"
                assert client.get("/health", headers={"authorization": ""}).status_code == 200
                assert client.get("/server_info", headers={"authorization": "Bearer sk-client"}).status_code == 403
                assert client.get("/server_info").json()["worker"]["address"] == f"w{worker}.1"
                assert "sk-" not in client.get("/server_info").text
                own = server.openai_over(client).with_options(api_key="sk-from-file")
                stream = own.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60, stream=True)
                assert "".join(chunk.choices[0].text for chunk in stream) == echo_text(PROMPT, 60)
        # Scanners are nobody's business.
        with socket.create_connection(("127.0.0.1", server.port), timeout=STOP_S) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while scanner.recv(4096):
                pass
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.base_url}/health", verify=ssl.create_default_context())
    assert "sk-" not in server.log
    assert "which others can reach" not in server.log


@pytest.mark.parametrize("what", ["no certificate", "another's key", "no keys", "no file"])
def test_what_can_not_be_used_ends_the_start(certificates: Certificates, tmp_path: Path, what: str) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    options, words = {
        "no certificate": (["--ssl-certfile", str(tmp_path / "none")], "--ssl-certfile: can't read"),
        "another's key": (
            ["--ssl-certfile", certificates.certfile, "--ssl-keyfile", other.keyfile],
            "not a certificate and its key",
        ),
        "no keys": (["--api-key-file", str(empty)], "--api-key-file: there is no key in"),
        "no file": (["--api-key-file", str(tmp_path / "none")], "--api-key-file: can't read"),
    }[what]
    with Server(*_FAST, *workers(2), *options, wait=False, errors=True) as server:
        assert server.wait(DEATH_S) == 2
        server.wait_for_line(words)
        assert "Traceback" not in server.log


def test_a_rolling_restart_brings_new_certificates_and_keys(certificates: Certificates, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-old\n")
    options = [*_FAST, *workers(2), "--api-key-file", str(keys), *_with_tls(certificates)]
    with Server(*options, api_key="sk-old", authority=certificates.authority_file, errors=True) as server:

        def shown() -> bytes:
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=STOP_S) as sock,
                certificates.client_context().wrap_socket(sock, server_hostname="localhost") as wrapped,
            ):
                certificate = wrapped.getpeercert(binary_form=True)
                assert certificate is not None
                return certificate

        def answers(key: str) -> set[int]:
            found = set()
            for _ in range(10):
                url, headers = f"{server.base_url}/v1/models", {"authorization": f"Bearer {key}"}
                found.add(httpx.get(url, headers=headers, verify=server.tls, trust_env=False).status_code)
            return found

        old = shown()
        assert (answers("sk-old"), answers("sk-new")) == ({200}, {401})
        # What can't be used is found before anybody is replaced.
        certificate = Path(certificates.certfile)
        pids, good = server.titles(), certificate.read_bytes()
        certificate.write_bytes(good[: len(good) // 2])
        server.send_signal(signal.SIGHUP)
        server.wait_for_line(" ERROR .*SIGHUP: no worker is replaced: --ssl-certfile, --ssl-keyfile: not a certificate")
        certificate.write_bytes(good)
        keys.write_text("")
        server.send_signal(signal.SIGHUP)
        server.wait_for_line(" ERROR .*SIGHUP: no worker is replaced: --api-key-file: there is no key in")
        assert server.titles() == pids
        assert shown() == old
        assert answers("sk-old") == {200}
        certificates.renew()
        keys.write_text("sk-new\n")
        server.send_signal(signal.SIGHUP)
        eventually(lambda: answers("sk-new") == {200} and answers("sk-old") == {401}, START_S, "new keys everywhere")
        assert all(shown() != old for _ in range(10))
        assert server.log.count(" ERROR ") == 2


def test_an_open_server_is_warned_about() -> None:
    with Server(*_FAST, "--host", "0.0.0.0", wait=False) as server:
        server.wait_for_line("is ready")
        server.terminate()
        assert server.wait() == 0
        server.wait_for_line("WARNING .*listening on 0.0.0.0, which others can reach")
        port = int(server.wait_for_line(r"0\.0\.0\.0:(\d+)")[1])
        assert port_is_free(port)
