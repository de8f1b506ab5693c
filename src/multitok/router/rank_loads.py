"""RankLoads: how much work each rank has, by what it last said and what was sent to it since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from multitok.messages.to_scheduler import Header


class RankWork(NamedTuple):
    """What a rank says of its work on the load board.

    Attributes
    ----------
    taken : int
        Requests that it has received in this life.
    tokens : int
        Prompt ids to read and output ids expected, of all of them that are not over.
    expected_output : int
        Output ids that a request makes, as its last ones did.
    """

    taken: int
    tokens: int
    expected_output: int


class RankLoads:
    """Work of each rank, in tokens; requests on their way to it count as well.

    What a rank says may be a step old. So each request that was sent is counted here until the rank's own count of
    requests has passed it.

    Parameters
    ----------
    ranks : int
        How many there are.
    read : callable
        Returns what a rank says of itself.
    """

    def __init__(self, ranks: int, read: Callable[[int], RankWork]) -> None:
        self._read = read
        # Of each rank: requests that it had taken, or will have, before the oldest that is on its way; and those.
        self._before = [read(rank).taken for rank in range(ranks)]
        self._under_way: list[deque[int]] = [deque() for _ in range(ranks)]
        self._tokens = [0] * ranks

    def work(self, rank: int) -> int:
        """Return the tokens that a rank has to work on."""
        said = self._read(rank)
        under_way = self._under_way[rank]
        while under_way and self._before[rank] < said.taken:
            self._before[rank] += 1
            self._tokens[rank] -= under_way.popleft()
        return said.tokens + self._tokens[rank]

    def sent(self, rank: int, header: Header) -> None:
        """Count a request that is on its way."""
        said = self._read(rank)
        if not self._under_way[rank]:
            # Nothing is on its way, whatever was counted wrongly before.
            self._before[rank] = said.taken
        tokens = header.prompt_length + min(header.token_limit, said.expected_output)
        self._under_way[rank].append(tokens)
        self._tokens[rank] += tokens

    def taken_back(self, rank: int, requests: int) -> None:
        """Count the last so many requests to a rank no more: they were not sent."""
        for _ in range(requests):
            self._tokens[rank] -= self._under_way[rank].pop()

    def rank_started(self, rank: int) -> None:
        """Begin anew with a rank whose new life has received nothing."""
        self._before[rank] = self._read(rank).taken
        self._under_way[rank].clear()
        self._tokens[rank] = 0
