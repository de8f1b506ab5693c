"""What the launcher makes before any child: sockets, shared blocks, the load board."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from itertools import count, islice

from multitok.config import ModelPorts, PortArgs, ServerArgs
from multitok.engines.base import EngineInfo
from multitok.launcher.listen import bind_http, listen_unix
from multitok.launcher.load_board import LoadBoard
from multitok.launcher.runtime_dir import RuntimeDir
from multitok.launcher.shared_memory import block_name, write_to_shared_memory
from multitok.tokenizer.model_settings import ModelSettings

_log = logging.getLogger(__name__)


class SharedState:
    """The HTTP socket, the unix sockets of all fixed addresses, and the blocks of one start.

    They stay with the launcher, so that a part's next life finds them as they were; `RuntimeDir.remove` removes them.

    Parameters
    ----------
    args : ServerArgs
        The user's options.
    models : sequence of ModelSettings
        What is served.
    runtime_dir : RuntimeDir
        Where the unix sockets are.

    Attributes
    ----------
    http_socket : socket
        Bound.
    ports : PortArgs
        Where the parts meet.
    board : LoadBoard
        The launcher's view of it.
    child_blocks : list of str
        Names of the blocks that each child reads.

    Raises
    ------
    OSError
        The port can't be had.
    """

    def __init__(self, args: ServerArgs, models: Sequence[ModelSettings], runtime_dir: RuntimeDir) -> None:
        try:
            self.http_socket = bind_http(args.host, args.port)
        except OSError as error:
            raise OSError(f"can't listen on {args.host} port {args.port}: {error.strerror}") from error
        host = self.http_socket.getsockname()[0]
        if not (_is_loopback(host) or args.api_key or args.api_key_file):
            _log.warning(
                "listening on %s, which others can reach, without --api-key: anybody there can use this server", host
            )
        numbers = count()
        ports = [
            ModelPorts(
                name=model.name,
                tokenizer_file=model.files.tokenizer_file,
                vocab_size=model.files.vocab_size,
                ranks=list(islice(numbers, model.args.data_parallel_size)),
            )
            for model in models
        ]
        ranks = next(numbers)
        self.ports = PortArgs(
            runtime_dir=runtime_dir.path,
            start_token=secrets.token_bytes(8),
            models=ports,
            router_ipc_name="router" if args.multi else None,
            control_ipc_name="control" if args.multi else None,
            scheduler_ipc_names=[f"s{rank}" for rank in range(ranks)],
            detokenizer_ipc_names=[f"d{index}" for index in range(args.detokenizer_worker_num)],
        )
        fixed = [*self.ports.scheduler_ipc_names, *self.ports.detokenizer_ipc_names, *self.router_addresses]
        self._sockets = {address: listen_unix(os.path.join(runtime_dir.path, address)) for address in fixed}
        self._nonce = runtime_dir.nonce
        sizes = (ranks, args.detokenizer_worker_num, args.tokenizer_worker_num)
        blocks = [
            write_to_shared_memory(args, block_name(self._nonce, "server_args")),
            write_to_shared_memory(self.ports, block_name(self._nonce, "port_args")),
            write_to_shared_memory(list(models), block_name(self._nonce, "models")),
            LoadBoard.create(block_name(self._nonce, "board"), *sizes),
        ]
        self.child_blocks = [block.name for block in blocks]
        self.board = LoadBoard(self.child_blocks[-1], *sizes)

    @property
    def router_addresses(self) -> list[str]:
        """The router's addresses; none where there is no router."""
        return [a for a in (self.ports.router_ipc_name, self.ports.control_ipc_name) if a is not None]

    def sockets(self, addresses: list[str]) -> dict[str, socket.socket]:
        """Return the listening sockets of fixed addresses."""
        return {address: self._sockets[address] for address in addresses}

    def share_engine_infos(self, infos: list[EngineInfo]) -> str:
        """Create the block with what each rank's engine is; returns its name."""
        return write_to_shared_memory(infos, block_name(self._nonce, "scheduler_info")).name


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
