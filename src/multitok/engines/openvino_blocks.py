"""Keeps requests apart that would go on from one cached block that is partly filled.

OpenVINO GenAI 2026.4 gives such a block to each request that comes before the next step, and all of them write into it:
all but one get wrong ids. One step later the first has made it its own, and the others get a copy of what was there.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

# As many blocks as could matter for prompts that come soon; more than these are forgotten, oldest first.
_MOST = 1 << 14
_ID_BYTES = 4
Key = tuple[bytes, bytes]


class PartialBlocks:
    """The partly filled blocks that ended requests may have left in the cache.

    Parameters
    ----------
    block_size : int
        Ids per block.
    most : int
        How many are remembered.
    """

    def __init__(self, block_size: int, most: int = _MOST) -> None:
        self._bytes = block_size * _ID_BYTES
        self._most = most
        # Ids of the partly filled blocks, packed, by the full blocks before them; ended last, at the end.
        self._tails: OrderedDict[bytes, dict[bytes, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def ended(self, ids: bytes | bytearray) -> None:
        """Note what a request leaves behind.

        Parameters
        ----------
        ids : bytes
            Its prompt and output, packed int32; of one that was aborted, the pipeline may have made an id more.
        """
        full = len(ids) // self._bytes * self._bytes
        chain, tail = self._chains(ids)[-1], bytes(ids[full:])
        tails = self._tails.setdefault(chain, {})
        self._tails.move_to_end(chain)
        if tail not in tails:
            tails[tail] = None
            self._count += 1
        while self._count > self._most:
            oldest = next(iter(self._tails))
            its = self._tails[oldest]
            del its[next(iter(its))]
            self._count -= 1
            if not its:
                del self._tails[oldest]

    def behind(self, prompt: bytes) -> set[Key]:
        """Return the partly filled blocks that a prompt could go on from."""
        found: set[Key] = set()
        for i, chain in enumerate(self._chains(prompt)):
            for tail in self._tails.get(chain, ()):
                if prompt.startswith(tail, i * self._bytes):
                    found.add((chain, tail))
        return found

    def _chains(self, ids: bytes | bytearray) -> list[bytes]:
        """Return a hash of the ids before each block, the one after the last full block included."""
        running = blake2b(digest_size=16)
        chains = [running.digest()]
        view = memoryview(ids)
        for start in range(0, len(ids) - self._bytes + 1, self._bytes):
            running.update(view[start : start + self._bytes])
            chains.append(running.digest())
        return chains
