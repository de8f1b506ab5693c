"""What every engine must do, as a suite: subclass `EngineConformance` and give it an engine and prompts.

`drive` is the scheduler's loop in small; it checks on the way what must hold for every output.
"""

import random
import select
from array import array
from dataclasses import dataclass, field

import pytest

from multitok.engines.base import Engine, EngineOutput, EngineRefusal, params_left
from multitok.messages.base import FinishReason
from multitok.messages.sampling import SamplingParams

# How long an engine that works by itself may take for its next word.
WAKEUP_S = 60


def pack(ids) -> bytes:
    return array("i", ids).tobytes()


def greedy(max_new_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **fields)


# For each field that `EngineInfo.resumable` may name, values that make a difference in an undisturbed run; None is the
# stop id, which comes as the 14th id if not before.
RESUMED = {
    "max_new_tokens": {},
    "min_new_tokens": {"min_new_tokens": 18, "stop_token_ids": None},
    "temperature": {"temperature": 0.8, "seed": 7},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.3},
    "seed": {"seed": 11},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "stop_token_ids": {"stop_token_ids": None},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 0},
}


@dataclass
class Result:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list = field(default_factory=list)
    finish: FinishReason | None = None
    embedding: bytes | None = None


class Driver:
    """Drives an engine and remembers what came for each request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: dict[int, Result] = {}
        self.aborted: set[int] = set()
        self._next = random.Random(1).getrandbits(48) << 16

    def add(self, ids, params: SamplingParams, resumed: int = 0) -> int:
        self._next += 1
        self.engine.add_request(self._next, pack(ids), params, resumed=resumed)
        self.results[self._next] = Result()
        return self._next

    def abort(self, number: int) -> None:
        self.aborted.add(number)
        self.engine.abort(number)

    def step(self) -> list[EngineOutput]:
        if self.engine.wakeup is not None:
            assert select.select([self.engine.wakeup], [], [], WAKEUP_S)[0], "the engine does not say anything"
        outputs = self.engine.step()
        assert len({output.number for output in outputs}) == len(outputs), "two outputs for one request in one step"
        for output in outputs:
            assert output.number not in self.aborted, "an output for an aborted request"
            result = self.results[output.number]
            assert result.finish is None, "an output after the last"
            assert output.output_ids or output.finish, "an output without anything"
            result.ids += output.output_ids
            if output.logprobs is not None:
                assert len(output.logprobs) == len(output.output_ids)
                result.logprobs += output.logprobs
            if output.top_logprobs is not None:
                assert len(output.top_logprobs) == len(output.output_ids)
                result.top_logprobs += output.top_logprobs
            result.finish = output.finish
            result.embedding = output.embedding
        return outputs

    def until_idle(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished(), "the engine does not become idle"
        for number, result in self.results.items():
            assert (result.finish is None) == (number in self.aborted), (
                "a request without an end, or an aborted one with"
            )
        load = self.engine.load()
        assert (load.running, load.waiting) == (0, 0)

    def run(self, *requests: tuple[list[int], SamplingParams]) -> list[Result]:
        numbers = [self.add(ids, params) for ids, params in requests]
        self.until_idle()
        return [self.results[number] for number in numbers]


class ResumptionConformance:
    """What holds for the fields in `EngineInfo.resumable`; fixtures as in `EngineConformance`."""

    new_tokens = 24

    @pytest.fixture
    def driver(self, engine):
        assert not engine.has_unfinished()
        yield Driver(engine)
        assert not engine.has_unfinished(), "the test left work in the engine"

    def test_a_resumed_request_gets_the_rest_of_an_undisturbed_run(self, driver, engine, prompts):
        """At several cuts for each field that the engine names, and for all of them together."""
        named = engine.info.resumable
        assert set(named) <= set(RESUMED)
        wanted = [RESUMED[name] for name in named]
        together = {field: value for fields in wanted for field, value in fields.items()}
        self.check_resumption(driver, prompts[:2], [*wanted, *([together] if named else [])])

    def check_resumption(self, driver, prompts, wanted):
        most = self.new_tokens
        free = driver.run(*((prompt, greedy(most, ignore_eos=True)) for prompt in prompts))
        runs = []
        for fields in wanted:
            for prompt, result in zip(prompts, free, strict=True):
                given = {"temperature": 0.0, **fields}
                if "stop_token_ids" in given:
                    given["stop_token_ids"] = [result.ids[13]]
                runs.append((prompt, SamplingParams(max_new_tokens=most, **given)))
        resumed = []
        for (prompt, params), whole in zip(runs, driver.run(*runs), strict=True):
            for cut in (1, 7, 13, len(whole.ids) - 1):
                if cut < len(whole.ids):
                    number = driver.add(prompt + whole.ids[:cut], params_left(params, cut), resumed=cut)
                    resumed.append((driver.results[number], whole, params, cut))
        driver.until_idle()
        for rest, whole, params, cut in resumed:
            assert rest.ids == whole.ids[cut:], (params, cut)
            assert rest.finish == whole.finish
            assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-3)


class EngineConformance(ResumptionConformance):
    """Subclasses define the fixtures `engine` (idle) and `prompts` (16 different ones), and may set `long_prompt`."""

    long_prompt_length = 400

    @pytest.fixture
    def long_prompt(self, prompts):
        ids = [token for prompt in prompts for token in prompt]
        return (ids * (self.long_prompt_length // len(ids) + 1))[: self.long_prompt_length]

    def test_an_idle_engine_has_no_load(self, engine):
        assert not engine.has_unfinished()
        load = engine.load()
        assert (load.running, load.waiting) == (0, 0)
        assert 0 <= load.kv_used <= 1

    def test_greedy_ids_are_the_same_alone_and_in_a_batch(self, driver, prompts):
        params = greedy(self.new_tokens, ignore_eos=True)
        alone = [driver.run((prompt, params))[0].ids for prompt in prompts]
        together = [result.ids for result in driver.run(*((prompt, params) for prompt in prompts))]
        assert alone == together

    def test_greedy_ids_are_the_same_for_requests_that_join_later(self, driver, prompts):
        params = greedy(self.new_tokens, ignore_eos=True)
        alone = driver.run((prompts[0], params))[0].ids
        first = driver.add(prompts[1], params)
        driver.step()
        driver.step()
        late = driver.add(prompts[0], params)
        driver.until_idle()
        assert driver.results[late].ids == alone
        assert len(driver.results[first].ids) == self.new_tokens

    @pytest.mark.parametrize("most", [1, 2, 17])
    def test_max_new_tokens_ends_a_request(self, driver, prompts, most):
        (result,) = driver.run((prompts[0], greedy(most, ignore_eos=True)))
        assert len(result.ids) == most
        assert result.finish == FinishReason("length")

    def test_a_stop_id_ends_a_request_and_is_its_last_id(self, driver, prompts):
        for eos in (True, False):
            free = driver.run((prompts[0], greedy(self.new_tokens, ignore_eos=eos)))[0].ids
            stop = free[min(5, len(free) - 1)]
            end = free.index(stop) + 1
            unused = next(token for token in range(3, 100) if token not in free)
            params = greedy(self.new_tokens, ignore_eos=eos, stop_token_ids=[unused, stop])
            (result,) = driver.run((prompts[0], params))
            assert result.ids == free[:end]
            assert result.finish == FinishReason("stop", matched=stop)

    def test_a_stop_id_as_the_last_allowed_token_is_a_stop(self, driver, prompts):
        free = driver.run((prompts[0], greedy(8, ignore_eos=True)))[0].ids
        end = free.index(free[4]) + 1
        (result,) = driver.run((prompts[0], greedy(end, ignore_eos=True, stop_token_ids=[free[4]])))
        assert result.finish == FinishReason("stop", matched=free[4])

    def test_min_new_tokens_holds_back_stop_ids(self, driver, prompts):
        free = driver.run((prompts[0], greedy(8, ignore_eos=True)))[0].ids
        for ignore_eos in (True, False):
            params = greedy(20, min_new_tokens=12, stop_token_ids=[free[0], free[3]], ignore_eos=ignore_eos)
            (result,) = driver.run((prompts[0], params))
            assert len(result.ids) >= 12
            assert not {free[0], free[3]} & set(result.ids[:12])

    def test_min_new_tokens_above_the_maximum_is_the_maximum(self, driver, prompts):
        (result,) = driver.run((prompts[0], greedy(4, min_new_tokens=9)))
        assert len(result.ids) == 4

    def test_log_probabilities_come_only_when_asked(self, driver, prompts):
        without, with_them = driver.run(
            (prompts[0], greedy(6, ignore_eos=True)), (prompts[0], greedy(6, ignore_eos=True, logprobs=0))
        )
        assert without.logprobs == []
        assert len(with_them.logprobs) == 6
        assert all(value < 0 for value in with_them.logprobs)
        assert with_them.top_logprobs == []
        assert without.ids == with_them.ids

    def test_top_log_probabilities_have_the_asked_number(self, driver, engine, prompts):
        if not engine.info.top_logprobs:
            with pytest.raises(EngineRefusal) as refusal:
                driver.add(prompts[0], greedy(4, logprobs=2))
            assert refusal.value.status == 400
            return
        (result,) = driver.run((prompts[0], greedy(4, ignore_eos=True, logprobs=3)))
        for token, logprob, top in zip(result.ids, result.logprobs, result.top_logprobs, strict=True):
            assert [len(top), top[0]] == [3, (token, logprob)]
            assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)

    def test_a_seed_reproduces(self, driver, prompts):
        params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2**40 + 5, ignore_eos=True)
        first, second = (driver.run((prompts[0], params))[0].ids for _ in range(2))
        assert first == second
        assert driver.run((prompts[0], params), (prompts[0], params))[0].ids == first

    @pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**63)])
    def test_any_seed_is_taken(self, driver, prompts, seed):
        (result,) = driver.run((prompts[0], SamplingParams(max_new_tokens=2, seed=seed, ignore_eos=True)))
        assert len(result.ids) == 2

    @pytest.mark.parametrize(
        "fields",
        [
            {"temperature": 1e-9},
            {"temperature": 2.0, "top_p": 0.5, "top_k": 20, "min_p": 0.05},
            {"min_p": 1.0},
            {"top_k": 10**6},
            {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 1.3},
            {"temperature": 0.0, "presence_penalty": 1.0, "top_p": 0.1, "min_p": 0.5},
        ],
    )
    def test_sampling_fields_are_taken(self, driver, prompts, fields):
        (result,) = driver.run((prompts[0], SamplingParams(max_new_tokens=4, ignore_eos=True, **fields)))
        assert len(result.ids) == 4

    def test_an_aborted_request_leaves_no_output_at_any_stage(self, driver, engine, prompts, long_prompt):
        params = greedy(self.new_tokens, ignore_eos=True)
        reference = driver.run((prompts[1], params))[0].ids
        kept = driver.add(prompts[1], params)
        waiting = driver.add(prompts[2], params)
        driver.abort(waiting)
        driver.step()
        prefill = driver.add(long_prompt, params)
        driver.step()
        driver.abort(prefill)
        decode = driver.add(prompts[3], params)
        while not driver.results[decode].ids:
            driver.step()
        driver.abort(decode)
        driver.abort(decode)
        driver.until_idle()
        assert driver.results[kept].ids == reference
        engine.abort(kept)
        engine.abort(12345)
        assert not engine.has_unfinished()
        assert driver.run((prompts[1], params))[0].ids == reference

    def test_aborting_all_at_once_makes_the_engine_idle_in_two_steps(self, driver, engine, prompts):
        numbers = [driver.add(prompt, greedy(200, ignore_eos=True)) for prompt in prompts]
        driver.step()
        for number in numbers:
            driver.abort(number)
        driver.until_idle(2)

    def test_a_number_can_be_used_again_after_its_end(self, driver, engine, prompts):
        number = driver.add(prompts[0], greedy(50, ignore_eos=True))
        driver.step()
        driver.abort(number)
        driver.aborted.clear()
        driver.results[number] = Result()
        engine.add_request(number, pack(prompts[1]), greedy(3, ignore_eos=True))
        driver.until_idle()
        assert len(driver.results[number].ids) == 3

    def test_a_number_in_use_is_not_taken_twice(self, driver, engine, prompts):
        number = driver.add(prompts[0], greedy(2, ignore_eos=True))
        with pytest.raises(ValueError, match="already"):
            engine.add_request(number, pack(prompts[1]), greedy(2))
        driver.until_idle()
        assert len(driver.results[number].ids) == 2

    def test_two_hundred_at_once_all_end_with_what_they_would_get_alone(self, driver, prompts):
        params = greedy(6, ignore_eos=True)
        alone = [driver.run((prompt, params))[0].ids for prompt in prompts[:4]]
        numbers = [driver.add(prompts[i % 4], params) for i in range(200)]
        driver.until_idle()
        assert [driver.results[number].ids for number in numbers] == [alone[i % 4] for i in range(200)]

    def test_an_empty_prompt_is_refused(self, driver):
        with pytest.raises(EngineRefusal) as refusal:
            driver.add([], greedy(4))
        assert refusal.value.status == 400
        assert not driver.engine.has_unfinished()
