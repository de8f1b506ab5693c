"""SGLang's real scheduler on the CPU, with a small Llama of random weights: `make test-sglang`.

SGLang's kernels for CPUs are for AMX. Without it all it lacks is a rotary embedding, which it would take from vLLM.
"""

import json
import os
import select
import signal
import sys
from pathlib import Path

import pytest
from conformance import Driver, EngineConformance, greedy, pack

from multitok.engines.registry import create_engine
from multitok.engines.settings import EngineSettings
from multitok.messages.base import FinishReason
from multitok.messages.operations import FlushCache
from multitok.messages.sampling import Grammar, SamplingParams
from multitok.tokenizer.model_files import resolve_model
from parts import byte_tokenizer, wait_until

EOS = 256
COMMAND_LINE = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "20000", "--max-running-requests", "32"]


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("real")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        vocab_size=257,
        eos_token_id=EOS,
        bos_token_id=EOS,
        # Far apart, so that no rounding decides which id is the likeliest.
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def real(real_folder):
    rotary = str(Path(__file__).parent / "rotary")
    sys.path.append(rotary)
    # Not the scheduler of the other tests.
    os.environ["SGLANG_PLUGINS"] = "none"
    settings = EngineSettings(files=resolve_model(str(real_folder)), command_line=COMMAND_LINE)
    engine = create_engine("sglang", settings)
    yield engine
    engine.shutdown()
    del os.environ["SGLANG_PLUGINS"]
    sys.path.remove(rotary)


class TestRealScheduler(EngineConformance):
    # SGLang honours seeds only with --enable-deterministic-inference, which needs a GPU.
    test_a_seed_reproduces = None

    @pytest.fixture
    def engine(self, real):
        return real

    @pytest.fixture
    def prompts(self):
        return [list(range(10 + 12 * i, 22 + 14 * i)) for i in range(16)]


@pytest.fixture
def driver(real):
    assert not real.has_unfinished()
    yield Driver(real)
    assert not real.has_unfinished()


def outputs_of(engine, ids, params):
    engine.add_request(1, pack(ids), params)
    outputs = []
    while not outputs or outputs[-1].finish is None:
        assert select.select([engine.wakeup], [], [], 60)[0]
        outputs += engine.step()
    return outputs


def test_ids_come_while_the_others_are_made(real):
    outputs = outputs_of(real, [1, 2, 3], greedy(200, ignore_eos=True))
    assert sum(len(output.output_ids) for output in outputs) == 200
    assert len(outputs) > 20


def test_a_cached_prefix_is_counted_until_the_cache_is_flushed(real):
    ids = list(range(200))
    wait_until(lambda: not real.operate(FlushCache()))
    first, second = (outputs_of(real, ids, greedy(2, ignore_eos=True))[-1] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 199)
    assert second.customized_info == {"cached_tokens_details": {"device": 199, "host": 0}}
    real.operate(FlushCache())
    assert outputs_of(real, ids, greedy(2, ignore_eos=True))[-1].cached_tokens == 0


def test_a_grammar_is_enforced(driver):
    params = SamplingParams(max_new_tokens=20, grammar=Grammar("regex", "(ab|cd){3}x"))
    for result in driver.run(*([([5, 6], params)] * 4)):
        text = bytes(byte for byte in result.ids if byte != EOS).decode()
        assert len(text) == 7
        assert set(text) <= set("abcdx")
        assert result.finish.type == "stop"


def test_a_wrong_grammar_is_the_requests_own_failure(driver):
    (result,) = driver.run(([5, 6], greedy(4, grammar=Grammar("json_schema", '{"type": "nonsense"}'))))
    assert (result.finish.type, result.finish.status) == ("error", 400)


def test_a_bias_and_a_penalty_choose_ids(driver):
    biased, penalised = driver.run(
        ([5, 6], greedy(4, ignore_eos=True, logit_bias={77: 1000.0})),
        ([5, 6], greedy(40, ignore_eos=True, logit_bias={77: 1000.0, 78: 999.0}, frequency_penalty=2.0)),
    )
    assert biased.ids == [77] * 4
    assert {77, 78} <= set(penalised.ids[:4])


def test_end_of_sequence_ends_a_request(driver):
    (result,) = driver.run(([5, 6], greedy(40, logit_bias={EOS: 1000.0}, min_new_tokens=3)))
    assert (len(result.ids), result.finish) == (4, FinishReason("stop", matched=EOS))


def test_its_death_is_told(real):
    """The last one: it ends the engine of the others."""
    (pid,) = real._processes._pidfds
    real.add_request(1, pack([1, 2]), greedy(1000, ignore_eos=True))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        while True:
            assert select.select([real.wakeup], [], [], 60)[0]
            real.step()
