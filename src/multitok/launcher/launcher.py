"""The launcher: the parent of all parts."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable

import msgspec

from multitok import __version__
from multitok.config import PortArgs, ServerArgs
from multitok.engines.base import EngineInfo
from multitok.launcher.child_process import ChildProcess, make_channel, part_name
from multitok.launcher.listen import bind_http, listen_http, listen_unix
from multitok.launcher.load_board import LoadBoard
from multitok.launcher.parent_death import adopt_orphans
from multitok.launcher.runtime_dir import RuntimeDir, remove_abandoned
from multitok.launcher.shared_memory import SharedBlock, block_name, write_to_shared_memory
from multitok.messages.numbers import owner_address
from multitok.messages.protocol import protocol_hash
from multitok.messages.to_child import Drain, Fork, OwnerDied, OwnerStarted, Start, Stop, ToChild
from multitok.messages.to_launcher import Drained, Failed, Forked, Hello, Ready, ToLauncher
from multitok.tokenizer.model_files import ModelFiles

_log = logging.getLogger(__name__)

WORKER = "tokenizer_worker"
SCHEDULER = "scheduler"
FORK_SERVER = "fork_server"
# Seconds that a part gets to exit after Stop; an engine finishes its step in them.
_STOP_TIMEOUT_S = 15.0
# A worker that dies this often within this many seconds won't get better by trying again.
_CRASH_LIMIT, _CRASH_WINDOW_S = 5, 10.0


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


class Launcher:
    """Creates what the parts share, starts them, waits until they are ready, supervises, drains and cleans up.

    It owns the HTTP socket, the unix sockets of all fixed addresses, the shared blocks and the runtime directory. Each
    child has a channel: hello, ready and failure come from it, deaths and orders go to it. One loop over channels,
    process descriptors and signals; no threads, no ZeroMQ.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.
    files : ModelFiles
        The model.
    """

    def __init__(self, server_args: ServerArgs, files: ModelFiles) -> None:
        self._args = server_args
        self._files = files
        self._children: dict[tuple[str, int], ChildProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._signals, self._signal_writer = socket.socketpair()
        self._received: list[signal.Signals] = []
        # Workers that the fork server has not made yet: life, and both ends of the channel.
        self._forking: dict[int, tuple[int, socket.socket, socket.socket]] = {}
        self._engine_infos: dict[int, EngineInfo] = {}
        self._info_block: SharedBlock | None = None
        self._blocks: list[SharedBlock] = []
        self._deaths: list[float] = []
        self._finished = self._cut = 0
        self._was_ready = self._stopping = self._draining = False
        self._status = 0

    # Life

    def run(self) -> int:
        """Serve until told to stop; returns the exit status."""
        self._watch_signals()
        adopt_orphans()
        remove_abandoned()
        self._runtime_dir = RuntimeDir.create()
        try:
            self._open_sockets()
            self._share_state()
            self.start_children()
            try:
                self.wait_until_ready()
            except StartError as error:
                if self._received:
                    _log.info("%s: stopped while starting", self._received[0].name)
                else:
                    _log.error("%s", error)
                    self._status = error.status
                # One that is loading hears nothing until it is done, and has nothing to lose.
                for child in self._late():
                    child.kill()
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
            self._clean_up()

    def start_children(self) -> None:
        """Start every part, all at once; they wait for each other where they need to."""
        self._started_at = time.monotonic()
        for rank, address in enumerate(self._ports.scheduler_ipc_names):
            self._start(SCHEDULER, rank, 1, [address])
        for index, address in enumerate(self._ports.detokenizer_ipc_names):
            self._start("detokenizer", index, 1, [address])
        if self._ports.router_ipc_name is not None and self._ports.control_ipc_name is not None:
            self._start("router", 0, 1, [self._ports.router_ipc_name, self._ports.control_ipc_name])
        self._start(FORK_SERVER, 0, 1, [])
        for index in range(1, self._args.tokenizer_worker_num + 1):
            self._fork_worker(index, 1)

    def wait_until_ready(self) -> None:
        """Wait until all parts have said that they are ready.

        Raises
        ------
        StartError
            One can't start, or takes too long, or a signal came.
        """
        deadline = self._started_at + self._args.start_timeout
        while self._forking or not all(child.ready for child in self._children.values()):
            self._turn(deadline - time.monotonic())
            if self._received:
                raise StartError("stopped while starting")
            if self._stopping:
                raise StartError(self._failure, self._status)
            if time.monotonic() > deadline:
                late = ", ".join([part_name(WORKER, i) for i in self._forking] + [c.name for c in self._late()])
                raise StartError(f"not ready after {self._args.start_timeout:g} s: {late}")
        self._board.set_ready(True)
        self._was_ready = True
        host, port = self._http_socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        _log.info(
            "multitok %s is ready after %.1f s: %s://%s:%d, model %s, %d HTTP worker(s), %d detokenizer(s), "
            "%d rank(s)%s",
            __version__,
            time.monotonic() - self._started_at,
            "http" if self._args.ssl_certfile is None else "https",
            shown,
            port,
            self._args.served_model_name or self._files.name,
            self._args.tokenizer_worker_num,
            self._args.detokenizer_worker_num,
            self._args.data_parallel_size,
            ", SIMULATED engine: no model runs" if self._engine_infos[0].simulated else "",
        )

    def supervise(self) -> None:
        """Keep the HTTP workers alive, until a signal or the death of another part."""
        while not self._received and not self._stopping:
            self._turn(None)

    def drain(self) -> None:
        """Let the HTTP workers finish what runs, then stop the rest; a second signal ends everything at once."""
        self._board.set_ready(False)
        if self._stopping:
            return self._stop_at_once()
        _log.info("%s: draining, at most %g s", self._received[0].name, self._args.drain_timeout)
        self._stopping = self._draining = True
        self._http_socket.close()
        for child in self._workers():
            child.send(Drain(self._args.drain_timeout))
        # A worker ends by itself at its limit; one that doesn't is stopped soon after.
        self._wait_for_exit(
            self._workers,
            self._args.drain_timeout + _STOP_TIMEOUT_S,
            lambda: len(self._received) > 1 or self._status != 0,
        )
        self._draining = False
        self._stop_at_once()
        _log.info("stopped: %d request(s) finished while draining, %d cut", self._finished, self._cut)

    def _stop_at_once(self) -> None:
        """End all parts in order: owners first, so that nobody waits for an answer that can't come."""
        self._stopping = True
        for child in self._workers():
            child.send(Stop())
        self._wait_for_exit(self._workers, _STOP_TIMEOUT_S)
        for child in self._children.values():
            child.send(Stop())
        self._wait_for_exit(lambda: list(self._children.values()), _STOP_TIMEOUT_S)

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

    def _clean_up(self) -> None:
        for block in self._blocks:
            block.remove()
        self._runtime_dir.remove()

    # What the parts share

    def _open_sockets(self) -> None:
        args = self._args
        try:
            self._http_socket = bind_http(args.host, args.port)
        except OSError as error:
            raise OSError(f"can't listen on {args.host} port {args.port}: {error.strerror}") from error
        multi = args.multi
        self._ports = PortArgs(
            runtime_dir=self._runtime_dir.path,
            start_token=secrets.token_bytes(8),
            tokenizer_file=self._files.tokenizer_file,
            vocab_size=self._files.vocab_size,
            router_ipc_name="router" if multi else None,
            control_ipc_name="control" if multi else None,
            scheduler_ipc_names=[f"s{rank}" for rank in range(args.data_parallel_size)],
            detokenizer_ipc_names=[f"d{index}" for index in range(args.detokenizer_worker_num)],
        )
        fixed = [*self._ports.scheduler_ipc_names, *self._ports.detokenizer_ipc_names]
        if self._ports.router_ipc_name is not None and self._ports.control_ipc_name is not None:
            fixed += [self._ports.router_ipc_name, self._ports.control_ipc_name]
        self._sockets = {a: listen_unix(os.path.join(self._ports.runtime_dir, a)) for a in fixed}
        self._sockets["http"] = self._http_socket

    def _share_state(self) -> None:
        args = self._args
        nonce = self._runtime_dir.nonce
        sizes = (args.data_parallel_size, args.detokenizer_worker_num, args.tokenizer_worker_num)
        self._blocks = [
            write_to_shared_memory(args, block_name(nonce, "server_args")),
            write_to_shared_memory(self._ports, block_name(nonce, "port_args")),
            write_to_shared_memory(self._files, block_name(nonce, "model_files")),
            LoadBoard.create(block_name(nonce, "board"), *sizes),
        ]
        self._child_blocks = [block.name for block in self._blocks]
        self._board = LoadBoard(self._blocks[-1].name, *sizes)

    # Children

    def _workers(self) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.role == WORKER]

    def _late(self) -> list[ChildProcess]:
        return [child for child in self._children.values() if not child.ready]

    def _start(self, role: str, index: int, life: int, addresses: list[str]) -> None:
        sockets = {address: self._sockets[address] for address in addresses}
        self._watch(ChildProcess.spawn(role, index, life, self._child_blocks, sockets))

    def _watch(self, child: ChildProcess) -> None:
        self._children[child.role, child.index] = child
        self._selector.register(child.channel, selectors.EVENT_READ, lambda: self._hear(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._bury(child))
        _log.debug("started %s, life %d, pid %d", child.name, child.life, child.pid)

    def _fork_worker(self, index: int, life: int) -> None:
        """Have the fork server make a worker, now or when it is ready."""
        ours, theirs = make_channel()
        self._forking[index] = (life, ours, theirs)
        fork_server = self._children.get((FORK_SERVER, 0))
        if fork_server is not None and fork_server.ready:
            fork_server.send(Fork(index, life), [theirs.fileno(), self._http_socket.fileno()])

    def _forget_forks(self) -> None:
        """Ask anew for the workers that a dead fork server may or may not have made.

        One that it has made sees its channel close, and exits; the next has a life, and so an address, of its own.
        """
        forking, self._forking = self._forking, {}
        for index, (life, ours, theirs) in forking.items():
            ours.close()
            theirs.close()
            self._fork_worker(index, life + 1)

    def _reap_strays(self) -> None:
        """Collect adopted children that this process knows nothing of."""
        known = {child.pid for child in self._children.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in known:
                    return
                os.waitpid(ended.si_pid, 0)

    def _worker_forked(self, message: Forked) -> None:
        _, ours, theirs = self._forking.pop(message.index)
        theirs.close()
        child = ChildProcess(WORKER, message.index, message.life, message.pid, ours)
        self._watch(child)
        if self._info_block is not None:
            child.send(Start(self._info_block.name))
        if self._stopping:
            child.send(Stop())

    def _turn(self, timeout: float | None) -> None:
        """Handle what has happened, or wait for something to happen."""
        for key, _ in self._selector.select(None if timeout is None else max(0.0, timeout)):
            key.data()

    def _hear(self, child: ChildProcess) -> None:
        if self._children.get((child.role, child.index)) is not child:
            return  # buried in this very turn
        messages = child.receive()
        if not messages:
            # It has closed its end, or is about to be reaped.
            self._unwatch(child.channel)
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
                child.ready = True
                self._board.set_life(child.role, child.index, child.life)
                if child.role == SCHEDULER and message.info is not None:
                    self._engine_infos[child.index] = msgspec.msgpack.decode(message.info, type=EngineInfo)
                    if len(self._engine_infos) == self._args.data_parallel_size:
                        self._start_workers()
                elif child.role == FORK_SERVER:
                    for index, (life, _, theirs) in self._forking.items():
                        child.send(Fork(index, life), [theirs.fileno(), self._http_socket.fileno()])
                elif child.role == WORKER:
                    self._announce(OwnerStarted(owner_address(child.index, child.life)))
            case Failed():
                child.failure = (message.message, message.exit_status)
            case Forked():
                self._worker_forked(message)
            case Drained():
                self._finished += message.finished
                self._cut += message.cut

    def _start_workers(self) -> None:
        infos = [self._engine_infos[rank] for rank in sorted(self._engine_infos)]
        self._info_block = write_to_shared_memory(infos, block_name(self._runtime_dir.nonce, "scheduler_info"))
        self._blocks.append(self._info_block)
        listen_http(self._http_socket)
        for child in self._workers():
            child.send(Start(self._info_block.name))

    def _announce(self, message: ToChild) -> None:
        for child in self._children.values():
            if child.role != WORKER:
                child.send(message)

    def _bury(self, child: ChildProcess) -> None:
        """A child has ended: read its last words, and replace it or end the server."""
        for message in child.receive():
            self._follow(child, message)
        self._unwatch(child.channel)
        self._unwatch(child.pidfd)
        ending = child.reap()
        self._reap_strays()
        del self._children[child.role, child.index]
        self._board.set_life(child.role, child.index, 0)
        if child.role == WORKER:
            self._announce(OwnerDied(owner_address(child.index, child.life)))
            self._remove_address(owner_address(child.index, child.life))
        if self._stopping:
            if self._draining and child.role not in (WORKER, FORK_SERVER):
                # It was not told to stop yet: what still runs can't be answered any more.
                _log.error("%s (pid %d) %s while draining", child.name, child.pid, ending)
                self._status = 1
            return
        if child.failure is not None:
            self._fail(f"{child.name}: {child.failure[0]}", child.failure[1])
        elif child.role in (WORKER, FORK_SERVER) and (child.ready or self._was_ready):
            self.keep_alive(child, ending)
        else:
            self._fail(f"{child.name} (pid {child.pid}) {ending}", 1)

    def keep_alive(self, dead: ChildProcess, ending: str) -> None:
        """Start the next life of an HTTP worker or of the fork server, unless they keep dying."""
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < _CRASH_WINDOW_S] + [now]
        if len(self._deaths) > _CRASH_LIMIT * self._args.tokenizer_worker_num:
            return self._fail(f"HTTP workers keep dying; the last, {dead.name}, {ending}", 1)
        _log.warning("%s (pid %d) %s; starting its life %d", dead.name, dead.pid, ending, dead.life + 1)
        if dead.role == WORKER:
            self._fork_worker(dead.index, dead.life + 1)
        else:
            self._forget_forks()
            self._start(FORK_SERVER, 0, dead.life + 1, [])

    def _remove_address(self, address: str) -> None:
        try:
            os.unlink(os.path.join(self._ports.runtime_dir, address))
        except FileNotFoundError:
            return

    def _fail(self, message: str, status: int) -> None:
        if not self._stopping:
            self._failure, self._status, self._stopping = message, status, True
            if all(child.ready for child in self._children.values()):
                _log.error("%s; stopping", message)

    def _unwatch(self, source: socket.socket | int) -> None:
        try:
            self._selector.unregister(source)
        except KeyError:
            return

    # Signals

    def _watch_signals(self) -> None:
        self._signals.setblocking(False)
        self._signal_writer.setblocking(False)
        signal.set_wakeup_fd(self._signal_writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: self._received.append(signal.Signals(received)))
        self._selector.register(self._signals, selectors.EVENT_READ, lambda: self._signals.recv(4096))
