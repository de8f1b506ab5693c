"""Limits of what a connection may send, beside the options."""

from __future__ import annotations

from multitok.http.errors import invalid

# Headers in one request.
MAX_HEADERS = 128
# A request's body must bring this much within each receive time-out.
BODY_STEP = 1024 * 1024
# Bytes of a chunked body's frames (sizes, extensions, trailers) per byte of content; one byte per chunk takes 5.
FRAMES_PER_BYTE = 8
# A refused request's body is thrown away, and the connection kept, up to this size.
DISCARDED_BODY = 64 * 1024


def check_request_id(request_id: str, param: str, limit: int) -> None:
    """Check a request's id, which goes back in a header.

    Parameters
    ----------
    request_id : str
        As the client gave it.
    param : str
        The field, or the header.
    limit : int
        Most characters.

    Raises
    ------
    RequestError
        400.
    """
    if not (0 < len(request_id) <= limit and all("!" <= c <= "~" for c in request_id)):
        raise invalid(param, f"must be 1 to {limit} printable ASCII characters without spaces")
