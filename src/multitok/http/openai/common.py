"""What chat completions, completions and embeddings share: model name, request id, stream options."""

from __future__ import annotations

import os

import msgspec

from multitok.http.errors import invalid
from multitok.http.exchange import HttpExchange
from multitok.http.limits import check_request_id
from multitok.http.manager import Manager
from multitok.http.openai.sampling import INT32_MAX
from multitok.http.openai.types import OpenAIFields, StreamOptions, refuse_unsupported, unsupported_fields
from multitok.messages.base import FinishReason
from multitok.messages.sampling import EngineFields
from multitok.tokenizer.requests import GenerateInput, RequestError

_STREAM_OPTIONS = unsupported_fields(StreamOptions)


def check_model(model: str | None, manager: Manager) -> None:
    """Refuse the name of another model; a request without a name means the one that is served.

    Raises
    ------
    RequestError
        404.
    """
    if model and model != manager.served_model_name:
        raise RequestError(404, f"the model {model[:200]!r} does not exist", "model")


def choose_model(request: GenerateInput, model: str | None, manager: Manager) -> str:
    """Settle who answers a request for generation: the model, or one of its LoRA adapters.

    Parameters
    ----------
    request : GenerateInput
        Told the adapter.
    model : str or None
        As the client says; `check_generator` has taken it.
    manager : Manager
        Knows both.

    Returns
    -------
    str
        The name in the answer.
    """
    if not model or model == manager.served_model_name:
        return manager.served_model_name
    request.engine_fields = msgspec.structs.replace(request.engine_fields or EngineFields(), adapter=model)
    return model


def check_generator(model: str | None, manager: Manager) -> None:
    """Refuse the name of another model, of which none of the loaded adapters has it; see `check_model`."""
    if model not in manager.control.state.adapters:
        check_model(model, manager)


def check_task(task: str, manager: Manager) -> None:
    """Refuse a generation by an encoder, and an embedding by a generator."""
    info = manager.engine_info
    if info.task != task:
        can = "generate text" if task == "generate" else "make embeddings"
        raise RequestError(400, f"the model {manager.served_model_name!r} does not {can}", "model")


def new_request_id(prefix: str) -> str:
    """Make an id."""
    return prefix + os.urandom(16).hex()


def set_request_id(
    exchange: HttpExchange, prefix: str, longest: int, *, rid: str | None, request_id: str | None = None
) -> str:
    """Settle a request's id: the body's, the ``X-Request-Id`` header's, or a new one.

    It is the `id` of the answer and what /abort_request takes, and goes back in ``x-request-id``.

    Parameters
    ----------
    exchange : HttpExchange
        The request.
    prefix : str
        Start of a new id.
    longest : int
        Most characters.
    rid, request_id : str or None
        The body's fields; the second goes first.

    Raises
    ------
    RequestError
        400 for an id that could not be a header, or is too long.
    """
    if request_id is not None:
        param = "request_id"
    elif rid is not None:
        request_id, param = rid, "rid"
    elif header := exchange.header(b"x-request-id"):
        request_id, param = header.decode("latin-1"), "X-Request-Id"
    else:
        exchange.request_id = request_id = new_request_id(prefix)
        return request_id
    check_request_id(request_id, param, longest)
    exchange.request_id = request_id
    exchange.id_is_given = True
    return request_id


def check_priority(priority: int | None) -> int:
    """Check ``priority``."""
    if priority is None:
        return 0
    if not -INT32_MAX <= priority <= INT32_MAX:
        raise invalid("priority", f"must be an integer from {-INT32_MAX} to {INT32_MAX}")
    return priority


def check_timeout(timeout: float | None) -> float | None:
    """Check ``timeout``, in seconds."""
    if timeout is not None and not 0.0 < timeout <= INT32_MAX:
        raise invalid("timeout", f"must be a number of seconds in the range 0 < x <= {INT32_MAX}")
    return timeout


def wants_usage(request: OpenAIFields) -> bool:
    """Read ``stream_options``."""
    options = request.stream_options
    if options is None:
        return False
    refuse_unsupported(options, _STREAM_OPTIONS, "stream_options.")
    if options.include_usage and not request.stream:
        raise invalid("stream_options", "is only allowed when stream is true")
    return bool(options.include_usage)


def finish_reason(finish: FinishReason | None) -> str | None:
    """Return OpenAI's word."""
    return None if finish is None else finish.type


def stop_reason(finish: FinishReason | None, eos_token_ids: list[int]) -> int | str | None:
    """Return what the client asked to stop at: the stop string or id; None for an end-of-sequence id."""
    if finish is None or finish.matched in eos_token_ids:
        return None
    return finish.matched
