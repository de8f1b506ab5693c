from __future__ import annotations

import logging

import msgspec
import pytest

from multitok.ipc import sockets
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.to_scheduler import Header, Kind, life_mark
from multitok.router.policies import RoundRobinPolicy
from multitok.router.rank_dispatcher import RankDispatcher, Undelivered


def request(number: int, rank: int | None = None, kind: Kind = Kind.GENERATE, model: int = 0) -> Header:
    return Header(kind, number, "w1.1", rank=rank, model=model)


class Ranks:
    """A dispatcher, and the schedulers that it sends to."""

    def __init__(self, site, ranks: int) -> None:
        self.token = site.token
        self.inboxes = [site.inbox(f"s{i}", Header) for i in range(ranks)]
        self.dispatcher = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy()))
        self._headers: FrameDecoder[Header] = FrameDecoder(site.token, Header)

    def pairs(self, *headers: Header) -> list[bytes]:
        """The frames of a message with a child per header; payloads are never looked at."""
        frames: list[bytes] = []
        for header in headers:
            frames += [bytes(encode_frame(self.token, header)), f"payload {header.number}".encode()]
        return frames

    def send(self, *headers: Header) -> None:
        self.dispatcher.send_frames(self.pairs(*headers))

    def received(self, rank: int, life: int = 1) -> list[int]:
        """Numbers of the children of a rank's next message, whose payloads must be theirs; it is for this life."""
        frames = self.inboxes[rank].pairs(life)
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


@pytest.fixture
def with_a_stuck_rank(make_site, monkeypatch):
    """Nobody is at rank 1, and its queue is full."""
    site = make_site(ranks=2)
    full = Ranks(site, 1)
    full.dispatcher = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy()))
    full.dispatcher.rank_died(1, 1)
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 3)
    full.dispatcher.rank_started(1, 2)
    for number in range(3):
        full.send(request(number, rank=1))
    return full


def test_a_rank_that_does_not_read_costs_only_its_own_requests(with_a_stuck_rank):
    with pytest.raises(Undelivered) as caught:
        with_a_stuck_rank.send(request(10), request(11), request(12), request(13, kind=Kind.ABORT))
    assert [(h.number, h.kind) for h in caught.value.headers] == [(11, Kind.GENERATE)]
    assert "does not take requests" in caught.value.reason
    assert with_a_stuck_rank.received(0) == [10, 12, 13]


def test_what_goes_to_all_ranks_leaves_out_one_that_does_not_read(with_a_stuck_rank, caplog):
    """No error: it would make the sender try again, and hold up the others."""
    told: list[str | None] = []
    with_a_stuck_rank.dispatcher.on_dropped = told.append
    for number, kind in ((20, Kind.ABORT), (21, Kind.ACK), (22, Kind.CONTROL), (23, Kind.ACK)):
        with_a_stuck_rank.send(request(number, kind=kind))
        assert with_a_stuck_rank.received(0) == [number]
    assert with_a_stuck_rank.dispatcher.dropped == 4
    assert told == ["w1.1"] * 4
    assert caplog.text.count("scheduler 1 does not read") == 3  # at the 1st, 2nd and 4th


def test_nothing_goes_to_a_rank_that_has_died(ranks):
    ranks.dispatcher.rank_died(0, 1)
    ranks.send(request(1), request(2), request(3, kind=Kind.ABORT))
    assert ranks.received(1) == [1, 2, 3]
    assert ranks.inboxes[0].is_empty()
    assert ranks.dispatcher.down == [0]


def test_a_new_life_of_a_rank_can_tell_what_was_meant_for_the_last(make_site):
    """A socket that is closed may have one more message on its way."""
    site = make_site(ranks=2)
    ranks = Ranks(site, 0)
    ranks.dispatcher = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy()))
    # Nobody is there: this waits in the socket.
    ranks.send(request(1, rank=0))
    for _ in range(2):
        ranks.dispatcher.rank_died(0, 1)
    for _ in range(2):
        ranks.dispatcher.rank_started(0, 2)
    ranks.send(request(2, rank=0), request(3, kind=Kind.ACK))
    ranks.inboxes = [site.inbox(f"s{i}", Header) for i in range(2)]
    assert ranks.received(1) == [3]
    meant: dict[bytes, list[int]] = {}
    headers: FrameDecoder[Header] = FrameDecoder(site.token, Header)
    while (new := meant.setdefault(life_mark(site.token, 2), [])) != [2, 3]:
        mark, *pairs = ranks.inboxes[0].frames()
        meant.setdefault(mark, []).extend(headers.decode(frame).number for frame in pairs[::2])
        assert new in ([], [2, 3])
    assert meant.keys() <= {life_mark(site.token, life) for life in (1, 2)}
    assert (ranks.dispatcher.down, ranks.dispatcher.lives) == ([], [2, 1])


