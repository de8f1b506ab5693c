"""DeadLives: what a dead life of a scheduler has said may arrive late, and counts no more."""

from __future__ import annotations


class DeadLives:
    """The newest life of each rank that has died; all before it are dead, too."""

    __slots__ = ("_newest",)

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def add(self, rank: int, life: int) -> bool:
        """Put down that a life has died; returns whether that is news."""
        if life <= self._newest.get(rank, 0):
            return False
        self._newest[rank] = life
        return True

    def has(self, rank: int, life: int) -> bool:
        """Whether a life has died; 0, which nobody has, never does."""
        return 0 < life <= self._newest.get(rank, 0)
