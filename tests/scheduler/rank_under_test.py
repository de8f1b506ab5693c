"""A scheduler as a real process with the simulated engine, and everybody around it."""

from __future__ import annotations

from typing import Any, NamedTuple

from multitok.messages.base import FinishReason
from multitok.messages.codec import encode_frame
from multitok.messages.control import ControlOperation, ControlState
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_child import Control
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, RefusedReq, ToDetokenizer
from multitok.messages.to_launcher import OperationAck
from multitok.messages.to_scheduler import (
    AbortReq,
    AckReq,
    DecodeParams,
    GetInternalStateReq,
    LiveReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    header_of,
)
from multitok.messages.to_tokenizer import GetInternalStateReqOutput, LiveReqOutput, ToTokenizer
from parts import Inbox, Site, pack, unpack

OWNER = "w1.1"
# More output than a test waits for.
LONG = 90


def generate(
    number: int,
    prompt: str | list[int] = "abc",
    tokens: int = 3,
    owner: str | None = OWNER,
    detokenizer: int = 0,
    **fields: Any,
) -> TokenizedGenerateReqInput:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return TokenizedGenerateReqInput(
        number=number,
        http_worker_ipc=owner,
        input_ids=pack(ids),
        sampling_params=fields.pop("sampling_params", SamplingParams(max_new_tokens=tokens)),
        detokenizer=detokenizer,
        **fields,
    )


def embed(number: int, prompt: str = "abc", owner: str = OWNER, **fields: Any) -> TokenizedEmbeddingReqInput:
    return TokenizedEmbeddingReqInput(
        number=number, http_worker_ipc=owner, input_ids=pack(list(prompt.encode())), **fields
    )


class Row(NamedTuple):
    number: int
    ids: list[int]
    first_index: int
    finish: FinishReason | None
    params: DecodeParams | None
    owner: str | None
    batch: BatchTokenIDOutput


class Rebuilt(NamedTuple):
    """A row that makes a state anew: the ids before it, and how much of their text the owner has."""

    row: Row
    before: list[int]
    read_offset: int


def rows_of(batch: BatchTokenIDOutput) -> list[Row]:
    count = len(batch.numbers)
    lengths = batch.output_lengths or [1] * count
    ids, rows = unpack(batch.output_ids), []
    for i in range(count):
        mine, ids = ids[: lengths[i]], ids[lengths[i] :]
        finish = batch.finished_reasons and batch.finished_reasons[i]
        params = batch.decode_params and batch.decode_params[i]
        rows.append(
            Row(batch.numbers[i], mine, batch.first_indexes[i], finish, params, batch.http_worker_ipcs[i], batch)
        )
    assert ids == []
    return rows


