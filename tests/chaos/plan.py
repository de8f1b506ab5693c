"""What is done to a server, in which order: decided by the seed alone."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

What = Literal["kill", "pair", "again", "hup", "roll", "ttin", "ttou"]
ROLES = ("tokenizer_worker", "detokenizer", "router", "scheduler", "fork_server")
SIGNALS = {"KILL": signal.SIGKILL, "ABRT": signal.SIGABRT, "STOP": signal.SIGSTOP}
# Far enough apart that nobody takes it for a crash loop: five deaths of one part within ten seconds.
_PAUSE_S = (2.0, 4.0)
_WEIGHTS: dict[str, float] = {"kill": 10, "pair": 2, "again": 1, "hup": 1, "roll": 1, "ttin": 1, "ttou": 1}


class Blow(msgspec.Struct, frozen=True):
    """One kill: of which role, which of its processes (0 to 1, of those that there are), by which signal."""

    role: str
    which: float
    signal: str


class Act(msgspec.Struct, frozen=True):
    """One thing that is done.

    Attributes
    ----------
    what : str
        `kill` one process, a `pair` at once, or one and its replacement (`again`); a signal to the launcher (SIGHUP and
        so on); or SIGHUP with a kill while it is carried out (`roll`).
    blows : list of Blow
        The kills.
    pause : float
        Seconds from the last act's end to this one.
    """

    what: What
    blows: list[Blow]
    pause: float


def plan(seed: int, roles: Sequence[str], signals: Sequence[str], others: Sequence[What]) -> Iterator[Act]:
    """Yield acts without end.

    Parameters
    ----------
    seed : int
        The same seed and choices give the same acts.
    roles, signals : sequence of str
        What may be killed, and by what.
    others : sequence of str
        What else may be done, beside plain kills.
    """
    chosen = random.Random(seed)
    whats: list[What] = ["kill", *others]

    def blow() -> Blow:
        return Blow(chosen.choice(roles), chosen.random(), chosen.choice(signals))

    while True:
        what = chosen.choices(whats, [_WEIGHTS[what] for what in whats])[0]
        blows = [blow() for _ in range({"kill": 1, "again": 1, "roll": 1, "pair": 2}.get(what, 0))]
        yield Act(what, blows, chosen.uniform(*_PAUSE_S))
