"""`multitok serve --engine sglang` with two workers, as its users see it."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from processes import pids_in, title
from server import Server, eventually, workers

# Two loads of SGLang's libraries on a busy machine.
LOAD_S = 280.0


class SGLangServer(Server):
    def __init__(self, variables, folder, *options, **settings):
        super().__init__(
            *("--engine", "sglang", "--model", str(folder), "--served-model-name", "model", *workers(2)),
            *(*options, "--", "--device", "cpu"),
            start_timeout=LOAD_S,
            **settings,
        )
        self._variables = variables

    def _environment(self):
        return super()._environment() | self._variables

    def schedulers(self):
        return [pid for pid in pids_in(self.directory) if title(pid).startswith("sglang::scheduler")]


def test_two_workers_serve_sglang_and_get_over_its_death(model_folder, stub_environment):
    with SGLangServer(stub_environment, model_folder, errors=True) as server:

        def chat(i):
            words = [f"t{100 + i}", f"t{200 + i}"]
            messages = [{"role": "user", "content": " ".join(words)}]
            whole = server.openai.chat.completions.create(model="model", messages=messages, max_tokens=6)
            stream = server.openai.chat.completions.create(model="model", messages=messages, max_tokens=6, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert whole.choices[0].message.content.split() == text.split() == words * 3
            assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 6)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(chat, range(40)))
        choice = server.openai.completions.create(model="model", prompt="t5 t6", max_tokens=3, logprobs=2).choices[0]
        assert [logprob < 0 for logprob in choice.logprobs.token_logprobs] == [True] * 3
        with pytest.raises(openai.BadRequestError, match="seed"):
            server.openai.completions.create(model="model", prompt="t5", seed=1)

        (before,) = server.schedulers()
        stream = iter(server.openai.completions.create(model="model", prompt="t5", max_tokens=2000, stream=True))
        next(stream)
        lines = len(server.log.splitlines())
        os.kill(before, signal.SIGKILL)
        with pytest.raises(openai.APIError):
            list(stream)
        server.wait_for_line("ended with exit code -9", begin=lines)
        server.wait_for_line("SGLang .* is ready", LOAD_S, begin=lines)
        # On fresh connections: both workers.
        ready = lambda: all(httpx.get(f"{server.base_url}/ready").is_success for _ in range(8))  # noqa: E731
        eventually(ready, LOAD_S, "requests are taken again")
        chat(50)
        assert before not in server.schedulers()