def test_without_any_rank_requests_are_refused_and_all_else_is_skipped(ranks):
    for rank in (0, 1):
        ranks.dispatcher.rank_died(rank, 1)
    with pytest.raises(Undelivered) as caught:
        ranks.send(request(1), request(2, kind=Kind.ABORT), request(3, rank=1))
    assert [header.number for header in caught.value.headers] == [1, 3]
    assert "restarting" in caught.value.reason
    ranks.send(request(4, kind=Kind.ACK))
    assert ranks.dispatcher.dropped == 0


def test_whoever_wants_the_same_rank_gets_the_same_one_while_it_is_down(make_site):
    """Two requests with one id meet, so that the second is refused."""
    ranks = Ranks(make_site(ranks=3), 3)
    ranks.dispatcher.rank_died(1, 1)
    ranks.send(request(1, rank=1), request(2), request(3, rank=1), request(4), request(5, rank=1), request(6, rank=0))
    # Of the two that are up, 0 and 2, it is the one at index 1 mod 2.
    assert ranks.received(2) == [1, 3, 4, 5]
    assert ranks.received(0) == [2, 6]


def test_a_dispatcher_that_begins_late_is_told_which_lives_the_ranks_have(make_site):
    site = make_site(ranks=2)
    ranks = Ranks(site, 0)
    ranks.dispatcher = site.keep(RankDispatcher(site.port_args, RoundRobinPolicy(), lives=[3, 1]))
    ranks.inboxes = [site.inbox(f"s{i}", Header) for i in range(2)]
    ranks.send(request(1), request(2))
    assert (ranks.received(0, life=3), ranks.received(1)) == ([1], [2])


def test_requests_of_an_owner_that_has_died_go_nowhere_but_its_aborts_do(ranks):
    """A scheduler that begins to live now has not heard of its death."""
    ranks.dispatcher.owner_died("w1.1")
    ranks.send(request(1), request(2, kind=Kind.EMBEDDING), request(3, kind=Kind.ABORT))
    assert ranks.received(0) == ranks.received(1) == [3]
    assert ranks.received_nothing_more()


@pytest.mark.parametrize("rank", [9, -1])
def test_a_rank_that_there_is_not_neither_dies_nor_starts(ranks, rank):
    ranks.dispatcher.rank_died(rank, 1)
    ranks.dispatcher.rank_started(rank, 2)
    ranks.send(request(1), request(2))
    assert (ranks.received(0), ranks.received(1)) == ([1], [2])


# Several models


@pytest.fixture
def two_models(make_site):
    """Rank 0 serves the first model, ranks 1 and 2 the second."""
    return Ranks(make_site(ranks=3, models=[[0], [1, 2]]), 3)


def test_a_request_goes_to_a_rank_of_its_model_in_turn(two_models):
    for number in range(4):
        two_models.send(request(number, model=1), request(10 + number, model=0))
    assert [two_models.received(0) for _ in range(4)] == [[10], [11], [12], [13]]
    assert [two_models.received(1), two_models.received(1)] == [[0], [2]]
    assert [two_models.received(2), two_models.received(2)] == [[1], [3]]
    two_models.send(request(20, kind=Kind.ABORT))
    assert [two_models.received(rank) for rank in range(3)] == [[20]] * 3
    assert two_models.received_nothing_more()


def test_while_all_ranks_of_a_model_are_down_its_requests_alone_are_refused(two_models):
    for rank in (1, 2):
        two_models.dispatcher.rank_died(rank, 1)
    with pytest.raises(Undelivered) as caught:
        two_models.send(request(1, model=1), request(2, model=0), request(3, rank=0, model=1))
    assert [header.number for header in caught.value.headers] == [1, 3]
    assert two_models.received(0) == [2]
    two_models.dispatcher.rank_started(2, 2)
    two_models.send(request(4, rank=1, model=1))
    assert two_models.received(2, life=2) == [4]


def test_a_model_that_there_is_not_has_no_rank(two_models):
    with pytest.raises(Undelivered):
        two_models.send(request(1, model=7))
    assert two_models.received_nothing_more()
