import json
import math
import os
import signal
import time

import pytest
from conformance import RESUMED, Driver, EngineConformance, ResumptionConformance, greedy, pack

from multitok.engines.base import EngineRefusal
from multitok.engines.openvino_llm import OpenVINOEngine
from multitok.messages.base import FinishReason
from multitok.messages.sampling import Grammar, SamplingParams

pytestmark = pytest.mark.real_engine

EOS = 2
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "What is 12 times 12?",
    "Name a fruit that is red.",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "What does HTTP stand for?",
    "Tell me a joke about cats.",
    "How do I sort a list in Python?",
    "What is the largest planet?",
    "Describe a rainy day in one sentence.",
    "Summarize the plot of Romeo and Juliet.",
]


def load(model, **options) -> OpenVINOEngine:
    text = {name: str(value) for name, value in options.items()}
    return OpenVINOEngine(model, text, eos_token_ids=[EOS], context_length=8192, vocab_size=49152)


@pytest.fixture(scope="session")
def loaded(smollm2_file):
    engine = load(smollm2_file)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def loaded_without_prefix_cache(smollm2_file):
    engine = load(smollm2_file, prefix_caching="false", kv_cache_tokens=8192)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def tokenizer(loaded):
    return loaded._pipeline.get_tokenizer()


@pytest.fixture(scope="session")
def chat(tokenizer):
    def encode(question: str) -> list[int]:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()

    return encode


