"""The sockets between SGLang's schedulers and this process, and what may come through them.

SGLang's tokenizer manager and its detokenizer are both here: a batch of new ids comes once per step, and nothing on the
way looks at it. What comes in is msgpack of a few of SGLang's own message classes. SGLang puts pickled objects into
some fields; none is ever opened: its measurements of times are left alone, any other makes the message one that is
refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections.abc import Iterator
from typing import Any, NamedTuple, Union

import msgspec
import zmq
from sglang.srt.managers import io_struct
from sglang.srt.utils.msgpack_utils import dec_hook, ext_hook
from sglang.srt.utils.network import get_zmq_socket

_log = logging.getLogger(__name__)

# The only values beside msgpack's own that the answers to our requests hold: arrays of ids.
_ARRAY = 1
_PICKLED = "SGLang sent a pickled object, which is never opened"
_TAKEN = (
    io_struct.BatchTokenIDOutput,
    io_struct.BatchEmbeddingOutput,
    io_struct.AbortReq,
    io_struct.ActiveRanksOutput,
    io_struct.FlushCacheReqOutput,
    io_struct.ProfileReqOutput,
    io_struct.LoRAUpdateOutput,
    io_struct.UpdateWeightFromDiskReqOutput,
    io_struct.GetInternalStateReqOutput,
    # Said on the way through, and of no use here.
    io_struct.HealthCheckOutput,
    io_struct.FreezeGCReq,
    io_struct.ConfigureLoggingReq,
    io_struct.PickleWrapper,
)
_SEND_TIMEOUT_MS = 10_000


class Refused(NamedTuple):
    """A message that was not taken: the ids of the requests that it was about, and why it was not."""

    rids: list[str]
    reason: str


class SGLangLink:
    """Binds what SGLang's schedulers connect to.

    Parameters
    ----------
    port_args : sglang.srt.server_args.PortArgs
        The addresses.

    Attributes
    ----------
    wakeup : select.epoll
        Readable while a message may be there, or `ring` was called.
    """

    def __init__(self, port_args: Any) -> None:
        self._context = zmq.Context(1)
        self._to_scheduler = get_zmq_socket(self._context, zmq.PUSH, port_args.scheduler_input_ipc_name, True)
        self._to_scheduler.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        # Answers to control messages come to the tokenizer manager's address, new ids to the detokenizer's.
        names = (port_args.tokenizer_ipc_name, port_args.detokenizer_ipc_name)
        self._receivers = [get_zmq_socket(self._context, zmq.PULL, name, True) for name in names]
        # Nothing is called over it; but the schedulers connect, and would try again for ever.
        self._rpc = get_zmq_socket(self._context, zmq.DEALER, port_args.rpc_ipc_name, True)
        self._decoder = msgspec.msgpack.Decoder(Union[_TAKEN], dec_hook=dec_hook, ext_hook=_ext_hook)  # noqa: UP007
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.wakeup = select.epoll()
        for descriptor in (self._bell, *(socket.getsockopt(zmq.FD) for socket in self._receivers)):
            self.wakeup.register(descriptor, select.EPOLLIN)

    def send(self, message: Any, *, wait: bool = False) -> None:
        """Send a message to the scheduler of rank 0, or to the data-parallel controller.

        Raises
        ------
        zmq.Again
            It doesn't take any more; only with `wait` it was given time to.
        """
        self._to_scheduler.send(io_struct.msgpack_encode(message), 0 if wait else zmq.NOBLOCK)

    def ring(self) -> None:
        """Make `wakeup` readable until the next `receive`."""
        os.eventfd_write(self._bell, 1)

    def receive(self) -> Iterator[Any]:
        """Yield every message that is there, decoded, or as `Refused`; never waits."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        for socket in self._receivers:
            # Until there is none: the descriptor of a socket says only once that there is something.
            while True:
                try:
                    frame = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                yield self._decoded(frame)

    def close(self) -> None:
        """Close all sockets; what was not sent is dropped."""
        self.wakeup.close()
        os.close(self._bell)
        self._context.destroy(linger=0)

    def _decoded(self, frame: bytes) -> Any:
        try:
            message = self._decoder.decode(frame)
        except Exception as error:
            # SGLang's hooks build arrays from what the frame says, so that damage may raise anything.
            return Refused(_rids_of(frame), f"a message of SGLang could not be decoded: {error}")
        if isinstance(message, io_struct.PickleWrapper):
            return Refused([], _PICKLED)
        if getattr(message, "customized_info", None) is not None:
            return Refused(list(message.rids or ()), _PICKLED)
        return message


def _ext_hook(code: int, data: memoryview) -> object:
    if code != _ARRAY:
        raise ValueError(f"extension type {code} is not taken")
    return ext_hook(code, data)


def _rids_of(frame: bytes) -> list[str]:
    """Return the requests that a message is about: the field after its tag, whatever else is wrong with it."""
    try:
        fields = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, RecursionError):
        return []
    rids = fields[1] if isinstance(fields, list) and len(fields) > 1 else None
    return [rid for rid in (rids if isinstance(rids, list) else [rids]) if isinstance(rid, str)]
