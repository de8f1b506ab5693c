"""Prompts have the number of tokens that they should have, and workloads the shape."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from multitok.bench.dataset import read_dataset
from multitok.bench.prompts import PromptMaker
from multitok.bench.requests import SPECIMEN, Body, Settings
from multitok.bench.target import BenchError
from multitok.bench.workloads import STANDARD, fit_context, make_sessions

SETTINGS = Settings(model="m")


class WordCounter:
    """Tokens are words of up to six letters, digits and marks."""

    exact = True

    def count(self, text: str) -> int:
        return len(re.findall(r"\d|[^\W\d]{1,6}|[^\w\s]|_", text))


@pytest.mark.parametrize("tokens", [20, 32, 128, 1000, 8000])
def test_exact_lengths(tokens: int) -> None:
    maker = PromptMaker(WordCounter())
    prompts = [maker.prompt(tokens) for _ in range(5)]
    assert len(set(prompts)) == 5
    for prompt in prompts:
        assert WordCounter().count(prompt.replace("@" * 12, SPECIMEN)) == tokens


def test_no_room_for_the_number() -> None:
    with pytest.raises(BenchError, match="too short"):
        PromptMaker(WordCounter()).prompt(5)


def test_a_template_that_leaves_no_room_makes_the_prompt_longer() -> None:
    maker = PromptMaker(WordCounter())
    sessions = make_sessions(STANDARD["C"], maker, SETTINGS, overhead=31)
    for (body,) in sessions:
        assert WordCounter().count(str(content(body)["messages"][0]["content"])) == maker.shortest  # type: ignore[index]


def content(body: Body) -> dict[str, object]:
    found: dict[str, object] = json.loads(body.with_number(7))
    return found


def test_chats_grow_and_share_their_system_prompt() -> None:
    sessions = make_sessions(STANDARD["D"], PromptMaker(WordCounter()), SETTINGS, overhead=5)
    systems = set()
    for chat in sessions:
        assert len(chat) == 20
        earlier: list[object] = []
        for body in chat:
            messages = content(body)["messages"]
            assert isinstance(messages, list)
            assert messages[: len(earlier)] == earlier
            assert [message["role"] for message in messages[-2:]] == ["assistant" if earlier else "system", "user"]
            earlier = messages
        systems.add(str(earlier[0]))
    assert len(systems) == 1


def test_one_in_ten_prompts_is_long() -> None:
    workload = fit_context(STANDARD["E"], 6_000)
    assert workload.long_tokens < 6_000
    sessions = make_sessions(workload, PromptMaker(WordCounter()), SETTINGS, overhead=5)
    limits = [content(body)["max_tokens"] for (body,) in sessions]
    assert limits.count(16) * 9 == limits.count(64)
    assert limits.index(16) == 9
    longest = max(sessions, key=lambda session: session[0].length)
    text = longest[0].with_number(0).decode()
    assert WordCounter().count(text) > 5_500


def test_dataset(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}], "max_tokens": 5}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (first,), (second,) = read_dataset(file, SETTINGS, 9)
    assert content(first)["messages"] == [{"role": "user", "content": "one"}]
    assert (content(first)["max_tokens"], content(second)["max_tokens"]) == (9, 5)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": 5}', '{"prompt": "a", "max_tokens": 0}'])
def test_dataset_errors_name_the_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(BenchError, match="line 2"):
        read_dataset(file, SETTINGS, 9)
