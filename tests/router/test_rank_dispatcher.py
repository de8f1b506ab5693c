from __future__ import annotations

import logging

import msgspec
import pytest

from multitok.ipc import sockets
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.to_scheduler import Header, Kind
from multitok.router.rank_dispatcher import RankDispatcher, RoundRobinPolicy, Undelivered


def request(number: int, rank: int | None = None, kind: Kind = Kind.GENERATE) -> Header:
    return Header(kind, number, "w1.1", rank=rank)


class Ranks:
    """A dispatcher, and the schedulers that it sends to."""

    def __init__(self, site, ranks: int) -> None:
        self.token = site.token
        self.inboxes = [site.inbox(f"s{i}", Header) for i in range(ranks)]
        self.dispatcher = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy(ranks)))
        self._headers: FrameDecoder[Header] = FrameDecoder(site.token, Header)

    def pairs(self, *headers: Header) -> list[bytes]:
        """The frames of a message with a child per header; payloads are never looked at."""
        frames: list[bytes] = []
        for header in headers:
            frames += [bytes(encode_frame(self.token, header)), f"payload {header.number}".encode()]
        return frames

    def send(self, *headers: Header) -> None:
        self.dispatcher.send_frames(self.pairs(*headers))

    def received(self, rank: int) -> list[int]:
        """Numbers of the children of a rank's next message, whose payloads must be theirs."""
        frames = self.inboxes[rank].frames()
        numbers = [self._headers.decode(frame).number for frame in frames[::2]]
        assert frames[1::2] == [f"payload {number}".encode() for number in numbers]
        return numbers

    def received_nothing_more(self) -> bool:
        """Whether nothing but a mark, sent now, is still on its way to any rank."""
        self.send(request(999, kind=Kind.CONTROL))
        return all(self.received(rank) == [999] for rank in range(len(self.inboxes)))


@pytest.fixture
def ranks(make_site):
    return Ranks(make_site(ranks=2), 2)


def test_requests_go_to_one_rank_each_in_turn(ranks):
    for number in range(4):
        ranks.send(request(number))
    assert [ranks.received(0), ranks.received(0)] == [[0], [2]]
    assert [ranks.received(1), ranks.received(1)] == [[1], [3]]
    assert ranks.received_nothing_more()


def test_children_of_a_batch_go_to_different_ranks_in_one_message_per_rank(ranks):
    ranks.send(*map(request, range(5)))
    assert ranks.received(0) == [0, 2, 4]
    assert ranks.received(1) == [1, 3]
    assert ranks.received_nothing_more()


def test_the_rank_that_the_owner_wants_is_taken(ranks):
    ranks.send(request(0, rank=1), request(1, rank=1), request(2), request(3, rank=0))
    assert ranks.received(1) == [0, 1]
    assert ranks.received(0) == [2, 3]


@pytest.mark.parametrize("rank", [2, -1, 10**9])
def test_a_rank_that_there_is_not_is_no_wish(ranks, rank):
    ranks.send(request(0, rank=rank), request(1, rank=rank))
    assert (ranks.received(0), ranks.received(1)) == ([0], [1])


@pytest.mark.parametrize("kind", [Kind.ABORT, Kind.ACK, Kind.CONTROL])
def test_what_is_no_request_goes_to_all_ranks(ranks, kind):
    ranks.send(request(5, kind=kind))
    assert ranks.received(0) == ranks.received(1) == [5]
    assert ranks.received_nothing_more()


def test_an_embedding_is_a_request(ranks):
    ranks.send(request(1, kind=Kind.EMBEDDING))
    ranks.send(request(2, kind=Kind.EMBEDDING))
    assert (ranks.received(0), ranks.received(1)) == ([1], [2])
    assert ranks.received_nothing_more()


def test_a_message_of_an_odd_number_of_frames_is_dropped(ranks, caplog):
    with caplog.at_level(logging.ERROR):
        ranks.dispatcher.send_frames([*ranks.pairs(request(1)), b"alone"])
        ranks.dispatcher.send_frames([b"alone"])
    assert "dropped a message of 3 frames" in caplog.text
    assert ranks.received_nothing_more()


def test_a_message_without_frames_is_nothing(ranks):
    ranks.dispatcher.send_frames([])
    assert ranks.received_nothing_more()


@pytest.mark.parametrize("broken", [b"", b"\xc1", msgspec.msgpack.encode(["no", "header"]), b"\x91" * 100_000])
def test_a_child_whose_header_is_broken_is_dropped_and_its_siblings_go_on(ranks, caplog, broken):
    ranks.dispatcher.send_frames([*ranks.pairs(request(0)), ranks.token + broken, b"x", *ranks.pairs(request(1))])
    assert (ranks.received(0), ranks.received(1)) == ([0], [1])
    assert "header can't be decoded" in caplog.text
    assert ranks.received_nothing_more()


def test_a_child_of_another_start_is_dropped(ranks, caplog):
    foreign = bytes(encode_frame(b"not-ours", request(7)))
    ranks.dispatcher.send_frames([foreign, b"x", *ranks.pairs(request(0))])
    assert ranks.received(0) == [0]
    assert "not of this start" in caplog.text
    assert ranks.received_nothing_more()


def test_a_rank_that_does_not_read_costs_only_its_own_requests(make_site, monkeypatch, caplog):
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 3)
    site = make_site(ranks=2)
    full = Ranks(site, 2)
    # Nobody is at rank 1 from now on: its queue takes three more messages.
    full.inboxes[1].socket.close(linger=0)
    other = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy(2)))
    for number in range(3):
        other.send_frames(full.pairs(request(number, rank=1)))
    with pytest.raises(Undelivered) as caught:
        other.send_frames(full.pairs(request(10), request(11), request(12), request(13, kind=Kind.ABORT)))
    assert [(h.number, h.kind) for h in caught.value.headers] == [(11, Kind.GENERATE), (13, Kind.ABORT)]
    assert full.received(0) == [10, 12, 13]
    assert "scheduler 1 does not read" in caplog.text
