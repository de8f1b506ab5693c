"""The other side of `GrammarGate`: answers on standard output what is wrong with the grammars from standard input.

Messages on both pipes are msgpack with the length in front.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec
from setproctitle import setproctitle

from multitok.messages.sampling import Grammar

# CPU seconds; the engine then needs as long once more, and all its requests wait for that.
COMPILE_LIMIT_S = 1.0
LENGTH = struct.Struct("<I")


class Verdict(msgspec.Struct, array_like=True):
    """What the compiler says of a grammar; `problem` is empty for a good one."""

    problem: str


def serve_grammars(load: Callable[[], Callable[[Grammar], str]]) -> None:
    """Check grammars from standard input until it ends; the first answer, without a question, means ready.

    Parameters
    ----------
    load : callable
        Loads what is needed, and returns the function that says what is wrong with a grammar; nothing for a good one.
    """
    setproctitle("multitok::grammar_compiler")
    # Ctrl-C reaches the whole group of processes; this one goes when its engine does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries that print must not reach the pipe.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    questions = sys.stdin.buffer
    check = load()
    decoder = msgspec.msgpack.Decoder(Grammar)
    _answer(answers, Verdict(""))
    while header := questions.read(LENGTH.size):
        grammar = decoder.decode(questions.read(LENGTH.unpack(header)[0]))
        # SIGPROF ends the process, as nothing handles it.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_LIMIT_S)
        problem = check(grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answers, Verdict(problem))


def _answer(pipe: BinaryIO, verdict: Verdict) -> None:
    data = msgspec.msgpack.encode(verdict)
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()
