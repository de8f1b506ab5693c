"""From CPU per stage to the number of processes that an engine needs: costs per request, token and step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

# What each stage's CPU is explained by. A step makes one message for the detokenizer, and from there one for each
# worker, whatever is in it; `messages` counts the latter.
EXPLAINED_BY = {
    "tokenizer_worker": ("requests", "prompt_tokens", "tokens", "messages"),
    "detokenizer": ("requests", "tokens", "steps", "messages"),
    "router": ("requests", "prompt_tokens"),
    "scheduler": ("requests", "prompt_tokens", "tokens", "steps"),
}
_MOST_PROCESSES = 256

Costs = Mapping[str, Mapping[str, float]]


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did, or what happens in a second."""

    requests: float
    prompt_tokens: float
    tokens: float
    steps: float
    messages: float


def amounts_of(run: Mapping[str, Any], workers: int) -> Amounts:
    """Return what a measured run did; all streams get a token per step, so the time per token is that of a step."""
    summary = run["summary"]
    steps = summary["wall_s"] * 1e3 / summary["per_token"]["mean"]
    return Amounts(
        requests=summary["ok"],
        prompt_tokens=summary["prompt_tokens"],
        tokens=summary["output_tokens"],
        steps=steps,
        messages=steps * min(workers, summary["clients"]),
    )


def fit(amounts: Sequence[Amounts], cpu_s: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Return seconds per unit of each amount, none below 0, with the least relative error."""
    used = list(names)
    measured = np.array([max(cpu, 1e-3) for cpu in cpu_s])
    while used:
        # Divided by what was measured, so that a short run counts as much as a long one.
        matrix = np.array([[getattr(each, name) for name in used] for each in amounts]) / measured[:, None]
        found, *_ = np.linalg.lstsq(matrix, np.ones(len(measured)), rcond=None)
        if found.min() >= 0:
            return dict.fromkeys(names, 0.0) | dict(zip(used, map(float, found), strict=True))
        used.pop(int(found.argmin()))
    return dict.fromkeys(names, 0.0)


def predict(costs: Costs, amounts: Amounts) -> dict[str, float]:
    """Return CPU seconds of each stage."""
    return {stage: sum(cost * getattr(amounts, name) for name, cost in parts.items()) for stage, parts in costs.items()}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Processes for an engine's rate, and how busy each would be."""

    workers: int
    detokenizers: int
    worker_busy: float
    detokenizer_busy: float
    router_busy: float
    scheduler_busy: float


def plan(
    costs: Costs, *, tokens_per_s: float, streams: int, input_tokens: int, output_tokens: int, busy: float
) -> Plan | None:
    """Return the fewest processes that keep up.

    Parameters
    ----------
    costs : mapping
        Of `fit`, by stage.
    tokens_per_s, streams : float, int
        What the engine makes, and for how many requests at a time.
    input_tokens, output_tokens : int
        Of a request.
    busy : float
        Share of a core that a process may use.

    Returns
    -------
    Plan or None
        None when no number of processes does: each more costs messages of its own.
    """
    requests = tokens_per_s / output_tokens
    steps = tokens_per_s / streams
    for workers in range(1, _MOST_PROCESSES + 1):
        amounts = Amounts(
            requests=requests,
            prompt_tokens=requests * input_tokens,
            tokens=tokens_per_s,
            steps=steps,
            messages=steps * workers,
        )
        cpu = predict(costs, amounts)
        if cpu["tokenizer_worker"] / workers > busy:
            continue
        parts = costs["detokenizer"]
        # Each detokenizer has every step and a message for every worker, but only its share of the requests.
        each = steps * parts["steps"] + amounts.messages * parts["messages"]
        shared = cpu["detokenizer"] - each
        if each >= busy:
            continue
        detokenizers = max(1, math.ceil(shared / (busy - each)))
        # Several detokenizers make several messages per step and worker.
        more = steps * (detokenizers - 1) * costs["tokenizer_worker"]["messages"]
        if cpu["tokenizer_worker"] / workers + more > busy:
            continue
        return Plan(
            workers=workers,
            detokenizers=detokenizers,
            worker_busy=round(cpu["tokenizer_worker"] / workers + more, 2),
            detokenizer_busy=round(each + shared / detokenizers, 2),
            router_busy=round(cpu.get("router", 0.0) if workers > 1 else 0.0, 2),
            scheduler_busy=round(cpu["scheduler"], 2),
        )
    return None
