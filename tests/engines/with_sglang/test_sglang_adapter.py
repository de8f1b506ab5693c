"""The adapter against SGLang's own processes and messages, with a scheduler that runs no model: `make test-sglang`."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conformance import Driver, EngineConformance, Result, greedy, pack

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
from parts import ends_within, wait_until

KILLED, RAISES, PICKLED_INFO, REFUSED, FORGED, DAMAGED, NO_NUMBER, NO_LOGPROBS = range(900, 908)
EOS = 7
COMMAND_LINE = ["--device", "cpu", "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"]
COMMAND_LINE += ["--max-loaded-loras", "2", "--max-loras-per-batch", "2", "--random-seed", "1"]


def make(folder, *command_line, **settings):
    files = resolve_model(str(folder))
    return create_engine("sglang", EngineSettings(files=files, command_line=list(command_line), **settings))


@pytest.fixture(scope="module")
def sglang(model_folder, stub_environment):
    engine = make(model_folder, *COMMAND_LINE)
    yield engine
    engine.shutdown()


@pytest.fixture
def logged(stub_environment):
    """What the scheduler got, newest last."""
    return lambda: [json.loads(line) for line in Path(stub_environment["STUB_LOG"]).read_text().splitlines()]


class TestConformance(EngineConformance):
    @pytest.fixture
    def engine(self, sglang):
        return sglang

    @pytest.fixture
    def prompts(self):
        return [list(range(10 + 20 * i, 22 + 21 * i)) for i in range(16)]


@pytest.fixture
def driver(sglang):
    assert not sglang.has_unfinished()
    yield Driver(sglang)
    assert not sglang.has_unfinished()


def test_what_it_says_of_itself(sglang):
    info = sglang.info
    assert (info.name, info.task, info.vocab_size, info.eos_token_ids) == ("sglang", "generate", 1000, [EOS])
    # SGLang leaves one position of the context free, and one of what is left.
    assert info.context_length == 2046
    assert info.max_running_requests == 48
    assert info.version.startswith("0.5.23")
    assert "seed" not in info.sampling
    assert info.fields == ["bootstrap_host", "bootstrap_port", "bootstrap_room", "adapter"]
    assert "load_lora_adapter" in info.operations


def test_end_of_sequence_ends_a_request_unless_ignored(driver):
    stopped, ignored = driver.run(([5, 6], greedy(4, stop_token_ids=[6])), ([5, 6], greedy(4, ignore_eos=True)))
    assert (stopped.ids, stopped.finish) == ([5, 6], FinishReason("stop", matched=6))
    assert (ignored.ids, ignored.finish) == ([5, 6, 5, 6], FinishReason("length"))


def test_sampling_parameters_arrive_as_they_were_meant(driver, logged):
    params = SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=2**40,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        stop_token_ids=[500, 501],
        logprobs=3,
        logit_bias={3: -100.0, 4: 2.5},
        grammar=Grammar("json_object"),
    )
    driver.run(([5, 6], params))
    got = logged()[-1]
    wanted = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "sampling_seed": 2**40,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "ignore_eos": False,
        "logit_bias": {"3": -100.0, "4": 2.5},
        "json_schema": '{"type": "object"}',
        "regex": None,
        "ebnf": None,
        "is_normalized": True,
        "stop_strs": [],
    }
    assert {name: got["sampling"][name] for name in wanted} == wanted
    assert sorted(got["sampling"]["stop_token_ids"]) == [500, 501]
    names = ("return_logprob", "logprob_start_len", "top_logprobs_num", "stream")
    assert [got[name] for name in names] == [True, -1, 3, True]
    # Nothing pickled goes to SGLang either.
    assert got["time_stats"] is None


def test_neutral_parameters_are_sglangs_own(driver, logged):
    driver.run(([5, 6], greedy(2)), ([5, 6], SamplingParams(max_new_tokens=2, grammar=Grammar("regex", "a+"))))
    first, second = (line["sampling"] for line in logged()[-2:])
    # Greedy is the likeliest id in SGLang.
    assert (first["temperature"], first["top_k"], first["stop_token_ids"]) == (1.0, 1, None)
    assert (second["temperature"], second["top_k"], second["regex"]) == (1.0, 1 << 30, "a+")


def test_what_sglang_has_not_is_refused_with_its_words(driver):
    with pytest.raises(EngineRefusal, match="repetition_penalty must be in") as refusal:
        driver.add([5], greedy(2, repetition_penalty=3.0))
    assert refusal.value.status == 400


def test_bootstrap_fields_pass_through(sglang, driver, logged):
    fields = EngineFields(bootstrap_host="10.0.0.1", bootstrap_port=8998, bootstrap_room=2**62)
    sglang.add_request(4, pack([5, 6]), greedy(2), fields=fields)
    driver.results[4] = Result()
    driver.until_idle()
    got = logged()[-1]
    assert [got[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")] == ["10.0.0.1", 8998, 2**62]


def test_a_failure_of_one_request_is_its_own(driver):
    """SGLang's status and words come through; a row that can't be right ends its request, and no other."""
    numbers = [driver.add([fault, 5], greedy(8, ignore_eos=True)) for fault in (REFUSED, NO_NUMBER, DAMAGED)]
    short = driver.add([NO_LOGPROBS, 5], greedy(8, ignore_eos=True, logprobs=0))
    good = driver.add([5, 6], greedy(8, ignore_eos=True))
    driver.until_idle()
    refused, no_number, damaged, short = (driver.results[number].finish for number in (*numbers, short))
    assert (refused.type, refused.status, refused.message) == ("error", 400, "the stub refuses as it was told")
    assert (no_number.type, no_number.status) == ("error", 500)
    assert "NaN" in no_number.message
    assert (damaged.status, "could not be decoded" in damaged.message) == (500, True)
    assert (short.status, "log probabilities" in short.message) == (500, True)
    assert driver.results[good].ids == [5, 6] * 4


def becomes_idle(engine):
    """Whether SGLang itself has ended all requests, those aborted included."""
    try:
        engine.operate(FlushCache())
    except EngineRefusal:
        return False
    return True


def test_nothing_is_ever_unpickled(sglang, driver, stub_environment, caplog):
    """Neither a message that is a pickle, nor a field of one, which may belong to any request of the batch."""
    info = driver.add([PICKLED_INFO, 5], greedy(8, ignore_eos=True))
    driver.until_idle()
    assert driver.results[info].finish == FinishReason(
        "error", status=500, message="SGLang sent a pickled object, which is never opened"
    )
    wait_until(lambda: becomes_idle(sglang))
    forged = driver.add([FORGED, 5], greedy(8, ignore_eos=True))
    driver.until_idle()
    assert len(driver.results[forged].ids) == 8
    assert "SGLang sent a pickled object" in caplog.text
    assert not Path(stub_environment["STUB_EVIL"]).exists()


def test_adapters_are_loaded_used_replaced_and_unloaded(sglang, driver, logged, tmp_path):
    with pytest.raises(EngineRefusal, match="no LoRA adapter 'a'; loaded are: none"):
        sglang.add_request(1, pack([5]), greedy(2), fields=EngineFields(adapter="a"))
    with pytest.raises(EngineRefusal, match="SGLang refuses: no adapter in /nowhere"):
        sglang.operate(LoadAdapter("a", "/nowhere"))
    sglang.operate(LoadAdapter("a", str(tmp_path)))
    sglang.operate(LoadAdapter("b", str(tmp_path)))
    with pytest.raises(EngineRefusal, match="max-loaded-loras"):
        sglang.operate(LoadAdapter("c", str(tmp_path)))
    sglang.add_request(1, pack([5]), greedy(200), fields=EngineFields(adapter="a"))
    with pytest.raises(EngineRefusal, match="1 requests use") as refusal:
        sglang.operate(UnloadAdapter("a"))
    assert refusal.value.status == 503
    sglang.abort(1)
    got = logged()[-1]
    assert got["lora_name"] == "a"
    sglang.operate(LoadAdapter("a", str(tmp_path)))
    number = 2
    sglang.add_request(number, pack([5]), greedy(2), fields=EngineFields(adapter="a"))
    while not (outputs := [output for output in sglang.step() if output.finish]):
        select.select([sglang.wakeup], [], [], 10)
    assert outputs[0].finish == FinishReason("length")
    assert logged()[-1]["lora_id"] not in (None, got["lora_id"])
    for name in "ab":
        sglang.operate(UnloadAdapter(name))
    with pytest.raises(EngineRefusal, match="no LoRA adapter 'b'"):
        sglang.operate(UnloadAdapter("b"))


def test_operations_wait_for_the_answer_and_lose_no_ids(sglang, driver, logged, tmp_path):
    sglang.operate(FlushCache())
    number = driver.add([5, 6], greedy(400, ignore_eos=True))
    driver.step()
    with pytest.raises(EngineRefusal, match="requests are running"):
        sglang.operate(FlushCache())
    with pytest.raises(EngineRefusal, match="weights are updated when there are none"):
        sglang.operate(UpdateWeights(str(tmp_path)))
    sglang.operate(StartProfile(str(tmp_path)))
    sglang.operate(StopProfile())
    driver.until_idle()
    assert driver.results[number].ids == [5, 6] * 200
    assert [(line["profile"], line["folder"]) for line in logged() if "profile" in line] == [
        ("START_PROFILE", str(tmp_path)),
        ("STOP_PROFILE", None),
    ]
    sglang.operate(UpdateWeights(str(tmp_path)))
    with pytest.raises(EngineRefusal, match="no weights in /nowhere"):
        sglang.operate(UpdateWeights("/nowhere"))


def test_a_step_never_waits(sglang, driver):
    """Also not while SGLang has a request and says nothing: it is stopped."""
    (pid,) = processes_of(sglang)
    os.kill(pid, signal.SIGSTOP)
    number = driver.add([5, 6], greedy(3))
    assert sglang.step() == []
    driver.abort(number)
    assert sglang.step() == []
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: becomes_idle(sglang))


def processes_of(engine):
    return list(engine._processes._pidfds)


def test_load_counts_what_has_begun(sglang, driver):
    number = driver.add([5] * 100, greedy(400, ignore_eos=True))
    assert (sglang.load().running, sglang.load().waiting) == (0, 1)
    driver.step()
    assert (sglang.load().running, sglang.load().waiting) == (1, 0)
    assert 0.001 <= sglang.load().kv_used < 0.1
    driver.abort(number)


class TestDeaths:
    """One engine each: it ends with the test."""

    @pytest.mark.parametrize(
        ("fault", "words"),
        [(KILLED, "ended with exit code -9"), (RAISES, "RuntimeError: the stub fails as it was told")],
    )
    def test_a_dead_scheduler_makes_the_step_fail_with_the_reason(self, model_folder, stub_environment, fault, words):
        engine = make(model_folder, *COMMAND_LINE)
        (pid,) = processes_of(engine)
        try:
            engine.add_request(1, pack([fault, 5]), greedy(8))
            with pytest.raises(RuntimeError, match=words):
                while True:
                    assert select.select([engine.wakeup], [], [], 30)[0]
                    engine.step()
        finally:
            engine.shutdown()
        assert not Path(f"/proc/{pid}").exists()

    def test_a_scheduler_that_can_not_load_ends_the_start_with_its_words(
        self, model_folder, stub_environment, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("STUB_FAIL_TO_LOAD", "the weights are of another model")
        with pytest.raises(RuntimeError, match=r"SGLang could not start: .*the weights are of another model"):
            make(model_folder, *COMMAND_LINE, runtime_dir=str(tmp_path))
        assert not list(tmp_path.iterdir())

    def test_no_process_outlives_the_one_that_started_it(self, model_folder, stub_environment, tmp_path):
        code = (
            "import sys, test_sglang_adapter as t\n"
            "if __name__ == '__main__':\n"
            "    engine = t.make(sys.argv[1], *t.COMMAND_LINE, runtime_dir=sys.argv[2])\n"
            "    print(*t.processes_of(engine), flush=True)\n"
            "    sys.stdin.read()\n"
        )
        paths = [str(Path(__file__).parent), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        command = [sys.executable, "-c", code, str(model_folder), str(tmp_path)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        pidfds = [os.pidfd_open(int(pid)) for pid in child.stdout.readline().split()]
        assert pidfds
        child.kill()
        assert child.wait() == -signal.SIGKILL
        for pidfd in pidfds:
            assert ends_within(pidfd)
            os.close(pidfd)
        child.stdin.close()
        child.stdout.close()


class TestOtherStarts:
    def test_a_second_rank_has_gpus_of_its_own_and_without_a_tokenizer_there_is_less(
        self, model_folder, stub_environment, logged
    ):
        command_line = ("--device", "cpu", "--skip-tokenizer-init", "--base-gpu-id", "2")
        engine = make(model_folder, *command_line, context_length=512, rank=1)
        try:
            assert "min_new_tokens" not in engine.info.sampling
            assert engine.info.grammars == []
            assert engine.info.context_length == 510
            (result,) = Driver(engine).run(([5, 6], greedy(3, ignore_eos=True)))
            assert result.ids == [5, 6, 5]
            assert logged()[-1]["gpu_id"] == 3
        finally:
            engine.shutdown()

    def test_data_parallel_ranks_of_sglang_share_the_requests(self, model_folder, stub_environment, logged):
        engine = make(model_folder, "--device", "cpu", "--dp-size", "2")
        try:
            assert len(processes_of(engine)) == 3
            assert engine.info.max_running_requests == 96
            engine.operate(FlushCache())
            driver = Driver(engine)
            results = driver.run(*(([5, 6], greedy(3)) for _ in range(8)))
            assert [result.ids for result in results] == [[5, 6, 5]] * 8
            assert {line["dp_rank"] for line in logged()[-8:] if "dp_rank" in line} == {0, 1}
            os.kill(processes_of(engine)[-1], signal.SIGKILL)
            assert wait_until(lambda: select.select([engine.wakeup], [], [], 1)[0])
            with pytest.raises(RuntimeError, match="SGLang's process"):
                wait_until(engine.step)
        finally:
            engine.shutdown()

    def test_embeddings(self, model_folder, stub_environment):
        files = resolve_model(str(model_folder))
        files = type(files)(**{name: getattr(files, name) for name in files.__struct_fields__} | {"task": "embed"})
        command_line = ["--device", "cpu"]
        engine = create_engine("sglang", EngineSettings(files=files, command_line=command_line))
        try:
            assert (engine.info.task, engine.info.embedding_size) == ("embed", 64)
            driver = Driver(engine)
            good, refused = driver.run(([5, 6], greedy(1)), ([REFUSED], greedy(1)))
            assert np.frombuffer(good.embedding, np.float32).tolist() == [5.0, 6.0] * 8
            assert good.finish == FinishReason("stop")
            assert (refused.embedding, refused.finish.status) == (None, 400)
        finally:
            engine.shutdown()
