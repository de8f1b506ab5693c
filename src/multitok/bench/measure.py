"""One measured point: warm-up, load, and the server's CPU meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
import uvloop

from multitok.bench.load import Load, Progress, run_load
from multitok.bench.processes import Process, snapshot, used_between
from multitok.bench.prompts import Counter
from multitok.bench.requests import Numbered, Session, Settings
from multitok.bench.summary import Summary, summarize
from multitok.bench.target import PATHS, BenchError, Target

# So that what a server does after its last answer counts for the run that caused it.
_SETTLE_S = 0.3


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A run and what the server's processes used for it; none where they can't be seen."""

    summary: Summary
    processes: list[Process]


def measure(
    target: Target,
    settings: Settings,
    sessions: list[Session],
    load: Load,
    *,
    warmup: int = 0,
    pid: int | None = None,
    progress: Progress | None = None,
) -> Point:
    """Run a load once.

    Parameters
    ----------
    target, settings, sessions, load
        What is asked of whom, and how much.
    warmup : int
        Sessions before that, which don't count.
    pid : int, optional
        First process of the server, if it runs here.
    progress : callable, optional
        See `run_load`.
    """

    async def run() -> Point:
        if warmup:
            first = msgspec.structs.replace(load, sessions=warmup)
            numbered = Numbered(sessions, target, settings.api, seed=2 * load.seed + 1)
            await run_load(target, settings.api, numbered, first)
            await asyncio.sleep(_SETTLE_S)
        numbered = Numbered(sessions, target, settings.api, seed=2 * load.seed)
        before = snapshot(pid) if pid else {}
        result = await run_load(target, settings.api, numbered, load, progress)
        await asyncio.sleep(_SETTLE_S if pid else 0)
        used = used_between(before, snapshot(pid)) if pid else []
        return Point(summary=summarize(result, load), processes=used)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def template_overhead(target: Target, settings: Settings, counter: Counter) -> int:
    """Send one request, and return the tokens that the server adds to a prompt's own.

    Raises
    ------
    BenchError
        When the server refuses it; the message holds what it said.
    """
    text = "Say one word."
    body = {"model": settings.model, "max_tokens": 1}
    body |= {"messages": [{"role": "user", "content": text}]} if settings.api == "chat" else {"prompt": text}
    answer = target.call(PATHS[settings.api], body)
    usage = answer.get("usage")
    if not isinstance(answer.get("choices"), list):
        raise BenchError(f"{target.url}{PATHS[settings.api]} answered without choices")
    prompt_tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not counter.exact or not isinstance(prompt_tokens, int):
        return 0
    return max(0, prompt_tokens - counter.count(text))
