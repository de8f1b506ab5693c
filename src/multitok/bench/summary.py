"""Figures of one run: rates, percentiles, errors by kind."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from multitok.bench.connection import Sample
from multitok.bench.load import Load, LoadResult


class Percentiles(msgspec.Struct, frozen=True):
    """Distribution of a time, in milliseconds; each is a value that was seen (nearest rank)."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes
    ----------
    ttft, inter_token : Percentiles or None
        Time to the first event with text, and from each to the next (events that came in one read are 0 apart); None
        when nothing was streamed.
    per_token : Percentiles or None
        Per request, time from the first event with text to the end, per token after the first.
    events_per_token : float or None
        Events with text per token; below 1 where a server merged tokens.
    reads_per_request : float
        How often the client's socket had something to read: below the events where they came in bunches.
    tokens_counted_by : str
        'usage', or 'events' where the server doesn't say how many tokens it made.
    own_cpu_s : float
        CPU time of the load generator.
    """

    clients: int | None
    rate: float | None
    requests: int
    ok: int
    errors: dict[str, int]
    error_details: list[str]
    wall_s: float
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    latency: Percentiles | None
    ttft: Percentiles | None
    inter_token: Percentiles | None
    per_token: Percentiles | None
    events: int
    events_per_request: float | None
    events_per_token: float | None
    reads_per_request: float
    bytes_per_request: float
    tokens_counted_by: str
    own_cpu_s: float

    @property
    def level(self) -> float:
        """Clients, or the rate."""
        return self.clients if self.clients is not None else self.rate or 0.0


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Return the distribution of times given in seconds; None when there are none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1

    def rank(share: float) -> float:
        return round(ordered[min(last, int(share * len(ordered)))] * 1e3, 3)

    mean = round(sum(ordered) / len(ordered) * 1e3, 3)
    return Percentiles(rank(0.5), rank(0.9), rank(0.99), round(ordered[-1] * 1e3, 3), mean)


def summarize(result: LoadResult, load: Load) -> Summary:
    """Return the figures of a run; latencies and rates are those of requests that succeeded."""
    ok = [sample for sample in result.samples if sample.error is None]
    failed = [sample for sample in result.samples if sample.error is not None]
    gaps = array("d")
    first: list[float] = []
    per_token: list[float] = []
    for sample in ok:
        times = sample.times
        if not times:
            continue
        first.append(times[0] - sample.start)
        gaps.extend(later - earlier for earlier, later in pairwise(times))
        tokens = sample.output_tokens or len(times)
        if tokens > 1:
            per_token.append((sample.end - times[0]) / (tokens - 1))
    counted = all(sample.output_tokens is not None for sample in ok)
    text_events = sum(len(sample.times) for sample in ok)
    output_tokens = sum(sample.output_tokens or 0 for sample in ok) if counted else text_events
    prompt_tokens = sum(sample.prompt_tokens or 0 for sample in ok)
    number = max(len(ok), 1)
    return Summary(
        clients=load.clients,
        rate=load.rate,
        requests=len(result.samples),
        ok=len(ok),
        errors=dict(Counter(str(sample.error) for sample in failed)),
        error_details=_details(failed),
        wall_s=round(result.wall_s, 3),
        requests_per_s=round(len(ok) / result.wall_s, 2),
        output_tokens=output_tokens,
        output_tokens_per_s=round(output_tokens / result.wall_s, 1),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(sample.cached_tokens or 0 for sample in ok),
        mean_prompt_tokens=round(prompt_tokens / number, 2),
        mean_output_tokens=round(output_tokens / number, 2),
        latency=percentiles([sample.end - sample.start for sample in ok]),
        ttft=percentiles(first),
        inter_token=percentiles(gaps),
        per_token=percentiles(per_token),
        events=text_events,
        events_per_request=round(text_events / number, 2) if first else None,
        events_per_token=round(text_events / output_tokens, 3) if first and output_tokens else None,
        reads_per_request=round(sum(sample.reads for sample in ok) / number, 2),
        bytes_per_request=round(sum(sample.size for sample in ok) / number),
        tokens_counted_by="usage" if counted else "events",
        own_cpu_s=round(result.own_cpu_s, 3),
    )


def _details(failed: list[Sample]) -> list[str]:
    """Return what was said about the first failure of each kind."""
    details = {sample.error: sample.detail for sample in reversed(failed)}
    return [f"{kind}: {detail}" if detail else str(kind) for kind, detail in details.items()]
