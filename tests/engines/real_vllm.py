"""The engine `vllm` on a real vLLM: `make test-vllm` runs it, in an environment of its own, and `make test` doesn't."""

import json
import os
import signal
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from conformance import Driver, EngineConformance, greedy
from processes import title
from safetensors.numpy import save_file
from safetensors_model import write_safetensors_folder
from test_openvino_llm import QUESTIONS
from tokenizers import Tokenizer

from multitok.engines.base import EngineRefusal
from multitok.engines.registry import create_engine
from multitok.engines.settings import EngineSettings
from multitok.messages.base import FinishReason
from multitok.messages.operations import (
    FlushCache,
    LoadAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from multitok.messages.sampling import EngineFields, Grammar, SamplingParams
from multitok.tokenizer.model_files import resolve_model

# Gigabytes; and nothing here is to be looked up elsewhere.
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

EOS = 2
# Exact, so that ids don't depend on what runs beside a request; and without compiling, which takes minutes.
COMMAND_LINE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]


@pytest.fixture(scope="session")
def model_folder(smollm2_file) -> Path:
    # Half a gigabyte: kept in the environment.
    return write_safetensors_folder(smollm2_file, Path(sys.prefix) / "smollm2-safetensors")


@pytest.fixture(scope="session")
def load(model_folder):
    files = resolve_model(str(model_folder))

    def load(*command_line, **settings):
        command_line = [*COMMAND_LINE, *command_line]
        return create_engine("vllm", EngineSettings(files=files, command_line=command_line, **settings))

    return load


@pytest.fixture(scope="module")
def loaded(load):
    engine = load()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def chat(tokenizer):
    def encode(question: str) -> list[int]:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return tokenizer.encode(text, add_special_tokens=False).ids

    return encode


