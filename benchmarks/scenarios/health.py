"""Does /health answer at once while long prompts and a huge body arrive?"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from harness.data import MODEL_NAME

from multitok.bench.summary import percentiles
from multitok.bench.target import Target
from scenarios.context import Context, Result

_PROMPTS = 8
_PROMPT_TOKENS = 100_000
_BODY_BYTES = 27_000_000
_EVERY_S = 0.005
_ROUNDS = 5
_QUIET_S = 2.0
_PATH = "/v1/chat/completions"
_PHASES = (("prompts", True, False), ("huge body", False, True), ("both", True, True))


def run(context: Context) -> Result:
    """Ask for /health every 5 ms: first alone, then while eight 100k-token prompts and a 27 MB body come in."""
    tokens = max(1000, int(_PROMPT_TOKENS * context.scale))
    prompts = [context.data.maker.text(tokens) for _ in range(_PROMPTS)]
    words = prompts[0].encode()
    huge = _chat((words * (_BODY_BYTES // len(words) + 1))[: _BODY_BYTES - 1000].decode(errors="ignore"))
    with context.serve() as server:
        post(server.target, _PATH, _chat("warm up"))
        quiet, _ = polled(server.target, lambda: time.sleep(_QUIET_S))
        answers: list[Any] = []

        def arrive(bodies: list[bytes]) -> None:
            threads = [
                threading.Thread(target=lambda body=body: answers.append(post(server.target, _PATH, body)))
                for body in bodies
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        phases: Result = {}
        for name, with_prompts, with_huge in _PHASES:
            waits: list[float] = []
            seconds: list[float] = []
            for number in range(_ROUNDS):
                bodies = (
                    [_chat(f"{name} {number} {k} {text}") for k, text in enumerate(prompts)] if with_prompts else []
                )
                bodies += [huge] if with_huge else []
                times, took = polled(server.target, lambda bodies=bodies: arrive(bodies))
                waits += times
                seconds.append(round(took, 2))
            figures = msgspec.to_builtins(percentiles(waits))
            phases[f"/health during {name}"] = figures | {"asked": len(waits), "rounds took, s": seconds}
    return {
        "prompt tokens": tokens,
        "huge body, bytes": len(huge),
        "answers by status": dict(Counter(str(status) for status, _ in answers)),
        "slowest answer, s": max(took for _, took in answers),
        "/health alone": msgspec.to_builtins(percentiles(quiet)),
        **phases,
    }


def _chat(text: str) -> bytes:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return json.dumps(body).encode()


def post(target: Target, path: str, body: bytes) -> tuple[int, float]:
    """Return a request's status, and how long it took."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection(target.host, target.port, timeout=300)
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, round(time.perf_counter() - start, 2)


def polled(target: Target, work: Any, *, from_due: bool = True) -> tuple[list[float], float]:
    """Return how long /health took each time while `work` ran, and how long that was.

    Parameters
    ----------
    target : Target
        The server.
    work : callable
        What runs meanwhile.
    from_due : bool
        Each time counts from when the request was due: a slow answer must not hide those that would have waited behind
        it. Otherwise from when it was sent: the longest time that a single one took.
    """
    ours, theirs = multiprocessing.Pipe()
    # A process of its own: nothing that happens here must look like the server's delay.
    poller = multiprocessing.get_context("spawn").Process(
        target=_poll, args=(target.host, target.port, theirs, from_due)
    )
    poller.start()
    ours.recv()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    ours.send(None)
    times: list[float] = ours.recv()
    poller.join()
    return times, seconds


def _poll(host: str, port: int, pipe: Connection, from_due: bool) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    times: list[float] = []
    pipe.send(None)
    due = time.perf_counter()
    while not pipe.poll():
        if not from_due:
            due = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(time.perf_counter() - due)
        due += _EVERY_S
        time.sleep(max(0.0, due - time.perf_counter()))
    pipe.send(times)
