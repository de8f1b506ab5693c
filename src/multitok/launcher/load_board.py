"""The load board: shared memory with a line per process, for what others only need as a hint.

Every word has one writer. A line is three cache lines, 24 words of 64 bits: the process's life number (0: not up),
which the launcher writes together with its pid and epoch, and what the process itself writes: load figures, and until
when it may be silent. Reading and writing an aligned word is one machine instruction, so there are no locks.

Of an HTTP worker two lives may exist at once, so a worker's line is not its index but any free one, its slot.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

from multitok.launcher.shared_memory import SharedBlock, open_block

_LINE_WORDS = 24
_WORD_SIZE = 8
_LIFE, _LOAD, _WAITING, _WAITING_TOKENS, _SILENT_UNTIL, _INDEX, _PID, _EPOCH = range(8)
_TAKEN, _WORK, _EXPECTED_OUTPUT = range(8, 11)
# What a process says of itself once a second.
_LAG, _REQUESTS, _TOKENS, _OLDEST, _KV_USED, _CUT_OFF = range(11, 17)


def worker_slots(workers: int) -> int:
    """Return how many HTTP workers there is room for when a server starts with this many.

    Half as many may be in service at once (`most_workers`), so that all of them can be replaced while the old ones
    drain.
    """
    return 2 * most_workers(workers)


def most_workers(workers: int) -> int:
    """Return how many HTTP workers may be in service at once when a server starts with this many."""
    return workers + 4


class LoadBoard:
    """The board, mapped into this process. Line 0 is the launcher's; others by role and index, or a worker's slot.

    Parameters
    ----------
    name : str
        Its shared block.
    ranks, detokenizers, workers : int
        How many of each a server starts with.
    """

    def __init__(self, name: str, ranks: int, detokenizers: int, workers: int) -> None:
        self._fd = open_block(name)
        self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        self._words = memoryview(self._map).cast("Q")
        router = 1 + ranks + detokenizers
        self._first_line = {
            "launcher": 0,
            "scheduler": 1,
            "detokenizer": 1 + ranks,
            "router": router,
            "fork_server": router + 1,
            # HTTP workers, and their slots, count from 1.
            "tokenizer_worker": router + 1,
        }
        self._workers = range(
            self._line("tokenizer_worker", 1),
            self._line("tokenizer_worker", worker_slots(workers) + 1),
            _LINE_WORDS,
        )

    @staticmethod
    def create(name: str, ranks: int, detokenizers: int, workers: int) -> SharedBlock:
        """Create the block of a board, all zero."""
        return SharedBlock(name, bytes((3 + ranks + detokenizers + worker_slots(workers)) * _LINE_WORDS * _WORD_SIZE))

    def _line(self, role: str, slot: int) -> int:
        return (self._first_line[role] + slot) * _LINE_WORDS

    # Written by the launcher

    def set_serving(self, serving: bool) -> None:
        """Say whether the server has started and does not end."""
        self._words[_LOAD] = serving

    def set_life(self, role: str, slot: int, life: int, *, index: int = 0, pid: int = 0) -> None:
        """Say which life of a process is up; 0: none. A new life begins without load.

        Parameters
        ----------
        role : str
            Its role.
        slot : int
            Its index, or an HTTP worker's slot.
        life : int
            Which life of it.
        index, pid : int
            Of an HTTP worker its index; and its process id.
        """
        line = self._line(role, slot)
        self._words[line + _INDEX] = index
        self._words[line + _PID] = pid
        self._words[line + _LIFE] = life

    def set_epoch(self, role: str, slot: int, epoch: int) -> None:
        """Say which control state a process has acknowledged."""
        self._words[self._line(role, slot) + _EPOCH] = epoch

    # Written by each process, in its own line

    def slot(self, role: str, slot: int) -> LoadSlot:
        """Return the line of this process, for writing."""
        return LoadSlot(self, self._words, self._line(role, slot))

    # Read by all

    def is_serving(self) -> bool:
        """Whether the server has started and does not end."""
        return bool(self._words[_LOAD])

    def lowest_connections(self) -> int:
        """Return the fewest connections that an HTTP worker which is up has open; 0 when none is up."""
        words = self._words
        return min([words[line + _LOAD] for line in self._workers if words[line + _LIFE]], default=0)

    def is_overdue(self, role: str, slot: int) -> bool:
        """Whether a process has been silent for longer than it said; one that has said nothing yet is not watched."""
        until = self._words[self._line(role, slot) + _SILENT_UNTIL]
        return bool(until) and time.monotonic() * 1000 > until

    def figures(self, role: str, index: int) -> dict[str, int]:
        """Return what a process's line says: of an HTTP worker, that of its last life that is up."""
        line = self._line_of(role, index)
        if line is None:
            return {"life": 0, "load": 0, "waiting": 0}
        words = self._words
        return {"life": words[line + _LIFE], "load": words[line + _LOAD], "waiting": words[line + _WAITING]}

    def details(self, role: str, index: int) -> Details:
        """Return what a process said of itself at its last beat; see `figures`."""
        line = self._line_of(role, index)
        if line is None:
            return Details()
        words = self._words[line : line + _LINE_WORDS]
        return Details(
            epoch=words[_EPOCH],
            lag=words[_LAG] / 1e6,
            requests=words[_REQUESTS],
            tokens=words[_TOKENS],
            oldest=words[_OLDEST] / 1000,
            kv_used=words[_KV_USED] / 1e6,
            reachable=not words[_CUT_OFF],
        )

    def rank_work(self, rank: int) -> tuple[int, int, int]:
        """Return what a scheduler last said: requests taken, tokens to work on, output ids that a request makes."""
        line = self._line("scheduler", rank)
        return self._words[line + _TAKEN], self._words[line + _WORK], self._words[line + _EXPECTED_OUTPUT]

    def pid(self, role: str, index: int) -> int:
        """Return the process id of the life that `figures` tells of; 0: not up."""
        line = self._line_of(role, index)
        return 0 if line is None else self._words[line + _PID]

    def worker_indexes(self) -> list[int]:
        """Return the indexes of the HTTP workers that are up."""
        return sorted({self._words[line + _INDEX] for line in self._workers if self._words[line + _LIFE]})

    def _line_of(self, role: str, index: int) -> int | None:
        if role != "tokenizer_worker":
            return self._line(role, index)
        lines = [line for line in self._workers if self._words[line + _INDEX] == index]
        return max(lines, key=lambda line: self._words[line + _LIFE], default=None)


