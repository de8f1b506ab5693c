"""The ASGI application: every route that is not hot, and the refusal of what does not exist."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from multitok.http.admin.control import OPERATIONS, ControlRoutes
from multitok.http.admin.health import HealthRoutes
from multitok.http.admin.info import InfoRoute
from multitok.http.auth import check_admin
from multitok.http.errors import internal_error
from multitok.http.exchange import PIECE
from multitok.http.native.tokens import TokenRoutes
from multitok.http.openai.models import ModelRoutes
from multitok.http.openapi import OpenApiRoute
from multitok.http.respond import error_response
from multitok.tokenizer.requests import RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from multitok.config import ServerArgs
    from multitok.http.cors import Headers
    from multitok.http.manager import Manager

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

_WORDS = {404: "there is no such route: {path}", 405: "{path} does not take {method}"}


def make_app(manager: Manager, hot_paths: Iterable[str], limits: ServerArgs, draining: Callable[[], bool]) -> ASGIApp:
    """Build the application.

    Parameters
    ----------
    manager : Manager
        Does the work.
    hot_paths : iterable of str
        Paths whose POST the protocol serves; known here so that other methods get 405.
    limits : ServerArgs
        What one request may hold.
    draining : callable
        Whether every connection's next answer is its last.
    """
    info = InfoRoute(manager)
    health, models = HealthRoutes(manager), ModelRoutes(manager)
    tokens = TokenRoutes(manager, limits)
    routes = [
        Route("/health", health.health, methods=["GET"]),
        Route("/ready", health.ready, methods=["GET"]),
        Route("/health_generate", health.health_generate, methods=["GET"]),
        Route("/openapi.json", OpenApiRoute(limits).openapi, methods=["GET"]),
        Route("/server_info", _control(info.server_info), methods=["GET"]),
        Route("/admin/state", _control(info.admin_state), methods=["GET"]),
        Route("/v1/models", models.list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        *(
            Route(path, _control(endpoint), methods=["GET", "POST"] if OPERATIONS[path][2] else ["POST"])
            for path, endpoint in ControlRoutes(manager, limits.max_request_id_length).endpoints.items()
        ),
        *(Route(path, _unreachable, methods=["POST"]) for path in hot_paths),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_error, Exception: _on_failure},
    )
    app.router.redirect_slashes = False
    return _Guard(app, draining)


def _control(endpoint: Endpoint) -> Endpoint:
    """Have a route take the admin key only, where there is one; the body has not been read when it refuses."""

    async def checked(request: Request) -> Response:
        check_admin(request.scope["state"]["access"])
        return await endpoint(request)

    return checked


async def _unreachable(request: Request) -> Response:
    raise RuntimeError(f"the protocol serves {request.url.path}")


async def _on_request_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestError)
    return error_response(exc)


async def _on_http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    words = _WORDS.get(exc.status_code, exc.detail)
    message = words.format(path=request.url.path[:200], method=request.method)
    return error_response(RequestError(exc.status_code, message), dict(exc.headers or {}))


async def _on_failure(request: Request, exc: Exception) -> Response:
    # Starlette raises the exception again after this, and the guard logs it.
    return error_response(internal_error())


async def _send_in_pieces(send: Send, message: Message) -> None:
    """Send a large body as the client takes it.

    Between two pieces uvicorn waits while writing is paused, and so is seen who takes nothing. With TLS a body in one
    piece would go through to the socket's transport, and what waits there pauses nobody.
    """
    body = message.get("body", b"")
    if len(body) <= PIECE:
        await send(message)
        return
    for start in range(0, len(body), PIECE):
        more = start + PIECE < len(body) or message.get("more_body", False)
        await send({**message, "body": body[start : start + PIECE], "more_body": more})


class _Guard:
    """Turns whatever goes wrong into an answer in the error format.

    Outermost, so that an exception is logged once and reaches neither uvicorn's text answer nor Starlette's.
    """

    def __init__(self, app: ASGIApp, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = False
        cors: Headers = scope["state"]["cors"]

        async def watched_send(message: Message) -> None:
            nonlocal started
            if not started and self._draining():
                # Only the newest versions of uvicorn say so themselves when a connection is about to close.
                lines = [line for line in message["headers"] if line[0] != b"connection"]
                message["headers"] = [*lines, (b"connection", b"close")]
            if not started and cors:
                message["headers"] = [*message["headers"], *cors]
            started = True
            await _send_in_pieces(send, message)

        headers: dict[str, str] = {}
        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # Only a drain whose time is up cancels a request.
            error = RequestError(503, "the server is shutting down")
            headers["connection"] = "close"
        except Exception:
            logger.exception("%s failed", scope["path"])
            error = internal_error()
        else:
            return
        if not started:
            await error_response(error, headers)(scope, receive, watched_send)
