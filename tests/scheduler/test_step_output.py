from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from multitok.engines.base import EngineOutput
from multitok.messages.base import FinishReason
from multitok.messages.sampling import SamplingParams
from multitok.messages.split import handle_output_by_index
from multitok.messages.to_scheduler import DecodeParams, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from multitok.scheduler.request import ScheduledRequest
from multitok.scheduler.step_output import embedding_batch, token_batch

NOW = 50.0
FINISHES = [None, FinishReason("length"), FinishReason("stop", 7), FinishReason("abort")]


def generating(number: int, made: list[int], started: bool) -> ScheduledRequest:
    """A request that has made some ids already."""
    message = TokenizedGenerateReqInput(
        number=number,
        input_ids=b"\1\0\0\0" * number,
        sampling_params=SamplingParams(max_new_tokens=9),
        decode_params=DecodeParams(stop=[str(number)]),
    )
    request = ScheduledRequest(message, f"w{number}.1", "d0", 1.0)
    request.admitted = 2.0
    request.output_ids.extend(made)
    if started:
        request.decode_params = None
        request.first_token = 3.0
    return request


@st.composite
def rows(draw: Any) -> dict[str, Any]:
    """What one request is, and what a step made for it."""
    finish = draw(st.sampled_from(FINISHES))
    started = draw(st.booleans())
    ids = draw(st.lists(st.integers(0, 300), min_size=0 if finish else 1, max_size=3))
    with_logprobs = draw(st.booleans())
    return {
        "request": (draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)) if started else [], started),
        "output": {
            "output_ids": ids,
            "finish": finish,
            "logprobs": [-float(i) for i in ids] if with_logprobs else None,
            "top_logprobs": [[(i, -0.5)] for i in ids] if with_logprobs else None,
            # Engines count them at the beginning or at the end.
            "cached_tokens": draw(st.integers(0, 2)) if finish or not started else 0,
        },
    }


def made_of(*described: tuple[int, dict[str, Any]]) -> list[tuple[ScheduledRequest, EngineOutput]]:
    return [
        (generating(number, *row["request"]), EngineOutput(number=number, **row["output"])) for number, row in described
    ]


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_a_row_of_a_step_is_what_the_request_alone_would_have_produced(described):
    numbered = list(enumerate(described, start=1))
    batch = token_batch(made_of(*numbered), 2, 3, NOW)
    for i, row in enumerate(numbered):
        assert handle_output_by_index(batch, i) == token_batch(made_of(row), 2, 3, NOW)


def test_new_ids_are_kept_with_their_request():
    ((request, output),) = made_of(
        (1, {"request": ([5, 6], True), "output": {"output_ids": [7, 8], "finish": None}}),
    )
    batch = token_batch([(request, output)], 0, 3, NOW)
    assert request.output_ids.tolist() == [5, 6, 7, 8]
    assert batch.first_indexes == [2]
    assert token_batch([(request, output)], 0, 3, NOW).first_indexes == [4]


def test_decode_params_and_the_time_of_the_first_token_are_given_once():
    request = generating(3, [], started=False)
    step = [(request, EngineOutput(3, [1]))]
    assert token_batch(step, 0, 3, NOW).decode_params == [DecodeParams(stop=["3"])]
    assert request.first_token == NOW
    assert token_batch(step, 0, 3, NOW + 1).decode_params is None
    assert request.first_token == NOW


def test_a_row_of_embeddings_is_what_the_request_alone_would_have_produced():
    def made(*numbers: int) -> list[tuple[ScheduledRequest, EngineOutput]]:
        made = []
        for number in numbers:
            message = TokenizedEmbeddingReqInput(number=number, input_ids=b"\1\0\0\0" * number)
            failed = FinishReason("error", None, 500, "x") if number == 2 else FinishReason("stop")
            output = EngineOutput(number, [], failed, embedding=None if number == 2 else bytes([number]) * 8)
            made.append((ScheduledRequest(message, f"w{number}.1", "d0", 1.0), output))
        return made

    batch = embedding_batch(made(1, 2, 3), 4, NOW)
    assert [handle_output_by_index(batch, i) for i in range(3)] == [
        embedding_batch(made(number), 4, NOW) for number in (1, 2, 3)
    ]
    assert batch.embeddings == [b"\1" * 8, None, b"\3" * 8]
    assert batch.prompt_tokens == [1, 2, 3]
