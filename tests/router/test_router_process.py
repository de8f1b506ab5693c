from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import zmq

from multitok.ipc.sockets import HIGH_WATER_MARK
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.to_child import OwnerDied, OwnerStarted, PartDied, PartStarted, Stop
from multitok.messages.to_detokenizer import RefusedReq
from multitok.messages.to_scheduler import AbortReq, GetInternalStateReq, Header, Kind, header_of
from multitok.messages.to_tokenizer import (
    GetInternalStateReqOutput,
    LiveListWanted,
    RankDied,
    RankStarted,
    ToTokenizer,
)
from parts import DEADLINE_S

ADDRESSES = ["router", "control"]


def request(number: int, owner: str | None = "w1.1") -> Header:
    return Header(Kind.GENERATE, number, owner)


def reply(number: int) -> GetInternalStateReqOutput:
    return GetInternalStateReqOutput(number=number, rank=0, running=1, queued=2, unacknowledged=3, kv_used=0.5)


def send_reply(site, owner, number: int) -> None:
    site.send("control", Header(Kind.CONTROL, number, owner), reply(number))


@pytest.fixture
def site(make_site):
    return make_site(workers=2, ranks=2)


@pytest.fixture
def router(site):
    return site.ready_child("router", ADDRESSES)


def test_requests_reach_one_scheduler_and_aborts_all_with_their_payloads_untouched(site, router):
    schedulers = [site.inbox(f"s{i}", Header) for i in range(2)]
    for number in range(4):
        site.send_frames("router", [encode_frame(site.token, request(number)), b"\xc1 no message at all"])
    abort = AbortReq(number=2, http_worker_ipc="w1.1")
    site.send("router", header_of(abort), abort)
    headers = FrameDecoder(site.token, Header)
    for rank, scheduler in enumerate(schedulers):
        for number in (rank, rank + 2):
            header, payload = scheduler.pairs()
            assert headers.decode(header) == request(number)
            assert payload == b"\xc1 no message at all"
        header, payload = scheduler.pairs()
        assert headers.decode(header).kind == Kind.ABORT
        assert payload == bytes(encode_frame(site.token, abort))


def test_control_replies_reach_the_worker_that_asked(site, router):
    workers = {owner: site.inbox(owner, ToTokenizer) for owner in ("w1.1", "w2.1")}
    for number, owner in enumerate(["w1.1", "w2.1", "w2.1"]):
        send_reply(site, owner, number)
    assert workers["w1.1"].next() == reply(0)
    assert [workers["w2.1"].next() for _ in range(2)] == [reply(1), reply(2)]


def test_a_reply_that_is_foreign_broken_or_without_owner_does_not_end_the_control_route(site, router):
    worker = site.inbox("w1.1", ToTokenizer)
    site.send_frames("control", [b"not-ours", b"x"])
    site.send_frames("control", [site.token + b"\xc1", b"x"])
    site.send_frames("control", [site.token + b"\x91" * 100_000, b"x"])
    send_reply(site, None, 1)
    send_reply(site, "w1.1", 2)
    assert worker.next() == reply(2)


def test_both_directions_run_at_the_same_time(site, router):
    """Neither waits for the other: a thousand questions and a thousand replies cross."""
    schedulers = [site.inbox(f"s{i}", Header) for i in range(2)]
    worker = site.inbox("w1.1", ToTokenizer)
    count = 1000

    def flood(address: str, messages) -> None:
        socket = zmq.Context.instance().socket(zmq.PUSH)
        with socket:
            socket.connect(site.port_args.endpoint(address))
            for pair in messages:
                socket.send_multipart([encode_frame(site.token, part) for part in pair])
            barrier.wait(DEADLINE_S)

    barrier = threading.Barrier(3)
    questions = [GetInternalStateReq(number=n, http_worker_ipc="w1.1") for n in range(count)]
    threads = [
        threading.Thread(target=flood, args=("router", [(header_of(q), q) for q in questions])),
        threading.Thread(
            target=flood, args=("control", [(Header(Kind.CONTROL, n, "w1.1"), reply(n)) for n in range(count)])
        ),
    ]
    for thread in threads:
        thread.start()
    headers = FrameDecoder(site.token, Header)
    for number in range(count):
        assert worker.next() == reply(number)
        for scheduler in schedulers:
            assert headers.decode(scheduler.pairs()[0]).number == number
    barrier.wait(DEADLINE_S)
    for thread in threads:
        thread.join(DEADLINE_S)