class Details(NamedTuple):
    """What a process says of itself once a second.

    Attributes
    ----------
    epoch : int
        The control state that it has acknowledged.
    lag : float
        Seconds that its loop has let others wait.
    requests, tokens : int
        In its hands: an HTTP worker's own, a scheduler's in the engine and in the queue; ids of prompts and outputs.
    oldest : float
        Seconds since the oldest came: of an HTTP worker's, of those that wait for a scheduler's engine.
    kv_used : float
        Used part of an engine's KV cache, 0 to 1.
    reachable : bool
        Whether a scheduler's engine takes requests.
    """

    epoch: int = 0
    lag: float = 0.0
    requests: int = 0
    tokens: int = 0
    oldest: float = 0.0
    kv_used: float = 0.0
    reachable: bool = True


class LoadSlot:
    """One process's line.

    Parameters
    ----------
    board : LoadBoard
        The board.
    words : memoryview
        Its words.
    line : int
        Index of the line's first word.
    """

    def __init__(self, board: LoadBoard, words: memoryview, line: int) -> None:
        self._board = board
        self._words = words
        self._line = line
        self.publish_load(0, 0)
        self._words[self._line + _SILENT_UNTIL] = 0
        self.publish_work(0, 0, 0)
        self.publish_details()

    def publish_load(self, load: int, waiting: int, waiting_tokens: int = 0) -> None:
        """Put down running and waiting requests, and the prompt ids of the latter."""
        self._words[self._line + _LOAD] = load
        self._words[self._line + _WAITING] = waiting
        self._words[self._line + _WAITING_TOKENS] = waiting_tokens

    def publish_work(self, taken: int, tokens: int, expected_output: int) -> None:
        """Put down requests taken, tokens to work on, and output ids that a request makes."""
        # The count last: until it is seen, whoever sent a request adds its work.
        self._words[self._line + _EXPECTED_OUTPUT] = expected_output
        self._words[self._line + _WORK] = tokens
        self._words[self._line + _TAKEN] = taken

    def publish_details(
        self,
        lag: float = 0.0,
        requests: int = 0,
        tokens: int = 0,
        oldest: float = 0.0,
        kv_used: float = 0.0,
        reachable: bool = True,
    ) -> None:
        """Put down what is said once a second; see `Details`."""
        line, words = self._line, self._words
        words[line + _LAG] = _scaled(lag, 1e6)
        words[line + _REQUESTS] = requests
        words[line + _TOKENS] = tokens
        words[line + _OLDEST] = _scaled(oldest, 1e3)
        words[line + _KV_USED] = _scaled(kv_used, 1e6)
        words[line + _CUT_OFF] = not reachable

    def beat(self, allowance: float) -> None:
        """Say that this process goes round, and counts as dead when it is silent for longer than this.

        Parameters
        ----------
        allowance : float
            Seconds from now. More than usual before something that may take long, such as an engine's step.
        """
        self._words[self._line + _SILENT_UNTIL] = int((time.monotonic() + allowance) * 1000)

    def set_connections(self, n: int) -> None:
        """Put down the open connections of this HTTP worker."""
        self._words[self._line + _LOAD] = n

    def lowest_connections(self) -> int:
        """Return the fewest connections that an HTTP worker which is up has open."""
        return self._board.lowest_connections()


def _scaled(value: float, factor: float) -> int:
    # In this order a NaN is 0; the rest has room in a word.
    return int(min(max(0.0, value), 1e9) * factor)
