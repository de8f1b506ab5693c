"""API keys, on every route, before a body is read."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from every_route import ALL, ASGI, CLIENT, CONTROL, HOT, call, error, head, message
from http_double import WAIT, DoubleManager, RunningServer, chat, running

from multitok.config import OptionError, ServerArgs
from multitok.http.auth import ApiKeys

KEYS = ["sk-one", "sk-two"]
UNKNOWN = [("GET", "/nothing", None), ("POST", "/server_info/", {}), ("OPTIONS", "/v1/chat/completions", None)]


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc"), api_key=KEYS) as server:
        yield server


@pytest.fixture
def administered() -> Iterator[RunningServer]:
    with running(DoubleManager(auto="abc"), api_key=KEYS, admin_api_key="sk-admin") as server:
        yield server


@pytest.mark.parametrize("route", ALL + UNKNOWN, ids=lambda route: route[1])
@pytest.mark.parametrize(
    "headers",
    [
        "",
        bearer("sk-other"),
        bearer("sk-onee"),
        bearer("sk-on"),
        bearer(""),
        "Authorization: Basic sk-one\r\n",
        "Authorization: sk-one\r\n",
        "Authorization: Bearer\r\n",
        "X-Api-Key: \xe9\r\n",
        "X-Api-Key:\r\n",
    ],
)
def test_without_a_key_there_is_no_answer_but_401(server: RunningServer, route: Any, headers: str) -> None:
    with server.connect() as connection:
        for _ in range(2):
            answer = call(connection, route, headers)
            assert error(answer)[0] == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert server.manager.submissions.empty()


@pytest.mark.parametrize("route", ALL, ids=lambda route: route[1])
@pytest.mark.parametrize("key", KEYS)
def test_a_key_opens_every_route(server: RunningServer, route: Any, key: str) -> None:
    with server.connect() as connection:
        for headers in (bearer(key), f"authorization: bearer  {key}\r\n", f"X-API-Key: {key}\r\n"):
            assert call(connection, route, headers).status == 200
        assert call(connection, route).status == 401
        assert call(connection, route, f"Authorization: Basic Zm9v\r\nx-api-key: {key}\r\n").status == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_and_ready_need_no_key(administered: RunningServer, path: str) -> None:
    with administered.connect() as connection:
        assert call(connection, ("GET", path, None)).status == 200


@pytest.mark.parametrize("route", [*CONTROL, ("GET", "/server%5Finfo", None), ("GET", "/server_info%0A", None)])
def test_control_routes_need_the_admin_key(administered: RunningServer, route: Any) -> None:
    with administered.connect() as connection:
        assert call(connection, route, bearer("sk-admin")).status == 200
        answer = call(connection, route, bearer("sk-one"))
        assert error(answer) == (403, "this route needs the admin key")
        assert "www-authenticate" not in answer.headers
        answer = call(connection, route)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert call(connection, route, f"{bearer('sk-one')}X-Api-Key: sk-admin\r\n").status == 200


@pytest.mark.parametrize("route", CLIENT, ids=lambda route: route[1])
def test_the_admin_key_opens_the_other_routes_too(administered: RunningServer, route: Any) -> None:
    with administered.connect() as connection:
        assert call(connection, route, bearer("sk-admin")).status == 200
        assert call(connection, route, bearer("sk-two")).status == 200


def test_an_admin_key_alone_leaves_the_api_open() -> None:
    with running(DoubleManager(auto="abc"), admin_api_key="sk-admin") as server, server.connect() as connection:
        for route in CLIENT:
            assert call(connection, route).status == 200
        for route in CONTROL:
            assert call(connection, route, bearer("sk-other")).status == 401
            assert call(connection, route, bearer("sk-admin")).status == 200


def test_a_forbidden_body_is_not_read(administered: RunningServer) -> None:
    with administered.connect() as connection:
        connection.send(head("POST", "/abort_request", bearer("sk-one"), 20_000))
        assert connection.read().status == 403
    assert administered.manager.control.asked == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/tokenize", "/abort_request", "/nothing"])
@pytest.mark.parametrize("length", [10, 30_000_000, None])
def test_the_refusal_comes_before_the_body(server: RunningServer, path: str, length: int | None) -> None:
    with server.connect() as connection:
        connection.send(head("POST", path, "" if length else "Transfer-Encoding: chunked\r\n", length))
        answer = connection.read()
        assert answer.status == 401
        # A body that can be thrown away in passing does not cost the connection.
        assert ("connection" not in answer.headers) == (length == 10)
        if length == 10:
            connection.send(b"x" * 10 + message(*ALL[0], bearer("sk-one")))
            assert connection.read().status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_client_without_a_key_can_not_make_us_keep_its_body(server: RunningServer, path: str) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    connections = [server.connect() for _ in range(20)]
    piece = b"x" * (1 << 20)
    for connection in connections:
        connection.send(head("POST", path, "", 30 << 20))
        assert connection.read().status == 401
        for _ in range(10):
            connection.send(piece)
    assert resident() - before < 50 << 20
    for connection in connections:
        connection.close()


def test_expect_100_continue_without_a_key(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.send(head("POST", "/v1/chat/completions", "Expect: 100-continue\r\n", 10))
        assert connection.read().status == 401
        assert connection.at_end()


def test_pipelined_requests_are_judged_one_by_one(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.send(
            message(*HOT[0], bearer("sk-one"))
            + message(*HOT[0])
            + message(*ASGI[1])
            + message(*ASGI[0], bearer("sk-two"))
            + message(*HOT[1], bearer("sk-no"))
            + message(*HOT[1], bearer("sk-two"))
        )
        assert [connection.read().status for _ in range(6)] == [200, 401, 401, 200, 401, 200]


def test_keys_are_nowhere_to_be_seen(administered: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    with administered.connect() as connection:
        for key in (*KEYS, "sk-admin", "sk-wrong"):
            assert key.encode() not in call(connection, CONTROL[0], bearer(key)).body
        connection.send(b"\x00" + bearer("sk-one").encode())
        assert b"sk-one" not in connection.read().body
    assert "sk-" not in caplog.text


def test_tenants(server: RunningServer) -> None:
    """One per key, the same in every process, whichever header carries it."""
    tenants: list[int] = []
    server.server._state.routes[b"/generate"] = lambda exchange: (  # type: ignore[index]
        tenants.append(exchange.tenant),
        exchange.respond(200, b"{}"),
    )
    with server.connect() as connection:
        for headers in (bearer("sk-one"), bearer("sk-two"), "X-Api-Key: sk-one\r\n", bearer("sk-one")):
            assert call(connection, HOT[1], headers).status == 200
    assert tenants[0] == tenants[2] == tenants[3] != tenants[1]
    assert all(0 < tenant < 1 << 63 for tenant in tenants)
    again = ApiKeys(["sk-zero", *KEYS], "sk-admin")
    assert again.access(b"Bearer sk-one", None).tenant == tenants[0]


def test_without_keys_there_is_one_tenant() -> None:
    with running(DoubleManager()) as server, server.connect() as connection:
        connection.post("/v1/chat/completions", chat(), bearer("sk-any"))
        submission = server.manager.next_submission()
        assert submission.sink._exchange.tenant == 0
        server.call(submission.finish, "x")
        assert connection.read().status == 200


def test_a_key_is_looked_up_once_per_connection(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = server.server._state.keys  # type: ignore[union-attr]
    assert keys is not None
    looked_up: list[Any] = []
    find = keys.access
    monkeypatch.setattr(keys, "access", lambda *shown: (looked_up.append(shown), find(*shown))[1])
    with server.connect() as connection:
        for _ in range(5):
            for route in ALL:
                assert call(connection, route, bearer("sk-one")).status == 200
    assert looked_up == [(b"Bearer sk-one", None)]


# Files.


def load(**options: Any) -> ApiKeys | None:
    return ApiKeys.load(ServerArgs(**options))


def test_keys_of_a_file_are_added(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a\n\n  sk-b \r\n")
    keys = load(api_key=["sk-c"], api_key_file=str(file))
    assert keys is not None
    for key, known in ((b"sk-a", True), (b"sk-b", True), (b"sk-c", True), (b"", False), (b"sk-d", False)):
        assert keys.access(None, key).known is known
    assert load() is None


@pytest.mark.parametrize("content", [b"", b"\n \n", b"two words\n", "schl\u00fcssel".encode(), b"a\0b"])
def test_a_file_without_usable_keys(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(OptionError, match=r"^--api-key-file.*keys") as caught:
        load(api_key_file=str(file))
    assert "words" not in str(caught.value)


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--api-key-file: can't read .*none: No such file"):
        load(api_key_file=str(tmp_path / "none"))


@pytest.mark.parametrize("options", [{"api_key": [""]}, {"api_key": ["sk a"]}, {"admin_api_key": "s\u00e9cret"}])
def test_keys_that_no_header_can_carry(options: Any) -> None:
    with pytest.raises(OptionError, match=r"api-key: a key must be") as caught:
        load(**options)
    assert "cret" not in str(caught.value)


def test_a_worker_does_not_start_without_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one\n")
    with running(DoubleManager(auto="abc"), api_key_file=str(file)) as server:
        file.write_text("sk-new\n")
        with server.connect() as connection:
            assert call(connection, ALL[0], bearer("sk-one")).status == 200
            assert call(connection, ALL[0], bearer("sk-new")).status == 401
        file.unlink()

        async def start_another() -> None:
            another = type(server.server)(
                ServerArgs(api_key_file=str(file)),
                server.manager,
                server.listener,
                server.slot,  # type: ignore[arg-type]
            )
            await another.start()

        with pytest.raises(OptionError):
            asyncio.run_coroutine_threadsafe(start_another(), server.loop).result(WAIT)
