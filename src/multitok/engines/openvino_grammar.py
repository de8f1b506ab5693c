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
from collections import deque

import msgspec

from multitok.engines.grammar_compiler import LENGTH, Verdict
from multitok.messages.sampling import Grammar

logger = logging.getLogger(__name__)

MAX_TEXT = 65536
# Deeper nesting is what the compiler recurses on until its stack ends.
MAX_NESTING = 128
# Verdicts kept; a program that sends a new schema with each request must not make this grow.
_REMEMBERED = 1024


class GrammarGate:
    """Asks the grammar compiler about grammars, without waiting.

    Parameters
    ----------
    model_path : str
        The model whose tokenizer grammars are meant for.
    vocab_size : int
        Number of ids.
    """

    def __init__(self, model_path: str, vocab_size: int) -> None:
        self._command = [sys.executable, "-P", "-m", "multitok.engines.grammar_compiler", model_path, str(vocab_size)]
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._received = b""
        self._queue: deque[Grammar] = deque()
        self._asked: Grammar | None = None
        self._again: Grammar | None = None
        self._verdicts: dict[Grammar, str] = {}
        self._decoder = msgspec.msgpack.Decoder(Verdict)

    def verdict(self, grammar: Grammar) -> str | None:
        """Return what is wrong with a grammar (nothing: empty); None while that is not known yet."""
        known = self._verdicts.get(grammar)
        if known is not None:
            return known
        problem = _limits(grammar)
        if problem:
            return problem
        if grammar != self._asked and grammar not in self._queue:
            self._queue.append(grammar)
            self._ask()
        return None

    def poll(self, timeout: float) -> None:
        """Read answers; wait for one for at most `timeout` seconds."""
        if self._process is None or self._process.stdout is None:
            return
        pipe = self._process.stdout.fileno()
        while select.select([pipe], [], [], timeout)[0]:
            timeout = 0
            data = os.read(pipe, 65536)
            if not data:
                self._lost()
                return
            self._received += data
            self._read_answers()

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
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not self._ready or self._process.stdin is None:
            return
        self._asked = self._queue.popleft()
        data = msgspec.msgpack.encode(self._asked)
        try:
            self._process.stdin.write(LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()
        except BrokenPipeError:
            # It died while idle; the end of its other pipe will say so.
            self._queue.appendleft(self._asked)
            self._asked = None

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
            while self._queue:
                self._remember(self._queue.popleft(), "the grammar compiler does not start")
        self._ask()

    def _forget_process(self) -> int:
        process, self._process = self._process, None
        self._ready, self._received = False, b""
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        return process.wait()

    def _remember(self, grammar: Grammar, problem: str) -> None:
        if len(self._verdicts) >= _REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[grammar] = problem


def _limits(grammar: Grammar) -> str:
    """Return which limit a grammar breaks, if any."""
    if len(grammar.text) > MAX_TEXT:
        return f"it is longer than {MAX_TEXT} characters"
    depth = deepest = 0
    for character in grammar.text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return f"it is nested deeper than {MAX_NESTING} levels" if deepest > MAX_NESTING else ""
