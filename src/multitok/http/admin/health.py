"""``/health``, ``/ready`` and ``/health_generate``: the process answers, all parts are up, a token went all the way."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from multitok.http.manager import Manager, Model
from multitok.http.openai.common import find_model, new_request_id
from multitok.http.respond import error_response, json_response
from multitok.messages.sampling import SamplingParams
from multitok.tokenizer.requests import (
    EmbeddingInput,
    EmbeddingOutput,
    GenerateInput,
    GenerateOutput,
    RequestError,
    Submission,
)

PROBE_TIMEOUT = 20.0


class _Probe:
    """Waits for any result."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write_delta(self, text: str) -> bool:
        """Take nothing this way."""
        return False

    def on_output(self, output: GenerateOutput | EmbeddingOutput) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_step_end(self) -> None:
        pass

    def on_error(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class HealthRoutes:
    """Serves health checks.

    Parameters
    ----------
    manager : Manager
        Knows the state of the parts.
    probe_timeout : float
        Seconds that the token of ``/health_generate`` may take.
    """

    def __init__(self, manager: Manager, probe_timeout: float = PROBE_TIMEOUT) -> None:
        self._manager = manager
        self._probe_timeout = probe_timeout

    async def health(self, request: Request) -> Response:
        """Serve ``/health``."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Serve ``/ready``: whether the model that the query names can be used, or all of them."""
        if all(model.is_up() for model in self._asked_about(request)):
            return json_response({"status": "ready"})
        return error_response(RequestError(503, "not all parts are up"))

    async def health_generate(self, request: Request) -> Response:
        """Serve ``/health_generate``; a request of its own goes through every part, for each model or the named one."""
        if self._manager.control.state.paused is not None:
            return error_response(RequestError(503, "generation is paused"))
        models = self._asked_about(request)
        try:
            async with asyncio.timeout(self._probe_timeout), asyncio.TaskGroup() as probes:
                for model in models:
                    probes.create_task(self._probe(model))
        except TimeoutError:
            return error_response(RequestError(503, f"no token came back within {self._probe_timeout:g} seconds"))
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            if not isinstance(first, RequestError):
                raise first from None
            return error_response(RequestError(503, f"a probe failed: {first.message}"))
        return json_response({"status": "ok"})

    def _asked_about(self, request: Request) -> Sequence[Model]:
        name = request.query_params.get("model")
        return [find_model(name, self._manager)] if name else self._manager.models

    async def _probe(self, model: Model) -> None:
        probe = _Probe()
        submission = self._submit(model, probe)
        try:
            await probe.done
        finally:
            submission.abort()

    def _submit(self, model: Model, probe: _Probe) -> Submission:
        manager = self._manager
        request_id = new_request_id("health-")
        prompt = array("i", [0]).tobytes()
        if model.engine_info.task == "embed":
            embedding = EmbeddingInput(prompts=[prompt], model=model.index, request_id=request_id)
            return manager.submit_embedding(embedding, probe)
        greedy = {"temperature": 0.0} if "temperature" in model.engine_info.sampling else {}
        request = GenerateInput(
            prompts=[prompt],
            model=model.index,
            sampling_params=SamplingParams(max_new_tokens=1, **greedy),  # type: ignore[arg-type]
            max_new_tokens=1,
            request_id=request_id,
        )
        return manager.submit(request, probe)