def test_control_replies_pass_while_requests_pile_up(site, router):
    worker = site.inbox("w1.1", ToTokenizer)
    for number in range(100):  # nobody reads at the schedulers
        site.send("router", request(number), request(number))
    send_reply(site, "w1.1", 5)
    assert worker.next() == reply(5)


def test_requests_that_a_scheduler_does_not_take_are_refused_to_their_owner(site, router):
    worker = site.inbox("w2.1", ToTokenizer)
    queued = 2 * HIGH_WATER_MARK
    for number in range(queued + 2):
        site.send_frames("router", [encode_frame(site.token, request(number, "w2.1")), b"payload"])
    # An abort that can't be delivered is nothing to refuse, but both ranks will have to hear what is live.
    abort = AbortReq(number=1, http_worker_ipc="w2.1")
    site.send("router", header_of(abort), abort)
    site.send_frames("router", [encode_frame(site.token, request(queued + 2, "w2.1")), b"payload"])
    heard = [worker.next() for _ in range(5)]
    assert [(type(answer), answer.number) for answer in heard] == [
        *((RefusedReq, queued + i) for i in range(2)),
        *((LiveListWanted, 0),) * 2,
        (RefusedReq, queued + 2),
    ]
    assert {answer.status for answer in heard if isinstance(answer, RefusedReq)} == {503}


def test_the_announced_death_of_an_owner_closes_its_socket(site, router):
    dying, living = (site.inbox(owner, ToTokenizer) for owner in ("w1.1", "w2.1"))
    router.send(OwnerStarted("w1.1"))
    send_reply(site, "w1.1", 1)
    assert dying.next() == reply(1)
    with dying.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        router.send(OwnerDied("w1.1"))
        assert monitor.poll(DEADLINE_S * 1000), "the socket stays open"
        dying.socket.disable_monitor()
    send_reply(site, "w1.1", 2)
    send_reply(site, "w2.1", 3)
    assert living.next() == reply(3)
    assert dying.is_empty()


# Ranks that die and start


def test_owners_hear_of_a_dead_rank_and_no_request_goes_there(site, router):
    workers = [site.inbox(owner, ToTokenizer) for owner in ("w1.1", "w2.1")]
    for owner in ("w1.1", "w2.1"):
        router.send(OwnerStarted(owner))
    router.send(PartDied("detokenizer", 0, 1))
    router.send(PartDied("scheduler", 0, 4))
    for owner, worker in zip(("w1.1", "w2.1"), workers, strict=True):
        assert worker.next() == RankDied(rank=0, life=4, http_worker_ipc=owner)
    scheduler = site.inbox("s1", Header)
    for number in range(3):
        site.send("router", request(number), request(number))
        assert FrameDecoder(site.token, Header).decode(scheduler.pairs()[0]).number == number
    # An owner that is new hears of it, too, and no other.
    new = site.inbox("w3.1", ToTokenizer)
    router.send(OwnerStarted("w3.1"))
    assert new.next() == RankDied(rank=0, life=4, http_worker_ipc="w3.1")
    router.send(PartStarted("scheduler", 0, 5))
    for worker in (*workers, new):
        started = worker.next()
        assert (started.rank, started.life) == (0, 5)
    back = site.inbox("s0", Header)
    site.send("router", request(3), request(3))
    site.send("router", request(4), request(4))
    assert back.pairs(life=5) and scheduler.pairs()


def test_without_any_rank_requests_are_refused_until_one_has_started(site, router):
    worker = site.inbox("w2.1", ToTokenizer)
    router.send(OwnerStarted("w2.1"))
    for rank in (0, 1):
        router.send(PartDied("scheduler", rank, 1))
        assert worker.next() == RankDied(rank=rank, life=1, http_worker_ipc="w2.1")
    site.send("router", request(7, "w2.1"), request(7))
    refusal = worker.next()
    assert (type(refusal), refusal.number, refusal.status) == (RefusedReq, 7, 503)
    assert "restarting" in refusal.message
    router.send(PartStarted("scheduler", 1, 2))
    assert worker.next() == RankStarted(rank=1, life=2, http_worker_ipc="w2.1")
    scheduler = site.inbox("s1", Header)
    site.send("router", request(8, "w2.1"), request(8))
    assert FrameDecoder(site.token, Header).decode(scheduler.pairs(life=2)[0]).number == 8


