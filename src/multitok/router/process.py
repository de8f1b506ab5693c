"""The router process."""

from __future__ import annotations

from collections.abc import Callable

from multitok.config import PortArgs
from multitok.ipc.launcher_channel import LauncherChannel
from multitok.router.multi_tokenizer_router import MultiTokenizerRouter
from multitok.router.policies import RoutingPolicy


def run_router_process(port_args: PortArgs, policy: RoutingPolicy, beat: Callable[[float], None]) -> None:
    """Run the router until the launcher says stop.

    Parameters
    ----------
    port_args : PortArgs
        Where the parts meet.
    policy : RoutingPolicy
        Chooses ranks.
    beat : callable
        Called at least every second while the loop goes round, with the seconds that it was late.

    Raises
    ------
    LauncherGone
        The launcher has exited.
    """
    MultiTokenizerRouter(port_args, LauncherChannel(port_args.channel_fd), policy, beat).run()
