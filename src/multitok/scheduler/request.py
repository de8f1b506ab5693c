"""A request as the scheduler keeps it: until its owner has acknowledged the end, or has died."""

from __future__ import annotations

from array import array

from multitok.messages.to_detokenizer import TimeStats
from multitok.messages.to_scheduler import DecodeParams, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput


class ScheduledRequest:
    """State of one request.

    Attributes
    ----------
    message : TokenizedGenerateReqInput or TokenizedEmbeddingReqInput
        As it came.
    number : int
        The request.
    owner : str
        Address that results go to.
    destination : str
        Address that its ids are sent to: a detokenizer's, or the owner's where there is none.
    prompt_tokens : int
        Prompt ids.
    output_ids : array of int32
        All ids so far: what a replaced detokenizer or owner is missing can be sent again.
    decode_params : DecodeParams or None
        Not yet sent; None once they were.
    received, admitted, first_token : float
        Moments, seconds of CLOCK_MONOTONIC.
    """

    __slots__ = (
        "admitted",
        "decode_params",
        "destination",
        "first_token",
        "message",
        "number",
        "output_ids",
        "owner",
        "prompt_tokens",
        "received",
    )

    def __init__(
        self,
        message: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
        owner: str,
        destination: str,
        received: float,
    ) -> None:
        self.message = message
        self.number = message.number
        self.owner = owner
        self.destination = destination
        self.prompt_tokens = len(message.input_ids) // 4
        self.output_ids: array[int] = array("i")
        self.decode_params: DecodeParams | None = (
            message.decode_params if isinstance(message, TokenizedGenerateReqInput) else None
        )
        self.received = received
        self.admitted = 0.0
        self.first_token = 0.0

    def time_stats(self, finished: float) -> TimeStats:
        """Return the moments of its life."""
        return TimeStats(self.received, self.admitted, self.first_token, finished)