def test_an_owner_that_has_died_hears_of_no_rank(site, router):
    dead, living = (site.inbox(owner, ToTokenizer) for owner in ("w1.1", "w2.1"))
    router.send(OwnerStarted("w1.1"))
    router.send(OwnerStarted("w2.1"))
    router.send(OwnerDied("w1.1"))
    router.send(PartDied("scheduler", 0, 1))
    assert living.next() == RankDied(rank=0, life=1, http_worker_ipc="w2.1")
    assert dead.is_empty()


def test_a_new_life_forwards_what_was_sent_while_there_was_no_router(site, router):
    scheduler = site.inbox("s0", Header)
    worker = site.inbox("w1.1", ToTokenizer)
    site.send("router", request(0), request(0))
    assert scheduler.pairs()
    router.kill()
    site.ending(router)
    for number in range(1, 6):
        site.send_frames("router", [encode_frame(site.token, Header(Kind.ACK, number, "w1.1")), b"payload"])
    send_reply(site, "w1.1", 9)
    again = site.ready_child("router", ADDRESSES)
    again.send(OwnerStarted("w1.1"))
    again.send(PartDied("scheduler", 1, 1))
    numbers = [FrameDecoder(site.token, Header).decode(scheduler.pairs()[0]).number for _ in range(5)]
    assert numbers == [1, 2, 3, 4, 5]
    assert {type(worker.next()) for _ in range(2)} == {GetInternalStateReqOutput, RankDied}


def test_a_new_life_that_missed_a_death_says_which_lives_the_ranks_have(site, router):
    worker = site.inbox("w1.1", ToTokenizer)
    site.kill(router)
    again = site.next_life(
        router, ADDRESSES, PartStarted("scheduler", 0, 3), PartDied("scheduler", 1, 4), OwnerStarted("w1.1")
    )
    assert worker.next() == RankStarted(rank=0, life=3, http_worker_ipc="w1.1")
    assert worker.next() == RankDied(rank=1, life=4, http_worker_ipc="w1.1")
    again.send(PartStarted("scheduler", 1, 5))
    assert worker.next() == RankStarted(rank=1, life=5, http_worker_ipc="w1.1")


def test_a_new_life_knows_who_is_up_and_who_is_dead_before_it_forwards_anything(site, router):
    """What workers had sent waits for it: of those that have died since, nothing begins any more."""
    scheduler = site.inbox("s0", Header)
    other = site.inbox("s1", Header)
    site.kill(router)
    for number in range(200):
        owner = f"w{number % 2 + 1}.1"
        site.send("router", request(number, owner), request(number))
    site.next_life(
        router,
        ADDRESSES,
        PartStarted("scheduler", 0, 3),
        PartDied("scheduler", 1, 1),
        OwnerDied("w2.1"),
        OwnerStarted("w1.1"),
    )
    headers = FrameDecoder(site.token, Header)
    assert [headers.decode(scheduler.pairs(life=3)[0]).number for _ in range(100)] == [*range(0, 200, 2)]
    assert scheduler.is_empty()
    assert other.is_empty()


@pytest.mark.parametrize("frame", [b"", b"\x80\x04]q\x00.", b"alone" * 1000])
def test_single_frames_of_others_end_nothing(site, router, frame):
    worker = site.inbox("w1.1", ToTokenizer)
    for address in ADDRESSES:
        site.send_frames(address, [frame])
        site.send_frames(address, [site.token + b"\xc1" + frame])
    send_reply(site, "w1.1", 2)
    assert worker.next() == reply(2)
    scheduler = site.inbox("s0", Header)
    site.send("router", request(1), request(1))
    assert scheduler.pairs()


def test_stop_ends_it(site, router):
    router.send(Stop())
    assert site.ending(router) == "exited with status 0"


def test_it_ends_with_the_launcher_and_cleans_up_as_the_last(site, router):
    site.die(router)
    assert site.ending(router) == "exited with status 1"
    assert not os.path.exists(site.runtime_dir.path)
    assert not list(Path("/dev/shm").glob(f"*{site.runtime_dir.nonce}*"))
