import json
import time

import numpy as np
import pytest
from conformance import Driver, EngineConformance, greedy, pack

from multitok.engines.base import EngineRefusal, params_left
from multitok.engines.simulated import SimulatedEngine, simulated_embedding, simulated_logprob
from multitok.messages.base import FinishReason

EOS = 7


def make(task="generate", **options) -> SimulatedEngine:
    text = {name: str(value) for name, value in options.items()}
    return SimulatedEngine(text, vocab_size=1000, eos_token_ids=[EOS], context_length=2048, task=task)


class TestEcho(EngineConformance):
    @pytest.fixture
    def engine(self):
        return make()

    @pytest.fixture
    def prompts(self):
        return [list(range(10 + 20 * i, 22 + 21 * i)) for i in range(16)]


class TestSeveralTokensPerStepInChunksWithFewSlots(TestEcho):
    @pytest.fixture
    def engine(self):
        return make(tokens_per_step="1,3,2", prefill_chunk=5, max_running=5, kv_tokens=2000)


class TestChosenIds(TestEcho):
    """Some tests look for an id that does not come again and again."""

    new_tokens = 30

    @pytest.fixture
    def engine(self):
        return make(ids=",".join(map(str, range(500, 560))), eos_after=16)


class TestReplay(TestEcho):
    """The offset depends on the number of requests so far, so only what doesn't compare two requests holds."""

    test_greedy_ids_are_the_same_alone_and_in_a_batch = None
    test_greedy_ids_are_the_same_for_requests_that_join_later = None
    test_a_seed_reproduces = None
    test_a_stop_id_ends_a_request_and_is_its_last_id = None
    test_a_stop_id_as_the_last_allowed_token_is_a_stop = None
    test_log_probabilities_come_only_when_asked = None
    test_an_aborted_request_leaves_no_output_at_any_stage = None
    test_two_hundred_at_once_all_end_with_what_they_would_get_alone = None

    @pytest.fixture
    def engine(self, tmp_path):
        file = tmp_path / "ids.json"
        file.write_text(json.dumps(list(range(100, 600))))
        return make(replay=file)


def test_echo_answers_with_the_prompt_without_end_of_sequence_ids():
    (result,) = Driver(make()).run(([5, EOS, 6], greedy(5)))
    assert result.ids == [5, 6, 5, 6, 5]


def test_chosen_ids_come_again_and_again():
    first, second = Driver(make(ids="1,2,3")).run(([5], greedy(5)), ([6], greedy(2)))
    assert (first.ids, second.ids) == ([1, 2, 3, 1, 2], [1, 2])


def test_replay_starts_elsewhere_for_each_request(tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(list(range(100, 900))))
    first, second = Driver(make(replay=file)).run(([5], greedy(3)), ([5], greedy(3)))
    assert first.ids != second.ids
    assert first.ids == list(range(first.ids[0], first.ids[0] + 3))


def test_end_of_sequence_ends_unless_ignored_or_too_early():
    driver = Driver(make(eos_after=3))
    stopped, ignored, least = driver.run(
        ([5], greedy(6)), ([5], greedy(6, ignore_eos=True)), ([5], greedy(6, min_new_tokens=4))
    )
    assert (stopped.ids, stopped.finish) == ([5, 5, EOS], FinishReason("stop", matched=EOS))
    assert (len(ignored.ids), ignored.finish) == (6, FinishReason("length"))
    assert least.ids == [5, 5, 5, 5, EOS]


def test_only_what_follows_from_the_prompt_and_the_position_can_be_resumed(tmp_path):
    file = tmp_path / "ids.json"
    file.write_text("[1, 2, 3]")
    assert "temperature" in make().info.resumable
    assert make(ids="5,6").info.resumable == make().info.resumable
    assert make(replay=file).info.resumable == make(task="embed").info.resumable == []


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("fields", [{}, {"min_new_tokens": 4}, {"ignore_eos": True}])
def test_the_end_of_a_resumed_request_is_where_it_was(cut, fields):
    params = greedy(8, logprobs=2, **fields)
    (whole,) = Driver(make(eos_after=3)).run(([5, 6], params))
    driver = Driver(make(eos_after=3))
    if cut >= len(whole.ids):
        return
    number = driver.add([5, 6, *whole.ids[:cut]], params_left(params, cut), resumed=cut)
    driver.until_idle()
    rest = driver.results[number]
    assert (rest.ids, rest.finish) == (whole.ids[cut:], whole.finish)
    assert (rest.logprobs, rest.top_logprobs) == (whole.logprobs[cut:], whole.top_logprobs[cut:])


