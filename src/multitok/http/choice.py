"""What has come of one choice and has not been sent: a whole answer, or what a slow reader has not taken yet."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from multitok.messages.base import FinishReason
from multitok.tokenizer.requests import GenerateOutput

# What one log probability, or one likeliest id, adds to the estimated size.
_LOGPROB_BYTES = 64


class _TopLogprobs:
    """Likeliest ids per position, packed: two million of them as tuples would take half a second to give up."""

    __slots__ = ("_counts", "_ids", "_logprobs")

    def __init__(self) -> None:
        self._counts = array("i")
        self._ids = array("i")
        self._logprobs = array("d")

    def extend(self, positions: Iterable[Sequence[tuple[int, float]]]) -> None:
        for top in positions:
            self._counts.append(len(top))
            self._ids.extend([token_id for token_id, _ in top])
            self._logprobs.extend([logprob for _, logprob in top])

    def __iter__(self) -> Iterator[list[tuple[int, float]]]:
        begin = 0
        for count in self._counts:
            end = begin + count
            yield list(zip(self._ids[begin:end], self._logprobs[begin:end], strict=True))
            begin = end


class ChoiceBuffer:
    """Outputs of one choice, merged in place.

    Attributes
    ----------
    finish : FinishReason or None
        Why the choice ended, once it has.
    """

    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "customized_info",
        "finish",
        "index",
        "logprobs",
        "output_ids",
        "prompt_tokens",
        "reasoning_tokens",
        "text",
        "top_logprobs",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        # UTF-8 in one array: a list of small strings would take many times the room of the text.
        self.text = bytearray()
        self.output_ids = bytearray()
        self.logprobs: array[float] | None = None
        self.top_logprobs: _TopLogprobs | None = None
        self.finish: FinishReason | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.customized_info: dict[str, Any] | None = None

    def add(self, output: GenerateOutput) -> int:
        """Merge one output and return about how many bytes it added."""
        self.text += output.text.encode()
        self.output_ids += output.output_ids
        size = len(output.text) + len(output.output_ids)
        if output.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = array("d")
            self.logprobs.extend(output.logprobs)
            size += _LOGPROB_BYTES * len(output.logprobs)
        if output.top_logprobs is not None:
            if self.top_logprobs is None:
                self.top_logprobs = _TopLogprobs()
            self.top_logprobs.extend(output.top_logprobs)
            size += _LOGPROB_BYTES * sum(map(len, output.top_logprobs))
        self.completion_tokens = output.completion_tokens
        if output.finish is not None:
            self.finish = output.finish
            self.prompt_tokens = output.prompt_tokens
            self.cached_tokens = output.cached_tokens
            self.reasoning_tokens = output.reasoning_tokens
            self.customized_info = output.customized_info
        return size

    def merged(self) -> GenerateOutput:
        """Return all that was added as one output."""
        return GenerateOutput(
            index=self.index,
            text=self.text.decode(),
            output_ids=bytes(self.output_ids),
            finish=self.finish,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.reasoning_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            customized_info=self.customized_info,
        )


class UsageCounter:
    """Token counts of one call; a prompt counts once however many choices it has.

    Parameters
    ----------
    n : int
        Choices per prompt.
    """

    __slots__ = ("cached_tokens", "completion_tokens", "n", "prompt_tokens", "reasoning_tokens")

    def __init__(self, n: int) -> None:
        self.n = n
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0

    def add(self, output: GenerateOutput) -> None:
        """Count the last output of a choice."""
        self.completion_tokens += output.completion_tokens
        self.reasoning_tokens += output.reasoning_tokens
        if output.index % self.n == 0:
            self.prompt_tokens += output.prompt_tokens
            self.cached_tokens += output.cached_tokens

    def usage(self) -> dict[str, object]:
        """Return the usage object of the OpenAI API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
