"""What is known of each process of a server: from the load board, and from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

from multitok.config import PortArgs, ServerArgs
from multitok.launcher.load_board import LoadBoard

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Places in /proc/PID/stat after the command's name.
_UTIME, _STIME, _STARTED, _RSS = 11, 12, 19, 21


def describe_processes(
    server_args: ServerArgs, port_args: PortArgs, board: LoadBoard
) -> dict[str, dict[str, int | float | str]]:
    """Return the figures of every process, by role and index.

    Parameters
    ----------
    server_args : ServerArgs
        How many HTTP workers there were at the start.
    port_args : PortArgs
        Which other parts there are.
    board : LoadBoard
        What they say.
    """
    parts = [("launcher", 0)]
    parts += [("scheduler", i) for i in range(len(port_args.scheduler_ipc_names))]
    parts += [("detokenizer", i) for i in range(len(port_args.detokenizer_ipc_names))]
    if port_args.router_ipc_name is not None:
        parts.append(("router", 0))
    parts.append(("fork_server", 0))
    # Those of the start, up or not, and those that were added.
    workers = {*range(1, server_args.tokenizer_worker_num + 1), *board.worker_indexes()}
    parts += [("tokenizer_worker", index) for index in sorted(workers)]
    return {f"{role}:{index}": _figures(board, role, index) for role, index in parts}


def _figures(board: LoadBoard, role: str, index: int) -> dict[str, int | float | str]:
    figures: dict[str, int | float | str] = {"role": role, **board.figures(role, index)}
    if role == "launcher":
        # Its word for load is another: whether the server is ready.
        figures["load"] = 0
    figures["pid"] = pid = board.pid(role, index)
    if not figures["life"]:
        return figures
    details = board.details(role, index)
    figures |= {"epoch": details.epoch}
    if role in ("scheduler", "tokenizer_worker"):
        figures |= {
            "requests": details.requests,
            "tokens": details.tokens,
            "oldest_request_s" if role == "tokenizer_worker" else "queue_age_s": details.oldest,
        }
    if role == "scheduler":
        figures |= {"kv_used": details.kv_used, "reachable": details.reachable}
    if role not in ("launcher", "fork_server"):
        figures["loop_lag_s"] = details.lag
    return figures | _of_proc(pid)


def _of_proc(pid: int) -> dict[str, int | float | str]:
    """Return uptime, CPU time and resident memory of a process, unless it has just ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return {}
    # The command's name, which may hold anything, is in parentheses.
    fields = stat.rpartition(b")")[2].split()
    cpu = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / _TICKS
    return {"uptime_s": round(max(0.0, uptime), 2), "cpu_s": cpu, "rss_bytes": int(fields[_RSS]) * _PAGE}
