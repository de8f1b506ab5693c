"""An engine in under 100 lines: its model says that each id is followed by the next one of the vocabulary."""

from array import array

from multitok.engines.base import EngineInfo, EngineLoad, EngineOutput, EngineRefusal, no_such_operation
from multitok.messages.base import FinishReason
from multitok.messages.operations import EngineOperation
from multitok.messages.sampling import EngineFields, SamplingParams

# What a request may ask for; everything else is refused before it comes here. A sure model heeds the last two.
SAMPLING = ["max_new_tokens", "min_new_tokens", "stop_token_ids", "ignore_eos", "logprobs", "temperature", "seed"]


class _Request:
    def __init__(self, last: int, params: SamplingParams, eos: list[int]) -> None:
        self.last = last
        self.params = params
        self.made = 0
        self.stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos)}


class CountingEngine:
    # The work is done inside `step`.
    wakeup: int | None = None

    def __init__(self, vocab_size: int, eos_token_ids: list[int], context_length: int) -> None:
        self.info = EngineInfo(
            name="counting",
            version="1",
            task="generate",
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_ids=eos_token_ids,
            sampling=SAMPLING,
            # Its output follows from the last id, so a request can go on from there after a death.
            resumable=SAMPLING,
        )
        self._requests: dict[int, _Request] = {}

    def add_request(
        self,
        number: int,
        input_ids: bytes,
        params: SamplingParams,
        resumed: int = 0,
        fields: EngineFields | None = None,
    ) -> None:
        if number in self._requests:
            raise ValueError(f"request {number} is in the engine already")
        if not input_ids:
            raise EngineRefusal(400, "the prompt has no tokens")
        if params.logprobs:
            raise EngineRefusal(400, "only the chosen id's log probability is known")
        self._requests[number] = _Request(array("i", input_ids)[-1], params, self.info.eos_token_ids)

    def abort(self, number: int) -> None:
        self._requests.pop(number, None)

    def step(self) -> list[EngineOutput]:
        outputs = [self._next(number, request) for number, request in self._requests.items()]
        for output in outputs:
            if output.finish is not None:
                del self._requests[output.number]
        return outputs

    def _next(self, number: int, request: _Request) -> EngineOutput:
        request.made += 1
        request.last = (request.last + 1) % self.info.vocab_size
        while request.made <= request.params.min_new_tokens and request.last in request.stops:
            request.last = (request.last + 1) % self.info.vocab_size
        output = EngineOutput(number, [request.last])
        if request.params.logprobs is not None:
            output.logprobs = [-0.1]
        if request.last in request.stops:
            output.finish = FinishReason("stop", matched=request.last)
        elif request.made == request.params.max_new_tokens:
            output.finish = FinishReason("length")
        return output

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._requests), waiting=0, kv_used=0.0)

    def operate(self, operation: EngineOperation) -> None:
        raise no_such_operation(self.info, operation)

    def shutdown(self) -> None:
        self._requests.clear()
