"""The routing policy that the user chose, with what it needs from the load board."""

from __future__ import annotations

from multitok.config import PortArgs, ServerArgs
from multitok.launcher.load_board import LoadBoard
from multitok.router.policies import RoutingPolicy, make_policy
from multitok.router.rank_loads import RankWork


def routing_policy(server_args: ServerArgs, port_args: PortArgs, board: LoadBoard) -> RoutingPolicy:
    """Return the policy for the router, or for the one HTTP process where there is none."""
    ranks = len(port_args.scheduler_ipc_names)
    return make_policy(server_args.routing_policy, ranks, lambda rank: RankWork(*board.rank_work(rank)))
