"""Recovery: what an owner does about its requests when another part has died, or a message was lost on the way."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from multitok.ipc.sender_wrapper import SenderWrapper
from multitok.messages.lives import DeadLives
from multitok.messages.numbers import RequestNumbers
from multitok.messages.sampling import SamplingParams
from multitok.messages.time_limits import took_too_long, waited_too_long
from multitok.messages.to_scheduler import AbortReq, LiveReq, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from multitok.messages.to_tokenizer import LiveReqOutput
from multitok.tokenizer.call import SubRequest
from multitok.tokenizer.requests import RequestError

_log = logging.getLogger(__name__)
# A question that has no answer after this is asked again.
_ASK_AGAIN_S = 10.0
# Last words that are on their way through a detokenizer may take this much longer than an answer.
_GRACE_S = 0.2
# How often requests are looked for that nothing has come of since.
_SILENCE_S = 10.0
# A request that is not streamed is silent all its life: after 1, 2, 4, 8, 16, ... times it is asked about.
_LONGEST_SILENCE = 8
_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
ENGINE_DIED = "the engine has died and is being restarted; try again later"
NOT_RESUMED = (
    "the engine has died, and this request can't go on with exactly the same output (see 'resumable' in /server_info)"
)


def _times_of(request: SubRequest) -> tuple[float, float]:
    """Return for how many seconds a request has been there, and has been waiting for the engine."""
    now, sent_at = time.monotonic(), request.call.sent_at
    return now - sent_at, now - (sent_at if request.waiting_since is None else request.waiting_since)


class _Question:
    """A `LiveReq` that was sent, and what has been answered so far.

    Attributes
    ----------
    number : int
        The question.
    asked : dict of int to int
        The requests that it names, and the bytes of ids that the owner had of each.
    resend : set of int
        What was asked for anew.
    awaited : set of int
        Ranks that have not answered.
    known : set of int
        Requests that some rank has.
    """

    __slots__ = ("asked", "awaited", "known", "number", "resend")

    def __init__(self, number: int, asked: dict[int, int], resend: set[int], awaited: set[int]) -> None:
        self.number = number
        self.asked = asked
        self.resend = resend
        self.awaited = awaited
        self.known: set[int] = set()


class Recovery:
    """An owner's requests, when what another part had of them is gone.

    One way for everything: the owner tells all ranks what it waits for and how much of it it has (`LiveReq`); each
    rank ends what is not in the list, sends again what has been lost, and says what it knows. What no rank knows is
    sent again if nothing of it has been delivered, and failed otherwise. There is one open question at a time.

    Parameters
    ----------
    requests : dict of int to SubRequest
        The running requests, by number.
    sender : SenderWrapper
        To the schedulers.
    numbers : RequestNumbers
        This owner's.
    ranks : sequence of sequence of int
        Of each model the ranks that serve it: its requests are known to these and are sent to no others.
    resume : sequence of (callable or None)
        Of each model, whether a request that has begun can go on at another life of a scheduler; None: none is to.
    patience : float
        Seconds after which a request whose fate nobody can tell is failed. Longer than an engine's step may take: a
        rank does not answer before the step's end.
    """

    def __init__(
        self,
        requests: dict[int, SubRequest],
        sender: SenderWrapper,
        numbers: RequestNumbers,
        *,
        ranks: Sequence[Sequence[int]],
        resume: Sequence[Callable[[SamplingParams], bool] | None],
        patience: float,
    ) -> None:
        self._requests = requests
        self._sender = sender
        self._numbers = numbers
        self._resume = resume
        self._patience = patience
        self._ranks_up = [set(its) for its in ranks]
        self._model_of = {rank: model for model, its in enumerate(ranks) for rank in its}
        self._dead_lives = DeadLives()
        self._router_up = True
        # Lost, and waiting for a rank that takes requests.
        self._held: set[int] = set()
        # To be asked for anew; they stay here until the answer has come.
        self._resend: set[int] = set()
        self._question: _Question | None = None
        self._questions = 0
        # Since when there has been no answer about a request.
        self._doubts: dict[int, float] = {}
        # At the last look for silence: the ids of each request, and how many looks ago they were as many.
        self._seen: dict[int, tuple[int, int]] = {}
        # Something could not be sent, and the next question makes up for it.
        self._behind = False
        # Some rank was left out of something that the open question may have been sent before.
        self._list_wanted = False
        self._retry_delay = _RETRY_S
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look for requests that nothing comes of."""
        self._loop = loop
        self._silence_timer = loop.call_later(_SILENCE_S, self._look_for_silence)

    def close(self) -> None:
        """Ask nothing more."""
        self._loop = None
        for timer in (self._timer, self._silence_timer):
            if timer is not None:
                timer.cancel()

    def any_rank_is_up(self, model: int) -> bool:
        """Whether there is a scheduler to send a model's requests to, as far as this owner has heard."""
        return bool(self._ranks_up[model])

    def is_late(self, rank: int, life: int) -> bool:
        """Whether a life of a scheduler has said this that is dead: its requests are somebody else's now."""
        return self._dead_lives.has(rank, life)

    # What has happened

    def rank_died(self, rank: int, life: int) -> None:
        """Fail or send again what a life of a scheduler had; find out about the requests that it may have had."""
        # What a router said that has died since may come after the next one's word.
        if self._dead_lives.add(rank, life):
            self._ranks_up[self._model_of[rank]].discard(rank)
            self._lose(rank, life)

    def _lose(self, rank: int, life: int) -> None:
        model = self._model_of[rank]
        unknown = False
        for request in list(self._requests.values()):
            if request.message.model != model:
                continue
            # One that failed has taken the others of its call along.
            if request.number not in self._requests or request.number in self._held:
                continue
            if request.rank == rank and request.life <= life:
                self._lost(request, RequestError(503, ENGINE_DIED))
            elif request.rank is None and not self._ranks_up[model]:
                self._lost(request, RequestError(503, ENGINE_DIED))
                if request.number not in self._held:
                    # It may be on its way to the next life.
                    self._say_abort(request)
            elif request.rank is None:
                unknown = True
        if unknown or self._question is not None:
            self._ask()

    def rank_started(self, rank: int, life: int) -> None:
        """Send what was held until a scheduler of its model takes requests; what it had in an earlier life is lost."""
        if self._dead_lives.has(rank, life):
            return
        model = self._model_of[rank]
        self._ranks_up[model].add(rank)
        held, self._held = self._held, set()
        for number in held:
            # It may have ended in between.
            if (request := self._requests.get(number)) is None:
                continue
            if request.message.model == model:
                self._send_again(request)
            else:
                self._held.add(number)
        if self._dead_lives.add(rank, life - 1):
            self._lose(rank, life - 1)
        if self._resend:
            self._ask_soon()

    def detokenizer_started(self, index: int) -> None:
        """Have the state of this detokenizer's requests made again."""
        resend = [n for n, r in self._requests.items() if r.message.detokenizer == index and n not in self._held]
        if resend:
            self._resend.update(resend)
            self._ask()

    def router_died(self) -> None:
        """Wait for the next one: whatever was asked may be lost, and can't be asked now."""
        self._router_up = False
        self._forget_question()

    def router_started(self) -> None:
        """Find out what the last one has lost: requests, aborts and acknowledgements."""
        self._router_up = True
        self._ask()

    def missed(self, request: SubRequest) -> bool:
        """Ask for what is missing of a request's output, once for each place.

        Returns
        -------
        bool
            Whether it is on its way; False when it has been asked for, and has not come.
        """
        if request.number in self._resend:
            return True
        if request.asked_at == len(request.output_ids):
            return False
        request.asked_at = len(request.output_ids)
        self._resend.add(request.number)
        self._ask_soon()
        return True

    def fell_behind(self) -> None:
        """Make up for aborts or acknowledgements that could not be sent: a list of what is live says the same."""
        if not self._behind:
            self._behind = True
            self._after(self._retry_delay, self._ask)

    def list_wanted(self) -> None:
        """Tell all ranks what is live, until they have answered: one was left out of an abort or an acknowledgement."""
        self._list_wanted = True
        self._ask_soon()

    def heard(self, answer: LiveReqOutput) -> None:
        """Take one rank's answer."""
        question = self._question
        if question is None or answer.number != question.number or self.is_late(answer.rank, answer.life):
            return
        for number in answer.known:
            if (request := self._requests.get(number)) is not None:
                request.rank, request.life = answer.rank, answer.life
        question.known.update(answer.known)
        if answer.rank in question.awaited:
            question.awaited.discard(answer.rank)
            if not question.awaited and not self._behind:
                self._after(_GRACE_S, self._conclude, question)

    # Questions

    def _ask_soon(self) -> None:
        # An open question is followed by another where something has come up in between.
        if self._question is None and self._timer is None:
            self._after(0.0, self._ask)

    def _after(self, delay: float, step: Callable[..., None], *arguments: object) -> None:
        """Take the next step of asking later; whatever was to be the next one is replaced."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None:
            self._timer = self._loop.call_later(delay, self._due, step, arguments)

    def _due(self, step: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self._timer = None
        step(*arguments)

    def _ask(self) -> None:
        """Tell all ranks what this owner waits for, and ask what they have of it; this replaces an open question."""
        self._behind = self._list_wanted = False
        if not self._router_up or not any(self._ranks_up):
            # Whichever starts next has it asked, or sends what is held.
            self._forget_question()
            return
        # Nothing is held while a rank is up.
        live = [*self._requests.values()]
        resend = self._resend.intersection(self._requests)
        self._questions += 1
        message = LiveReq(
            number=self._questions,
            upto=self._numbers.last,
            numbers=[request.number for request in live],
            token_counts=[len(request.output_ids) // 4 for request in live],
            text_lengths=[request.text_length for request in live],
            resend=sorted(resend),
        )
        try:
            self._sender.send(message)
        except zmq.Again:
            self._question = None
            self._retry_delay = min(2 * self._retry_delay, _LONGEST_RETRY_S)
            self.fell_behind()
            return
        self._retry_delay = _RETRY_S
        had = {request.number: len(request.output_ids) for request in live}
        self._question = _Question(self._questions, had, resend, {rank for its in self._ranks_up for rank in its})
        self._after(_ASK_AGAIN_S, self._not_answered, self._question)

    def _forget_question(self) -> None:
        self._question = None
        self._behind = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _not_answered(self, question: _Question) -> None:
        """Ask again; what nobody could say anything about for too long is failed."""
        now = time.monotonic()
        doubts: dict[int, float] = {}
        for request in self._unknown_of(question):
            if request.number not in self._requests:
                continue
            since = doubts[request.number] = self._doubts.get(request.number, now - _ASK_AGAIN_S)
            if now - since >= self._patience:
                self._say_abort(request)
                self._fail(request, RequestError(500, "the request was lost: no scheduler has answered for it"))
        self._doubts = doubts
        _log.warning("scheduler(s) %s have not said what they have; asking again", sorted(question.awaited))
        self._ask()

    def _conclude(self, question: _Question) -> None:
        """Every rank has answered: what none of them has is lost."""
        self._question = None
        self._doubts.clear()
        self._resend -= question.resend
        for request in self._unknown_of(question):
            if request.number in self._requests:
                self._lost(request, RequestError(500, "the request was lost when a part of the server died"))
        self._resend.intersection_update(self._requests)
        if self._resend or self._list_wanted:
            self._ask_soon()

    def _unknown_of(self, question: _Question) -> list[SubRequest]:
        """Return the requests that are live, unknown to whoever has answered, and have had nothing since."""
        unknown: list[SubRequest] = []
        for number, had in question.asked.items():
            request = self._requests.get(number)
            if request is not None and number not in question.known and len(request.output_ids) == had:
                unknown.append(request)
        return unknown

    def _look_for_silence(self) -> None:
        """Ask about requests of which nothing has come: a lost last message shows no gap."""
        if self._loop is None:
            return
        self._silence_timer = self._loop.call_later(_SILENCE_S, self._look_for_silence)
        seen: dict[int, tuple[int, int]] = {}
        silent: list[int] = []
        for number, request in self._requests.items():
            had, times = self._seen.get(number, (-1, 0))
            have = len(request.output_ids)
            times = times + 1 if have == had else 0
            seen[number] = (have, times)
            if times and number not in self._held and (times & (times - 1) == 0 or times % _LONGEST_SILENCE == 0):
                silent.append(number)
        self._seen = seen
        if silent:
            self._resend.update(silent)
            self._ask_soon()

    # Fates

    def _lost(self, request: SubRequest, error: RequestError) -> None:
        """Go on with a request that no scheduler has any more, if that is possible."""
        if request.waiting_at != len(request.output_ids):
            request.waiting_at, request.waiting_since = len(request.output_ids), time.monotonic()
        model = request.message.model
        resume, is_up = self._resume[model], bool(self._ranks_up[model])
        if request.output_ids:
            again = resume is not None and self._may_resume(resume, request.message)
            if resume is not None and not again:
                error = RequestError(error.status, NOT_RESUMED)
        else:
            again = resume is not None or is_up
        if not again:
            self._fail(request, error)
        elif is_up:
            self._send_again(request)
        else:
            self._hold(request)

    @staticmethod
    def _may_resume(
        resume: Callable[[SamplingParams], bool], message: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
    ) -> bool:
        if not isinstance(message, TokenizedGenerateReqInput):
            return False
        # Where its prompt was read, or its cache is to go, another engine waits for this very run.
        met = [name for name in message.engine_fields.in_use() if name != "adapter"] if message.engine_fields else []
        return not met and resume(message.sampling_params)

    def hold_refused(self, request: SubRequest) -> bool:
        """Whether a request that was sent again, and refused since no scheduler is up any more, waits for the next."""
        model = request.message.model
        if self._resume[model] is None or self._ranks_up[model] or not request.was_sent_again:
            return False
        self._hold(request)
        return True

    def _hold(self, request: SubRequest) -> None:
        request.rank = None
        self._held.add(request.number)
        self._watch_held(request)

    def _watch_held(self, request: SubRequest) -> None:
        """Do what a scheduler does where there is one: look at the time limits of a request that waits."""
        if request.number not in self._held or self._requests.get(request.number) is not request:
            return
        message = request.message
        spent, waited = _times_of(request)
        to_end = math.inf if message.timeout is None else message.timeout - spent
        to_begin = math.inf if message.queue_timeout is None else message.queue_timeout - waited
        if min(to_end, to_begin) <= 0:
            self._held.discard(request.number)
            words = took_too_long if to_end <= 0 else waited_too_long
            self._fail(request, RequestError(*words(message)))
        elif min(to_end, to_begin) < math.inf and self._loop is not None:
            self._loop.call_later(min(to_end, to_begin), self._watch_held, request)

    def _send_again(self, request: SubRequest) -> None:
        message = request.message
        if message.timeout is not None or message.queue_timeout is not None:
            spent, waited = _times_of(request)
            message = msgspec.structs.replace(message, spent=spent, waited=waited)
        if request.output_ids:
            assert isinstance(message, TokenizedGenerateReqInput)
            message = msgspec.structs.replace(
                message, resumed_ids=bytes(request.output_ids), text_length=request.text_length
            )
        request.rank = None
        request.asked_at = -1
        request.was_sent_again = True
        self._resend.discard(request.number)
        try:
            self._sender.send(message, request.call.request.id_is_given)
        except zmq.Again:
            self._fail(request, RequestError(503, ENGINE_DIED))

    def _say_abort(self, request: SubRequest) -> None:
        try:
            self._sender.send(AbortReq(number=request.number))
        except zmq.Again:
            self.fell_behind()

    def _fail(self, request: SubRequest, error: RequestError) -> None:
        # Nobody has it, so there is nothing to abort of it.
        self._requests.pop(request.number, None)
        request.call.running.pop(request.number, None)
        request.call.fail(error)