class TestOpenVINO(EngineConformance):
    @pytest.fixture
    def engine(self, loaded):
        return loaded

    @pytest.fixture
    def prompts(self, chat):
        return [chat(question) for question in QUESTIONS]

    def test_different_seeds_and_no_seed_differ(self, driver, prompts):
        def sample(seed):
            return SamplingParams(max_new_tokens=16, temperature=1.5, seed=seed, ignore_eos=True)

        results = driver.run(*((prompts[4], sample(seed)) for seed in (1, 2, None, None)))
        assert len({tuple(result.ids) for result in results}) == 4

    def test_greedy_log_probabilities_barely_depend_on_the_batch(self, driver, prompts):
        """With 8-bit activations the difference was up to 0.25, and ids began to differ."""
        params = greedy(32, ignore_eos=True, logprobs=0)
        (alone,) = driver.run((prompts[1], params))
        together = driver.run(*((prompt, params) for prompt in prompts))[1]
        assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
        assert all(-20 < value < 0 for value in alone.logprobs)
        assert math.exp(max(alone.logprobs)) > 0.5

    def test_it_knows_the_answer(self, driver, prompts, tokenizer):
        (result,) = driver.run((prompts[0], greedy(40)))
        assert "Paris" in tokenizer.decode(result.ids)
        assert result.ids[-1] == EOS
        assert result.finish == FinishReason("stop", matched=EOS)

    def test_penalties_change_the_text(self, driver, prompts):
        base, *others = driver.run(
            *((prompts[8], greedy(32, ignore_eos=True, **fields)) for fields in PENALTIES),
        )
        assert all(other.ids != base.ids for other in others)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"top_p": 0.0}, "top_p"),
            ({"presence_penalty": 3.0}, "presence_penalty"),
            ({"repetition_penalty": 0.0}, "repetition_penalty"),
            ({"logit_bias": {5: 1.0}}, "logit_bias"),
            ({"logprobs": 5}, "top_logprobs"),
        ],
    )
    def test_values_out_of_range_are_refused_by_name(self, driver, prompts, fields, words):
        with pytest.raises(EngineRefusal, match=words) as refusal:
            driver.add(prompts[0], SamplingParams(max_new_tokens=3, **fields))
        assert refusal.value.status == 400
        assert ".cpp" not in refusal.value.message

    @pytest.mark.parametrize("ids", [[49152], [-1], [5, 2**31 - 1]])
    def test_ids_outside_the_vocabulary_are_refused(self, driver, ids):
        with pytest.raises(EngineRefusal, match="from 0 to 49151"):
            driver.add(ids, greedy(3))

    def test_more_than_the_context_is_refused(self, driver):
        with pytest.raises(EngineRefusal, match="8192"):
            driver.add([5] * 8000, greedy(193))

    def test_a_long_prompt_is_worked_on_in_many_short_steps(self, driver, prompts):
        running = driver.add(prompts[0], greedy(200, ignore_eos=True))
        driver.step()
        number = driver.add([100 + i % 40000 for i in range(1500)], greedy(1, ignore_eos=True))
        start = time.monotonic()
        longest = 0.0
        while not driver.results[number].ids:
            before = time.monotonic()
            driver.step()
            longest = max(longest, time.monotonic() - before)
        assert len(driver.results[running].ids) >= 10
        assert longest < (time.monotonic() - start) / 3
        driver.abort(running)
        driver.until_idle()

    def test_grammars_are_enforced(self, driver, chat, tokenizer):
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        }
        grammars = [
            Grammar("json_schema", json.dumps(schema)),
            Grammar("regex", "[a-c]{3}"),
            Grammar("ebnf", 'root ::= "yes" | "no"'),
        ]
        prompt = chat("Give me name and age of a person as JSON.")
        results = driver.run(*((prompt, greedy(60, grammar=grammar)) for grammar in grammars))
        texts = [tokenizer.decode(result.ids) for result in results]
        assert set(json.loads(texts[0])) == {"name", "age"}
        assert texts[1].strip("abc") == "" and len(texts[1]) == 3
        assert texts[2] in ("yes", "no")
        (free,) = driver.run((prompt, greedy(60, grammar=Grammar("json_object"))))
        assert tokenizer.decode(free.ids).startswith("{")

    @pytest.mark.parametrize(
        ("grammar", "words"),
        [
            (Grammar("json_schema", "{bad"), "Failed to parse JSON"),
            (Grammar("json_schema", "[]"), "should be an object"),
            (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
            (Grammar("json_schema", '{"$ref": "#/$defs/x"}'), "Cannot find"),
            (Grammar("regex", "[a-"), "Unclosed"),
            (Grammar("regex", "(?=a)b"), "Lookahead"),
            (Grammar("ebnf", "root = ("), "root"),
            (Grammar("regex", "(" * 129 + "a" + ")" * 129), "nested deeper than 128"),
            (Grammar("regex", "a" * 65537), "longer than 65536"),
            (Grammar("regex", "(a*b*c*)*" * 1000), "too long to compile"),
        ],
    )
    def test_a_bad_grammar_is_refused_and_harms_nobody(self, driver, prompts, grammar, words):
        params = greedy(6, ignore_eos=True)
        reference = driver.run((prompts[1], params))[0].ids
        running = driver.add(prompts[1], params)
        driver.step()
        try:
            number = driver.add(prompts[0], greedy(5, grammar=grammar))
            driver.until_idle()
            finish = driver.results[number].finish
            assert (finish.type, finish.status) == ("error", 400)
            message = finish.message
        except EngineRefusal as refusal:
            message = refusal.message
        assert words in message and "can't be enforced" in message
        assert ".cc" not in message
        driver.until_idle()
        assert driver.results[running].ids == reference
        with pytest.raises(EngineRefusal, match="can't be enforced"):
            driver.add(prompts[0], greedy(5, grammar=grammar))

    def test_the_death_of_the_grammar_compiler_harms_nobody(self, driver, engine, prompts):
        gate = engine._grammars
        driver.run((prompts[0], greedy(5, grammar=Grammar("regex", "[d-f]{2}"))))
        os.kill(gate._process.pid, signal.SIGKILL)
        gate._process.wait()
        (idle,) = driver.run((prompts[0], greedy(5, grammar=Grammar("regex", "[d-f]{3}"))))
        assert idle.finish.type == "stop"
        running = driver.add(prompts[1], greedy(6, ignore_eos=True))
        aborted = driver.add(prompts[0], greedy(5, grammar=Grammar("regex", "[d-f]{4}")))
        assert engine.load().waiting == 2
        driver.abort(aborted)
        driver.until_idle()
        assert len(driver.results[running].ids) == 6

    def test_a_grammar_compiler_that_hangs_costs_one_request(self, driver, engine, prompts, monkeypatch):
        driver.run((prompts[0], greedy(5, grammar=Grammar("regex", "[d-f]{5}"))))
        monkeypatch.setattr("multitok.engines.grammar_gate.ANSWER_LIMIT_S", 0.3)
        os.kill(engine._grammars._process.pid, signal.SIGSTOP)
        free, stuck = driver.run(
            (prompts[1], greedy(6, ignore_eos=True)), (prompts[0], greedy(5, grammar=Grammar("regex", "[d-f]{6}")))
        )
        assert len(free.ids) == 6
        assert (stuck.finish.type, stuck.finish.status) == ("error", 503)
        assert "does not answer" in stuck.finish.message
        monkeypatch.undo()
        (again,) = driver.run((prompts[0], greedy(9, grammar=Grammar("regex", "[d-f]{6}"))))
        assert again.finish.type == "stop"

    def test_grammars_together_with_other_limits_break_nothing(self, driver, prompts):
        grammar = Grammar("regex", "[a-c]{3}")
        results = driver.run(
            (prompts[0], greedy(10, grammar=grammar, ignore_eos=True)),
            (prompts[0], greedy(10, grammar=grammar, min_new_tokens=8)),
            (prompts[0], greedy(10, grammar=grammar, stop_token_ids=[81])),
            (prompts[0], greedy(10, grammar=grammar, ignore_eos=True, stop_token_ids=[30000])),
            (prompts[0], SamplingParams(max_new_tokens=10, grammar=grammar, top_k=1, logprobs=0)),
        )
        assert all(result.finish.type in ("stop", "length") for result in results)

    def test_info_says_what_it_can_do(self, engine):
        info = engine.info
        assert (info.name, info.task, info.simulated, info.top_logprobs) == ("openvino", "generate", False, 0)
        assert "logit_bias" not in info.sampling
        # Its prefix cache mixes up requests that extend one cached block at the same time.
        assert info.resumable == []
        assert info.version.startswith("20")

    def test_load_counts_what_runs(self, driver, engine, prompts):
        numbers = [driver.add(prompt, greedy(20, ignore_eos=True)) for prompt in prompts[:3]]
        assert engine.load().waiting == 3
        driver.step()
        load = engine.load()
        assert (load.running, load.waiting) == (3, 0)
        assert 0 < load.kv_used < 0.1
        for number in numbers:
            driver.abort(number)
        driver.until_idle()


PENALTIES = [{}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.5}]


