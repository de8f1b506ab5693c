"""A process that does not belong to a server, and does to its unix sockets what it should not.

    python foreign.py ATTACK SOCKET...

It says `done` when everything was sent; attacks that keep connections open go on until its input ends.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import sys
from collections.abc import Callable, Iterator

import zmq

from multitok.messages.codec import encode_frame
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_child import Stop
from multitok.messages.to_scheduler import AbortReq, TokenizedGenerateReqInput, ToScheduler, header_of

Frames = list[bytes] | list[bytearray]
_LINGER_MS = 20_000
_IDLE = 200
_HUGE = 100 * 1000 * 1000
# What a ZMTP peer says first: signature, version, mechanism and more; 64 bytes.
_HALF_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL"


class _Trap:
    """Whoever unpickles this makes a file."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("unpickled",)


def _pickles() -> Iterator[Frames]:
    trap = pickle.dumps(_Trap())
    for count in (1, 2, 3, 4):
        yield [trap] * count


def _random() -> Iterator[Frames]:
    chosen = random.Random(1)
    for _ in range(200):
        yield [chosen.randbytes(chosen.choice((0, 1, 7, 8, 9, 100, 5000))) for _ in range(chosen.randint(1, 5))]


def _of_another_start() -> Iterator[Frames]:
    """Everything that would do harm, if it had the right token."""
    token = os.urandom(8)
    request = TokenizedGenerateReqInput(
        number=1 << 60,
        http_worker_ipc="w1.1",
        input_ids=bytes(400),
        sampling_params=SamplingParams(max_new_tokens=5000),
    )
    messages: list[ToScheduler] = [request, AbortReq(number=1 << 60, http_worker_ipc="w1.1")]
    for message in messages:
        pair = [encode_frame(token, header_of(message)), encode_frame(token, message)]
        yield pair
        yield pair * 2
        yield pair[:1]
        yield [frame[8:] for frame in pair]
    yield [encode_frame(token, Stop())]


def _single() -> Iterator[Frames]:
    for size in (1, 7, 8, 9, 64, 1000):
        yield [b"\x93" * size]


def _empty() -> Iterator[Frames]:
    for _ in range(1000):
        yield [b""]
    yield [b""] * 1000


def _huge() -> Iterator[Frames]:
    yield [bytes(_HUGE)]


MESSAGES: dict[str, Callable[[], Iterator[Frames]]] = {
    "pickles": _pickles,
    "random bytes": _random,
    "another start's": _of_another_start,
    "single frames": _single,
    "empty frames": _empty,
    "100 MB": _huge,
}
CONNECTIONS = {"half a handshake": (1, _HALF_GREETING), "idle connections": (_IDLE, b"")}


def _connect(path: str, greeting: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(greeting)
    return connection


def main() -> None:
    attack, *paths = sys.argv[1:]
    held: list[socket.socket] = []
    if attack in MESSAGES:
        with zmq.Context() as context:
            for path in paths:
                with context.socket(zmq.PUSH) as push:
                    push.linger = _LINGER_MS
                    push.sndhwm = 0
                    push.connect(f"ipc://{path}")
                    for frames in MESSAGES[attack]():
                        push.send_multipart(frames)
            # Leaving the block waits until everything was sent.
    else:
        count, greeting = CONNECTIONS[attack]
        held = [_connect(path, greeting) for path in paths for _ in range(count)]
    sys.stdout.write("done\n")
    sys.stdout.flush()
    sys.stdin.read()
    for connection in held:
        connection.close()


if __name__ == "__main__":
    main()
