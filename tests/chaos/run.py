"""One run: a server of one mode, a load, a killer, an end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from server import DEATH_S, STOP_S, Server, eventually, port_is_free, workers

from chaos import leftovers
from chaos.killer import Event, Killer, ServerGone
from chaos.ledger import Totals, read_ledger
from chaos.observe import Watch
from chaos.plan import What, plan
from chaos.verdict import Times, Verdict, judge, times_by_kind

STEP_MS = 5
# Of HTTP workers, detokenizers and ranks.
MODES = {"single": (1, 1, 1), "multi": (4, 2, 1), "ranks": (4, 2, 2)}
_RESUME = "+resume"
_WARM_UP_S = 3.0
# After the last act, so that what was replaced has been used.
_COOL_DOWN_S = 3.0
# In this order: owners hear of a scheduler's death from the router, and schedulers of the owners' requests after it.
_CONNECTING = ("router", "scheduler", "detokenizer")
_LOST_AFTER_S = 60.0
_IDLE_S = 10.0
_SETTLED_S = 1.0
_LEARNED = 24
_LOG_SHOWN = 4000


class Options(msgspec.Struct, kw_only=True):
    """What a run is like.

    Attributes
    ----------
    mode : str
        Of `MODES`, with `+resume` for ``--resume-generation``.
    seconds : float
        From the first request to the last.
    seed : int
        Of the plan and of the load.
    roles, signals, others : list of str
        See `plan`.
    clients : int
        Requests at a time.
    longest : int
        Most tokens of an answer.
    end : str
        `term`, or `kill` for the launcher's own death.
    engine : list of str
        Options of ``multitok serve`` that choose it.
    learn : bool
        Whether the engine's own undisturbed answers are the reference.
    hang_timeout : float
        Seconds of silence after which a process counts as dead.
    """

    mode: str
    seconds: float
    seed: int
    roles: list[str]
    signals: list[str]
    others: list[What]
    clients: int
    longest: int
    end: str
    engine: list[str]
    learn: bool = False
    hang_timeout: float = 3.0

    def command(self) -> list[str]:
        """Return the server's options."""
        n, detokenizers, ranks = self.size
        resume = ["--resume-generation"] if self.mode.endswith(_RESUME) else []
        parts = ["--detokenizer-worker-num", str(detokenizers), "--data-parallel-size", str(ranks)]
        return [*self.engine, *workers(n), *parts, *resume, "--hang-timeout", str(self.hang_timeout)]

    @property
    def size(self) -> tuple[int, int, int]:
        """HTTP workers, detokenizers, ranks."""
        return MODES[self.mode.removesuffix(_RESUME)]


class Result(msgspec.Struct, kw_only=True):
    """What a run has shown.

    Attributes
    ----------
    options : Options
        What it was like.
    verdict : Verdict
        Of the ledger.
    leftovers : list of str
        What was left behind, while it ran and at its end.
    failures : list of str
        What else went wrong.
    times : dict of str to Times
        By kind of act.
    growth_mb : dict of str to float
        Of the memory of the processes.
    events : list of Event
        What was done.
    """

    options: Options
    verdict: Verdict
    leftovers: list[str] = []
    failures: list[str] = []
    times: dict[str, Times] = {}
    growth_mb: dict[str, float] = {}
    events: list[Event] = []


