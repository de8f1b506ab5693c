"""The launcher: the parent of all parts."""

from __future__ import annotations

import enum
import logging
import os
import selectors
import time
from collections.abc import Callable, Sequence

import msgspec

from multitok import __version__
from multitok.config import ServerArgs
from multitok.engines.base import EngineInfo
from multitok.http.files import check_files
from multitok.launcher.child_process import STOPPED, ChildProcess
from multitok.launcher.children import DETOKENIZER, FORK_SERVER, ROUTER, SCHEDULER, WORKER, Announcer, Children
from multitok.launcher.control_plane import LAUNCHER, ControlPlane
from multitok.launcher.hang_watch import CHECK_S, HangWatch
from multitok.launcher.http_workers import HttpWorkers
from multitok.launcher.listen import listen_http
from multitok.launcher.parent_death import adopt_orphans
from multitok.launcher.restart_policy import CRASH_LIMIT, RestartPolicy
from multitok.launcher.runtime_dir import RuntimeDir, remove_abandoned
from multitok.launcher.shared_state import SharedState
from multitok.launcher.signals import Signals
from multitok.launcher.timers import Timers
from multitok.launcher.worker_changes import WorkerChanges
from multitok.messages.protocol import protocol_hash
from multitok.messages.to_child import Drain, Start, Stop
from multitok.messages.to_launcher import (
    ControlReq,
    Drained,
    Failed,
    Forked,
    Hello,
    OperationAck,
    Ready,
    ToLauncher,
)
from multitok.tokenizer.model_settings import ModelSettings

_log = logging.getLogger(__name__)

# Seconds that a part gets to exit after Stop; an engine finishes its step in them.
_STOP_TIMEOUT_S = 15.0


