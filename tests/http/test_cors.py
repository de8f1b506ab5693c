"""Web pages of other origins."""

from __future__ import annotations

import pytest
from every_route import ALL, CLIENT, call, error, head
from http_double import DoubleManager, chat, running

ORIGIN = "Origin: https://page.example\r\n"
ASKS = "Access-Control-Request-Method: POST\r\n"
ALLOW = "access-control-allow-origin"


@pytest.mark.parametrize("route", ALL, ids=lambda route: route[1])
def test_off_unless_asked_for(route) -> None:
    with running(DoubleManager(auto="abc")) as server, server.connect() as connection:
        answer = call(connection, route, ORIGIN)
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        connection.send(head("OPTIONS", route[1], ORIGIN + ASKS))
        answer = connection.read()
        assert answer.status == 405
        assert ALLOW not in answer.headers


@pytest.mark.parametrize("route", ALL, ids=lambda route: route[1])
@pytest.mark.parametrize("allowed", ["https://page.example", "https://Page.example/", "*"])
def test_an_allowed_origin(route, allowed: str) -> None:
    args = {"cors_origin": ["https://other.example", allowed], "api_key": ["sk-one"]}
    with running(DoubleManager(auto="abc"), **args) as server, server.connect() as connection:
        # The preflight shows no key.
        connection.send(
            head(
                "OPTIONS", route[1], ORIGIN + ASKS + "Access-Control-Request-Headers: authorization, x-stainless-os\r\n"
            )
        )
        answer = connection.read()
        assert answer.status == 204
        assert "content-length" not in answer.headers
        assert answer.headers["access-control-allow-methods"] == "GET, POST"
        assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        expected = "*" if allowed == "*" else "https://page.example"
        assert answer.headers[ALLOW] == expected
        answer = call(connection, route, ORIGIN + "Authorization: Bearer sk-one\r\n")
        assert (answer.status, answer.headers[ALLOW]) == (200, expected)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.headers.get("vary") == (None if allowed == "*" else "origin")
        # A page can read why it is refused.
        answer = call(connection, route, ORIGIN)
        assert (error(answer)[0], answer.headers[ALLOW]) == (401, expected)
        # No page.
        assert ALLOW not in call(connection, route, "Authorization: Bearer sk-one\r\n").headers


@pytest.mark.parametrize("route", CLIENT, ids=lambda route: route[1])
def test_another_origin(route) -> None:
    with (
        running(DoubleManager(auto="abc"), cors_origin=["https://other.example"]) as server,
        server.connect() as connection,
    ):
        answer = call(connection, route, ORIGIN)
        assert (answer.status, answer.headers.get(ALLOW)) == (200, None)
        connection.send(head("OPTIONS", route[1], ORIGIN + ASKS))
        answer = connection.read()
        assert (answer.status, answer.headers.get(ALLOW)) == (405, None)


def test_a_stream_for_a_page() -> None:
    with running(DoubleManager(auto="abc"), cors_origin=["*"]) as server, server.connect() as connection:
        connection.post("/v1/chat/completions", chat(stream=True), ORIGIN)
        answer = connection.read()
        assert answer.headers[ALLOW] == "*"
        assert answer.events()[-1] == b"[DONE]"


def test_options_without_a_question_is_no_preflight() -> None:
    with (
        running(DoubleManager(auto="abc"), cors_origin=["*"], api_key=["sk-one"]) as server,
        server.connect() as connection,
    ):
        connection.send(head("OPTIONS", "/v1/models", ORIGIN))
        assert connection.read().status == 401


def test_a_failing_route_tells_a_page(caplog: pytest.LogCaptureFixture) -> None:
    manager = DoubleManager(auto="abc")
    manager.server_info = None  # type: ignore[assignment, method-assign]
    with running(manager, cors_origin=["*"]) as server, server.connect() as connection:
        answer = call(connection, ("GET", "/server_info", None), ORIGIN)
        assert (answer.status, answer.headers[ALLOW]) == (500, "*")
    assert "/server_info failed" in caplog.text
