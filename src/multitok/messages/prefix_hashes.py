"""Hash chains of prompts, by which requests that share a prefix are known as such without looking at their ids."""

from __future__ import annotations

from hashlib import blake2b

BLOCK_TOKENS = 256
HASH_BYTES = 8
# Past so much of a shared prefix, more of it makes no difference to where a request should go.
MOST_BLOCKS = 64


def prefix_hashes(input_ids: bytes) -> bytes | None:
    """Return a hash of each full block of a prompt's ids; it covers all ids before it, too.

    Parameters
    ----------
    input_ids : bytes
        Packed int32.

    Returns
    -------
    bytes or None
        `HASH_BYTES` per block, at most `MOST_BLOCKS`; None for a prompt shorter than a block.
    """
    size = 4 * BLOCK_TOKENS
    blocks = min(len(input_ids) // size, MOST_BLOCKS)
    if not blocks:
        return None
    chain = blake2b(digest_size=HASH_BYTES)
    hashes = bytearray()
    view = memoryview(input_ids)
    for i in range(blocks):
        chain.update(view[i * size : (i + 1) * size])
        hashes += chain.digest()
    return bytes(hashes)
