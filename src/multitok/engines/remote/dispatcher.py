"""Which address does which request: least work first, again elsewhere before the first id, on from the ids after it."""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections.abc import Sequence
from functools import partial

from multitok.engines.base import EngineInfo, may_go_on, params_left
from multitok.engines.remote.api import Delta, Failure, Work
from multitok.engines.remote.attempt import Attempt
from multitok.engines.remote.outbox import Outbox, Pending
from multitok.engines.remote.peer import Peer
from multitok.messages.base import FinishReason
from multitok.messages.sampling import EngineFields, SamplingParams

_log = logging.getLogger(__name__)
# A request that engines die of must not go through all of them again and again.
_MOST_MOVES = 4
# Ids are packed as int32.
_ID_LIMIT = 1 << 31
UNREACHABLE = "no engine can be reached at the moment; try again later"
_LOST = (
    "the engine was lost during the generation, and none can go on with exactly the same ids for this request's options"
)


class RemoteRequest:
    """A request, from when it is taken to its last word; the loop's thread alone touches it.

    Parameters
    ----------
    pending : Pending
        Where its output is put.
    prompt : bytes
        Packed int32.
    params : SamplingParams
        How ids are chosen.
    resumed : int
        How many of the prompt's last ids are output of an earlier run.
    fields : EngineFields or None
        What else the engine is told.
    """

    __slots__ = ("attempt", "fields", "moves", "output", "params", "pending", "prompt", "reserved", "resumed", "tried")

    def __init__(
        self, pending: Pending, prompt: bytes, params: SamplingParams, resumed: int, fields: EngineFields | None
    ) -> None:
        self.pending = pending
        self.prompt = prompt
        self.params = params
        self.resumed = resumed
        self.fields = fields
        self.output: array[int] = array("i")
        self.attempt: Attempt | None = None
        self.reserved = 0
        self.tried: set[Peer] = set()
        self.moves = 0

    @property
    def is_tied(self) -> bool:
        """Whether other engines expect it where it is."""
        return self.fields is not None and self.fields.in_use() not in ([], ["adapter"])


