"""Servers that several test modules share; each must be idle again when a test is done with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server import SIMULATED, Server, engine_args, workers

_SHARED = [*SIMULATED, *engine_args(step_ms=5), "--drain-timeout", "5"]


@pytest.fixture(scope="session")
def single_server() -> Iterator[Server]:
    with Server(*_SHARED) as server:
        yield server


@pytest.fixture(scope="session")
def multi_server() -> Iterator[Server]:
    with Server(*_SHARED, *workers(4), "--detokenizer-worker-num", "2") as server:
        yield server


@pytest.fixture
def single(single_server: Server) -> Iterator[Server]:
    """One HTTP process, one detokenizer; the simulated engine answers with the prompt's ids, one per 5 ms."""
    yield single_server
    single_server.wait_until_idle()


@pytest.fixture
def multi(multi_server: Server) -> Iterator[Server]:
    """Four HTTP workers, two detokenizers; otherwise like `single`."""
    yield multi_server
    multi_server.wait_until_idle()


@pytest.fixture(params=["single", "multi"])
def either(request: pytest.FixtureRequest) -> Server:
    """In turn one of the two."""
    server: Server = request.getfixturevalue(request.param)
    return server