def test_a_small_kv_cache_limits_the_context_and_preempts_and_leaks_nothing(smollm2_file, capfd):
    engine = load(smollm2_file, kv_cache_tokens=280, max_num_batched_tokens=64)
    assert engine.info.context_length == 288
    driver = Driver(engine)
    with pytest.raises(EngineRefusal, match="288"):
        driver.add([5] * 280, greedy(9))
    params = greedy(60, ignore_eos=True)
    prompts = [[1000 + 7 * i + 100 * k for i in range(100)] for k in range(3)]
    alone = driver.run((prompts[0], params))[0].ids
    results = driver.run(*((prompt, params) for prompt in prompts))
    assert [result.finish for result in results] == [FinishReason("length")] * 3
    assert results[0].ids == alone
    (full,) = driver.run(([9] * 200, greedy(88, ignore_eos=True)))
    assert len(full.ids) == 88

    for prompt in prompts:
        engine.add_request(prompt[0], pack(prompt), params)
    engine.step()
    engine.step()
    engine.shutdown()
    del driver, engine
    output = capfd.readouterr()
    assert "leaked" not in output.out + output.err


class TestResumption(ResumptionConformance):
    """Without prefix caching; with it, nothing can be resumed."""

    @pytest.fixture
    def engine(self, loaded_without_prefix_cache):
        return loaded_without_prefix_cache

    @pytest.fixture
    def prompts(self, chat):
        return [chat(question) for question in QUESTIONS]

    def test_what_it_names(self, engine):
        info = engine.info
        assert {"repetition_penalty", "min_new_tokens"} < set(info.resumable) < set(info.sampling)
        assert not {"temperature", "presence_penalty", "frequency_penalty", "grammar"} & set(info.resumable)

    @pytest.mark.slow
    def test_all_prompts_with_all_that_it_names(self, driver, engine, prompts):
        wanted = [RESUMED[name] for name in engine.info.resumable]
        together = {field: value for fields in wanted for field, value in fields.items()}
        self.check_resumption(driver, prompts, [{"ignore_eos": True}, {"repetition_penalty": 1.3}, together])


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_precision": "u8"},
        {"dynamic_quantization": 32},
        {"inference_precision": "bf16", "kv_cache_precision": "bf16"},
    ],
)
def test_an_engine_that_rounds_resumes_nothing(smollm2_file, options):
    engine = load(smollm2_file, kv_cache_tokens=64, prefix_caching="false", **options)
    assert engine.info.resumable == []
    engine.shutdown()


