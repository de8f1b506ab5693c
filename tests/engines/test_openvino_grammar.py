import os
import signal
import sys
import time

import pytest

from multitok.engines.grammar_gate import GrammarGate
from multitok.messages.sampling import Grammar

# Plays the compiler: the text of a grammar is what becomes of it.
COMPILER = """
import os, signal, struct, sys, time
import msgspec
log = open(sys.argv[1], "a")
print("start", file=log, flush=True)
def answer(problem):
    data = msgspec.msgpack.encode([problem])
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()
if os.path.exists(sys.argv[1] + ".broken"):
    sys.exit(3)
if os.path.exists(sys.argv[1] + ".stopped"):
    os.kill(os.getpid(), signal.SIGSTOP)
answer("")
while header := sys.stdin.buffer.read(4):
    text = msgspec.msgpack.decode(sys.stdin.buffer.read(struct.unpack("<I", header)[0]))[1]
    print(text, file=log, flush=True)
    if text.startswith("signal "):
        os.kill(os.getpid(), int(text.split()[1]))
    answer("" if text.startswith("good") else text)
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def gate(log):
    gate = GrammarGate("module")
    gate._command = [sys.executable, "-c", COMPILER, str(log)]
    yield gate
    gate.close()


def verdict(gate, text: str) -> str:
    """The verdict on a grammar, or why there is none."""
    grammar = Grammar("regex", text)
    deadline = time.monotonic() + 20
    while (problem := gate.verdict(grammar)) is None:
        assert time.monotonic() < deadline
        given_up = gate.poll(0.05)
        if grammar in given_up:
            return given_up[grammar]
    return problem


def test_it_starts_with_the_first_grammar_and_remembers_verdicts(gate, log):
    gate.poll(0)
    assert not log.exists()
    assert [verdict(gate, text) for text in ("good", "bad", "good", "bad")] == ["", "bad", "", "bad"]
    assert log.read_text().split() == ["start", "good", "bad"]


def test_questions_wait_for_their_turn(gate):
    grammars = [Grammar("regex", f"good{i}") for i in range(5)]
    assert [gate.verdict(grammar) for grammar in grammars] == [None] * 5
    assert verdict(gate, "good4") == ""
    assert [gate.verdict(grammar) for grammar in grammars] == [""] * 5


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGSEGV, "can't take it"), (signal.SIGPROF, "takes too long to compile")]
)
def test_a_death_is_the_fault_of_the_grammar_and_of_no_other(gate, log, number, words):
    other = Grammar("regex", "good")
    bad = f"signal {int(number)}"
    gate.verdict(Grammar("regex", bad))
    gate.verdict(other)
    assert words in verdict(gate, bad)
    assert verdict(gate, "good") == ""
    assert log.read_text().splitlines() == ["start", bad, "start", "good"]


def test_what_somebody_else_killed_is_asked_once_more(gate, log):
    assert "can't take it" in verdict(gate, f"signal {int(signal.SIGKILL)}")
    assert log.read_text().count("signal") == 2


def test_a_death_between_questions_costs_nothing(gate):
    assert verdict(gate, "good") == ""
    os.kill(gate._process.pid, signal.SIGKILL)
    assert verdict(gate, "good2") == ""
    assert verdict(gate, "bad") == "bad"


def test_a_compiler_that_does_not_start_refuses_and_is_tried_again(gate, log):
    broken = log.with_name("log.broken")
    broken.touch()
    assert "does not start" in verdict(gate, "good")
    broken.unlink()
    assert verdict(gate, "good") == ""


def test_a_compiler_that_is_stopped_while_it_works_is_killed_and_replaced(gate, log, monkeypatch):
    assert verdict(gate, "good") == ""
    monkeypatch.setattr("multitok.engines.grammar_gate.ANSWER_LIMIT_S", 0.2)
    stuck, other = Grammar("regex", f"signal {int(signal.SIGSTOP)}"), Grammar("regex", "good2")
    gate.verdict(stuck)
    gate.verdict(other)
    pid = gate._process.pid
    assert "does not answer" in verdict(gate, stuck.text)
    monkeypatch.undo()
    # Nobody else's grammar is given up, and a new one serves it.
    assert verdict(gate, "good2") == ""
    assert gate._process.pid != pid
    assert log.read_text().count("start") == 2
    assert not os.path.exists(f"/proc/{pid}")


def test_a_question_that_does_not_fit_into_the_pipe_of_a_stopped_compiler_holds_up_nobody(gate, monkeypatch):
    assert verdict(gate, "good") == ""
    monkeypatch.setattr("multitok.engines.grammar_gate.ANSWER_LIMIT_S", 0.2)
    os.kill(gate._process.pid, signal.SIGSTOP)
    long = "good" + "\U0001f600" * 60000
    assert "does not answer" in verdict(gate, long)
    monkeypatch.undo()
    assert verdict(gate, long) == ""


def test_a_compiler_that_is_stopped_while_it_starts_is_killed_and_tried_again(gate, log, monkeypatch):
    monkeypatch.setattr("multitok.engines.grammar_gate.START_LIMIT_S", 0.2)
    # By itself: a signal from here may come when it has started.
    stopped = log.with_name("log.stopped")
    stopped.touch()
    assert "does not start" in verdict(gate, "good")
    stopped.unlink()
    monkeypatch.undo()
    assert verdict(gate, "good") == ""


def test_limits_are_checked_without_the_compiler(gate, log):
    assert "nested" in gate.verdict(Grammar("json_schema", "[" * 129))
    assert "longer" in gate.verdict(Grammar("ebnf", "x" * 65537))
    assert not log.exists()


def test_memory_of_verdicts_is_bounded(gate, monkeypatch):
    monkeypatch.setattr("multitok.engines.grammar_gate._REMEMBERED", 3)
    for i in range(6):
        assert verdict(gate, f"good{i}") == ""
    assert len(gate._verdicts) == 3