class Dispatcher:
    """Sends requests to addresses; lives in the loop's thread.

    Parameters
    ----------
    outbox : Outbox
        For the scheduler's thread.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._peers: Sequence[Peer] = ()
        self._outbox = outbox
        self._requests: dict[Pending, RemoteRequest] = {}
        self._info: EngineInfo | None = None
        # A fixed length keeps one from being the beginning of another, which SGLang's abort would take for the same.
        self._nonce = os.urandom(6).hex()
        self._rids = 0
        self._signalling = False

    def use(self, peers: Sequence[Peer], info: EngineInfo) -> None:
        """Take the addresses, and what was promised of all of them together, before the first request."""
        self._peers = peers
        self._info = info

    def add(self, request: RemoteRequest) -> None:
        """Send a request to the address with the least work."""
        self._requests[request.pending] = request
        self._try(request, Failure(503, UNREACHABLE))

    def abort(self, pending: Pending) -> None:
        """End a request, here and where it runs."""
        request = self._requests.pop(pending, None)
        if request is not None and request.attempt is not None:
            attempt = request.attempt
            self._release(request)
            attempt.cancel()

    def went_down(self, peer: Peer) -> None:
        """Take the requests of an address elsewhere."""
        for request in [r for r in self._requests.values() if r.attempt is not None and r.attempt.peer is peer]:
            assert request.attempt is not None
            request.attempt.cancel()
            self._failed(request, Failure(503, peer.problem))

    def close(self) -> None:
        """End everything."""
        for pending in list(self._requests):
            self.abort(pending)

    # One request

    def _try(self, request: RemoteRequest, failure: Failure) -> None:
        """Send a request, or what is left of it; `failure` is why it has no address so far."""
        peer = self._choose(request.tried)
        if peer is None:
            self._finish(request, _end_of(failure, request))
            return
        so_far = len(request.output)
        params = params_left(request.params, so_far) if so_far else request.params
        self._rids += 1
        work = Work(
            ids=request.prompt + request.output.tobytes(),
            params=params,
            resumed=request.resumed + so_far,
            fields=request.fields,
            rid=f"multitok-{self._nonce}-{self._rids:012x}",
        )
        try:
            request.attempt = Attempt(peer, work, partial(self._on_delta, request))
        except Exception:
            _log.exception("a request could not be put into words")
            self._finish(request, FinishReason("error", None, 500, "the request could not be sent to the engine"))
            return
        request.reserved = len(work.ids) // 4 + params.max_new_tokens
        peer.work += request.reserved
        peer.running += 1
        request.attempt.start()

    def _choose(self, tried: set[Peer]) -> Peer | None:
        return min(
            (peer for peer in self._peers if peer.up and peer not in tried),
            key=lambda peer: (peer.suspect, peer.work, peer.running),
            default=None,
        )

    def _on_delta(self, request: RemoteRequest, delta: Delta) -> None:
        attempt = request.attempt
        assert attempt is not None
        assert self._info is not None
        if delta.failure is not None:
            self._failed(request, delta.failure)
            return
        if delta.finish is not None:
            _add_the_stop(delta, delta.finish, request)
        if (problem := _nonsense_of(delta, request, self._info.vocab_size)) is not None:
            self._misbehaved(request, problem)
            return
        ids = delta.ids
        if ids:
            request.output.extend(ids)
            attempt.peer.work -= len(ids)
            request.reserved -= len(ids)
        most = request.params.logprobs
        if most is None:
            delta.logprobs = delta.top_logprobs = None
        elif not most:
            delta.top_logprobs = None
        elif delta.top_logprobs is not None:
            delta.top_logprobs = [top[:most] for top in delta.top_logprobs]
        if delta.finish is not None:
            if delta.finish.type == "stop":
                # Of one that the engine doesn't name the last id is meant.
                delta.finish = FinishReason("stop", matched=request.output[-1] if request.output else None)
            self._release(request)
            del self._requests[request.pending]
        self._put(request, delta)

    def _failed(self, request: RemoteRequest, failure: Failure) -> None:
        attempt = request.attempt
        assert attempt is not None
        self._release(request)
        _log.log(
            logging.DEBUG if failure.blames_the_request else logging.WARNING,
            "%s: a request failed after %d ids: %d %s",
            attempt.peer.url,
            attempt.have,
            failure.status,
            failure.message,
        )
        if failure.blames_the_request or request.is_tied:
            self._finish(request, _end_of(failure, request))
            return
        if attempt.have:
            request.tried.clear()
        request.tried.add(attempt.peer)
        if request.output:
            if (end := self._end_that_was_lost(request)) is not None:
                self._finish(request, end)
                return
            assert self._info is not None
            request.moves += 1
            if request.moves > _MOST_MOVES or not may_go_on(request.params, self._info.resumable):
                self._finish(request, FinishReason("error", None, 503, _LOST))
                return
        self._try(request, failure)

    def _end_that_was_lost(self, request: RemoteRequest) -> FinishReason | None:
        """Return the end of a request whose last id has come, but not the word that it was the last."""
        assert self._info is not None
        params, output = request.params, request.output
        if len(output) > params.min_new_tokens:
            stops = set(params.stop_token_ids or ())
            if not params.ignore_eos:
                stops.update(self._info.eos_token_ids)
            if output[-1] in stops:
                return FinishReason("stop", matched=output[-1])
        return FinishReason("length") if len(output) >= params.max_new_tokens else None

    def _misbehaved(self, request: RemoteRequest, what: str) -> None:
        attempt = request.attempt
        assert attempt is not None
        _log.error("%s: %s", attempt.peer.url, what)
        self._release(request)
        attempt.cancel()
        self._finish(request, FinishReason("error", None, 502, "the engine's answer makes no sense"))

    def _release(self, request: RemoteRequest) -> None:
        """Take a request off its address's account."""
        attempt, request.attempt = request.attempt, None
        assert attempt is not None
        attempt.peer.work -= request.reserved
        attempt.peer.running -= 1
        request.reserved = 0

    def _finish(self, request: RemoteRequest, finish: FinishReason) -> None:
        self._requests.pop(request.pending, None)
        self._put(request, Delta([], finish))

    def _put(self, request: RemoteRequest, delta: Delta) -> None:
        self._outbox.put(request.pending, delta)
        if not self._signalling:
            # After all that has come by now, so that it makes one step.
            self._signalling = True
            asyncio.get_running_loop().call_soon(self._signal)

    def _signal(self) -> None:
        self._signalling = False
        self._outbox.signal()


def _add_the_stop(delta: Delta, finish: FinishReason, request: RemoteRequest) -> None:
    """Have a stop id that the engine names as the last id, as the protocol wants it."""
    matched = finish.matched
    if isinstance(matched, int) and (delta.ids[-1:] or request.output[-1:].tolist()) != [matched]:
        delta.ids = [*delta.ids, matched]
        if delta.logprobs is not None:
            delta.logprobs = [*delta.logprobs, 0.0]


def _nonsense_of(delta: Delta, request: RemoteRequest, vocab_size: int) -> str | None:
    """Return what is wrong with what an engine gave, if anything is: no part after this one expects such values."""
    ids = delta.ids
    if len(request.output) + len(ids) > request.params.max_new_tokens:
        return "it gave more ids than it was asked for"
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        return f"it gave an id outside the vocabulary of {vocab_size}"
    if any(not 0 <= token < _ID_LIMIT for top in delta.top_logprobs or () for token, _ in top):
        return "it gave the log probability of something that is no id"
    return None


def _end_of(failure: Failure, request: RemoteRequest) -> FinishReason:
    """Return what the client hears of a failure: addresses and other inner matters stay in the log."""
    if failure.blames_the_request:
        return FinishReason("error", None, 400, failure.message)
    if failure.status == 404 and request.fields is not None and request.fields.adapter is not None:
        return FinishReason("error", None, 400, f"adapter {request.fields.adapter!r}: {failure.message}")
    if failure.status in (429, 503):
        return FinishReason("error", None, 503, UNREACHABLE if not request.output else _LOST)
    return FinishReason("error", None, 500 if failure.status == 500 else 502, "the engine failed")
