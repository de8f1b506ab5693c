from __future__ import annotations

import itertools
import logging

import msgspec
import pytest
import zmq

from multitok.detokenizer import process
from multitok.detokenizer.incremental import TextDecoder
from multitok.detokenizer.manager import DetokenizerManager
from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel
from multitok.messages.base import FinishReason
from multitok.messages.codec import encode_frame
from multitok.messages.to_child import OwnerDied, PartDied, PartStarted, Stop
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, RefusedReq
from multitok.messages.to_scheduler import DecodeParams
from multitok.messages.to_tokenizer import BatchStrOutput, ToTokenizer
from parts import DEADLINE_S, byte_tokenizer, channel_pair, pack, wait_until


def ids(text: str, owners: list[str | None], first: int = 0, **fields) -> BatchTokenIDOutput:
    """One id, a byte of the text, for each of the owners' requests: 1, 2, ..."""
    return BatchTokenIDOutput(
        numbers=list(range(1, len(owners) + 1)),
        http_worker_ipcs=owners,
        output_ids=pack(list(text.encode())),
        first_indexes=[first] * len(owners),
        decode_params=None if first else [DecodeParams()] * len(owners),
        **fields,
    )


def refusal(owner: str | None, number: int = 99) -> RefusedReq:
    return RefusedReq(number=number, http_worker_ipc=owner, status=503, message="full")


@pytest.fixture(params=[1, 2], ids=["single", "multi"])
def site(request, make_site):
    return make_site(workers=request.param)


@pytest.fixture
def detokenizer(site):
    return site.ready_child("detokenizer", ["d0"])


def test_an_owner_gets_its_text(site, detokenizer):
    owner = site.inbox("w1.1", ToTokenizer)
    site.send("d0", ids("ab", ["w1.1"] * 2))
    output = owner.next()
    assert isinstance(output, BatchStrOutput)
    assert (output.numbers, output.output_strs) == ([1, 2], ["a", "b"])
    assert output.output_ids == pack(list(b"ab"))


def test_refusals_and_embeddings_pass_through(site, detokenizer):
    owner = site.inbox("w1.1", ToTokenizer)
    embeddings = BatchEmbeddingOutput(
        numbers=[1, 2],
        http_worker_ipcs=["w1.1", "w1.1"],
        embeddings=[b"\0\0\0\0", None],
        finished_reasons=[FinishReason("stop"), FinishReason("error", None, 500, "x")],
        prompt_tokens=[3, 4],
    )
    site.send("d0", embeddings)
    site.send("d0", refusal("w1.1"))
    assert owner.next() == embeddings
    assert owner.next() == refusal("w1.1")


def test_a_batch_that_cannot_be_decoded_fails_its_requests_and_nobody_elses(site, detokenizer):
    owner = site.inbox("w1.1", ToTokenizer)
    site.send("d0", ids("a", ["w1.1"]))
    assert owner.next().output_strs == ["a"]
    fields = msgspec.msgpack.decode(encode_frame(b"", ids("xy", ["w1.1"] * 2))[8:])
    fields[1] = [7, 8]
    fields[4] = "no indexes"
    site.send_frames("d0", [site.token + msgspec.msgpack.encode(fields)])
    failed = owner.next()
    assert failed.numbers == [7, 8]
    for finish in failed.finished_reasons:
        assert (finish.type, finish.status, finish.message) == ("error", 500, "the answer could not be decoded")
    site.send("d0", ids("b", ["w1.1"], first=1))
    assert owner.next().output_strs == ["b"]


def test_a_batch_of_a_rank_that_there_is_not_fails_its_requests(site, detokenizer):
    owner = site.inbox("w1.1", ToTokenizer)
    for rank in (1, -1):
        site.send("d0", ids("a", ["w1.1"], rank=rank))
        assert owner.next().finished_reasons[0].message == "the answer could not be decoded"
    site.send("d0", ids("a", ["w1.1"]))
    assert owner.next().output_strs == ["a"]


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91\x10", b"\x92\x10" + b"\x91" * 100_000])
def test_what_nobody_can_be_told_of_is_dropped_and_the_loop_goes_on(site, detokenizer, frame):
    owner = site.inbox("w1.1", ToTokenizer)
    site.send_frames("d0", [site.token + frame])
    site.send_frames("d0", [b"not-ours" + frame])
    site.send("d0", refusal("w1.1"))
    assert owner.next() == refusal("w1.1")


