"""The load, a process of its own: clients that ask, wait or leave, and write down what became of each request.

Told on its standard input, one word a line, what to do: `pause` (finish what runs, close all connections), `go`, `end`.
It answers each with a line when that is done.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

import uvloop

from chaos.answer import Answer, compare
from chaos.asks import Ask, Asks
from chaos.connection import Connection
from chaos.ledger import Entry, LedgerWriter

# How many connections are kept, how many of those idle a while, and how long at most.
_KEPT, _IDLE, _IDLE_S = 0.6, 0.2, 0.5
_STAGGER_S = 1.0
_RETRY_S = 0.02
# Less than a client is asked to wait, so that a part that is up again has work at once.
_BACK_OFF_S = 0.2


class Load:
    """Some clients, each with one request at a time.

    Parameters
    ----------
    port : int
        The server's.
    asks : Asks
        What they ask.
    ledger : LedgerWriter
        Where they write.
    deadline : float
        Seconds after which a request without an end counts as silent.
    """

    def __init__(self, port: int, asks: Asks, ledger: LedgerWriter, deadline: float) -> None:
        self._port = port
        self._asks = asks
        self._ledger = ledger
        self._deadline = deadline
        self._random = random.Random(0)
        self._known: list[Ask] = []
        self._going = asyncio.Event()
        self._ending = False
        self._active = 0
        self._still = asyncio.Condition()

    # What it is told

    async def learn(self, count: int) -> None:
        """Ask what will be asked beforehand, undisturbed: an engine's own answers are the reference."""
        for _ in range(count):
            ask = self._asks.next()
            connection = await Connection.open(self._port, self._deadline)
            answer = Answer(len(ask.expected), ask.stream)
            await connection.ask(ask.request(keep=False), answer)
            if not answer.ended_well:
                raise SystemExit(f"the reference could not be learned: {answer.error or connection.loss}")
            ask.expected = answer.texts
            self._known.append(ask)

    def go(self) -> None:
        """Begin, or go on."""
        self._going.set()

    async def pause(self) -> None:
        """Let every client finish what it does, and close its connection."""
        self._going.clear()
        async with self._still:
            await self._still.wait_for(lambda: not self._active)

    async def run(self, clients: int) -> None:
        """Be so many clients until the end."""
        async with asyncio.TaskGroup() as group:
            for i in range(clients):
                group.create_task(self._be_client(_STAGGER_S * i / clients))

    def end(self) -> None:
        """Let the clients go, when they pause."""
        self._ending = True
        self._going.set()

    # A client

    async def _be_client(self, delay: float) -> None:
        await asyncio.sleep(delay)
        connection: Connection | None = None
        while not self._ending:
            if self._going.is_set():
                self._active += 1
                connection = await self._ask_next(connection)
                self._active -= 1
            else:
                if connection is not None:
                    connection.leave()
                    connection = None
                async with self._still:
                    self._still.notify_all()
                await self._going.wait()

    async def _ask_next(self, connection: Connection | None) -> Connection | None:
        """Ask one request; returns the connection if it is kept."""
        if connection is not None and self._random.random() < _IDLE:
            await asyncio.sleep(self._random.uniform(0, _IDLE_S))
        fresh = connection is None or connection.closed
        if connection is None or connection.closed:
            connection = await self._connect()
            if connection is None:
                return None
        ask = self._random.choice(self._known) if self._known else self._asks.next()
        keep = self._random.random() < _KEPT
        answer = Answer(len(ask.expected), ask.stream)
        totals = self._ledger.totals
        totals.sent += 1
        entry = Entry(number=totals.sent, kind=ask.kind, worker=connection.worker, fresh=fresh, begun=time.monotonic())
        stay = self._asks.stay()
        try:
            async with asyncio.timeout(self._deadline if stay is None else stay):
                await connection.ask(ask.request(keep), answer)
        except TimeoutError:
            entry.outcome = "silent" if stay is None else "left"
        self._note(entry, ask, answer, connection)
        if entry.outcome != "complete" or not keep:
            connection.leave()
        if entry.outcome == "refused":
            await asyncio.sleep(_BACK_OFF_S)
        return None if connection.closed else connection

    async def _connect(self) -> Connection | None:
        totals = self._ledger.totals
        begun = time.monotonic()
        try:
            connection = await Connection.open(self._port, self._deadline)
        except ConnectionRefusedError:
            totals.turned_away += 1
            await asyncio.sleep(_RETRY_S)
            return None
        except (OSError, TimeoutError):
            connection = None
        if connection is None or not connection.worker:
            totals.unconnected += 1
            totals.unconnected_at.append((begun, time.monotonic()))
            return None
        # A worker that is about to go answers once, and closes.
        return None if connection.closed else connection

    def _note(self, entry: Entry, ask: Ask, answer: Answer, connection: Connection) -> None:
        entry.ended = time.monotonic()
        entry.status, entry.retry_after = answer.status, answer.retry_after
        entry.first, entry.last = answer.first, answer.last
        entry.pause, entry.pause_at = answer.pause, answer.pause_at
        entry.message = answer.error or ""
        if answer.complete:
            if answer.status != 200:
                entry.outcome = "refused"
            elif answer.error is not None:
                entry.outcome = "error"
            else:
                entry.outcome = "complete"
        elif entry.outcome != "left" and connection.closed:
            entry.outcome, entry.message = "broken", connection.loss
        whole = entry.outcome == "complete"
        entry.text, entry.detail = compare(answer.texts, ask.expected, whole)
        if whole and entry.text == "right" and not answer.ended_well:
            entry.text, entry.detail = "wrong", f"ends: {answer.finishes}, [DONE] {answer.done} time(s)"
        elif whole and answer.tokens != ask.tokens:
            entry.text, entry.detail = "wrong", f"{answer.tokens} tokens were counted, {ask.tokens} asked for"
        entry.ends = answer.excess_ends + connection.stray
        self._ledger.add(entry)


async def _lead(load: Load, clients: int, learn: int) -> None:
    """Do what the standard input says."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    if learn:
        await load.learn(learn)
    running = asyncio.ensure_future(load.run(clients))
    # One that fails, by a fault of the load's own, ends everything.
    running.add_done_callback(lambda _: reader.feed_eof())
    _answer("ready")
    while word := (await reader.readline()).decode().strip():
        if word == "go":
            load.go()
        else:
            await load.pause()
        if word == "end":
            load.end()
            break
        _answer(word)
    await running


def _answer(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def main() -> int:
    """Be a load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--longest", type=int, required=True, help="most tokens of an answer")
    parser.add_argument("--deadline", type=float, required=True, help="seconds until a request counts as lost")
    parser.add_argument("--learn", type=int, default=0, help="requests to ask beforehand, for their answers")
    options = parser.parse_args()
    ledger = LedgerWriter(options.ledger)

    async def run() -> None:
        load = Load(options.port, Asks(options.seed, options.longest), ledger, options.deadline)
        await _lead(load, options.clients, options.learn)

    uvloop.run(run())
    ledger.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
