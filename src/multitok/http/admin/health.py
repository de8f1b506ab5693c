"""``/health``, ``/ready`` and ``/health_generate``: the process answers, all parts are up, a token went all the way."""

from __future__ import annotations

import asyncio
from array import array

from starlette.requests import Request
from starlette.responses import Response

from multitok.http.manager import Manager
from multitok.http.openai.common import new_request_id
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
        """Serve ``/ready``."""
        if self._manager.is_ready():
            return json_response({"status": "ready"})
        return error_response(RequestError(503, "not all parts are up"))

    async def health_generate(self, request: Request) -> Response:
        """Serve ``/health_generate``; a request of its own goes through every part."""
        if self._manager.control.state.paused is not None:
            return error_response(RequestError(503, "generation is paused"))
        probe = _Probe()
        submission = None
        try:
            submission = self._submit(probe)
            await asyncio.wait_for(probe.done, self._probe_timeout)
        except TimeoutError:
            return error_response(RequestError(503, f"no token came back within {self._probe_timeout:g} seconds"))
        except RequestError as error:
            return error_response(RequestError(503, f"a probe failed: {error.message}"))
        finally:
            if submission is not None:
                submission.abort()
        return json_response({"status": "ok"})

    def _submit(self, probe: _Probe) -> Submission:
        manager = self._manager
        request_id = new_request_id("health-")
        prompt = array("i", [0]).tobytes()
        if manager.engine_info.task == "embed":
            return manager.submit_embedding(EmbeddingInput(prompts=[prompt], request_id=request_id), probe)
        greedy = {"temperature": 0.0} if "temperature" in manager.engine_info.sampling else {}
        request = GenerateInput(
            prompts=[prompt],
            sampling_params=SamplingParams(max_new_tokens=1, **greedy),  # type: ignore[arg-type]
            max_new_tokens=1,
            request_id=request_id,
        )
        return manager.submit(request, probe)