class Rank:
    """The process, and the sockets of its detokenizers and of one owner."""

    def __init__(self, site: Site, index: int = 0) -> None:
        self.site = site
        self.address = f"s{index}"
        # Which life of it is meant by what is sent.
        self.life = 1
        self.child = site.ready_child("scheduler", [self.address], index)
        names = site.port_args.detokenizer_ipc_names or [OWNER]
        self.inboxes = {name: site.inbox(name, ToDetokenizer) for name in names}
        self.inbox = self.inboxes[names[0]]
        self._owners: dict[str, Inbox] = {}
        self.operations = 0
        # All that was heard, by request.
        self.rows: dict[int, list[Row]] = {}
        self.refusals: dict[int, RefusedReq] = {}

    def send(self, *messages: Any) -> None:
        """Send one message, with a child for each of `messages`."""
        frames = []
        for message in messages:
            frames += [
                bytes(encode_frame(self.site.token, header_of(message))),
                bytes(encode_frame(self.site.token, message)),
            ]
        self.site.send_pairs(self.address, frames, self.life)

    def abort(self, number: int) -> None:
        self.send(AbortReq(number=number, http_worker_ipc=OWNER))

    def operate(self, operation: ControlOperation | None, state: ControlState | None = None) -> OperationAck:
        """Be the launcher, and wait for the acknowledgement of an operation; without a state, it changes none."""
        self.begin(operation, state)
        return self.hear_ack()

    def begin(self, operation: ControlOperation | None, state: ControlState | None = None) -> None:
        """Be the launcher, and do not wait."""
        self.operations += 1
        self.child.send(Control(state or ControlState(), self.operations, operation))

    def hear_ack(self) -> OperationAck:
        ack = self.site.hear(self.child)
        assert isinstance(ack, OperationAck)
        return ack

    def ack(self, *numbers: int) -> None:
        self.send(AckReq(numbers=list(numbers), http_worker_ipc=OWNER))

    def hear(self) -> BatchTokenIDOutput | RefusedReq | BatchEmbeddingOutput:
        """Take the next message to the first detokenizer."""
        message = self.inbox.next()
        if isinstance(message, RefusedReq):
            assert message.number not in self.refusals
            self.refusals[message.number] = message
        elif isinstance(message, BatchTokenIDOutput):
            for row in rows_of(message):
                its_rows = self.rows.setdefault(row.number, [])
                assert not its_rows or its_rows[-1].finish is None, "heard after its end"
                its_rows.append(row)
        return message

    def wait_for_first(self, number: int) -> Row:
        """Wait until a request has its first output."""
        while number not in self.rows:
            self.hear()
        return self.rows[number][0]

    def wait_for_end(self, number: int) -> FinishReason:
        """Wait for the last word on a request."""
        while number not in self.rows or not self.rows[number][-1].finish:
            self.hear()
        finish = self.rows[number][-1].finish
        assert finish is not None
        return finish

    def wait_for_refusal(self, number: int) -> RefusedReq:
        while number not in self.refusals:
            self.hear()
        return self.refusals[number]

    def ids(self, number: int) -> list[int]:
        """All ids of a request, which must follow each other."""
        ids: list[int] = []
        for row in self.rows[number]:
            assert row.first_index == len(ids)
            ids += row.ids
        return ids

    def compare(
        self,
        has: dict[int, int],
        resend: list[int] | None = None,
        owner: str = OWNER,
        texts: dict[int, int] | None = None,
        upto: int = 1 << 63,
    ) -> list[int]:
        """Say what an owner waits for and how many ids it has of each; returns what the rank knows."""
        if owner not in self._owners:
            self._owners[owner] = self.site.inbox(owner, ToTokenizer)
        live = LiveReq(
            number=88,
            http_worker_ipc=owner,
            upto=upto,
            numbers=list(has),
            token_counts=list(has.values()),
            text_lengths=[(texts or has)[number] for number in has],
            resend=resend or [],
        )
        self.send(live)
        answer = self._owners[owner].next()
        assert isinstance(answer, LiveReqOutput)
        assert (answer.number, answer.http_worker_ipc, answer.life) == (88, owner, 1)
        return answer.known

    def hear_rebuilt(self, number: int) -> Rebuilt:
        """Take the next row that makes a request's state anew; what was heard of it is forgotten."""
        while True:
            batch = self.inbox.next()
            if not isinstance(batch, BatchTokenIDOutput):
                continue
            decode_ids = batch.extras and batch.extras.decode_ids
            for i, row in enumerate(rows_of(batch)):
                if row.number == number and decode_ids and decode_ids[i] is not None:
                    self.rows[number] = [row]
                    return Rebuilt(row, unpack(decode_ids[i]), batch.extras.read_offsets[i])

    def state(self) -> GetInternalStateReqOutput:
        """Ask for its state: what was sent before is done when the answer is there."""
        if "w9.1" not in self._owners:
            self._owners["w9.1"] = self.site.inbox("w9.1", ToTokenizer)
        self.send(GetInternalStateReq(number=77, http_worker_ipc="w9.1"))
        answer = self._owners["w9.1"].next()
        assert isinstance(answer, GetInternalStateReqOutput)
        assert answer.number == 77
        return answer

    def counts(self) -> tuple[int, int, int]:
        """Running, queued and unacknowledged requests; which of them run is settled after the step that is on."""
        state = self.state()
        return state.running, state.queued, state.unacknowledged
