"""Carries out a plan on a running server, and measures how long it takes to recover."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from processes import pids_in
from server import Server

from chaos.observe import Part, Watch, owner_address, parts_of
from chaos.plan import SIGNALS, Act, Blow

_POLL_S = 0.01
# Far beyond what is promised: it is measured, and judged later.
_PATIENCE_S = 60.0
_LOAD_PATIENCE_S = 5.0
_ORDERS = {"hup": signal.SIGHUP, "ttin": signal.SIGTTIN, "ttou": signal.SIGTTOU}
_MOST_ADDED = 2
# Within this time of a SIGHUP something dies.
_ROLL_S = 0.3
_T = TypeVar("_T")


class Event(msgspec.Struct, kw_only=True):
    """Something that was done to the server; times are of `time.monotonic`.

    Attributes
    ----------
    kind : str
        Role and signal, with the act's name in front unless it was a plain kill; or the launcher's signal.
    name, address : str
        Process, as in its title, and an HTTP worker's address.
    at : float
        When.
    detected : float or None
        When the launcher had collected it.
    recovered : float or None
        When the replacement was ready.
    successor : str
        The replacement's address, of an HTTP worker.
    """

    kind: str
    name: str = ""
    address: str = ""
    at: float
    detected: float | None = None
    recovered: float | None = None
    successor: str = ""

    @property
    def role(self) -> str:
        """The role that was hit; empty for an order to the launcher."""
        return self.name.partition(":")[0]

    @property
    def over(self) -> float:
        """When it was over, at the latest."""
        return self.recovered or self.at + _PATIENCE_S


class ServerGone(Exception):
    """The server has ended, or does not recover."""


class Killer:
    """Does what the plan says while enough requests run.

    Parameters
    ----------
    server : Server
        A running one.
    enough : int
        Requests in the engines before a kill, if they come in time.
    workers : int
        HTTP workers that it began with.

    Attributes
    ----------
    events : list of Event
        What was done.
    """

    def __init__(self, server: Server, enough: int, workers: int) -> None:
        self._server = server
        self._enough = enough
        self._workers = workers
        self._added = 0
        self._watch = Watch(server.port)
        self.events: list[Event] = []

    def run(self, acts: Iterator[Act], until: float) -> None:
        """Carry out acts until a time, then restore the number of workers.

        Raises
        ------
        ServerGone
            There is nothing to go on with.
        """
        for act in acts:
            if time.monotonic() + act.pause > until:
                break
            time.sleep(act.pause)
            self._wait_for_load()
            self._carry_out(act)
        while self._added:
            self._order("ttou" if self._added > 0 else "ttin")

    def kill_each_once(self, roles: Sequence[str]) -> None:
        """Kill every process of some roles by SIGKILL, so that all connections are there that a recovery opens."""
        for role in roles:
            for part in [part for part in self._parts_in_service() if part.role == role]:
                self._wait_for_load()
                self._strike(Act("kill", [Blow(role, 0.0, "KILL")], 0.0), [part])

    def _carry_out(self, act: Act) -> None:
        match act.what:
            case "kill" | "pair":
                self._strike(act)
            case "again":
                first = len(self.events)
                for part in self._strike(act, wait=False):
                    self._strike(act, [self._successor(part)])
                for event in self.events[first:]:
                    event.recovered = self.events[-1].recovered
            case "roll":
                finish = self._begin("hup")
                time.sleep(act.blows[0].which * _ROLL_S)
                self._strike(act)
                finish()
            case "ttin" | "ttou" if self._workers == 1:
                # Without a router there is one worker, and no more.
                self._order("hup")
            case "ttin" if self._added >= _MOST_ADDED:
                self._order("ttou")
            case "ttou" if self._workers + self._added <= 1:
                self._order("ttin")
            case order:
                self._order(order)

    # Kills

    def _strike(self, act: Act, victims: list[Part] | None = None, wait: bool = True) -> list[Part]:
        """Kill processes at once; then wait until each has been replaced, or at least missed."""
        # Counted before anybody is chosen: in a rolling restart a successor may be ready a moment later.
        line = self._server.log.count("\n")
        struck = victims if victims is not None else self._choose(act.blows)
        kind = "" if act.what == "kill" else f"{act.what}: "
        addresses = [owner_address(part.pid) for part in struck]
        events: list[Event] = []
        for part, address, blow in zip(struck, addresses, act.blows, strict=False):
            name = f"{kind}{part.role} {blow.signal}"
            events.append(Event(kind=name, name=part.name, address=address, at=time.monotonic()))
            os.kill(part.pid, SIGNALS[blow.signal])
        self.events += events

        def follow(event: Event, part: Part) -> None:
            self._until(lambda: not Path(f"/proc/{part.pid}").exists(), f"{part.name} is missed")
            event.detected = time.monotonic()
            if wait:
                ready = rf" {part.name} \(pid (?!{part.pid}\))\d+\) is ready, life (\d+)"
                life = self._server.wait_for_line(ready, _PATIENCE_S, begin=line)[1]
                event.recovered = time.monotonic()
                if part.role == "tokenizer_worker":
                    event.successor = f"w{part.name.partition(':')[2]}.{life}"

        # Each is followed by a thread of its own: who is missed first is not known.
        with ThreadPoolExecutor() as threads:
            list(threads.map(follow, events, struck))
        return struck

    def _choose(self, blows: list[Blow]) -> list[Part]:
        parts = self._parts_in_service()
        struck: list[Part] = []
        for blow in blows:
            of_role = [part for part in parts if part.role == blow.role and part not in struck]
            if of_role:
                struck.append(of_role[int(blow.which * len(of_role))])
        return struck

    def _successor(self, dead: Part) -> Part:
        def found() -> list[Part]:
            others = parts_of(self._server.directory)
            return [part for part in others if part.name == dead.name and part.pid != dead.pid]

        return self._until(found, f"{dead.name} is started anew")[0]

    # Orders to the launcher

    def _order(self, what: str) -> None:
        self._begin(what)()

    def _begin(self, what: str) -> Callable[[], None]:
        """Send a signal to the launcher; what is returned waits until that is done which it asks for."""
        before = self._workers_up()
        event = Event(kind=f"SIG{what.upper()}", at=time.monotonic())
        event.detected = event.at
        self.events.append(event)
        self._server.send_signal(_ORDERS[what])
        step = {"hup": 0, "ttin": 1, "ttou": -1}[what]

        def is_done() -> bool:
            now = self._workers_up()
            return len(now) == len(before) + step and not (what == "hup" and now & before)

        def finish() -> None:
            self._until(is_done, f"{event.kind} is done")
            self._added += step
            event.recovered = time.monotonic()

        return finish

    def _workers_up(self) -> set[tuple[str, int]]:
        """Name and life of each HTTP worker that is up."""
        up = {(name, life) for name, life in self._lives().items() if name.startswith("tokenizer_worker") and life}
        return up

    # What is known

    def _parts_in_service(self) -> list[Part]:
        """Return the children but for those that drain, and are replaced already."""
        figures = self._until(self._watch.figures, "/server_info answers")
        pids = {each["pid"] for name, each in figures.items() if name.startswith("tokenizer_worker") and each["life"]}
        return [p for p in parts_of(self._server.directory) if p.role != "tokenizer_worker" or p.pid in pids]

    def _lives(self) -> dict[str, int]:
        figures = self._until(self._watch.figures, "/server_info answers")
        return {name: each["life"] for name, each in figures.items()}

    def _wait_for_load(self) -> None:
        deadline = time.monotonic() + _LOAD_PATIENCE_S
        while time.monotonic() < deadline:
            figures = self._watch.figures() or {}
            if sum(each["load"] for name, each in figures.items() if name.startswith("scheduler")) >= self._enough:
                return
            time.sleep(_POLL_S)

    def _until(self, condition: Callable[[], _T | None], what: str) -> _T:
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := condition()):
            if not pids_in(self._server.directory) or time.monotonic() > deadline:
                raise ServerGone(f"it does not come to pass that {what}")
            time.sleep(_POLL_S)
        return found

    def close(self) -> None:
        """Close the connection to the server."""
        self._watch.close()
