"""The fork server: loads what every HTTP worker needs once, then forks workers, in milliseconds and with shared memory.

A worker is the launcher's child, like every other part: it is forked twice, and the launcher, a subreaper, adopts it
when the process in between exits. So it is supervised, reaped and outlived like the others, and the fork server may
die without any worker noticing. Nothing here starts a thread or a ZeroMQ context before a fork.
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
from collections.abc import Callable

from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel
from multitok.messages.to_child import Control, Fork, Stop
from multitok.messages.to_launcher import Forked, Ready

_log = logging.getLogger(__name__)

# How long the loop waits at most before it says that it goes round.
_BEAT_S = 1.0

WorkerMain = Callable[[Fork, list[int]], int]


def run_fork_server(
    channel: LauncherChannel, controlled: Controlled, worker_main: WorkerMain, beat: Callable[[float], None]
) -> None:
    """Fork HTTP workers until the launcher says stop.

    Parameters
    ----------
    channel : LauncherChannel
        To the launcher.
    controlled : Controlled
        What operators have set.
    worker_main : callable
        Runs a worker in its process, with what to be and its descriptors; returns the exit status.
    beat : callable
        Called at least every second while the loop goes round, with the seconds that it was late.

    Raises
    ------
    LauncherGone
        The launcher has exited.
    """
    # A collection in a worker must not touch, and so copy, what was loaded here.
    gc.collect()
    gc.freeze()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        _log.error("%d threads run in the fork server; workers may hang", threads)
    beat(0.0)
    channel.send(Ready())
    with selectors.DefaultSelector() as selector:
        selector.register(channel.fileno(), selectors.EVENT_READ)
        while True:
            selector.select(_BEAT_S)
            beat(0.0)
            for message, fds in channel.receive_with_fds():
                if isinstance(message, Stop):
                    return
                if isinstance(message, Fork):
                    pid = _fork_adopted(channel, message, fds, worker_main)
                    channel.send(Forked(message.index, message.life, pid))
                if isinstance(message, Control):
                    controlled.follow(message)
                for fd in fds:
                    os.close(fd)


def _fork_adopted(channel: LauncherChannel, order: Fork, fds: list[int], worker_main: WorkerMain) -> int:
    """Fork a worker whose parent is the launcher; returns its pid."""
    pid_reader, pid_writer = os.pipe()
    adopted_reader, adopted_writer = os.pipe()
    between = os.fork()
    if between == 0:
        worker = os.fork()
        if worker:
            os.write(pid_writer, worker.to_bytes(4))
            os._exit(0)
        os.close(adopted_writer)
        for fd in (pid_reader, pid_writer):
            os.close(fd)
        # The fork server says when the process in between is gone: then the launcher is the parent.
        os.read(adopted_reader, 1)
        os.close(adopted_reader)
        channel.close()
        os._exit(worker_main(order, fds))
    os.waitpid(between, 0)
    pid = int.from_bytes(os.read(pid_reader, 4))
    os.write(adopted_writer, b"1")
    for fd in (pid_reader, pid_writer, adopted_reader, adopted_writer):
        os.close(fd)
    return pid
