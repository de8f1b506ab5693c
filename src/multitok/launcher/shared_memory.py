"""Shared blocks: files in /dev/shm that carry msgpack, or the load board, from the launcher to its children.

A block is held while somebody holds a shared flock on it: that, and not a pid, tells whether it is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_DIRECTORY = Path("/dev/shm")
_PREFIX = "multitok-"
_PREAMBLE = struct.Struct("<QI")
_T = TypeVar("_T")


class SharedBlock:
    """A block that this process created and holds.

    Parameters
    ----------
    name : str
        From `block_name`.
    content : bytes
        What is in it.

    Raises
    ------
    FileExistsError
        There is one of this name.
    """

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        while True:
            self._fd = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            # Another start, cleaning up, may have found it before it was locked.
            if os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)
        os.write(self._fd, content)

    def remove(self) -> None:
        """Let go of it and remove it."""
        os.close(self._fd)
        remove_block(self.name)


def block_name(nonce: str, what: str) -> str:
    """Return a name for a block of this start: with the pid, and the start's random `nonce`."""
    return f"{_PREFIX}{os.getpid()}-{nonce}-{what}"


def write_to_shared_memory(value: Any, name: str) -> SharedBlock:
    """Create a block that holds a value as msgpack, with its length and checksum in front.

    Parameters
    ----------
    value : object
        What msgspec can encode.
    name : str
        From `block_name`.
    """
    payload = msgspec.msgpack.encode(value)
    return SharedBlock(name, _PREAMBLE.pack(len(payload), zlib.crc32(payload)) + payload)


def read_from_shared_memory(name: str, value_type: type[_T]) -> _T:
    """Return the value in a block.

    Raises
    ------
    FileNotFoundError
        There is no such block.
    ValueError
        It is cut, or its checksum is wrong.
    msgspec.ValidationError
        It holds something else.
    """
    content = (_DIRECTORY / name).read_bytes()
    if len(content) < _PREAMBLE.size:
        raise ValueError(f"shared block {name} is cut")
    length, checksum = _PREAMBLE.unpack_from(content)
    payload = content[_PREAMBLE.size :]
    if len(payload) != length or zlib.crc32(payload) != checksum:
        raise ValueError(f"shared block {name} is damaged")
    return msgspec.msgpack.decode(payload, type=value_type)


def open_block(name: str) -> int:
    """Open a block for mapping and hold it; returns the descriptor."""
    fd = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def remove_block(name: str) -> None:
    """Remove a block, if it is still there."""
    with contextlib.suppress(FileNotFoundError):
        (_DIRECTORY / name).unlink()


def remove_blocks_of(nonce: str) -> None:
    """Remove every block of one start."""
    for path in _DIRECTORY.glob(f"{_PREFIX}*-{nonce}-*"):
        remove_block(path.name)


def remove_abandoned_blocks() -> None:
    """Remove the blocks of this user that nobody holds."""
    for path in _DIRECTORY.glob(f"{_PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or just gone
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one that was locked, not a new one of this name.
            if os.fstat(fd).st_nlink:
                remove_block(path.name)
        except BlockingIOError:
            pass  # held
        finally:
            os.close(fd)
