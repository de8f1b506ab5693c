"""The conformance suite against engines that run somewhere, whatever they are.

    REMOTE_URL=http://HOST:PORT[,...] REMOTE_TOKENIZER=FOLDER pytest tests/engines/real_remote.py

Not a part of `make test`: docs/engines.md says what it was run against. REMOTE_ARGS holds further options, KEY=VALUE
separated by blanks.
"""

import logging
import os

import pytest
from conformance import EngineConformance, greedy

from multitok.engines.registry import parse_engine_args
from multitok.engines.remote.engine import RemoteEngine
from multitok.engines.settings import EngineSettings
from multitok.messages.sampling import Grammar, SamplingParams
from multitok.tokenizer.model_files import resolve_tokenizer


@pytest.fixture(scope="module")
def shared():
    options = {"url": os.environ["REMOTE_URL"], **parse_engine_args(os.environ.get("REMOTE_ARGS", "").split())}
    engine = RemoteEngine(EngineSettings(files=resolve_tokenizer(os.environ["REMOTE_TOKENIZER"]), options=options))
    logging.getLogger(__name__).warning("%s", engine.info)
    yield engine
    engine.shutdown()


class TestRemote(EngineConformance):
    @pytest.fixture
    def engine(self, shared):
        return shared

    @pytest.fixture(autouse=True)
    def what_it_has(self, request, engine):
        for field, words in {"seed": ("seed",), "min_new_tokens": ("min_new",)}.items():
            if field not in engine.info.sampling and any(word in request.node.name for word in words):
                pytest.skip(f"the engine has no {field}")

    @pytest.fixture
    def prompts(self):
        return [list(range(100 + 20 * i, 112 + 21 * i)) for i in range(16)]

    @pytest.mark.parametrize("kind", ["json_object", "json_schema", "regex"])
    def test_a_grammar_is_taken(self, driver, engine, prompts, kind):
        if kind not in engine.info.grammars:
            pytest.skip(f"the engine has no {kind}")
        text = {"json_object": "", "json_schema": '{"type":"object","maxProperties":0}', "regex": "[0-9]{3}"}[kind]
        (result,) = driver.run((prompts[0], greedy(40, grammar=Grammar(kind, text))))
        assert result.finish.type in ("stop", "length"), result.finish

    def test_what_the_engine_refuses_is_the_clients_mistake(self, driver, engine, prompts):
        (result,) = driver.run((prompts[0], SamplingParams(max_new_tokens=4, temperature=-1.0)))
        assert (result.finish.type, result.finish.status) == ("error", 400)
        assert "temperature" in result.finish.message
