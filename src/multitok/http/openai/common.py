"""What chat completions, completions and embeddings share: the model, request id, stream options."""

from __future__ import annotations

import os

import msgspec

from multitok.engines.base import Task
from multitok.http.errors import invalid
from multitok.http.exchange import HttpExchange
from multitok.http.limits import check_request_id
from multitok.http.manager import Manager, Model
from multitok.http.openai.sampling import INT32_MAX
from multitok.http.openai.types import OpenAIFields, StreamOptions, refuse_unsupported, unsupported_fields
from multitok.messages.base import FinishReason
from multitok.messages.sampling import EngineFields
from multitok.tokenizer.requests import RequestError

_STREAM_OPTIONS = unsupported_fields(StreamOptions)


def find_model(name: str | None, manager: Manager, task: Task | None = None) -> Model:
    """Return the model that a request is for.

    Parameters
    ----------
    name : str or None
        Its name; without one it is the first that does the task.
    manager : Manager
        Has the models.
    task : {'generate', 'embed'} or None
        What it must be able to do.

    Raises
    ------
    RequestError
        404: no model has this name; 400: it does something else.
    """
    models = [model for model in manager.models if not name or model.name == name]
    if not models:
        raise RequestError(404, f"the model {(name or '')[:200]!r} does not exist", "model")
    for model in models:
        if task in (None, model.engine_info.task):
            return model
    can = "generate text" if task == "generate" else "make embeddings"
    raise RequestError(400, f"the model {models[0].name!r} does not {can}", "model")


def find_generator(name: str | None, manager: Manager) -> tuple[Model, str | None]:
    """Return the model that a generation is for, and which of its LoRA adapters; see `find_model`."""
    adapter = manager.control.state.adapters.get(name) if name else None
    if adapter is None:
        return find_model(name, manager, "generate"), None
    return manager.models[adapter.model], name


def with_adapter(fields: EngineFields | None, adapter: str | None) -> EngineFields | None:
    """Return what the engine is told, and with which adapter."""
    if adapter is None:
        return fields
    return msgspec.structs.replace(fields or EngineFields(), adapter=adapter)


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
