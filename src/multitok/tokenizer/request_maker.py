"""RequestMaker: from a call whose prompts are ids to the messages for the schedulers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multitok.messages.numbers import RequestNumbers
from multitok.messages.to_scheduler import (
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    DecodeParams,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from multitok.tokenizer.call import EmbeddingCall, GenerateCall
from multitok.tokenizer.limits import check_prompt, fit_output, fit_prompt
from multitok.tokenizer.served_model import ServedModel

# Enough ids for whatever a decoder's text depends on: an open character, a run of byte tokens, the first space.
_TAIL_IDS = 16


class RequestMaker:
    """Checks a call's prompts against the limits, and makes a request of each prompt and choice.

    Parameters
    ----------
    numbers : RequestNumbers
        This owner's.
    detokenizers : Iterator of int
        Which detokenizer is next.
    """

    def __init__(self, numbers: RequestNumbers, detokenizers: Iterator[int]) -> None:
        self._numbers = numbers
        self._detokenizers = detokenizers

    def generate(self, call: GenerateCall, model: ServedModel) -> BatchTokenizedGenerateReqInput:
        """Return the requests of a call for generation.

        Raises
        ------
        RequestError
            400: a prompt is empty or too long, or leaves too little room.
        """
        request, args, info = call.request, model.args, model.engine_info
        children: list[TokenizedGenerateReqInput] = []
        several = len(call.prompt_ids) * request.n > 1
        for ids in call.prompt_ids:
            check_prompt(ids, args.max_prompt_tokens)
            params = fit_output(request, len(ids) // 4, info.context_length)
            decode_params = DecodeParams(
                prompt_tail=ids[-4 * _TAIL_IDS :] if request.raw else b"",
                stop=request.stop or None,
                skip_special_tokens=request.skip_special_tokens,
                min_new_tokens=params.min_new_tokens,
                # Log probabilities of a whole answer may be two million: too many for one message.
                stream=request.stream or params.logprobs is not None,
            )
            for i in range(request.n):
                seeded = (
                    params if params.seed is None or i == 0 else msgspec.structs.replace(params, seed=params.seed + i)
                )
                children.append(
                    TokenizedGenerateReqInput(
                        number=self._numbers.next(),
                        rid=_sub_id(request.request_id, len(children), several),
                        group=request.request_id if several else None,
                        input_ids=ids,
                        sampling_params=seeded,
                        decode_params=decode_params,
                        detokenizer=next(self._detokenizers),
                        model=model.index,
                        priority=request.priority,
                        tenant=request.tenant,
                        timeout=_timeout(request.timeout, args.request_timeout),
                        queue_timeout=args.queue_timeout,
                        engine_fields=request.engine_fields,
                        resumed_tokens=request.resumed_tokens,
                    )
                )
        return BatchTokenizedGenerateReqInput(numbers=[c.number for c in children], batch=children)

    def embedding(self, call: EmbeddingCall, model: ServedModel) -> BatchTokenizedEmbeddingReqInput:
        """Return the requests of a call for embeddings, whose prompts are cut where that is wanted; see `generate`."""
        request, args = call.request, model.args
        for ids in call.prompt_ids:
            check_prompt(ids, None)
        call.prompt_ids = [fit_prompt(ids, model.longest_prompt, request.truncate) for ids in call.prompt_ids]
        several = len(call.prompt_ids) > 1
        children = [
            TokenizedEmbeddingReqInput(
                number=self._numbers.next(),
                rid=_sub_id(request.request_id, i, several),
                group=request.request_id if several else None,
                input_ids=ids,
                detokenizer=next(self._detokenizers),
                model=model.index,
                priority=request.priority,
                tenant=request.tenant,
                timeout=_timeout(request.timeout, args.request_timeout),
                queue_timeout=args.queue_timeout,
            )
            for i, ids in enumerate(call.prompt_ids)
        ]
        return BatchTokenizedEmbeddingReqInput(numbers=[c.number for c in children], batch=children)


def _timeout(wanted: float | None, limit: float | None) -> float | None:
    return min(wanted, limit) if wanted is not None and limit is not None else wanted or limit


def _sub_id(request_id: str | None, index: int, several: bool) -> str | None:
    return f"{request_id}-{index}" if several and request_id is not None else request_id