class TestVLLM(EngineConformance):
    @pytest.fixture
    def engine(self, loaded):
        return loaded

    @pytest.fixture
    def prompts(self, chat):
        return [chat(question) for question in QUESTIONS]

    def test_greedy_ids_are_those_of_transformers_on_the_same_weights(self, driver, prompts, model_folder):
        """OpenVINO, which reads the GGUF file itself, is no reference here: docs/decisions.md."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        expected = []
        some = prompts[:5]
        for prompt in some:
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": [0, EOS], "pad_token_id": 0}
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            expected.append(output[0, len(prompt) :].tolist())
        assert [result.ids for result in driver.run(*((prompt, greedy(24)) for prompt in some))] == expected

    def test_it_ends_with_the_models_end_token(self, driver, prompts, tokenizer):
        (result,) = driver.run((prompts[0], greedy(40)))
        assert "Paris" in tokenizer.decode(result.ids)
        assert result.finish == FinishReason("stop", matched=EOS)

    def test_grammars_are_enforced(self, driver, chat, tokenizer):
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        grammars = [
            Grammar("json_schema", json.dumps(schema)),
            Grammar("regex", "[a-c]{3}"),
            Grammar("ebnf", 'root ::= "yes" | "no"'),
            Grammar("json_object"),
        ]
        prompt = chat("Give me name and age of a person as JSON.")
        results = driver.run(*((prompt, greedy(60, grammar=grammar)) for grammar in grammars))
        texts = [tokenizer.decode(result.ids) for result in results]
        assert set(json.loads(texts[0])) == {"name", "age"}
        assert texts[1].strip("abc") == "" and len(texts[1]) == 3
        assert texts[2] in ("yes", "no")
        assert texts[3].startswith("{")

    @pytest.mark.parametrize(
        ("grammar", "words"),
        [
            (Grammar("json_schema", "{bad"), "Invalid JSON"),
            (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
            (Grammar("regex", "[a-"), "unclosed"),
            (Grammar("ebnf", "root = ("), "can't be enforced"),
            (Grammar("regex", "(" * 129 + "a" + ")" * 129), "nested deeper than 128"),
            # In vLLM's step each token of it would take a quarter of a minute.
            (Grammar("regex", "(a*b*c*)*" * 300), "too long to compile"),
        ],
    )
    def test_a_bad_grammar_is_refused_and_harms_nobody(self, driver, prompts, grammar, words):
        running = driver.add(prompts[1], greedy(6, ignore_eos=True))
        try:
            number = driver.add(prompts[0], greedy(5, grammar=grammar))
            driver.until_idle()
            finish = driver.results[number].finish
            assert (finish.type, finish.status) == ("error", 400)
            message = finish.message
        except EngineRefusal as refusal:
            assert refusal.status == 400
            message = refusal.message
        assert words in message and "can't be enforced" in message
        driver.until_idle()
        assert len(driver.results[running].ids) == 6

    def test_the_largest_grammars_that_are_taken_harm_nobody(self, driver, prompts):
        grammar = Grammar("regex", "(" * 128 + "a" + ")" * 128)
        nested, other = driver.run((prompts[0], greedy(5, grammar=grammar)), (prompts[1], greedy(6, ignore_eos=True)))
        assert nested.finish.type == "stop"
        assert len(other.ids) == 6

    def test_a_request_that_is_aborted_while_its_grammar_is_checked_never_starts(self, driver, engine, prompts):
        number = driver.add(prompts[0], greedy(5, grammar=Grammar("regex", "[d-f]{200}")))
        driver.abort(number)
        assert not engine.has_unfinished()
        (result,) = driver.run((prompts[0], greedy(2, grammar=Grammar("regex", "[d-f]{2}"))))
        assert len(result.ids) == 2

    def test_logit_bias_moves_the_choice(self, driver, prompts):
        biased, without = driver.run(
            (prompts[0], greedy(3, ignore_eos=True, logit_bias={505: 100.0})),
            (prompts[0], greedy(3, ignore_eos=True, logit_bias={505: -100.0})),
        )
        assert biased.ids == [505] * 3
        assert 505 not in without.ids

    def test_different_seeds_and_no_seed_differ(self, driver, prompts):
        seeds = (1, 2, -1, None, None)
        results = driver.run(
            *((prompts[4], SamplingParams(max_new_tokens=16, seed=seed, ignore_eos=True)) for seed in seeds)
        )
        assert len({tuple(result.ids) for result in results}) == len(seeds)

    def test_the_seed_of_minus_one_reproduces(self, driver, prompts):
        params = SamplingParams(max_new_tokens=16, temperature=1.5, seed=-1, ignore_eos=True)
        assert driver.run((prompts[4], params))[0].ids == driver.run((prompts[4], params))[0].ids

    @pytest.mark.parametrize(
        ("fields", "words"),
        [({"top_p": 0.0}, "top_p"), ({"presence_penalty": 3.0}, "presence_penalty"), ({"logprobs": 21}, "21")],
    )
    def test_values_out_of_range_are_refused_by_name(self, driver, prompts, fields, words):
        with pytest.raises(EngineRefusal, match=words) as refusal:
            driver.add(prompts[0], SamplingParams(max_new_tokens=3, **fields))
        assert refusal.value.status == 400

    def test_cached_prefixes_count_until_they_are_flushed(self, driver, engine):
        prompt = [1000 + i for i in range(300)]

        def cached():
            number = driver.add(prompt, greedy(1, ignore_eos=True))
            while True:
                for output in driver.step():
                    if output.number == number:
                        return output.cached_tokens

        assert cached() == 0
        assert 0 < cached() < 300
        running = driver.add(prompt, greedy(100, ignore_eos=True))
        driver.step()
        with pytest.raises(EngineRefusal) as refusal:
            engine.operate(FlushCache())
        assert refusal.value.status == 503
        driver.abort(running)
        engine.operate(FlushCache())
        assert cached() == 0

    def test_weights_are_replaced_while_requests_run(self, driver, engine, prompts, model_folder, tmp_path):
        params = greedy(24, ignore_eos=True)
        before = driver.run((prompts[0], params))[0].ids
        other = _write_other_weights(model_folder, tmp_path / "other")
        running = driver.add(prompts[1], greedy(40, ignore_eos=True))
        driver.step()
        engine.operate(UpdateWeights(str(other)))
        after = driver.run((prompts[0], params))[0].ids
        assert after != before
        assert len(driver.results[running].ids) == 40
        engine.operate(UpdateWeights(str(model_folder)))
        assert driver.run((prompts[0], params))[0].ids == before
        with pytest.raises(EngineRefusal, match="no folder with"):
            engine.operate(UpdateWeights(str(tmp_path)))

    def test_info_says_what_it_can_do(self, engine):
        info = engine.info
        assert (info.name, info.task, info.simulated, info.top_logprobs) == ("vllm", "generate", False, 20)
        assert (info.context_length, info.vocab_size, info.eos_token_ids) == (2048, 49152, [0, EOS])
        assert {"logit_bias", "grammar"} <= set(info.sampling)
        assert info.operations == ["flush_cache", "update_weights_from_disk"]
        assert info.fields == []

    @pytest.mark.parametrize(
        "operation", [LoadAdapter("a", "/nowhere"), UnloadAdapter("a"), StartProfile(), StopProfile()]
    )
    def test_what_was_not_switched_on_is_refused(self, engine, operation):
        with pytest.raises(EngineRefusal, match="has no operation"):
            engine.operate(operation)


def _write_other_weights(model_folder: Path, folder: Path) -> Path:
    """Write the model with its last layers' weights changed."""
    from safetensors.numpy import load_file

    folder.mkdir()
    weights = load_file(model_folder / "model.safetensors")
    for name in weights:
        if ".layers.29.mlp." in name:
            weights[name] = -weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in model_folder.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of random numbers, large enough to change what the model says."""
    folder.mkdir()
    rank, size, kv = 8, 576, 192
    generator = np.random.default_rng(seed)
    weights = {}
    for layer in range(30):
        for name, rows in (("q_proj", size), ("v_proj", kv)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = generator.standard_normal((rank, size), dtype=np.float32) * 0.1
            weights[f"{prefix}.lora_B.weight"] = generator.standard_normal((rows, rank), dtype=np.float32) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none", "task_type": "CAUSAL_LM"}))
    return folder


class TestWithEverythingSwitchedOn:
    """LoRA, a KV connector, the profiler; and what happens at the core's end."""

    @pytest.fixture(scope="class")
    def engine(self, load, tmp_path_factory):
        folder = tmp_path_factory.mktemp("everything")
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
        }
        profiler = {"profiler": "torch", "torch_profiler_dir": str(folder / "profile")}
        engine = load(
            *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
            *("--kv-transfer-config", json.dumps(transfer)),
            *("--profiler-config", json.dumps(profiler)),
            max_running_requests=8,
            context_length=2048,
        )
        engine.profile_folder = folder / "profile"
        yield engine
        engine.shutdown()

    @pytest.fixture
    def run(self, engine, chat):
        numbers = iter(range(1, 1000))

        def run(fields=None, most=16):
            driver, number = Driver(engine), next(numbers)
            ids = array("i", chat(QUESTIONS[0])).tobytes()
            engine.add_request(number, ids, greedy(most, ignore_eos=True), fields=fields)
            driver.results[number] = result = _Collected()
            driver.until_idle()
            return result

        return run

    def test_info_names_it(self, engine):
        assert engine.info.fields == ["adapter", "kv_transfer_params"]
        assert {"load_lora_adapter", "unload_lora_adapter", "start_profile", "stop_profile"} < set(
            engine.info.operations
        )
        assert engine.info.max_running_requests == 8

    def test_adapters_come_are_replaced_and_go(self, engine, run, tmp_path):
        plain = run().ids
        with pytest.raises(EngineRefusal, match="no adapter 'a'"):
            run(EngineFields(adapter="a"))
        engine.operate(LoadAdapter("a", str(_write_adapter(tmp_path / "first", 1))))
        first = run(EngineFields(adapter="a")).ids
        assert first != plain
        engine.operate(LoadAdapter("a", str(_write_adapter(tmp_path / "second", 2))))
        second = run(EngineFields(adapter="a")).ids
        assert second not in (plain, first)
        assert run().ids == plain
        engine.operate(UnloadAdapter("a"))
        with pytest.raises(EngineRefusal, match="no adapter 'a'"):
            run(EngineFields(adapter="a"))
        with pytest.raises(EngineRefusal, match="no adapter 'a'"):
            engine.operate(UnloadAdapter("a"))

    def test_an_adapter_that_is_none_is_refused(self, engine, run, tmp_path):
        for path in (tmp_path / "nowhere", tmp_path):
            with pytest.raises(EngineRefusal) as refusal:
                engine.operate(LoadAdapter("b", str(path)))
            assert refusal.value.status == 400
        assert len(run().ids) == 16

    def test_kv_transfer_params_reach_the_core(self, run):
        assert len(run(EngineFields(kv_transfer_params={"do_remote_decode": False, "x": [1, "y"]})).ids) == 16

    def test_a_profile_is_written(self, engine, run):
        with pytest.raises(EngineRefusal, match="--profiler-config"):
            engine.operate(StartProfile(folder="/elsewhere"))
        engine.operate(StartProfile())
        run()
        engine.operate(StopProfile())
        assert list(engine.profile_folder.iterdir())

    def test_a_workers_death_is_raised_as_the_cores(self, engine, chat):
        """The last one: nothing is left after it."""
        driver = Driver(engine)
        driver.add(chat(QUESTIONS[0]), greedy(500, ignore_eos=True))
        driver.step()
        (core,) = engine._core._client.resources.engine_manager.processes
        workers = [pid for pid in _children(core.pid) if title(pid).startswith("VLLM::Worker")]
        os.kill(workers[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="engine core died: RuntimeError"):
            while True:
                driver.step()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class _Collected:
    """As `conformance.Result`."""

    def __init__(self):
        self.ids, self.logprobs, self.top_logprobs = [], [], []
        self.finish = self.embedding = None


@pytest.mark.parametrize(
    ("command_line", "settings", "words"),
    [
        (["--no-such-option"], {}, "unrecognized arguments: --no-such-option"),
        (["--max-model-len", "much"], {}, "max-model-len"),
        (["--model", "elsewhere"], {}, "give --model before the --"),
        (["--max-model-len", "1024"], {"context_length": 512}, "contradict"),
        (["--max-model-len", "100000"], {}, "max_model_len"),
        (["--quantization", "nonsense"], {}, "nonsense"),
        ([], {"options": {"a": "1"}}, "after --, and no --engine-arg"),
    ],
)
def test_wrong_options_end_the_start_with_vllms_words(load, command_line, settings, words):
    with pytest.raises(ValueError, match=words):
        load(*command_line, **settings)


def test_a_model_that_cannot_be_loaded_says_so_in_the_cores_words(load, model_folder, tmp_path):
    for file in model_folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({"nothing": np.zeros(4, np.float32)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = EngineSettings(files=resolve_model(str(tmp_path)), command_line=COMMAND_LINE)
    with pytest.raises(ValueError, match=r"vLLM can't load .*nothing"):
        create_engine("vllm", settings)


def test_vllms_own_data_parallelism_balances_and_answers_all(load, chat, monkeypatch):
    # vLLM would give each core a NUMA node of its own.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine = load("--data-parallel-size", "2")
    try:
        assert engine.info.max_running_requests == 2 * engine._config.scheduler_config.max_num_seqs
        driver = Driver(engine)
        params = greedy(12, ignore_eos=True)
        alone = [driver.run((chat(question), params))[0].ids for question in QUESTIONS[:4]]
        numbers = [driver.add(chat(QUESTIONS[i % 4]), params) for i in range(24)]
        aborted = driver.add(chat(QUESTIONS[5]), greedy(500, ignore_eos=True))
        driver.step()
        driver.abort(aborted)
        driver.until_idle()
        assert [driver.results[number].ids for number in numbers] == [alone[i % 4] for i in range(24)]
        engine.operate(FlushCache())
    finally:
        engine.shutdown()
