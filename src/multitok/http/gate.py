"""What a request must pass before anything of its body is read."""

from __future__ import annotations

from multitok.http.auth import OPEN, OPEN_PATHS, Access, check_client
from multitok.http.exchange import body_too_large
from multitok.http.limits import MAX_HEADERS, check_request_id
from multitok.http.state import DirectServerState
from multitok.tokenizer.requests import RequestError


class Gate:
    """Checks the heads of one connection's requests.

    Parameters
    ----------
    state : DirectServerState
        Keys and limits.

    Attributes
    ----------
    access : Access
        What the last request that came by may do.
    """

    __slots__ = ("_shown", "_state", "access")

    def __init__(self, state: DirectServerState) -> None:
        self._state = state
        self.access: Access = OPEN
        # The headers with keys that were seen last: they are the same all the time.
        self._shown: tuple[bytes | None, bytes | None] | None = None

    def check(
        self, path: bytes, headers: list[tuple[bytes, bytes]], noted: dict[bytes, bytes], preflight: bool
    ) -> RequestError | None:
        """Say why a request is refused whatever its body is.

        Parameters
        ----------
        path : bytes
            As sent.
        headers : list of (bytes, bytes)
            All of them.
        noted : dict of bytes to bytes
            Those that matter here.
        preflight : bool
            A browser asks whether a page may send the request; it shows no key for that.
        """
        state = self._state
        if len(headers) > MAX_HEADERS:
            return RequestError(431, f"the request has more than {MAX_HEADERS} headers")
        if state.keys is not None:
            shown = (noted.get(b"authorization"), noted.get(b"x-api-key"))
            if shown != self._shown:
                self._shown, self.access = shown, state.keys.access(*shown)
        try:
            if not (self.access.client or path in OPEN_PATHS or preflight):
                check_client(self.access)
            if request_id := noted.get(b"x-request-id"):
                check_request_id(request_id.decode("latin-1"), "X-Request-Id", state.max_request_id_length)
        except RequestError as error:
            return error
        if int(noted.get(b"content-length", 0)) > state.max_body_bytes:
            return body_too_large(state.max_body_bytes)
        return None