def test_a_message_without_output_is_skipped(site, detokenizer):
    owner = site.inbox("w1.1", ToTokenizer)
    site.send("d0", BatchTokenIDOutput(numbers=[], http_worker_ipcs=[], output_ids=b"", first_indexes=[]))
    site.send("d0", BatchEmbeddingOutput(numbers=[], http_worker_ipcs=[], finished_reasons=[], prompt_tokens=[]))
    held = ids("a", ["w1.1"])
    held.decode_params = [DecodeParams(stream=False)]
    site.send("d0", held)  # nothing to say yet
    site.send("d0", refusal("w1.1"))
    assert owner.next() == refusal("w1.1")


def test_stop_ends_it(site, detokenizer):
    detokenizer.send(Stop())
    assert site.ending(detokenizer) == "exited with status 0"


def test_an_owner_that_has_died_gets_nothing_more_and_the_others_do(make_site):
    site = make_site(workers=2)
    detokenizer = site.ready_child("detokenizer", ["d0"])
    dying, living = (site.inbox(owner, ToTokenizer) for owner in ("w1.1", "w2.1"))
    site.send("d0", ids("ab", ["w1.1", "w2.1"]))
    assert (dying.next().output_strs, living.next().output_strs) == (["a"], ["b"])
    with dying.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        detokenizer.send(OwnerDied("w1.1"))
        assert monitor.poll(DEADLINE_S * 1000), "the socket stays open"
        dying.socket.disable_monitor()
    site.send("d0", ids("cd", ["w1.1", "w2.1"], first=1))
    assert living.next().output_strs == ["d"]
    assert dying.is_empty()


def test_two_lives_of_the_one_owner_each_get_their_rows(make_site):
    site = make_site(workers=1)
    detokenizer = site.ready_child("detokenizer", ["d0"])
    old, new = (site.inbox(owner, ToTokenizer) for owner in ("w1.1", "w1.2"))
    site.send("d0", ids("a", ["w1.1"]))
    assert old.next().output_strs == ["a"]
    site.send("d0", ids("bx", ["w1.1", "w1.2"]))
    site.send("d0", ids("cy", ["w1.1", "w1.2"], first=1))
    assert [old.next().output_strs for _ in range(2)] == [["b"], ["c"]]
    assert [new.next().output_strs for _ in range(2)] == [["x"], ["y"]]
    detokenizer.send(OwnerDied("w1.1"))
    rows = itertools.count(2)

    def is_alone() -> bool:
        # The launcher's word comes by another way than rows do.
        site.send("d0", ids("dz", ["w1.1", "w1.2"], first=next(rows)))
        strings = new.next().output_strs
        assert strings in (["d", "z"], ["z"])
        return strings == ["z"]

    wait_until(is_alone)


@pytest.mark.parametrize("news", [PartDied("scheduler", 0, 1), PartStarted("scheduler", 0, 2)])
def test_the_death_of_a_scheduler_ends_the_state_of_its_requests(site, detokenizer, news):
    owner = site.inbox("w1.1", ToTokenizer)
    site.send("d0", ids("a", ["w1.1"], rank=0, life=1))
    assert owner.next().output_strs == ["a"]
    detokenizer.send(news)
    detokenizer.send(PartDied("router", 0, 1))

    def is_forgotten() -> bool:
        # Once it is known, what the dead life says is dropped.
        site.send("d0", ids("b", ["w1.1"], first=1, rank=0, life=1))
        site.send("d0", refusal("w1.1"))
        heard = []
        while not heard or heard[-1] != refusal("w1.1"):
            heard.append(owner.next())
        return len(heard) == 1

    wait_until(is_forgotten)
    # The next life may use the rank's name.
    site.send("d0", ids("c", ["w1.1"], rank=0, life=2))
    assert owner.next().output_strs == ["c"]


# In multi mode


