"""What SGLang and vLLM are asked, and what their recorded answers mean; `real_remote.py` asks them themselves."""

import json

import pytest
from conformance import Driver, Result, greedy, pack
from recorded_peer import RECORDED, RecordedPeer, sglang, vllm

from multitok.engines.remote.engine import RemoteEngine
from multitok.engines.remote.events import EventReader
from multitok.engines.settings import EngineSettings
from multitok.messages.base import FinishReason
from multitok.messages.sampling import EngineFields, Grammar, SamplingParams
from multitok.tokenizer.model_files import ModelFiles

TOKENS = "POST /inference/v1/generate"
COMPLETIONS = "POST /v1/completions"
GENERATE = "POST /generate"


def files(**changes) -> ModelFiles:
    known = {
        "name": "tiny",
        "task": "generate",
        "model_path": "",
        "tokenizer_file": "",
        "chat_template": None,
        "bos_token": None,
        "eos_token": None,
        "add_bos": False,
        "eos_token_ids": [2],
        "context_length": 2048,
        "vocab_size": 49152,
    }
    return ModelFiles(**(known | changes))


@pytest.fixture
def start():
    """Start an engine in front of a recorded one."""
    open_ones = []

    def make(answers, **options):
        peer = RecordedPeer(answers).__enter__()
        open_ones.append(peer.__exit__)
        engine = RemoteEngine(EngineSettings(files=files(), options={"url": peer.base_url, **options}))
        open_ones.append(engine.shutdown)
        return peer, engine

    yield make
    for close in reversed(open_ones):
        close()


def run(engine, params, fields=None):
    driver = Driver(engine)
    result = driver.results[1] = Result()
    engine.add_request(1, pack([10, 11, 12]), params, 0, fields)
    outputs = []
    while engine.has_unfinished():
        outputs += driver.step()
    return result, outputs


ALL = SamplingParams(
    max_new_tokens=5,
    min_new_tokens=9,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    seed=-1,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.3,
    stop_token_ids=[40],
    ignore_eos=True,
    logprobs=2,
    logit_bias={7: -1.5},
    grammar=Grammar("json_schema", "{}"),
)


