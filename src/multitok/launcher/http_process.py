"""An HTTP process: the one of single mode, or one of N workers. Here its parts are put together."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys

import uvloop

from multitok import __version__
from multitok.config import PortArgs, ServerArgs
from multitok.detokenizer.step import DetokenizerStep
from multitok.engines.base import EngineInfo
from multitok.http.server import HttpServer
from multitok.ipc.launcher_channel import LauncherChannel, LauncherGone
from multitok.ipc.router_socket import RouterSocket
from multitok.ipc.sender_wrapper import FrameSender
from multitok.launcher.load_board import LoadBoard
from multitok.launcher.shared_memory import read_from_shared_memory
from multitok.launcher.text_tools import TextTools
from multitok.messages.to_child import Drain, PartDied, PartStarted, Start, Stop, ToChild
from multitok.messages.to_launcher import Drained, Ready
from multitok.router.rank_dispatcher import RankDispatcher, RoundRobinPolicy
from multitok.tokenizer.manager import TokenizerManager
from multitok.tokenizer.model_files import ModelFiles
from multitok.tokenizer.worker import TokenizerWorker

_log = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 0.0005


def run_http_process(
    server_args: ServerArgs, port_args: PortArgs, files: ModelFiles, board: LoadBoard, tools: TextTools
) -> None:
    """Serve HTTP until the launcher says stop, or until a drain is done.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.
    port_args : PortArgs
        Where the parts meet, and which worker this is.
    files : ModelFiles
        The model.
    board : LoadBoard
        Of this start.
    tools : TextTools
        Loaded.

    Raises
    ------
    LauncherGone
        The launcher has exited.
    """
    channel = LauncherChannel(port_args.channel_fd)
    # What large bodies and prompts keep busy in threads hands the interpreter over to the loop at once.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvloop.run(_serve(server_args, port_args, files, board, channel, tools))


class _Orders:
    """What the launcher says, for a coroutine to wait for."""

    def __init__(self, channel: LauncherChannel) -> None:
        self._channel = channel
        self._launcher_gone = False
        self._queue: asyncio.Queue[ToChild | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(channel.fileno(), self._on_readable)
        loop.add_signal_handler(signal.SIGTERM, self._queue.put_nowait, None)
        # A handler that raises would raise inside whatever runs; the channel's end says the same.
        signal.signal(signal.SIGCONT, signal.SIG_IGN)

    def _on_readable(self) -> None:
        try:
            for message in self._channel.receive():
                self._queue.put_nowait(message)
        except LauncherGone:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._launcher_gone = True
            # Wakes whoever waits.
            self._queue.put_nowait(None)

    async def next(self) -> ToChild | None:
        """Return the next order; None is a SIGTERM to this process."""
        message = await self._queue.get()
        if self._launcher_gone:
            raise LauncherGone
        return message


class _Parts:
    """What is to be done here when another part has died or started.

    Parameters
    ----------
    manager : TokenizerManager
        Whose requests they have.
    dispatcher : RankDispatcher or None
        Of single mode. Where there is a router, it says what becomes of schedulers, in order with what it forwards.
    """

    def __init__(self, manager: TokenizerManager, dispatcher: RankDispatcher | None) -> None:
        self._results = manager.results
        self._dispatcher = dispatcher
        if dispatcher is not None:
            dispatcher.on_dropped = lambda _: manager.results.recovery.list_wanted()

    def follow(self, order: ToChild) -> None:
        """Follow an order of the launcher, if it is one about parts."""
        recovery, dispatcher = self._results.recovery, self._dispatcher
        match order:
            case PartDied(role="scheduler") if dispatcher is not None:
                dispatcher.rank_died(order.index, order.life)
                self._results.rank_died(order.index, order.life)
            case PartStarted(role="scheduler") if dispatcher is not None:
                dispatcher.rank_started(order.index, order.life)
                self._results.rank_started(order.index, order.life)
            case PartStarted(role="detokenizer"):
                recovery.detokenizer_started(order.index)
            case PartDied(role="router"):
                recovery.router_died()
            case PartStarted(role="router"):
                recovery.router_started()


async def _serve(
    server_args: ServerArgs,
    port_args: PortArgs,
    files: ModelFiles,
    board: LoadBoard,
    channel: LauncherChannel,
    tools: TextTools,
) -> None:
    orders = _Orders(channel)
    while not isinstance(order := await orders.next(), Start):
        if order is None or isinstance(order, Stop | Drain):
            return
    engine_infos = read_from_shared_memory(order.block, list[EngineInfo])
    dispatcher = None
    if port_args.router_ipc_name is None:
        policy = RoundRobinPolicy(len(port_args.scheduler_ipc_names))
        dispatcher = RankDispatcher(port_args, policy, order.lives)
    manager = _make_manager(server_args, port_args, files, board, tools, engine_infos, dispatcher)
    parts = _Parts(manager, dispatcher)
    server = HttpServer(
        server_args,
        manager,
        socket.socket(fileno=port_args.listen_fds["http"]),
        board.slot("tokenizer_worker", port_args.slot),
    )
    tools.backend.warm_up()
    manager.start()
    await server.start()
    gc.collect()
    gc.freeze()
    channel.send(Ready())
    while not (order is None or isinstance(order, Drain | Stop)):
        parts.follow(order)
        order = await orders.next()
    # At a stop clients are told, too: it is a drain without time.
    if isinstance(order, Stop):
        order = Drain(0.0)
    elif order is None:
        order = Drain(server_args.drain_timeout, rolling=True)
    drain = asyncio.ensure_future(server.drain(order.timeout, order.rolling))
    hurry = asyncio.ensure_future(_hurry_on_stop(orders, server, parts))
    await asyncio.wait([drain, hurry], return_when=asyncio.FIRST_COMPLETED)
    if hurry.done():
        await hurry
    channel.send(Drained(*drain.result()))
    hurry.cancel()
    manager.close()


async def _hurry_on_stop(orders: _Orders, server: HttpServer, parts: _Parts) -> None:
    while True:
        order = await orders.next()
        if isinstance(order, Stop):
            server.hurry()
        elif isinstance(order, Drain) and not order.rolling:
            server.leave_idle_connections()
        elif order is not None:
            parts.follow(order)


def _make_manager(
    server_args: ServerArgs,
    port_args: PortArgs,
    files: ModelFiles,
    board: LoadBoard,
    tools: TextTools,
    engine_infos: list[EngineInfo],
    dispatcher: RankDispatcher | None,
) -> TokenizerManager:
    manager_class: type[TokenizerManager] = TokenizerManager
    sender: FrameSender
    if dispatcher is not None:
        sender = dispatcher
    else:
        assert port_args.router_ipc_name is not None
        manager_class = TokenizerWorker
        sender = RouterSocket(port_args.endpoint(port_args.router_ipc_name))
    ranks = range(len(port_args.scheduler_ipc_names))
    running = min(info.max_running_requests for info in engine_infos)
    most = min(running, server_args.max_running_requests or running) + server_args.max_queued_requests

    def queues_are_full() -> bool:
        up = False
        for rank in ranks:
            figures = board.figures("scheduler", rank)
            if figures["life"]:
                if figures["load"] + figures["waiting"] < most:
                    return False
                up = True
        return up

    def describe() -> dict[str, object]:
        return {
            "version": __version__,
            "ready": board.is_ready(),
            "processes": _figures(server_args, port_args, board),
        }

    return manager_class(
        server_args,
        port_args,
        files,
        engine_infos[0],
        text_tools=tools,
        sender=sender,
        detokenize_step=None if port_args.detokenizer_ipc_names else DetokenizerStep(tools.decoder),
        is_ready=board.is_ready,
        queues_are_full=queues_are_full,
        describe=describe,
    )


def _figures(server_args: ServerArgs, port_args: PortArgs, board: LoadBoard) -> dict[str, dict[str, int]]:
    parts = [("scheduler", i) for i in range(len(port_args.scheduler_ipc_names))]
    parts += [("detokenizer", i) for i in range(len(port_args.detokenizer_ipc_names))]
    if port_args.router_ipc_name is not None:
        parts.append(("router", 0))
    # Those of the start, up or not, and those that were added.
    workers = {*range(1, server_args.tokenizer_worker_num + 1), *board.worker_indexes()}
    parts += [("tokenizer_worker", index) for index in sorted(workers)]
    return {f"{role}:{index}": board.figures(role, index) | {"pid": board.pid(role, index)} for role, index in parts}
