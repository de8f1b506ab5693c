"""Clients that do not read cost the others nothing."""

from __future__ import annotations

import json
import resource
import socket
import time
from pathlib import Path

import pytest
from reference import MODEL, echo_text
from server import FACTOR, SIMULATED, STOP_S, Server, engine_args, eventually, workers

PROMPT = "once upon a time in a land far away"
# What one stalled client may hold in its worker: the connection's buffer, and what is merged behind it.
MOST_HELD = 512 * 1024


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _stalled(server: Server, n: int) -> list[socket.socket]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8000, "stream": True, "return_token_ids": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    clients = []
    for _ in range(n):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(STOP_S)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head + body)
        clients.append(client)
    return clients


@pytest.mark.parametrize(
    ("clients", "step_ms", "patience"),
    [pytest.param(40, 3, 4, id="40"), pytest.param(500, 40, 40, id="500", marks=pytest.mark.slow)],
)
def test_clients_that_do_not_read(clients: int, step_ms: int, patience: int) -> None:
    tokens = 200
    options = [*SIMULATED, *engine_args(step_ms=step_ms), *workers(4), "--detokenizer-worker-num", "2"]
    options += ["--max-running-requests", "1024", "--slow-client-timeout", str(patience)]
    with Server(*options) as server:
        pids = [pid for name, pid in server.titles().items() if "tokenizer_worker" in name]
        assert len(pids) == 4
        before = sum(map(_resident, pids))
        stalled = _stalled(server, clients)
        server.wait_for_load(clients)
        most = before
        dropped_at = time.monotonic() + FACTOR * STOP_S * patience
        reads = 0
        # Somebody reads all the while, until the last of the others is dropped.
        while server.load()[0]:
            began = time.monotonic()
            stream = server.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=tokens, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == echo_text(PROMPT, tokens)
            assert time.monotonic() - began < FACTOR * (1 + tokens * step_ms / 1000)
            reads += 1
            most = max(most, sum(map(_resident, pids)))
            assert time.monotonic() < dropped_at
        assert reads > 1
        assert most - before < clients * MOST_HELD
        server.wait_until_idle()
        for client in stalled:
            client.close()
        eventually(
            lambda: sum(f["load"] for name, f in server.processes().items() if "tokenizer_worker" in name) <= 2,
            STOP_S,
            "nobody else is connected",
        )
