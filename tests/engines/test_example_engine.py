"""The engine that docs/engines.md shows is what every engine must be."""

import inspect
from pathlib import Path

import pytest
from conformance import EngineConformance
from example_engine import CountingEngine

EXAMPLE = Path(__file__).with_name("example_engine.py")
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


class TestExample(EngineConformance):
    @pytest.fixture
    def engine(self):
        engine = CountingEngine(vocab_size=1000, eos_token_ids=[999], context_length=4096)
        yield engine
        engine.shutdown()

    @pytest.fixture
    def prompts(self):
        return [[200 + 10 * i, 201 + 10 * i] for i in range(16)]


def test_the_page_shows_how_it_is_tested():
    shown = inspect.getsource(TestExample).replace("TestExample", "TestCounting")
    assert shown in PAGE.read_text()


def test_the_page_shows_this_engine_in_under_100_lines():
    source = EXAMPLE.read_text()
    assert f"```python\n{source}```" in PAGE.read_text()
    assert source.count("\n") < 100
