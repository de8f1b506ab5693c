"""Checks grammars beside the other work: what vLLM says of them, and whether they would hold up its core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from multitok.engines.grammar_gate import GrammarGate
from multitok.messages.base import FinishReason
from multitok.messages.sampling import Grammar

_LOOK_S = 0.5


class GrammarChecks:
    """A thread that checks one grammar after the other.

    Parameters
    ----------
    verify : callable
        Raises what is wrong with vLLM's sampling parameters, which hold the grammar, and completes them.
    gate : GrammarGate or None
        Tries them; None where vLLM's backend has limits of its own.
    notify : callable
        Called, in the thread, when there is a result.
    """

    def __init__(self, verify: Callable[[Any], None], gate: GrammarGate | None, notify: Callable[[], None]) -> None:
        self._verify = verify
        self._gate = gate
        self._notify = notify
        self._thread = ThreadPoolExecutor(1, "vllm-grammars")
        self._results: deque[tuple[Any, FinishReason | None]] = deque()
        self._closing = False

    def submit(self, request: Any, grammar: Grammar) -> None:
        """Have an ``EngineCoreRequest`` checked."""
        self._thread.submit(self._check, request, grammar)

    def take(self) -> list[tuple[Any, FinishReason | None]]:
        """Return the requests that were checked, each with why it can't be taken, or None."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        """End the thread and the gate's process."""
        self._closing = True
        self._thread.shutdown(cancel_futures=True)
        if self._gate is not None:
            self._gate.close()

    def _check(self, request: Any, grammar: Grammar) -> None:
        finish = None
        try:
            self._verify(request.sampling_params)
        except Exception as error:  # the libraries that compile grammars raise what they like
            message = error.args[0] if error.args else type(error).__name__
            finish = FinishReason("error", status=400, message=grammar_problem(grammar, str(message)))
        else:
            # An EBNF grammar as vLLM, which takes a second notation too, has rewritten it.
            rewritten = request.sampling_params.structured_outputs.grammar
            finish = self._try(Grammar(grammar.kind, rewritten) if rewritten else grammar)
        self._results.append((request, finish))
        self._notify()

    def _try(self, grammar: Grammar) -> FinishReason | None:
        if self._gate is None:
            return None
        while (problem := self._gate.verdict(grammar)) is None:
            reason = self._gate.poll(_LOOK_S).get(grammar)
            if reason is not None or self._closing:
                message = grammar_problem(grammar, reason or "the engine ends")
                return FinishReason("error", status=503, message=message)
        return FinishReason("error", status=400, message=grammar_problem(grammar, problem)) if problem else None


def grammar_problem(grammar: Grammar, problem: str) -> str:
    """Return the words for a client whose grammar can't be taken."""
    return f"the {grammar.kind} can't be enforced: {problem}"
