"""What a client is told whose request ran out of time, whoever watched the clock."""

from __future__ import annotations

from multitok.messages.to_scheduler import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

Request = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput


def took_too_long(request: Request) -> tuple[int, str]:
    """Return HTTP status and words for one that has not ended within its `timeout`."""
    return 504, f"the request took longer than its limit of {request.timeout:g} seconds"


def waited_too_long(request: Request) -> tuple[int, str]:
    """Return HTTP status and words for one that has not begun within its `queue_timeout`."""
    return 503, f"the request waited for more than {request.queue_timeout:g} seconds"
