"""Every combination of HTTP workers, detokenizers and ranks starts and serves."""

from __future__ import annotations

import itertools

import pytest
from reference import MODEL, echo_text
from server import SIMULATED, Server, workers

_ALL = list(itertools.product((1, 2, 3), (0, 1, 2, 3), (1, 2, 3)))
# Each pair of values of two numbers comes up in these.
_PAIRWISE = {(w, d, (w + d) % 3 + 1) for w, d in itertools.product((1, 2, 3), (0, 1, 2, 3))}


@pytest.mark.parametrize(
    ("http_workers", "detokenizers", "ranks"),
    [pytest.param(*c, marks=[] if c in _PAIRWISE else [pytest.mark.slow]) for c in _ALL],
)
def test_combination_starts_and_serves(http_workers: int, detokenizers: int, ranks: int) -> None:
    parts = ["--detokenizer-worker-num", str(detokenizers), "--data-parallel-size", str(ranks)]
    with Server(*SIMULATED, *workers(http_workers), *parts) as server:
        titles = [name.partition("::")[2].partition(":")[0] for name in server.titles()]
        assert titles.count("tokenizer_worker") == http_workers
        assert titles.count("detokenizer") == detokenizers
        assert titles.count("scheduler") == ranks
        assert titles.count("router") == (http_workers > 1)
        assert server.http.get("/health_generate").status_code == 200
        prompts = [f"the answer to prompt number {i} in a list" for i in range(7)]
        answer = server.openai.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=20)
        assert [choice.text for choice in answer.choices] == [echo_text(p, 20) for p in prompts for _ in range(2)]
        for prompt in prompts[:3]:
            stream = server.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=20, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == echo_text(prompt, 20)
        server.wait_until_idle()
