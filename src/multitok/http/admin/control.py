"""Routes of the control plane, with SGLang's names and fields: what an operator does while the server runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from multitok.engines.base import no_such_operation
from multitok.http.body_route import read_body
from multitok.http.decode import decode_body
from multitok.http.errors import invalid
from multitok.http.limits import check_request_id
from multitok.http.manager import Manager, Model
from multitok.http.openai.common import find_model
from multitok.http.openai.types import Unsupported, UnsupportedFlag, refuse_unsupported, unsupported_fields
from multitok.http.respond import json_response
from multitok.messages.control import (
    AbortMatching,
    Continue,
    ControlOperation,
    FreezeGc,
    LogLevel,
    Pause,
    PauseMode,
    SetLogLevel,
)
from multitok.messages.operations import (
    EngineOperation,
    FlushCache,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    name_of,
)
from multitok.messages.to_child import ControlReqOutput
from multitok.tokenizer.requests import RequestError

# What each part does between two steps, and what takes as long as loading a model, or as the requests that run.
QUICK_S = 30.0
LONG_S = 600.0
_MOST_S = 86400.0
_MOST_PATH = 4096
_MOST_NAME = 256

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T", bound="Timed")


class Timed(msgspec.Struct, kw_only=True):
    """What every operation takes: seconds until the answer names those that have not done it."""

    timeout: float | None = None


class ForModel(Timed, kw_only=True):
    """What operations on an engine take: the model's name; without it, the first whose engine has the operation."""

    model: str | None = None


class PauseRequest(Timed, kw_only=True):
    """Body of ``/pause_generation``, for all models together; SGLang's ``in_place`` is ``keep``."""

    mode: Literal["wait", "abort", "keep", "in_place"] = "abort"

    model: Unsupported = None


class ContinueRequest(Timed, kw_only=True):
    """Body of ``/continue_generation``."""

    torch_empty_cache: bool | None = None

    model: Unsupported = None


class FlushCacheRequest(ForModel, kw_only=True):
    """Body of ``/flush_cache``."""


class FreezeGcRequest(Timed, kw_only=True):
    """Body of ``/freeze_gc``."""


class LoggingRequest(Timed, kw_only=True):
    """Body of ``/configure_logging``."""

    log_level: LogLevel | None = None

    log_requests: UnsupportedFlag = None
    log_requests_level: Unsupported = None
    log_requests_format: Unsupported = None
    dump_requests_folder: Unsupported = None
    dump_requests_threshold: Unsupported = None
    crash_dump_folder: Unsupported = None


class LoadAdapterRequest(ForModel, kw_only=True):
    """Body of ``/load_lora_adapter``."""

    lora_name: str
    lora_path: str

    pinned: UnsupportedFlag = None


class UnloadAdapterRequest(Timed, kw_only=True):
    """Body of ``/unload_lora_adapter``."""

    lora_name: str


class UpdateWeightsRequest(ForModel, kw_only=True):
    """Body of ``/update_weights_from_disk``; the engine's cache is flushed where it can be."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None

    load_format: Unsupported = None
    is_async: UnsupportedFlag = None
    keep_pause: UnsupportedFlag = None
    recapture_cuda_graph: UnsupportedFlag = None
    manifest: Unsupported = None


class StartProfileRequest(ForModel, kw_only=True):
    """Body of ``/start_profile``."""

    output_dir: str | None = None

    start_step: Unsupported = None
    num_steps: Unsupported = None
    activities: Unsupported = None
    profile_by_stage: UnsupportedFlag = None
    with_stack: UnsupportedFlag = None
    record_shapes: UnsupportedFlag = None


class StopProfileRequest(ForModel, kw_only=True):
    """Body of ``/stop_profile``."""


class AbortRequest(Timed, kw_only=True):
    """Body of ``/abort_request``: one of the three, and which model's requests are meant; without it, all models'."""

    model: str | None = None
    rid: str | None = None
    rid_prefix: str | None = None
    abort_all: bool | None = None


class OperationAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer of every operation.

    Attributes
    ----------
    success, status : bool, str
        True and ``ok``; what fails is an error.
    message : str
        What was done, for people.
    id, epoch : int
        The operation, and the version of the control state after it.
    done, died : list of str
        Parts that have done it, and parts that died first; their next life has the state.
    aborted, loaded_adapters, num_paused_requests : int, dict or None
        What some routes say beside that.
    """

    success: bool
    status: Literal["ok"]
    message: str
    id: int
    epoch: int
    done: list[str]
    died: list[str]
    aborted: int | None = None
    loaded_adapters: dict[str, str] | None = None
    num_paused_requests: int | None = None