def test_log_probabilities_follow_the_formula():
    (result,) = Driver(make(ids="3,4", tokens_per_step=2)).run(([5], greedy(4, logprobs=0)))
    assert result.logprobs == [simulated_logprob(token, i) for i, token in enumerate([3, 4, 3, 4])]


def test_kv_limit_refuses_what_never_fits_and_holds_back_what_does_not_fit_now():
    engine = make(kv_tokens=20)
    driver = Driver(engine)
    with pytest.raises(EngineRefusal) as refusal:
        driver.add([5] * 10, greedy(11))
    assert refusal.value.status == 400
    first = driver.add([5] * 10, greedy(5))
    second = driver.add([6] * 4, greedy(3))
    driver.step()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used) == (1, 1, 0.75)
    driver.abort(first)
    driver.step()
    assert driver.results[second].ids == [6]
    driver.until_idle()


def test_failures_are_ends_with_an_error():
    (by_id, other) = Driver(make(fail_on_id=9)).run(([5, 9], greedy(3)), ([5], greedy(3)))
    assert (by_id.ids, by_id.finish.type, by_id.finish.status) == ([], "error", 500)
    assert other.finish == FinishReason("length")
    (late,) = Driver(make(fail_after_tokens=2)).run(([5], greedy(3)))
    assert (len(late.ids), late.finish.type) == (2, "error")


def test_crash_raises_from_the_step():
    engine = make(crash_after_steps=2)
    engine.add_request(1, pack([5]), greedy(9))
    engine.step()
    with pytest.raises(RuntimeError, match="crash"):
        engine.step()


def test_steps_take_their_time_and_lost_time_is_not_caught_up():
    engine = make(step_ms=20, prefill_ms_per_token=10)
    engine.add_request(1, pack([5] * 4), greedy(5))
    start = time.monotonic()
    engine.step()
    assert time.monotonic() - start >= 0.06
    time.sleep(0.1)
    late = time.monotonic()
    engine.step()
    engine.step()
    engine.step()
    assert time.monotonic() - late >= 0.04
    engine.shutdown()
    assert not engine.has_unfinished()


def test_loading_takes_its_time(caplog):
    start = time.monotonic()
    engine = make(load_s=0.05)
    assert time.monotonic() - start >= 0.05
    assert engine.info.simulated
    assert "simulated engine" in caplog.text


def test_embeddings_are_unit_vectors_that_depend_on_the_ids():
    engine = make(task="embed", embedding_size=8)
    assert (engine.info.task, engine.info.embedding_size, engine.info.sampling) == ("embed", 8, [])
    first, second, same = Driver(engine).run(([1, 2], greedy(1)), ([2, 1], greedy(1)), ([1, 2], greedy(1)))
    vector = np.frombuffer(first.embedding, dtype=np.float32)
    assert vector.shape == (8,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert first.embedding == same.embedding == simulated_embedding(pack([1, 2]), 8)
    assert first.embedding != second.embedding
    assert first.ids == [] and first.finish == FinishReason("stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stepms": 5}, "no option stepms; it has: replay, ids"),
        ({"step_ms": "x"}, "must be a number"),
        ({"step_ms": "-1"}, "at least 0"),
        ({"step_ms": "nan"}, "at least 0"),
        ({"tokens_per_step": 0}, "at least 1"),
        ({"ids": "1,x"}, "separated by commas"),
        ({"ids": "1,1000"}, "vocabulary has 1000"),
        ({"ids": "1", "replay": "x"}, "exclude each other"),
        ({"replay": "/nonexistent"}, "can't be read"),
        ({"max_running": ""}, "must not be empty"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_replay_file_must_be_a_list_of_ids(tmp_path):
    file = tmp_path / "ids.json"
    for text in ("{}", "[]", '["a"]', "[1, true]"):
        file.write_text(text)
        with pytest.raises(ValueError, match="no JSON list"):
            make(replay=file)


def test_a_step_costs_little_per_request():
    """Benchmarks see this cost; 3 us is far above the 0.3 that it takes, and far below what a mistake would cost."""
    engine = make(max_running=512)
    for number in range(1, 513):
        engine.add_request(number, pack(range(128)), greedy(100))
    start = time.process_time()
    for _ in range(100):
        engine.step()
    assert (time.process_time() - start) / 51_200 < 3e-6
