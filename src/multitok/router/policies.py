"""Routing policies: which rank a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from multitok.config import RoutingPolicyName
from multitok.messages.to_scheduler import Header
from multitok.router.prefix_ranks import PrefixRanks
from multitok.router.rank_loads import RankLoads, RankWork


class RoutingPolicy(Protocol):
    """Chooses the rank of a request that may go to any."""

    def choose(self, header: Header, up: Sequence[int]) -> int:
        """Return one of the ranks that are up and serve the request's model, which are in order and at least one."""
        ...

    def sent(self, rank: int, header: Header) -> None:
        """Hear that a request goes to a rank."""
        ...

    def taken_back(self, rank: int, requests: int) -> None:
        """Hear that the last so many requests to a rank could not be sent."""
        ...

    def rank_started(self, rank: int) -> None:
        """Hear that a new life of a rank takes requests: it has none, and nothing is cached."""
        ...


class RoundRobinPolicy:
    """Ranks in turn, of each model."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def choose(self, header: Header, up: Sequence[int]) -> int:
        """Return the next in turn."""
        last = self._last.get(header.model, -1)
        chosen = self._last[header.model] = next((rank for rank in up if rank > last), up[0])
        return chosen

    def sent(self, rank: int, header: Header) -> None:
        """Do nothing."""

    def taken_back(self, rank: int, requests: int) -> None:
        """Do nothing."""

    def rank_started(self, rank: int) -> None:
        """Do nothing."""


class LeastWorkPolicy:
    """The rank with the least outstanding work: prompt ids to read, and output ids that are expected.

    Parameters
    ----------
    loads : RankLoads
        What the ranks have to do.
    """

    def __init__(self, loads: RankLoads) -> None:
        self._loads = loads
        self._turn = RoundRobinPolicy()

    def choose(self, header: Header, up: Sequence[int]) -> int:
        """Return the rank with the least work; the next in turn of several."""
        if len(up) == 1:
            return up[0]
        work = [self._loads.work(rank) for rank in up]
        least = min(work)
        return self._turn.choose(header, [rank for rank, its in zip(up, work, strict=True) if its == least])

    def sent(self, rank: int, header: Header) -> None:
        """Count the request's work."""
        self._loads.sent(rank, header)

    def taken_back(self, rank: int, requests: int) -> None:
        """Count their work no more."""
        self._loads.taken_back(rank, requests)

    def rank_started(self, rank: int) -> None:
        """Forget what the dead life had to do."""
        self._loads.rank_started(rank)


class PrefixAffinityPolicy:
    """The rank that would be done first: outstanding work, and the part of the prompt that it has not seen.

    So requests that share a long prefix stay on one rank until that has more work than the others by about the length
    of the prefix; then another rank gets to see it too.

    Parameters
    ----------
    loads : RankLoads
        What the ranks have to do.
    """

    def __init__(self, loads: RankLoads) -> None:
        self._loads = loads
        self._prefixes = PrefixRanks()
        self._turn = RoundRobinPolicy()

    def choose(self, header: Header, up: Sequence[int]) -> int:
        """Return the rank with the least work left after the request; the next in turn of several."""
        if len(up) == 1:
            return up[0]
        seen = self._prefixes.tokens_seen(header.prefix_hashes)
        costs = [self._loads.work(rank) - seen.get(rank, 0) for rank in up]
        least = min(costs)
        return self._turn.choose(header, [rank for rank, cost in zip(up, costs, strict=True) if cost == least])

    def sent(self, rank: int, header: Header) -> None:
        """Count the request's work, and remember its prefix."""
        self._loads.sent(rank, header)
        self._prefixes.add(header.prefix_hashes, rank)

    def taken_back(self, rank: int, requests: int) -> None:
        """Count their work no more."""
        self._loads.taken_back(rank, requests)

    def rank_started(self, rank: int) -> None:
        """Forget what the dead life had to do, and had cached."""
        self._loads.rank_started(rank)
        self._prefixes.forget(rank)


def make_policy(name: RoutingPolicyName, ranks: int, read: Callable[[int], RankWork]) -> RoutingPolicy:
    """Return the policy of a name.

    Parameters
    ----------
    name : {'prefix-affinity', 'least-work', 'round-robin'}
        Its name.
    ranks : int
        How many ranks there are.
    read : callable
        Reads from the load board what a rank says of its work.
    """
    match name:
        case "prefix-affinity":
            return PrefixAffinityPolicy(RankLoads(ranks, read))
        case "least-work":
            return LeastWorkPolicy(RankLoads(ranks, read))
        case "round-robin":
            return RoundRobinPolicy()
