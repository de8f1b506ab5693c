"""What every child process begins with: its title, its end with the launcher, its log; then its role.

Run as ``python -m multitok.launcher.child ROLE INDEX LIFE LAUNCHER_PID CHANNEL_FD LISTEN_FDS BLOCK...``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable

import msgspec
import setproctitle

from multitok.config import OptionError, PortArgs, ServerArgs
from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel, LauncherGone
from multitok.launcher.child_process import part_name
from multitok.launcher.load_board import LoadBoard
from multitok.launcher.parent_death import kill_itself_when_parent_died
from multitok.launcher.runtime_dir import RuntimeDir
from multitok.launcher.shared_memory import read_from_shared_memory
from multitok.messages.to_child import Fork
from multitok.messages.to_launcher import Failed
from multitok.observability.logging import configure_logger
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.model_settings import ModelSettings

_log = logging.getLogger(__name__)
# With this every child is gone two seconds after it has noticed, whatever the others do.
_OTHERS_EXIT_S = 1.0
USAGE_STATUS = 2


def main(arguments: list[str]) -> int:
    """Run a child; returns its exit status."""
    role, index, life, launcher_pid, channel_fd, listen_fds, *blocks = arguments
    server_args_block, port_args_block, models_block, board_block = blocks[:4]
    server_args = read_from_shared_memory(server_args_block, ServerArgs)
    port_args = msgspec.structs.replace(
        read_from_shared_memory(port_args_block, PortArgs),
        index=int(index),
        life=int(life),
        channel_fd=int(channel_fd),
        listen_fds=msgspec.json.decode(listen_fds, type=dict[str, int]),
    )
    begin(role, server_args, port_args, int(launcher_pid))
    runtime_dir = RuntimeDir(port_args.runtime_dir)

    def run() -> None:
        models = read_from_shared_memory(models_block, list[ModelSettings])
        board = LoadBoard(
            board_block,
            len(port_args.scheduler_ipc_names),
            len(port_args.detokenizer_ipc_names),
            server_args.tokenizer_worker_num,
        )
        match role:
            # Each role's libraries are imported only where they are needed: they cost time and memory.
            case "scheduler":
                from multitok.scheduler.process import run_scheduler_process

                model = models[port_args.model_of_rank[port_args.index]]
                run_scheduler_process(model.args, port_args, model.files, board.slot(role, port_args.index))
            case "detokenizer":
                from multitok.detokenizer.process import run_detokenizer_process

                run_detokenizer_process(server_args, port_args, beat=_beat_of(role, server_args, port_args, board))
            case "router":
                from multitok.launcher.routing import routing_policy
                from multitok.router.process import run_router_process

                policy = routing_policy(server_args, port_args, board)
                run_router_process(port_args, policy, _beat_of(role, server_args, port_args, board))
            case "fork_server":
                _run_fork_server(server_args, port_args, models, board, runtime_dir, int(launcher_pid))
            case _:
                raise ValueError(f"there is no role {role!r}")

    return guarded(run, port_args, runtime_dir)


def begin(role: str, server_args: ServerArgs, port_args: PortArgs, launcher_pid: int) -> None:
    """Make this process a part: its title, its signals, its end with the launcher, its log."""
    name = part_name(role, port_args.index)
    setproctitle.setproctitle(f"multitok::{name}")
    # The launcher says when to go, whoever else gets its signals; an HTTP worker takes SIGTERM as its own drain.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCONT, _end_without(launcher_pid))
    # A step may hold the GIL for long, so a scheduler can't rely on its own handler; the others clean up, and are woken
    # up for that where they are stopped.
    kill_itself_when_parent_died(launcher_pid, signal.SIGKILL if role == "scheduler" else signal.SIGCONT)
    configure_logger(server_args.log_level, name)


def guarded(run: Callable[[], None], port_args: PortArgs, runtime_dir: RuntimeDir) -> int:
    """Run a part; returns its exit status, after its failure was reported or the last child has cleaned up."""
    try:
        run()
    except LauncherGone:
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        _log.warning("the launcher is gone")
        runtime_dir.leave(_OTHERS_EXIT_S)
        return 1
    except (ModelError, OptionError) as error:
        _log.debug("failed", exc_info=True)
        return _report(port_args, str(error), USAGE_STATUS)
    except Exception as error:
        _log.exception("failed")
        return _report(port_args, f"{type(error).__name__}: {error}", 1)
    return 0


def _run_fork_server(
    server_args: ServerArgs,
    port_args: PortArgs,
    models: list[ModelSettings],
    board: LoadBoard,
    runtime_dir: RuntimeDir,
    launcher_pid: int,
) -> None:
    from multitok.launcher.fork_server import run_fork_server
    from multitok.launcher.http_process import run_http_process
    from multitok.launcher.text_tools import TextTools

    channel = LauncherChannel(port_args.channel_fd)
    controlled = Controlled(channel)
    tools = [TextTools.load(server_args, model.files) for model in models]

    def worker_main(order: Fork, fds: list[int]) -> int:
        channel_fd, http_fd = fds
        worker_args = msgspec.structs.replace(
            port_args,
            index=order.index,
            life=order.life,
            slot=order.slot,
            channel_fd=channel_fd,
            listen_fds={"http": http_fd},
        )
        begin("tokenizer_worker", server_args, worker_args, launcher_pid)
        return guarded(
            lambda: run_http_process(server_args, worker_args, models, board, tools), worker_args, runtime_dir
        )

    run_fork_server(channel, controlled, worker_main, _beat_of("fork_server", server_args, port_args, board))


def _beat_of(role: str, server_args: ServerArgs, port_args: PortArgs, board: LoadBoard) -> Callable[[float], None]:
    slot = board.slot(role, port_args.index)

    def beat(lag: float) -> None:
        slot.beat(server_args.hang_timeout)
        slot.publish_details(lag)

    return beat


def _end_without(launcher_pid: int) -> Callable[[int, object], None]:
    def on_signal(*_: object) -> None:
        # Anybody may send this one.
        if os.getppid() != launcher_pid:
            raise LauncherGone

    return on_signal


def _report(port_args: PortArgs, message: str, status: int) -> int:
    # Straight to the descriptor: the role may have failed before it made its channel.
    with contextlib.suppress(OSError):
        os.write(port_args.channel_fd, msgspec.msgpack.encode(Failed(message, status)))
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # No interpreter shutdown: engines and ZeroMQ contexts were closed in order, and the rest is the kernel's.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
