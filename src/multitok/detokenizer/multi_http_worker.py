"""The detokenizer's fan-out to several owners; everything else is `DetokenizerManager`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from multitok.ipc.socket_mapping import SocketMapping
from multitok.messages.base import BaseBatchReq, BaseReq
from multitok.messages.split import split_by_owner


class _Host(Protocol):
    socket_mapping: SocketMapping

    def outputs(self) -> Iterator[BaseReq | BaseBatchReq]: ...
    def fan_out(self, output: BaseReq | BaseBatchReq) -> None: ...
    def maybe_clear_socket_mapping(self) -> None: ...


class MultiHttpWorkerDetokenizerMixin:
    """Sends each owner its rows of a step, in one message."""

    def multi_http_worker_event_loop(self: _Host) -> None:
        """Serve several HTTP workers until told to stop."""
        try:
            for output in self.outputs():
                self.fan_out(output)
        finally:
            self.maybe_clear_socket_mapping()

    def fan_out(self: _Host, output: BaseReq | BaseBatchReq) -> None:
        """Send an output to its owner, or each row of it to its own."""
        if isinstance(output, BaseReq):
            self.socket_mapping.send_output(output.http_worker_ipc, output)
            return
        for owner, rows in split_by_owner(output):
            self.socket_mapping.send_output(owner, rows)

    def maybe_clear_socket_mapping(self: _Host) -> None:
        """Close the sockets to the owners, where any were opened."""
        if len(self.socket_mapping):
            self.socket_mapping.clear_all_sockets()
