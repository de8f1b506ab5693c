"""What every message has in common: identity, owner, finish reason.

A message is declared once, as a tagged ``msgspec.Struct``; codec (`codec`) and split (`split`) are derived from the
declaration. ``array_like`` keeps field names off the wire and lets a reader take only the leading fields; ``gc=False``
keeps the garbage collector from walking them, which is safe because no message refers to itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from multitok.messages.columns import Rows

FinishType = Literal["stop", "length", "abort", "error"]


class FinishReason(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Why a request ended.

    Attributes
    ----------
    type : {'stop', 'length', 'abort', 'error'}
        ``stop`` an end-of-sequence id, a stop id or a stop string; ``length`` a token limit; ``abort`` ended on
        request; ``error`` refused or failed, then `status` and `message` are set.
    matched : int or str or None
        The stop id or the stop string that ended the request.
    status : int or None
        HTTP status of a refusal or failure.
    message : str or None
        What went wrong, in words meant for the client.
    """

    type: FinishType
    matched: int | str | None = None
    status: int | None = None
    message: str | None = None


class BaseReq(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """One message that belongs to one request or caller.

    Attributes
    ----------
    number : int
        Unsigned 64-bit request number, unique in this start (`numbers`); 0 for a message about no single request.
    http_worker_ipc : str or None
        Short address of the owner's life, ``w3.2``; stamped by `SenderWrapper`.
    """

    number: int = 0
    http_worker_ipc: str | None = None


class BaseBatchReq(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """One message that carries a row per request.

    Attributes
    ----------
    numbers : list of int
        Request number of each row.
    http_worker_ipcs : list of (str or None) or None
        Owner of each row.
    """

    numbers: Annotated[list[int], Rows()]
    http_worker_ipcs: Annotated[list[str | None] | None, Rows()] = None
