"""Lets only grammars reach the engine that the grammar compiler, a process of its own, has taken.

That process is started with the first grammar (about 2 s) and lives as long as the engine; a check takes about 1 ms.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque

import msgspec

from multitok.engines.grammar_limits import problem_of_size
from multitok.engines.grammar_server import LENGTH, Verdict
from multitok.messages.sampling import Grammar

logger = logging.getLogger(__name__)

# How long it may take to start, and to answer. It has a second of CPU time for a grammar (`COMPILE_LIMIT_S`), so one
# that is silent for longer than this on a busy machine is stopped or stuck, and the grammar is not at fault.
START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 15.0
# Verdicts kept; a program that sends a new schema with each request must not make this grow.
_REMEMBERED = 1024


class GrammarGate:
    """Asks the grammar compiler about grammars, without waiting.

    Parameters
    ----------
    module : str
        What the compiler is: a module here that runs `serve_grammars`.
    *arguments : str
        For the module.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-P", "-m", f"multitok.engines.{module}", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._received = b""
        self._queue: deque[Grammar] = deque()
        self._asked: Grammar | None = None
        # Until when it must have started, or answered; and what of the question is not yet in the pipe.
        self._deadline = 0.0
        self._unwritten = memoryview(b"")
        # Grammars that will get no verdict, and why.
        self._given_up: dict[Grammar, str] = {}
        self._again: Grammar | None = None
        self._verdicts: dict[Grammar, str] = {}
        self._decoder = msgspec.msgpack.Decoder(Verdict)

    def verdict(self, grammar: Grammar) -> str | None:
        """Return what is wrong with a grammar (nothing: empty); None while that is not known yet."""
        known = self._verdicts.get(grammar)
        if known is not None:
            return known
        problem = problem_of_size(grammar)
        if problem:
            return problem
        if grammar != self._asked and grammar not in self._queue:
            self._queue.append(grammar)
            self._ask()
        return None

    def poll(self, timeout: float) -> dict[Grammar, str]:
        """Read answers; wait for one for at most `timeout` seconds.

        Returns
        -------
        dict of Grammar to str
            Grammars about which nothing can be said now, through no fault of theirs, and why. They are not remembered:
            whoever asks again begins anew.
        """
        if self._process is not None and self._process.stdout is not None:
            pipe = self._process.stdout.fileno()
            self._write()
            while select.select([pipe], [], [], timeout)[0]:
                timeout = 0
                data = os.read(pipe, 65536)
                if not data:
                    self._lost()
                    break
                self._received += data
                self._read_answers()
            if self._is_waited_for() and time.monotonic() > self._deadline:
                self._stuck()
        given_up, self._given_up = self._given_up, {}
        return given_up

    def close(self) -> None:
        """End the compiler."""
        self._queue.clear()
        if self._process is not None:
            self._process.kill()
            self._forget_process()

    def _ask(self) -> None:
        """Send the next question. One at a time, so that a death is the fault of that one."""
        if self._asked is not None or not self._queue:
            return
        if self._process is None:
            logger.info("starting the grammar compiler")
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            if self._process.stdin is not None:
                os.set_blocking(self._process.stdin.fileno(), False)
            self._deadline = time.monotonic() + START_LIMIT_S
        if not self._ready:
            return
        self._asked = self._queue.popleft()
        data = msgspec.msgpack.encode(self._asked)
        self._unwritten = memoryview(LENGTH.pack(len(data)) + data)
        self._deadline = time.monotonic() + ANSWER_LIMIT_S
        self._write()

    def _write(self) -> None:
        """Write as much of the question as the pipe takes: one that is stopped must not stop its engine, too."""
        if not self._unwritten or self._process is None or self._process.stdin is None:
            return
        try:
            self._unwritten = self._unwritten[os.write(self._process.stdin.fileno(), self._unwritten) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # It died while idle; the end of its other pipe will say so.
            self._unwritten = memoryview(b"")
            if self._asked is not None:
                self._queue.appendleft(self._asked)
                self._asked = None

    def _is_waited_for(self) -> bool:
        return self._process is not None and (self._asked is not None or not self._ready)

    def _read_answers(self) -> None:
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            verdict = self._decoder.decode(self._received[LENGTH.size : end])
            self._received = self._received[end:]
            if self._asked is not None:
                self._remember(self._asked, verdict.problem)
                self._asked = None
            self._ready = True
            self._ask()

    def _stuck(self) -> None:
        """End a compiler that does not answer, and go on with a new one."""
        logger.error("the grammar compiler does not answer; it is killed and replaced")
        was_ready = self._ready
        if self._process is not None:
            self._process.kill()
        self._forget_process()
        if self._asked is not None:
            self._given_up[self._asked] = "the grammar compiler does not answer"
            self._asked = None
        if not was_ready:
            self._give_up_all("the grammar compiler does not start")
        self._ask()

    def _give_up_all(self, reason: str) -> None:
        self._given_up |= dict.fromkeys(self._queue, reason)
        self._queue.clear()

    def _lost(self) -> None:
        """Blame the death of the compiler on what it was asked, and go on with a new one."""
        was_ready = self._ready
        code = self._forget_process()
        if self._asked is not None and code in (-signal.SIGKILL, -signal.SIGTERM) and self._asked != self._again:
            # Somebody else ended it: ask once more. Only once, as the kernel also kills so what takes all memory.
            self._again = self._asked
            self._queue.appendleft(self._asked)
            self._asked = None
        elif self._asked is not None:
            logger.warning("the grammar compiler ended with %d on a %s", code, self._asked.kind)
            too_long = code == -signal.SIGPROF
            self._remember(self._asked, "it takes too long to compile" if too_long else "the compiler can't take it")
            self._asked = None
        elif not was_ready:
            logger.error("the grammar compiler ended with %d at start", code)
            self._give_up_all("the grammar compiler does not start")
        self._ask()

    def _forget_process(self) -> int:
        process, self._process = self._process, None
        self._ready, self._received, self._unwritten = False, b"", memoryview(b"")
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.wait()

    def _remember(self, grammar: Grammar, problem: str) -> None:
        if len(self._verdicts) >= _REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[grammar] = problem
