"""An HTTP process: the one of single mode, or one of N workers. Here its parts are put together."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop

from multitok import __version__
from multitok.config import PortArgs, ServerArgs
from multitok.detokenizer.step import DetokenizerStep
from multitok.engines.base import EngineInfo
from multitok.http.server import HttpServer
from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel, LauncherGone
from multitok.ipc.router_socket import RouterSocket
from multitok.ipc.sender_wrapper import FrameSender
from multitok.launcher.load_board import LoadBoard, LoadSlot
from multitok.launcher.process_figures import describe_processes
from multitok.launcher.routing import routing_policy
from multitok.launcher.shared_memory import read_from_shared_memory
from multitok.launcher.text_tools import TextTools
from multitok.messages.to_child import Control, ControlReqOutput, Drain, PartDied, PartStarted, Start, Stop, ToChild
from multitok.messages.to_launcher import Drained, Ready
from multitok.router.rank_dispatcher import RankDispatcher
from multitok.tokenizer.control_client import ControlClient
from multitok.tokenizer.manager import TokenizerManager
from multitok.tokenizer.model_settings import ModelSettings
from multitok.tokenizer.served_model import ServedModel
from multitok.tokenizer.worker import TokenizerWorker

_log = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 0.0005
_DETAILS_S = 1.0


def run_http_process(
    server_args: ServerArgs,
    port_args: PortArgs,
    settings: Sequence[ModelSettings],
    board: LoadBoard,
    tools: Sequence[TextTools],
) -> None:
    """Serve HTTP until the launcher says stop, or until a drain is done.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.
    port_args : PortArgs
        Where the parts meet, and which worker this is.
    settings : sequence of ModelSettings
        What is served.
    board : LoadBoard
        Of this start.
    tools : sequence of TextTools
        Of each model, loaded.

    Raises
    ------
    LauncherGone
        The launcher has exited.
    """
    channel = LauncherChannel(port_args.channel_fd)
    # What large bodies and prompts keep busy in threads hands the interpreter over to the loop at once.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvloop.run(_serve(server_args, port_args, settings, board, channel, tools))


class _Orders:
    """What the launcher says, for a coroutine to wait for; what operators say goes to `control` at once."""

    def __init__(self, channel: LauncherChannel, control: ControlClient) -> None:
        self._channel = channel
        self._control = control
        self._launcher_gone = False
        self._queue: asyncio.Queue[ToChild | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(channel.fileno(), self.look)
        loop.add_signal_handler(signal.SIGTERM, self._queue.put_nowait, None)
        # A handler that raises would raise inside whatever runs; the channel's end says the same.
        signal.signal(signal.SIGCONT, signal.SIG_IGN)

    def look(self) -> None:
        """Take what has come by now."""
        try:
            for message in self._channel.receive():
                if isinstance(message, Control | ControlReqOutput):
                    self._control.follow(message)
                else:
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
    settings: Sequence[ModelSettings],
    board: LoadBoard,
    channel: LauncherChannel,
    tools: Sequence[TextTools],
) -> None:
    control = ControlClient(Controlled(channel), channel.send)
    orders = _Orders(channel, control)
    while not isinstance(order := await orders.next(), Start):
        if order is None or isinstance(order, Stop | Drain):
            return
    engine_infos = read_from_shared_memory(order.block, list[EngineInfo])
    dispatcher = None
    if port_args.router_ipc_name is None:
        dispatcher = RankDispatcher(port_args, routing_policy(server_args, port_args, board), order.lives)
    models = [
        _served_model(index, settings[index], port_args.models[index].ranks, board, tools[index], engine_infos)
        for index in range(len(settings))
    ]
    manager = _make_manager(server_args, port_args, models, board, tools, dispatcher, control)
    parts = _Parts(manager, dispatcher)
    slot = board.slot("tokenizer_worker", port_args.slot)
    server = HttpServer(server_args, manager, socket.socket(fileno=port_args.listen_fds["http"]), slot)
    for its_tools in tools:
        its_tools.backend.warm_up()
    manager.start()
    _describe_itself(manager, slot)
    # No request is taken before what operators have set until now is known.
    orders.look()
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


def _served_model(
    index: int,
    settings: ModelSettings,
    ranks: Sequence[int],
    board: LoadBoard,
    tools: TextTools,
    engine_infos: Sequence[EngineInfo],
) -> ServedModel:
    args = settings.args
    running = min(engine_infos[rank].max_running_requests for rank in ranks)
    most = min(running, args.max_running_requests or running) + args.max_queued_requests

    def is_up() -> bool:
        return board.is_serving() and any(
            board.figures("scheduler", rank)["life"] and board.details("scheduler", rank).reachable for rank in ranks
        )

    def is_full() -> bool:
        up = False
        for rank in ranks:
            figures = board.figures("scheduler", rank)
            if figures["life"]:
                if figures["load"] + figures["waiting"] < most:
                    return False
                up = True
        return up

    return ServedModel(index, settings, ranks, engine_infos[ranks[0]], text_tools=tools, is_up=is_up, is_full=is_full)


def _make_manager(
    server_args: ServerArgs,
    port_args: PortArgs,
    models: Sequence[ServedModel],
    board: LoadBoard,
    tools: Sequence[TextTools],
    dispatcher: RankDispatcher | None,
    control: ControlClient,
) -> TokenizerManager:
    manager_class: type[TokenizerManager] = TokenizerManager
    sender: FrameSender
    if dispatcher is not None:
        sender = dispatcher
    else:
        assert port_args.router_ipc_name is not None
        manager_class = TokenizerWorker
        sender = RouterSocket(port_args.endpoint(port_args.router_ipc_name))
    step = None
    if not port_args.detokenizer_ipc_names:
        step = DetokenizerStep([tools[model].decoder for model in port_args.model_of_rank])

    def describe() -> dict[str, object]:
        return {
            "version": __version__,
            "processes": describe_processes(server_args, port_args, board),
        }

    return manager_class(
        server_args,
        port_args,
        models,
        sender=sender,
        detokenize_step=step,
        describe=describe,
        control=control,
    )


def _describe_itself(manager: TokenizerManager, slot: LoadSlot, due: float | None = None) -> None:
    """Put down once a second what this process has in hand, and how late its loop is."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    slot.publish_details(0.0 if due is None else now - due, *manager.results.in_flight())
    loop.call_at(now + _DETAILS_S, _describe_itself, manager, slot, now + _DETAILS_S)