class TestVllm:
    def test_its_tokens_and_their_log_probabilities_are_taken(self, start):
        peer, engine = start(vllm())
        peer.answers[TOKENS] = (200, RECORDED["vllm"]["tokens"])
        result, _ = run(engine, greedy(5, ignore_eos=True, logprobs=2))
        assert engine.info.version == "vllm 0.32.0"
        assert result.ids == [35976, 12, 35976, 12, 35976]
        assert result.finish == FinishReason("length")
        assert [len(top) for top in result.top_logprobs] == [2] * 5
        assert result.top_logprobs[1][0] == (12, result.logprobs[1])

    def test_completions_give_tokens_where_there_is_nothing_better(self, start):
        peer, engine = start(vllm(tokens=False))
        result, _ = run(engine, greedy(5, ignore_eos=True, logprobs=2))
        assert result.ids == [35976, 12, 35976, 12, 35976]
        assert result.logprobs == [-10.802672386169434] * 5
        assert [[token for token, _ in top] for top in result.top_logprobs[:2]] == [[35976, 27417], [12, 13882]]
        (body,) = peer.bodies(COMPLETIONS)
        assert (body["prompt"], body["return_token_ids"], body["add_special_tokens"]) == ([10, 11, 12], True, False)
        assert body["return_tokens_as_token_ids"] is True

    def test_every_parameter_has_its_name(self, start):
        peer, engine = start(vllm())
        peer.answers[TOKENS] = (200, RECORDED["vllm"]["tokens"])
        run(engine, ALL)
        body = peer.bodies(TOKENS)[-1]
        assert body["sampling_params"] == {
            "max_tokens": 5,
            "min_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "seed": 2**63 - 1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.3,
            "stop_token_ids": [40],
            "ignore_eos": True,
            "logprobs": 2,
            "logit_bias": {"7": -1.5},
            "structured_outputs": {"json": "{}"},
            "detokenize": False,
        }
        assert (body["token_ids"], body["stream"], body["model"]) == ([10, 11, 12], True, "tiny")

    def test_a_stop_id_is_named_whichever_it_was(self, start):
        peer, engine = start(vllm())
        for reason, matched in ((7, 7), (None, 2)):
            choice = {"index": 0, "finish_reason": "stop", "stop_reason": reason, "token_ids": [5, matched]}
            peer.answers[TOKENS] = (200, f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")
            result, _ = run(engine, greedy(5))
            assert (result.ids, result.finish) == ([5, matched], FinishReason("stop", matched=matched))

    def test_what_a_prefill_engine_says_for_the_decode_engine_comes_back(self, start):
        peer, engine = start(vllm())
        answer = json.loads(RECORDED["vllm"]["whole"])
        answer["kv_transfer_params"] = {"remote_block_ids": [1, 2], "remote_host": "h"}
        peer.answers[TOKENS] = (200, json.dumps(answer))
        fields = EngineFields(kv_transfer_params={"do_remote_decode": True}, adapter="lora")
        result, outputs = run(engine, greedy(1), fields)
        body = peer.bodies(TOKENS)[-1]
        assert (body["stream"], body["model"]) == (False, "lora")
        assert body["kv_transfer_params"] == {"do_remote_decode": True}
        assert result.ids == [35976]
        assert outputs[-1].customized_info == {"kv_transfer_params": answer["kv_transfer_params"]}

    def test_a_dead_engine_is_an_error_that_says_nothing_about_it(self, start):
        peer, engine = start(vllm())
        peer.answers[TOKENS] = (200, RECORDED["vllm"]["dead engine"])
        result, _ = run(engine, greedy(5))
        assert (result.finish.type, result.finish.status) == ("error", 500)
        assert "EngineCore" not in result.finish.message


class TestSglang:
    @pytest.mark.parametrize("shape", ["incremental", "cumulative"])
    def test_ids_are_taken_once_whichever_way_they_come(self, start, shape):
        peer, engine = start(sglang())
        peer.answers[GENERATE] = (200, RECORDED["sglang"][shape])
        result, _ = run(engine, greedy(5, logprobs=0))
        ids, finish = {
            "incremental": ([10, 11, 12], FinishReason("stop", matched=12)),
            "cumulative": ([197, 1492, 10557], FinishReason("length")),
        }[shape]
        assert (result.ids, result.finish) == (ids, finish)
        assert result.logprobs == [-0.01, -0.02, -0.03]
        assert result.top_logprobs == []

    def test_every_parameter_has_its_name(self, start):
        peer, engine = start(sglang(skip_tokenizer_init=False, enable_deterministic_inference=True, enable_lora=True))
        fields = EngineFields(adapter="lora", bootstrap_host="h", bootstrap_port=8998, bootstrap_room=2**62)
        assert set(fields.in_use()) <= set(engine.info.fields)
        run(engine, ALL, fields)
        (body,) = peer.bodies(GENERATE)
        assert body.pop("rid").startswith("multitok-")
        assert body == {
            "input_ids": [10, 11, 12],
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 2,
            "lora_path": "lora",
            "bootstrap_host": "h",
            "bootstrap_port": 8998,
            "bootstrap_room": 2**62,
            "sampling_params": {
                "max_new_tokens": 5,
                "min_new_tokens": 5,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 7,
                "min_p": 0.1,
                "sampling_seed": 2**63 - 1,
                "presence_penalty": 0.1,
                "frequency_penalty": 0.2,
                "repetition_penalty": 1.3,
                "stop_token_ids": [40],
                "ignore_eos": True,
                "logit_bias": {"7": -1.5},
                "json_schema": "{}",
            },
        }

    def test_what_it_cannot_do_is_not_promised(self, start):
        _, engine = start(sglang())
        assert not {"seed", "min_new_tokens", "grammar"} & set(engine.info.sampling)
        assert engine.info.grammars == []

    def test_a_value_that_it_refuses_is_the_clients_mistake(self, start):
        peer, engine = start(sglang())
        peer.answers[GENERATE] = (200, RECORDED["sglang"]["bad value"])
        result, _ = run(engine, greedy(5))
        words = "temperature must be a non-negative finite number, got -1."
        assert result.finish == FinishReason("error", None, 400, words)

    def test_an_abort_names_the_request(self, start):
        peer, engine = start(sglang())
        begun = json.dumps({"output_ids": [5], "meta_info": {"completion_tokens": 1, "finish_reason": None}})

        def hang(handler):
            handler.send_response(200)
            handler.send_header("transfer-encoding", "chunked")
            handler.end_headers()
            event = f"data: {begun}\n\n".encode()
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            # Until the other side leaves.
            handler.rfile.read(1)
            handler.close_connection = True

        peer.answers[GENERATE] = hang
        driver = Driver(engine)
        number = driver.add([10, 11, 12], greedy(5))
        (output,) = driver.step()
        assert output.output_ids == [5]
        driver.abort(number)
        assert peer.wait_for("POST /abort_request") == {"rid": peer.bodies(GENERATE)[0]["rid"]}


def test_the_key_is_shown_and_what_is_no_key_is_refused(start):
    peer, _ = start(sglang(), api_key="secret")
    assert {headers["authorization"] for _, headers, _ in peer.asked} == {"Bearer secret"}
    with pytest.raises(ValueError, match="printable"):
        start(sglang(), api_key="secret\r\nx: y")


@pytest.mark.parametrize(
    "answer",
    [
        'data: {"output_ids":[1,2,3,4,5,6],"meta_info":{"completion_tokens":6}}\n\n',
        'data: {"output_ids":[99999],"meta_info":{"completion_tokens":1}}\n\n',
        'data: {"output_ids":[1],"meta_info":{"completion_tokens":7}}\n\n',
        'data: {"output_ids":"x"}\n\n',
        "data: {\n\n",
        'data: {"output_ids":[1],"meta_info":{"completion_tokens":1,"finish_reason":{"type":"dance"}}}\n\n',
    ],
)
def test_an_answer_that_makes_no_sense_fails_its_request_alone(start, answer):
    peer, engine = start(sglang())
    peer.answers[GENERATE] = (200, answer)
    result, _ = run(engine, greedy(5))
    assert (result.finish.type, result.finish.status) == ("error", 502)
    peer.answers[GENERATE] = (200, RECORDED["sglang"]["incremental"])
    result, _ = run(engine, greedy(5))
    assert result.ids == [10, 11, 12]


def test_an_answer_that_ends_too_early_fails_its_request(start):
    peer, engine = start(sglang())
    peer.answers[GENERATE] = (200, RECORDED["sglang"]["incremental"].split("\n\n")[0] + "\n\n")
    result, _ = run(engine, greedy(5, presence_penalty=1.0))
    assert result.ids == [10, 11]
    assert (result.finish.type, result.finish.status) == ("error", 503)
    assert "none can go on" in result.finish.message


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 1000])
def test_events_are_the_same_however_they_are_cut(size):
    body = b'data:1\ndata:2\n\n: hello\n\ndata: {"a": 1}\r\n\r\ndata:{"b":\t2}\n\nevent: x\ndata: [DONE]\n\n'
    reader = EventReader()
    events = [event.strip() for i in range(0, len(body), size) for event in reader.feed(body[i : i + size])]
    assert events == [b"1", b"2", b'{"a": 1}', b'{"b":\t2}', b"[DONE]"]