class StartError(Exception):
    """The server can't start; the message is for the user.

    Parameters
    ----------
    message : str
        Why.
    status : int
        Exit status.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class _Phase(enum.Enum):
    STARTING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()


class Launcher:
    """Creates what the parts share, starts them, waits until they are ready, supervises, drains and cleans up.

    Each child has a channel: hello, ready and failure come from it, deaths and orders go to it. One loop over channels,
    process descriptors, signals and timers; no threads, no ZeroMQ. What it knows lies with `SharedState` (sockets,
    blocks), `Children` and `Announcer` (who lives, who is told), `HttpWorkers` and `WorkerChanges` (which workers there
    should be), `RestartPolicy` (when a part that has died begins its next life), `HangWatch` (who counts as dead) and
    `ControlPlane` (what operators have set).

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.
    models : sequence of ModelSettings
        What is to be served.
    """

    def __init__(self, server_args: ServerArgs, models: Sequence[ModelSettings]) -> None:
        self._args = server_args
        self._models = models
        self._selector = selectors.DefaultSelector()
        self._timers = Timers()
        self._signals = Signals()
        self._children = Children(self._selector, self._hear, self._bury)
        self._policy = RestartPolicy()
        self._engine_infos: dict[int, EngineInfo] = {}
        self._info_block: str | None = None
        self._finished = self._cut = 0
        self._phase = _Phase.STARTING
        # Why the server has to end, and with which exit status.
        self._failure: str | None = None
        self._status = 0

    # Life

    def run(self) -> int:
        """Serve until told to stop; returns the exit status."""
        self._signals.watch(self._selector)
        adopt_orphans()
        remove_abandoned()
        runtime_dir = RuntimeDir.create()
        try:
            self._shared = SharedState(self._args, self._models, runtime_dir)
            self.start_children(runtime_dir)
            try:
                self.wait_until_ready()
            except StartError as error:
                if self._signals.to_end:
                    _log.info("%s: stopped while starting", self._signals.to_end[0].name)
                else:
                    _log.error("%s", error)
                    self._status = error.status
                self._stop_at_once()
                return self._status
            self.supervise()
            self.drain()
            return self._status
        except OSError as error:
            _log.error("%s", error)
            self._stop_at_once()
            return 1
        finally:
            runtime_dir.remove()

    def start_children(self, runtime_dir: RuntimeDir) -> None:
        """Start every part, all at once; they wait for each other where they need to."""
        self._started_at = time.monotonic()
        ports = self._shared.ports
        self._board = self._shared.board
        self._announcer = Announcer(self._children, runtime_dir.path)
        self._hang_watch = HangWatch(self._board, self._args.start_timeout, self._started_at)
        resumes = any(model.args.resume_generation for model in self._models)
        self._control = ControlPlane(
            self._children, self._timers, self._board, self._args.log_level, resumes, ports.model_of_rank
        )
        self._board.set_life(LAUNCHER, 0, 1, pid=os.getpid())
        self._timers.call_later(CHECK_S, self._check)
        self._workers = HttpWorkers(
            self._args.tokenizer_worker_num,
            self._children,
            self._board,
            self._shared.http_socket,
            self._timers,
            drain_timeout=self._args.drain_timeout,
            exit_timeout=_STOP_TIMEOUT_S,
            on_made=self._brief_worker,
        )
        self._changes = WorkerChanges(self._workers, self._args.multi, lambda: check_files(self._args))
        for rank in range(len(ports.scheduler_ipc_names)):
            self._start(SCHEDULER, rank)
        for index in range(len(ports.detokenizer_ipc_names)):
            self._start(DETOKENIZER, index)
        if self._args.multi:
            self._start(ROUTER, 0)
        self._start(FORK_SERVER, 0)
        self._workers.make_all()

    def wait_until_ready(self) -> None:
        """Wait until all parts have said that they are ready.

        Raises
        ------
        StartError
            One can't start, or takes too long, or a signal came.
        """
        deadline = self._started_at + self._args.start_timeout
        while self._workers.ordered() or self._children.late():
            self._turn(deadline - time.monotonic())
            if self._signals.to_end:
                raise StartError("stopped while starting")
            if self._failure is not None:
                raise StartError(self._failure, self._status)
            if time.monotonic() > deadline:
                late = ", ".join(self._workers.ordered() + [child.name for child in self._children.late()])
                raise StartError(f"not ready after {self._args.start_timeout:g} s: {late}")
        self._enter(_Phase.SERVING)
        host, port = self._shared.http_socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        _log.info(
            "multitok %s (pid %d) is ready after %.1f s: %s://%s:%d, model %s, %d HTTP worker(s), %d detokenizer(s), "
            "%d rank(s)%s",
            __version__,
            os.getpid(),
            time.monotonic() - self._started_at,
            "http" if self._args.ssl_certfile is None else "https",
            shown,
            port,
            ", ".join(model.name for model in self._models),
            self._args.tokenizer_worker_num,
            self._args.detokenizer_worker_num,
            len(self._engine_infos),
            ", SIMULATED engine: no model runs" if any(e.simulated for e in self._engine_infos.values()) else "",
        )

    def supervise(self) -> None:
        """Keep all parts alive, until a signal to end or until one keeps dying."""
        while not self._signals.to_end and self._failure is None:
            for number in self._signals.take_changes():
                self._changes.ask(number)
            self._turn(None)

    def drain(self) -> None:
        """Let the HTTP workers finish what runs, then stop the rest; a second signal ends everything at once."""
        self._enter(_Phase.DRAINING)
        if self._failure is not None:
            return self._stop_at_once()
        _log.info("%s: draining, at most %g s", self._signals.to_end[0].name, self._args.drain_timeout)
        self._workers.close()
        self._shared.http_socket.close()
        for worker in self._children.of(WORKER):
            worker.draining = True
            worker.send(Drain(self._args.drain_timeout))
        # A worker ends by itself at its limit; one that doesn't is stopped soon after. What it waits for is kept alive.
        self._wait_for_exit(
            lambda: self._children.of(WORKER),
            self._args.drain_timeout + _STOP_TIMEOUT_S,
            lambda: len(self._signals.to_end) > 1 or self._failure is not None,
        )
        if len(self._signals.to_end) > 1:
            _log.info("%s: ending at once", self._signals.to_end[1].name)
        self._stop_at_once()
        _log.info("stopped: %d request(s) finished while draining, %d cut", self._finished, self._cut)

    def _stop_at_once(self) -> None:
        """End all parts in order: owners first, so that nobody waits for an answer that can't come."""
        self._phase = _Phase.STOPPING
        # One that is loading hears nothing until it is done, and has nothing to lose.
        for child in self._children.late():
            child.kill()
        for child in self._children.of(WORKER):
            child.send(Stop())
        self._wait_for_exit(lambda: self._children.of(WORKER), _STOP_TIMEOUT_S)
        for child in self._children.all():
            child.send(Stop())
        self._wait_for_exit(self._children.all, _STOP_TIMEOUT_S)

    def _wait_for_exit(
        self,
        whom: Callable[[], list[ChildProcess]],
        timeout: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        deadline = time.monotonic() + timeout
        while whom() and not interrupted():
            if time.monotonic() > deadline:
                for child in whom():
                    _log.error("%s (pid %d) does not exit; killed", child.name, child.pid)
                    child.kill()
                deadline += timeout
            self._turn(deadline - time.monotonic())

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._board.set_serving(phase is _Phase.SERVING)

    # Turns

    def _turn(self, timeout: float | None) -> None:
        """Handle what has happened, or wait for something to happen."""
        waits = [max(0.0, seconds) for seconds in (timeout, self._timers.seconds_left()) if seconds is not None]
        for key, _ in self._selector.select(min(waits, default=None)):
            key.data()
        self._timers.run_due()

    def _check(self) -> None:
        """Once a second: kill what hangs, and look after what could not be done at once."""
        self._timers.call_later(CHECK_S, self._check)
        children = self._children.all()
        for child, how in self._hang_watch.find_hung(children, time.monotonic()):
            # One that ends may be silent; one that is stopped will not end.
            if self._phase is not _Phase.STOPPING or how == STOPPED:
                _log.warning("%s (pid %d) %s; killed", child.name, child.pid, how)
                child.hung = how
                child.kill()
        for child in children:
            child.send_rest()
        if not self._workers.ordered():
            self._children.reap_strays()

    # Children

    def _start(self, role: str, index: int, life: int = 1) -> None:
        if self._phase is _Phase.STOPPING:
            return
        ports = self._shared.ports
        addresses = {
            SCHEDULER: ports.scheduler_ipc_names[index : index + 1],
            DETOKENIZER: ports.detokenizer_ipc_names[index : index + 1],
            ROUTER: self._shared.router_addresses,
            FORK_SERVER: [],
        }[role]
        blocks, sockets = self._shared.child_blocks, self._shared.sockets(addresses)
        briefing = [self._control.briefing, *self._announcer.briefing(role, index)]
        child = ChildProcess.spawn(role, index, life, blocks, sockets, briefing)
        self._children.watch(child)
        _log.debug("started %s, life %d, pid %d", child.name, child.life, child.pid)

    def _hear(self, child: ChildProcess) -> None:
        messages = child.receive()
        if not messages:
            # It has closed its end, or is about to be reaped.
            self._children.stop_listening(child)
        for message in messages:
            self._follow(child, message)

    def _follow(self, child: ChildProcess, message: ToLauncher) -> None:
        match message:
            case Hello():
                if message.protocol_hash != protocol_hash():
                    self._fail(
                        f"{child.name} is multitok {message.version} and speaks another protocol than the launcher's "
                        f"{__version__}; is an upgrade under way?",
                        1,
                    )
            case Ready():
                self._became_ready(child, message)
            case Failed():
                child.failure = (message.message, message.exit_status)
            case Forked():
                self._workers.made(message)
            case ControlReq():
                self._control.ask(child, message)
            case OperationAck():
                self._control.acknowledged(child, message)
            # One that was replaced before has finished its requests as any worker does.
            case Drained() if self._phase in (_Phase.DRAINING, _Phase.STOPPING):
                self._finished += message.finished
                self._cut += message.cut

    def _became_ready(self, child: ChildProcess, message: Ready) -> None:
        child.ready_at = time.monotonic()
        if not child.draining:
            self._board.set_life(child.role, child.slot, child.life, index=child.index, pid=child.pid)
        self._control.became_ready(child)
        if child.life > 1:
            _log.info("%s (pid %d) is ready, life %d", child.name, child.pid, child.life)
        self._announcer.became_ready(child)
        if child.role == SCHEDULER and message.info is not None:
            self._engine_infos[child.index] = msgspec.msgpack.decode(message.info, type=EngineInfo)
            if self._info_block is None and len(self._engine_infos) == len(self._shared.ports.scheduler_ipc_names):
                self._start_workers()
        elif child.role == FORK_SERVER:
            self._workers.fork_server_is_ready(child)
        elif child.role == WORKER and not child.draining:
            self._workers.became_ready(child)
            self._changes.became_ready(child.index)

    def _start_workers(self) -> None:
        infos = [self._engine_infos[rank] for rank in sorted(self._engine_infos)]
        self._info_block = self._shared.share_engine_infos(infos)
        listen_http(self._shared.http_socket)
        for worker in self._children.of(WORKER):
            self._send_start(worker)

    def _brief_worker(self, worker: ChildProcess) -> None:
        worker.send(self._control.briefing)
        self._send_start(worker)

    def _send_start(self, worker: ChildProcess) -> None:
        if self._info_block is not None:
            worker.send(Start(self._info_block, self._announcer.scheduler_lives))
            self._announcer.brief_worker(worker)

    # Deaths

    def _bury(self, child: ChildProcess) -> None:
        """A child has ended: read its last words, tell the others, and replace it or end the server."""
        for message in child.receive():
            self._follow(child, message)
        ending = self._children.reap(child)
        if child.failure is not None:
            ending += f": {child.failure[0]}"
        self._board.set_life(child.role, child.slot, 0)
        self._announcer.died(child)
        self._control.buried(child)
        if child.role == WORKER:
            self._workers.buried(child)
        if self._phase is _Phase.STARTING and not (child.role in (WORKER, FORK_SERVER) and child.ready):
            said = child.failure
            self._fail(
                f"{child.name}: {said[0]}" if said else f"{child.name} (pid {child.pid}) {ending}", _status(child)
            )
        elif self._is_needed(child):
            self.keep_alive(child, ending)

    def _is_needed(self, dead: ChildProcess) -> bool:
        """Whether a child that has ended is to be replaced."""
        if self._phase is _Phase.STOPPING:
            return False
        if dead.role == FORK_SERVER:
            return self._phase is not _Phase.DRAINING
        if dead.role != WORKER:
            return True
        workers, index = self._workers, dead.index
        missing = self._changes.is_awaited(index) or not workers.is_up(index)
        return not dead.draining and index in workers.wanted and missing and not workers.is_coming(index)

    def keep_alive(self, dead: ChildProcess, ending: str) -> None:
        """Start the next life of a part, now or after a while, unless it keeps dying."""
        ready_for = None if dead.ready_at is None else time.monotonic() - dead.ready_at
        delay = self._policy.delay_after_death(dead.part, ready_for, dead.was_killed_from_outside)
        died = f"{dead.name} (pid {dead.pid}) {ending}"
        if delay is None:
            reason = f"it has died {CRASH_LIMIT + 1} times in a row; the last time, {died}"
            if dead.role == WORKER and self._changes.can_do_without(dead.index):
                self._policy.forgive(dead.part)
                return self._changes.give_up(dead.index, reason)
            return self._fail(f"{dead.name} keeps dying: {reason}", _status(dead))
        when = f" in {delay:g} s" if delay else ""
        _log.warning("%s; starting its life %d%s", died, dead.life + 1, when)
        if dead.role == WORKER:
            self._workers.make_later(dead.index, delay)
            return
        if dead.role == FORK_SERVER:
            self._workers.fork_server_died()
        self._timers.call_later(delay, lambda: self._start(dead.role, dead.index, dead.life + 1))

    def _fail(self, message: str, status: int) -> None:
        if self._failure is None:
            self._failure, self._status = message, status
            if self._phase is not _Phase.STARTING:
                _log.error("%s; stopping", message)


def _status(dead: ChildProcess) -> int:
    return dead.failure[1] if dead.failure is not None else 1
