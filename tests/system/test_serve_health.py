"""Health checks and /server_info."""

from __future__ import annotations

import openai
import pytest
from reference import MODEL
from server import SIMULATED, Server, engine_args, workers


def test_health_ready_and_health_generate_say_yes(either: Server) -> None:
    for path in ("/health", "/ready", "/health_generate"):
        assert either.http.get(path).status_code == 200, path


def test_health_generate_says_no_when_the_engine_fails_what_it_gets() -> None:
    with Server(*SIMULATED, *engine_args(fail_after_tokens=0), *workers(2)) as server:
        answer = server.http.get("/health_generate")
        assert answer.status_code == 503
        assert "simulated failure" in answer.json()["error"]["message"]
        assert server.http.get("/health").status_code == 200


def test_server_info_tells_what_runs(multi: Server) -> None:
    info = multi.http.get("/server_info").json()
    assert info["model"] == MODEL
    assert info["engine"]["name"] == "simulated"
    assert info["engine"]["simulated"] is True
    assert info["engine"]["vocab_size"] == 49152
    assert info["server_args"]["tokenizer_worker_num"] == 4
    assert info["ready"] is True
    assert info["version"]
    assert info["worker"]["address"] in {f"w{k}.1" for k in range(1, 5)}
    assert {name for name, figures in info["processes"].items() if figures["life"] == 1} >= {
        *(f"tokenizer_worker:{k}" for k in range(1, 5)),
        *("detokenizer:0", "detokenizer:1", "scheduler:0", "router:0"),
    }


def test_log_says_that_the_engine_is_simulated(multi: Server) -> None:
    assert "SIMULATED engine: no model runs" in multi.log


@pytest.mark.parametrize("http_workers", [1, 2])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_disaggregation_mode_is_kept_for_server_info(mode: str, http_workers: int) -> None:
    with Server(*SIMULATED, *workers(http_workers), "--disaggregation-mode", mode) as server:
        for worker in range(1, http_workers + 1):
            with server.connection_to(worker) as client:
                assert client.get("/server_info").json()["server_args"]["disaggregation_mode"] == mode
        assert server.openai.completions.create(model=MODEL, prompt="one two", max_tokens=3).choices[0].text


def test_served_model_name_is_the_one_that_clients_use() -> None:
    with Server(*SIMULATED, "--served-model-name", "my/model") as server:
        assert [model.id for model in server.openai.models.list()] == ["my/model"]
        assert server.openai.models.retrieve("my/model").id == "my/model"
        answer = server.openai.completions.create(model="my/model", prompt="one two", max_tokens=3)
        assert answer.model == "my/model"
        with pytest.raises(openai.NotFoundError):
            server.openai.completions.create(model=MODEL, prompt="one two", max_tokens=3)
