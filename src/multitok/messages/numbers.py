"""Request numbers and owner addresses: 64 bits that say which life of which HTTP worker made them."""

from __future__ import annotations

_COUNTER_BITS = 36
_LIFE_BITS = 18
_INDEX_BITS = 10


def owner_address(index: int, life: int) -> str:
    """Return the short address of an HTTP worker's life, ``w3.2``; an address is never used again."""
    return f"w{index}.{life}"


class RequestNumbers:
    """Hands out the request numbers of one life of one HTTP worker.

    Parameters
    ----------
    index : int
        Worker, 1 to 1023.
    life : int
        Its life, from 1.

    Raises
    ------
    ValueError
        When `index` or `life` does not fit.
    """

    __slots__ = ("_next",)

    def __init__(self, index: int, life: int) -> None:
        if not (0 < index < 1 << _INDEX_BITS and 0 < life < 1 << _LIFE_BITS):
            raise ValueError(f"worker {index}, life {life}: out of range")
        self._next = (index << _LIFE_BITS | life) << _COUNTER_BITS

    @property
    def last(self) -> int:
        """The newest number that was returned."""
        return self._next

    def next(self) -> int:
        """Return a number that was never returned before."""
        self._next += 1
        return self._next


def owner_of(number: int) -> str:
    """Return the address of the worker life that made a request number."""
    worker_life = number >> _COUNTER_BITS
    return owner_address(worker_life >> _LIFE_BITS, worker_life & (1 << _LIFE_BITS) - 1)