# Path: what it does, what it takes, whether GET does it, too (SGLang takes that where nothing need be said).
OPERATIONS: dict[str, tuple[str, type[Timed], bool]] = {
    "/pause_generation": ("Let no request begin", PauseRequest, False),
    "/continue_generation": ("End a pause", ContinueRequest, False),
    "/flush_cache": ("Forget cached prefixes", FlushCacheRequest, True),
    "/abort_request": ("End requests by id", AbortRequest, False),
    "/configure_logging": ("Set the log level", LoggingRequest, False),
    "/load_lora_adapter": ("Load a LoRA adapter", LoadAdapterRequest, False),
    "/unload_lora_adapter": ("Unload a LoRA adapter", UnloadAdapterRequest, False),
    "/update_weights_from_disk": ("Load other weights of the model", UpdateWeightsRequest, False),
    "/freeze_gc": ("Freeze garbage collection", FreezeGcRequest, True),
    "/start_profile": ("Begin to record a profile", StartProfileRequest, True),
    "/stop_profile": ("End the profile", StopProfileRequest, True),
}
_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for _, kind, _ in OPERATIONS.values()
}
_UNSUPPORTED = {kind: unsupported_fields(kind) for kind in _DECODERS}


class ControlRoutes:
    """Serves operations; each answer says who has done it.

    Parameters
    ----------
    manager : Manager
        Has the way to the control plane.
    longest_id : int
        Most characters of a request's id.
    """

    def __init__(self, manager: Manager, longest_id: int) -> None:
        self._manager = manager
        self._longest_id = longest_id

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """What serves each path of `OPERATIONS`."""
        return {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": self.flush_cache,
            "/abort_request": self.abort,
            "/configure_logging": self.configure_logging,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
            "/update_weights_from_disk": self.update_weights,
            "/freeze_gc": self.freeze_gc,
            "/start_profile": self.start_profile,
            "/stop_profile": self.stop_profile,
        }

    async def pause(self, request: Request) -> Response:
        """Serve ``/pause_generation``."""
        body = await _read(PauseRequest, request)
        mode: PauseMode = "keep" if body.mode == "in_place" else body.mode
        answer = await self._operate(Pause(mode), body, LONG_S if mode == "wait" else QUICK_S)
        return _done("Generation paused successfully.", answer, aborted=answer.count if mode == "abort" else None)

    async def resume(self, request: Request) -> Response:
        """Serve ``/continue_generation``."""
        body = await _read(ContinueRequest, request)
        return _done("Generation continued successfully.", await self._operate(Continue(), body, QUICK_S))

    async def flush_cache(self, request: Request) -> Response:
        """Serve ``/flush_cache``."""
        body = await _read(FlushCacheRequest, request)
        operation = FlushCache(self._model_for(FlushCache, body.model))
        return _done("Cache flushed.", await self._operate(operation, body, QUICK_S))

    async def freeze_gc(self, request: Request) -> Response:
        """Serve ``/freeze_gc``."""
        body = await _read(FreezeGcRequest, request)
        return _done("Garbage collection frozen.", await self._operate(FreezeGc(), body, QUICK_S))

    async def configure_logging(self, request: Request) -> Response:
        """Serve ``/configure_logging``."""
        body = await _read(LoggingRequest, request)
        if body.log_level is None:
            raise invalid("log_level", "is required")
        answer = await self._operate(SetLogLevel(body.log_level), body, QUICK_S)
        return _done(f"The log level is {body.log_level}.", answer)

    async def load_adapter(self, request: Request) -> Response:
        """Serve ``/load_lora_adapter``."""
        body = await _read(LoadAdapterRequest, request)
        _check_text("lora_name", body.lora_name, _MOST_NAME)
        _check_text("lora_path", body.lora_path, _MOST_PATH)
        if any(body.lora_name == model.name for model in self._manager.models):
            raise invalid("lora_name", "is the name of a model")
        model = self._model_for(LoadAdapter, body.model)
        answer = await self._operate(LoadAdapter(body.lora_name, body.lora_path, model), body, LONG_S)
        return _done("The adapter is loaded.", answer, loaded_adapters=self._adapters())

    async def unload_adapter(self, request: Request) -> Response:
        """Serve ``/unload_lora_adapter``."""
        body = await _read(UnloadAdapterRequest, request)
        self._model_for(UnloadAdapter, None)
        adapter = self._manager.control.state.adapters.get(body.lora_name)
        if adapter is None:
            raise invalid("lora_name", f"no adapter {body.lora_name[:_MOST_NAME]!r} is loaded")
        answer = await self._operate(UnloadAdapter(body.lora_name, adapter.model), body, QUICK_S)
        return _done("The adapter is unloaded.", answer, loaded_adapters=self._adapters())

    async def update_weights(self, request: Request) -> Response:
        """Serve ``/update_weights_from_disk``."""
        body = await _read(UpdateWeightsRequest, request)
        _check_text("model_path", body.model_path, _MOST_PATH)
        if body.weight_version is not None:
            _check_text("weight_version", body.weight_version, _MOST_NAME)
        model = self._model_for(UpdateWeights, body.model)
        operation = UpdateWeights(body.model_path, body.weight_version, model)
        if body.abort_all_requests:
            await self._operate(AbortMatching(model=model), body, QUICK_S)
        answer = await self._operate(operation, body, LONG_S)
        if body.flush_cache is not False and _has(self._manager.models[model], FlushCache):
            try:
                await self._operate(FlushCache(model), body, QUICK_S)
            except RequestError as error:
                message = f"the weights are updated, but the cache is not flushed: {error.message}"
                raise RequestError(error.status, message) from None
        return _done("The weights are updated.", answer, num_paused_requests=0)

    async def start_profile(self, request: Request) -> Response:
        """Serve ``/start_profile``."""
        body = await _read(StartProfileRequest, request)
        if body.output_dir is not None:
            _check_text("output_dir", body.output_dir, _MOST_PATH)
        operation = StartProfile(body.output_dir, self._model_for(StartProfile, body.model))
        return _done("Profiling has begun.", await self._operate(operation, body, QUICK_S))

    async def stop_profile(self, request: Request) -> Response:
        """Serve ``/stop_profile``."""
        body = await _read(StopProfileRequest, request)
        operation = StopProfile(self._model_for(StopProfile, body.model))
        return _done("Profiling has ended.", await self._operate(operation, body, LONG_S))

    async def abort(self, request: Request) -> Response:
        """Serve ``/abort_request``; an id that is not running is no error, since it may just have ended."""
        body = await _read(AbortRequest, request)
        if body.rid is not None and body.rid_prefix is not None:
            raise invalid("rid_prefix", "can't be combined with rid")
        model = find_model(body.model, self._manager).index if body.model else None
        if body.abort_all:
            operation = AbortMatching(model=model)
        elif body.rid is not None:
            check_request_id(body.rid, "rid", self._longest_id)
            operation = AbortMatching(body.rid, model=model)
        elif body.rid_prefix is not None:
            check_request_id(body.rid_prefix, "rid_prefix", self._longest_id)
            operation = AbortMatching(body.rid_prefix, prefix=True, model=model)
        else:
            raise invalid("rid", "or rid_prefix or abort_all is required")
        answer = await self._operate(operation, body, QUICK_S)
        return _done("Requests are ended.", answer, aborted=answer.count)

    # Inside

    def _model_for(self, operation: type[EngineOperation], name: str | None) -> int:
        """Return the index of the model that an operation is for; its engine has it."""
        models = [find_model(name, self._manager)] if name else self._manager.models
        for model in models:
            if _has(model, operation):
                return model.index
        refusal = no_such_operation(models[0].engine_info, operation)
        raise RequestError(refusal.status, refusal.message)

    def _adapters(self) -> dict[str, str]:
        return {name: adapter.path for name, adapter in self._manager.control.state.adapters.items()}

    async def _operate(self, operation: ControlOperation, body: Timed, timeout: float) -> ControlReqOutput:
        return await self._manager.control.operate(operation, timeout if body.timeout is None else body.timeout)


def _has(model: Model, operation: type[EngineOperation]) -> bool:
    return name_of(operation) in model.engine_info.operations


async def _read(kind: type[T], request: Request) -> T:
    """Decode a body; none at all stands for an object without fields."""

    def read(data: bytes) -> T:
        body: T = decode_body(_DECODERS[kind], data)
        refuse_unsupported(body, _UNSUPPORTED[kind])
        if body.timeout is not None and not 0.0 < body.timeout <= _MOST_S:
            raise invalid("timeout", f"must be a number of seconds in the range 0 < x <= {_MOST_S:g}")
        return body

    return await read_body(read, request, empty=b"{}")


def _check_text(name: str, text: str, most: int) -> None:
    if not text or len(text) > most or not text.isprintable():
        raise invalid(name, f"must be 1 to {most} printable characters")


def _done(message: str, answer: ControlReqOutput, **fields: Any) -> Response:
    said = OperationAnswer(
        success=True,
        status="ok",
        message=message,
        id=answer.id,
        epoch=answer.epoch,
        done=answer.done,
        died=answer.died,
        **fields,
    )
    return json_response(said)
