"""PrefixRanks: which ranks have seen which beginnings of prompts."""

from __future__ import annotations

from collections import OrderedDict

from multitok.messages.prefix_hashes import BLOCK_TOKENS, HASH_BYTES

# Some 10 MB: blocks of 256 ids, so 16 million ids of distinct prefixes.
_MOST_BLOCKS = 1 << 16


class PrefixRanks:
    """A bounded memory of prefixes, least recently used out first.

    Each block of a prefix is one entry, whose hash covers the blocks before it.
    """

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self._most = most_blocks
        # A set of ranks as bits.
        self._ranks: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ranks)

    def tokens_seen(self, hashes: bytes | None) -> dict[int, int]:
        """Return how many ids of a prompt each rank has seen; ranks that have seen none are left out.

        Parameters
        ----------
        hashes : bytes or None
            Hash chain of the prompt's blocks, 8 bytes each.
        """
        seen: dict[int, int] = {}
        still = -1
        for i in range(0, len(hashes or b""), HASH_BYTES):
            assert hashes is not None
            # One that has forgotten a block has no use for those after it.
            still &= self._ranks.get(hashes[i : i + HASH_BYTES], 0)
            if not still:
                break
            for rank in range(still.bit_length()):
                if still >> rank & 1:
                    seen[rank] = (i // HASH_BYTES + 1) * BLOCK_TOKENS
        return seen

    def add(self, hashes: bytes | None, rank: int) -> None:
        """Remember that a rank has seen a prompt."""
        ranks = self._ranks
        # The first block last, so that a prefix is forgotten from its end.
        for i in reversed(range(0, len(hashes or b""), HASH_BYTES)):
            assert hashes is not None
            key = hashes[i : i + HASH_BYTES]
            ranks[key] = ranks.get(key, 0) | 1 << rank
            ranks.move_to_end(key)
        while len(ranks) > self._most:
            ranks.popitem(last=False)

    def forget(self, rank: int) -> None:
        """Forget all that a rank has seen."""
        kept = {key: its & ~(1 << rank) for key, its in self._ranks.items()}
        self._ranks = OrderedDict((key, its) for key, its in kept.items() if its)