def test_each_owner_gets_its_rows_of_a_step_in_one_message(make_site):
    site = make_site(workers=3)
    site.ready_child("detokenizer", ["d0"])
    owners = {name: site.inbox(name, ToTokenizer) for name in ("w1.1", "w2.1", "w3.1")}
    site.send("d0", ids("abcde", ["w1.1", "w2.1", "w1.1", None, "w3.1"]))
    site.send("d0", ids("fghij", ["w1.1", "w2.1", "w1.1", None, "w3.1"], first=1))
    for name, numbers, said in (
        ("w1.1", [1, 3], [["a", "c"], ["f", "h"]]),
        ("w2.1", [2], [["b"], ["g"]]),
        ("w3.1", [5], [["e"], ["j"]]),
    ):
        for i in range(2):
            output = owners[name].next()
            assert output.numbers == numbers
            assert output.http_worker_ipcs == [name] * len(numbers)
            assert output.first_indexes == [i] * len(numbers)
            assert output.output_strs == said[i]
        assert owners[name].is_empty()


# In this process


class Recorder(DetokenizerManager):
    """Says which loop was chosen."""

    loop: list[str] = []

    def event_loop(self) -> None:
        self.loop.append("event_loop")

    def multi_http_worker_event_loop(self) -> None:
        self.loop.append("multi_http_worker_event_loop")


@pytest.fixture
def channel():
    ours, theirs = channel_pair()
    channel = LauncherChannel(theirs)
    yield ours, channel
    channel.close()
    ours.close()


@pytest.mark.parametrize(
    ("workers", "loop"), [(1, "event_loop"), (2, "multi_http_worker_event_loop"), (16, "multi_http_worker_event_loop")]
)
def test_the_number_of_http_workers_chooses_the_loop(make_site, monkeypatch, channel, workers, loop):
    site = make_site(workers=workers)
    monkeypatch.setattr(Recorder, "loop", [])
    monkeypatch.setattr(process, "LauncherChannel", lambda fd: channel[1])

    class Kept(Recorder):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            site.keep(self)

    process.run_detokenizer_process(site.server_args, site.ports("d0"), Kept, beat=lambda lag: None)
    assert Recorder.loop == [loop]


@pytest.fixture
def manager(make_site, channel):
    site = make_site(workers=2)
    decoder = TextDecoder.from_tokenizer(byte_tokenizer())
    return site.keep(
        DetokenizerManager(
            site.server_args,
            site.ports("d0"),
            channel=channel[1],
            controlled=Controlled(channel[1]),
            decoders=[decoder],
            beat=lambda lag: None,
        )
    )


def test_the_socket_mapping_is_cleared_where_it_was_used(manager, monkeypatch):
    cleared = []
    clear = manager.socket_mapping.clear_all_sockets
    monkeypatch.setattr(manager.socket_mapping, "clear_all_sockets", lambda: (cleared.append(True), clear()))
    manager.maybe_clear_socket_mapping()
    assert cleared == []
    manager.socket_mapping.send_output("w1.1", refusal("w1.1"))
    manager.maybe_clear_socket_mapping()
    assert cleared == [True]
    assert len(manager.socket_mapping) == 0


def test_the_loop_of_multi_mode_closes_its_sockets_when_it_ends(manager, monkeypatch):
    sockets = []

    def outputs():
        yield refusal("w1.1")
        yield ids("ab", ["w2.1", None])
        sockets.extend(manager.socket_mapping._sockets.values())

    monkeypatch.setattr(manager, "outputs", outputs)
    manager.multi_http_worker_event_loop()
    assert len(sockets) == 2
    assert all(socket.closed for socket in sockets)
    assert len(manager.socket_mapping) == 0


def test_a_row_without_owner_is_counted_and_the_others_are_sent(manager, monkeypatch, caplog):
    monkeypatch.setattr(manager, "outputs", lambda: iter([ids("ab", ["w2.1", None]), refusal(None)]))
    with caplog.at_level(logging.ERROR):
        manager.multi_http_worker_event_loop()
    assert manager.socket_mapping.without_owner == 2
    assert "RefusedReq has no owner; skipped" in caplog.text


def test_the_announced_death_of_an_owner_closes_its_socket(manager, channel, monkeypatch):
    ours, _ = channel
    manager.socket_mapping.send_output("w1.1", refusal("w1.1"))
    for order in (OwnerDied("w1.1"), Stop()):
        ours.send(msgspec.msgpack.encode(order))
    assert list(manager.outputs()) == []
    assert "w1.1" not in manager.socket_mapping
    assert not manager.socket_mapping.send_output("w1.1", refusal("w1.1"))
