"""The launcher's orders on a process's own address, so that its loop waits for one socket only.

A blocking receive on one ZeroMQ socket costs two system calls per message; polling it together with the channel costs
ten. The thread sleeps in the kernel until the launcher says something, which is rare, or a second has passed.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Sequence

from multitok.ipc.launcher_channel import LauncherChannel, LauncherGone
from multitok.ipc.sockets import connect_push
from multitok.messages.codec import encode_frame
from multitok.messages.to_child import LauncherExited, Ping, Stop, ToChild, ToItself

_BEAT_S = 1.0


def forward_orders(channel: LauncherChannel, endpoint: str, start_token: bytes) -> None:
    """Send whatever the launcher says, up to `Stop`, to an address of this process; at its end, `LauncherExited`.

    And a `Ping` every second, so that what goes round can say so.

    Parameters
    ----------
    channel : LauncherChannel
        To the launcher; nobody else receives from it from now on.
    endpoint : str
        The address.
    start_token : bytes
        Mark of this start.
    """

    def forward() -> None:
        with connect_push(endpoint) as socket:
            message: ToChild | ToItself = Ping(time.monotonic())
            socket.send(encode_frame(start_token, message))
            while not isinstance(message, Stop | LauncherExited):
                readable, _, _ = select.select([channel], [], [], _BEAT_S)
                messages: Sequence[ToChild | ToItself] = [Ping(time.monotonic())]
                try:
                    if readable:
                        messages = channel.receive()
                except LauncherGone:
                    messages = [LauncherExited()]
                for message in messages:
                    socket.send(encode_frame(start_token, message))
            # Closing would throw away what has not been sent.
            socket.linger = -1

    threading.Thread(target=forward, name="orders", daemon=True).start()