@pytest.mark.parametrize("cuts", [(7, 13), (13, 7), (7, 8, 9, 13)])
def test_requests_that_go_on_from_one_cached_block_get_their_own_ids(smollm2_file, chat, cuts):
    """OpenVINO GenAI 2026.4 lets all write into that block which come before the same step: see `openvino_blocks`."""
    engine = load(smollm2_file, kv_cache_tokens=512)
    driver = Driver(engine)
    prompt = chat(QUESTIONS[3])
    whole = driver.run((prompt, greedy(24, ignore_eos=True)))[0].ids
    driver.run((prompt + whole[:1], greedy(3, ignore_eos=True)))
    numbers = {cut: driver.add(prompt + whole[:cut], greedy(24 - cut, ignore_eos=True)) for cut in cuts}
    # One begins at each step, and one that leaves while it waits leaves nothing behind.
    leaver = driver.add(prompt + whole[:10], greedy(5))
    assert (engine.load().running, engine.load().waiting) == (0, len(cuts) + 1)
    driver.abort(leaver)
    driver.until_idle()
    rests = {cut: driver.results[number].ids for cut, number in numbers.items()}
    engine.shutdown()
    assert rests == {cut: whole[cut:] for cut in numbers}


def test_when_the_kv_cache_runs_full_the_request_ends_with_an_error(smollm2_file):
    engine = load(smollm2_file, kv_cache_tokens=64)
    # A limit that is wrong on purpose, to see what happens should the pipeline ever run out of room.
    engine._info = type(engine.info)(**{**_fields(engine.info), "context_length": 8192})
    driver = Driver(engine)
    (output,) = driver.run(([5] * 40, greedy(100, ignore_eos=True)))
    assert (output.finish.type, output.finish.status) == ("error", 503)
    assert "KV cache" in output.finish.message
    (prompt,) = driver.run(([5] * 100, greedy(1)))
    assert prompt.finish.type == "error"
    (fits,) = driver.run(([5] * 10, greedy(3, ignore_eos=True)))
    assert len(fits.ids) == 3
    engine.shutdown()


def _fields(info):
    return {name: getattr(info, name) for name in info.__struct_fields__}


def test_a_folder_with_openvino_ir_loads_too(smollm2_file, tmp_path, tokenizer):
    """The file beside it is what OpenVINO itself makes of the GGUF."""
    copy = tmp_path / "model.gguf"
    copy.symlink_to(smollm2_file)
    import openvino_genai as genai

    genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    assert (tmp_path / "openvino_model.xml").exists()
    copy.unlink()
    engine = load(tmp_path, kv_cache_tokens=512)
    (result,) = Driver(engine).run(([1, 4093, 198], greedy(5, ignore_eos=True)))
    assert len(result.ids) == 5
    engine.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": 1}, "no option kv_cache; it has: device"),
        ({"kv_cache_gb": 0}, "at least 1"),
        ({"kv_cache_gb": 1, "kv_cache_tokens": 64}, "exclude each other"),
        ({"kv_cache_precision": "f8"}, "must be one of"),
        ({"prefix_caching": "maybe"}, "must be one of"),
    ],
)
def test_wrong_options_are_refused_by_name(smollm2_file, options, message):
    with pytest.raises(ValueError, match=message):
        load(smollm2_file, **options)


def test_a_broken_model_says_so(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(ValueError, match="can't load"):
        load(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="can't load"):
        load(tmp_path)
