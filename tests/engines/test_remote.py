"""The remote engine in front of a real multitok."""


import pytest
from conformance import EngineConformance
from server import SIMULATED, Server, engine_args

from multitok.engines.remote.engine import RemoteEngine
from multitok.engines.settings import EngineSettings
from multitok.tokenizer.model_files import resolve_model


def make(*servers: Server | str, **options) -> RemoteEngine:
    urls = ",".join(server if isinstance(server, str) else server.base_url for server in servers)
    text = {name: str(value) for name, value in options.items()}
    return RemoteEngine(EngineSettings(files=resolve_model(None), options={"url": urls, **text}))


@pytest.fixture(scope="module")
def server():
    with Server(*SIMULATED, *engine_args(step_ms=1)) as server:
        yield server


@pytest.fixture(scope="module")
def shared(server):
    engine = make(server)
    yield engine
    engine.shutdown()


class TestMultitok(EngineConformance):
    @pytest.fixture
    def engine(self, server, shared):
        yield shared
        server.wait_until_idle()

    @pytest.fixture
    def prompts(self):
        return [list(range(10 + 20 * i, 22 + 21 * i)) for i in range(16)]

    def test_it_promises_what_the_other_one_does(self, engine):
        info = engine.info
        assert (info.name, info.simulated, info.task) == ("remote", True, "generate")
        assert "seed" in info.sampling
        assert "temperature" in info.resumable
        assert info.top_logprobs == 20