class _LoadProcess:
    """The load, as a process; what it is told is done when the call returns."""

    def __init__(self, options: Options, port: int, ledger: Path) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "chaos.load", "--port", str(port), "--ledger", str(ledger)),
                *("--seed", str(options.seed), "--clients", str(options.clients), "--longest", str(options.longest)),
                *("--deadline", str(_LOST_AFTER_S), "--learn", str(_LEARNED if options.learn else 0)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        self._expect("ready")

    def tell(self, word: str) -> None:
        """Tell it something."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        if word != "end":
            self._expect(word)
        elif self._process.wait(2 * _LOST_AFTER_S):
            raise SystemExit("the load has failed")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != word:
            raise SystemExit(f"the load said {said!r} where {word!r} was due")

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def carry_out(options: Options, log: Path | None = None) -> Result:
    """Do one run.

    Parameters
    ----------
    options : Options
        What it is like.
    log : Path or None
        File to which the server's log is added.
    """
    found: list[str] = []
    failures: list[str] = []
    events: list[Event] = []
    growth: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        ledger = Path(folder) / "ledger"
        try:
            with Server(*options.command(), errors=True, start_timeout=150) as server, _log_to(log, server):
                with _load(options, server.port, ledger) as load:
                    growth = _disturb(options, server, load, events, found, failures)
                _end(options, server, failures)
        except AssertionError as error:
            # What it quotes of the log has been shown if something else has failed.
            failures.append(str(error).partition("\n")[0] if failures else str(error)[-_LOG_SHOWN:])
        entries, totals = read_ledger(ledger) if ledger.exists() else ([], Totals())
    verdict = judge(entries, totals, events)
    return Result(
        options=options,
        verdict=verdict,
        leftovers=found,
        failures=failures,
        times=times_by_kind(entries, events, verdict),
        growth_mb=growth,
        events=events,
    )


@contextlib.contextmanager
def _log_to(file: Path | None, server: Server) -> Iterator[None]:
    try:
        yield
    finally:
        if file is not None:
            with file.open("a") as log:
                log.write(f"{server.log}\n\n")


@contextlib.contextmanager
def _load(options: Options, port: int, ledger: Path) -> Iterator[_LoadProcess]:
    load = _LoadProcess(options, port, ledger)
    try:
        yield load
    finally:
        load.close()


def _disturb(
    options: Options,
    server: Server,
    load: _LoadProcess,
    events: list[Event],
    found: list[str],
    failures: list[str],
) -> dict[str, float]:
    """Run the load, look at what the server holds, kill, look again; returns how memory grew."""
    killer = Killer(server, options.clients // 2, options.size[0])
    killer.events = events
    load.tell("go")
    time.sleep(_WARM_UP_S)
    try:
        killer.kill_each_once([role for role in _CONNECTING if role in options.roles])
        time.sleep(_COOL_DOWN_S)
        load.tell("pause")
        before = _look(server, options.size[1])
        until = time.monotonic() + options.seconds - _COOL_DOWN_S
        load.tell("go")
        killer.run(plan(options.seed, options.roles, options.signals, options.others), until)
        time.sleep(_COOL_DOWN_S)
    except (ServerGone, AssertionError) as error:
        failures.append(f"{error}; the log's end:\n{server.log[-_LOG_SHOWN:]}")
        server.terminate()
    finally:
        killer.close()
    load.tell("end")
    if failures:
        return {}
    after = _look(server, options.size[1])
    found += leftovers.excess(before, after)
    return leftovers.growth(before, after)


def _look(server: Server, detokenizers: int) -> leftovers.Snapshot:
    """Let every HTTP worker use every detokenizer, wait until nothing runs, and look at what the server holds then."""
    watch = Watch(server.port)
    figures = eventually(watch.figures, _IDLE_S, "/server_info answers")
    watch.close()
    for name, each in figures.items():
        if name.startswith("tokenizer_worker") and each["life"]:
            with server.connection_to(int(name.partition(":")[2]), life=each["life"]) as client:
                # Choices go to the detokenizers in turn.
                body = {"prompt": "hello", "max_tokens": 1, "n": detokenizers}
                client.post("/v1/completions", json=body).raise_for_status()

    def idle() -> bool:
        figures = watch.figures()
        return figures is not None and not any(
            each["load"] + each["waiting"] for name, each in figures.items() if name.startswith("scheduler")
        )

    eventually(idle, _IDLE_S, "the engines are idle when nobody asks")
    watch.close()
    # Acknowledgements are sent half a second late, and a worker sees a connection's end a little later than its client.
    time.sleep(_SETTLED_S)
    return leftovers.take(server.directory, server.pid)


def _end(options: Options, server: Server, failures: list[str]) -> None:
    """End the server as the options say; what it leaves behind is found by its own check."""
    if options.end == "kill":
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.wait_for_children(DEATH_S)
    elif not failures:
        server.terminate()
        status = server.wait(STOP_S)
        if status:
            failures.append(f"exit status {status} after SIGTERM; the log's end:\n{server.log[-_LOG_SHOWN:]}")
    if not port_is_free(server.port):
        failures.append("the port is not free")


def end_of(seed: int, choice: str) -> str:
    """Return how a run ends: every fourth by the launcher's death, if that is left to chance."""
    return choice if choice != "random" else "kill" if seed % 4 == 0 else "term"


def expand(mode: str) -> Sequence[str]:
    """Return the modes that a choice means."""
    if mode != "all":
        return mode.split(",")
    return [name + suffix for name in MODES for suffix in ("", _RESUME)]
