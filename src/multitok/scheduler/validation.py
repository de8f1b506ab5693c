"""What the engine can't take, whatever its load."""

from __future__ import annotations

import numpy

from multitok.engines.base import EngineInfo
from multitok.messages.to_scheduler import TokenizedGenerateReqInput
from multitok.scheduler.request import RequestMessage, token_limit


def problem_of(message: RequestMessage, info: EngineInfo) -> str | None:
    """Return why a request can't be taken, in words meant for the client; None when it can."""
    generates = isinstance(message, TokenizedGenerateReqInput)
    task = "generate" if generates else "embed"
    if task != info.task:
        return f"the model does not {task}"
    problem = _problem_of_ids(message.input_ids, "prompt", info.vocab_size)
    if problem is not None:
        return problem
    if not message.input_ids:
        return "the prompt is empty"
    if isinstance(message, TokenizedGenerateReqInput):
        most = message.sampling_params.max_new_tokens
        if most < 1:
            return f"{most} output tokens are less than one"
        problem = _problem_of_ids(message.resumed_ids, "output so far", info.vocab_size)
        if problem is not None:
            return problem
        resumed = len(message.resumed_ids) // 4
        if resumed > most:
            return f"the output so far has {resumed} tokens, more than the limit of {most}"
        if not 0 <= message.resumed_tokens < len(message.input_ids) // 4:
            return f"the prompt can't end with {message.resumed_tokens} output tokens"
        fields = message.engine_fields
        if fields is not None and (unknown := [name for name in fields.in_use() if name not in info.fields]):
            return f"engine {info.name!r} does not take {', '.join(unknown)}"
    longest = token_limit(message)
    if longest > info.context_length:
        return f"prompt and output of {longest} tokens exceed the context of {info.context_length}"
    return None


def _problem_of_ids(packed: bytes, what: str, vocab_size: int) -> str | None:
    if not packed:
        return None
    if len(packed) % 4:
        return f"the ids of the {what} are cut"
    ids = numpy.frombuffer(packed, numpy.int32)
    if ids.min() < 0 or ids.max() >= vocab_size:
        return f"the {what} has ids outside the vocabulary of {vocab_size}"
    return None
