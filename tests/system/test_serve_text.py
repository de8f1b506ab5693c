"""Streamed text, whole text and the reference are one and the same; nothing comes after a stop string."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference import EOS, MODEL, echoed, ids_of, raw_text, tokenizer
from server import LEAVE_S, SIMULATED, Server, engine_args, workers
from tokenizers import Tokenizer, decoders, models, normalizers

TEXTS = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "emoji with ZWJ": "family 👨‍👩‍👧‍👦, flag 🏳️‍🌈, wave 👋🏽!",
    "Korean": "안녕하세요, 오늘은 날씨가 좋네요.",
    "Thai": "สวัสดีครับ วันนี้อากาศดีมาก",
    "Chinese": "你好，世界。今天天气很好。",
    "Arabic": "مرحبا بالعالم، كيف حالك؟",
    "combining marks": "e\u0301a\u0308\u0332 n\u0303 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!",
    "whitespace": " \t\t  \n\n\n   a    b\r\n\u00a0\u2003c   ",
    "old scripts": "𐍈𐎀𒀀 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🜁",
    "special tokens": "a<|im_start|>user\nb<|im_start|> c",
}
# Prompts of ids that no text has: single bytes of characters, and anything.
_BYTES = [token for token in range(49152) if len(tokenizer().id_to_token(token) or "ab") == 1]
RANDOM = {f"random ids {seed}": random.Random(seed).choices(range(3, 49152), k=60) for seed in range(4)} | {
    f"random bytes {seed}": random.Random(seed).choices(_BYTES, k=80) for seed in range(4)
}
PROMPTS = {name: ids_of(text) for name, text in TEXTS.items()} | RANDOM


_SERVERS = {
    "one id per step": [*engine_args(tokens_per_step=1), "--detokenizer-worker-num", "2"],
    "three ids per step, no detokenizer": [*engine_args(tokens_per_step=3), "--detokenizer-worker-num", "0"],
}


@pytest.fixture(scope="module", params=_SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(*SIMULATED, *workers(2), *_SERVERS[request.param]) as server:
        yield server


def _whole(server: Server, **body: Any) -> Any:
    return server.openai.completions.create(**body).choices[0]


def _streamed(server: Server, **body: Any) -> tuple[str, Any]:
    text, last = "", None
    for chunk in server.openai.completions.create(**body, stream=True):
        text += chunk.choices[0].text
        last = chunk.choices[0]
    return text, last


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", PROMPTS)
def test_streamed_text_is_the_whole_text_is_the_reference(name: str, skip: bool, server: Server) -> None:
    # A plain word ends every prompt, so that what is the prompt's text is beyond doubt.
    prompt = [*PROMPTS[name], *ids_of(" end")]
    output = echoed(prompt, 2 * len(prompt) - 3)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": len(output), "extra_body": {"skip_special_tokens": skip}}
    expected = raw_text(prompt, output, skip=skip)
    assert _whole(server, **body).text == expected
    assert _streamed(server, **body)[0] == expected


def test_chosen_ids_after_a_chat_are_decoded_alone() -> None:
    ids = [token for name in RANDOM for token in RANDOM[name]]
    with Server(*SIMULATED, *engine_args(ids=",".join(map(str, ids)), tokens_per_step="2,1")) as server:
        messages: Any = [{"role": "user", "content": "hello"}]
        expected = tokenizer().decode(ids, skip_special_tokens=True)
        body: Any = {"model": MODEL, "messages": messages, "max_tokens": len(ids)}
        assert server.openai.chat.completions.create(**body).choices[0].message.content == expected
        stream = server.openai.chat.completions.create(**body, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_prompt_that_ends_inside_a_character_shows_no_part_of_itself(server: Server) -> None:
    first, *rest = ids_of("🙂")
    assert rest
    # The echo begins with the ids that complete the prompt's last character.
    prompt = [*rest, *ids_of("look"), first]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": len(rest)}
    assert _whole(server, **body).text == "🙂"
    assert _streamed(server, **body)[0] == "🙂"


# Each begins and ends inside tokens of the text.
_STORY = "In the beginning there was a harbour, and above the harbour hung seventeen paper lanterns; no wind."
_STOPS = ["arbour, and ab", "r hung sev", "n paper lanterns; n", " ", "17", "lant", "."]


@pytest.mark.parametrize("stop", _STOPS)
def test_nothing_comes_after_a_stop_string(stop: str, server: Server) -> None:
    prompt = ids_of(_STORY)
    text, count = "", 0
    output: list[int] = []
    while stop not in text and count < 3 * len(prompt):
        count += 1
        output = echoed(prompt, count)
        text = raw_text(prompt, output)
    found = stop in text
    huge = 8000 if found else count
    body = {"model": MODEL, "prompt": prompt, "max_tokens": huge, "stop": ["never there", stop]}
    with_ids = {"return_token_ids": True}
    answer = server.openai.completions.create(**body, extra_body=with_ids)
    choice = answer.choices[0]
    expected = text[: text.index(stop)] if found else text
    assert choice.text == expected
    assert choice.finish_reason == ("stop" if found else "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == count
    assert choice.token_ids == output
    assert choice.stop_reason == (stop if found else None)
    # The engine does not go on for the thousands of tokens that were allowed.
    server.wait_until_idle(LEAVE_S)

    chunks = list(
        server.openai.completions.create(
            **body, stream=True, stream_options={"include_usage": True}, extra_body=with_ids
        )
    )
    *deltas, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in deltas) == expected
    assert [token for chunk in deltas for token in chunk.choices[0].token_ids] == output
    assert usage.usage is not None
    assert usage.usage.completion_tokens == count
    assert [chunk.choices[0].finish_reason for chunk in deltas if chunk.choices[0].finish_reason] == [
        choice.finish_reason
    ]
    server.wait_until_idle(LEAVE_S)


def test_log_probabilities_end_with_the_token_that_completed_the_stop(server: Server) -> None:
    prompt = ids_of(_STORY)
    choice = _whole(server, model=MODEL, prompt=prompt, max_tokens=8000, stop="there was", logprobs=1)
    assert choice.text == "In the beginning "
    assert (
        len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(ids_of("In the beginning there was"))
    )
    server.wait_until_idle(LEAVE_S)


def test_stop_id_ends_the_answer_and_is_counted_but_not_shown(server: Server) -> None:
    prompt = ids_of(_STORY)
    stop = ids_of(" harbour")[0]
    at = prompt.index(stop)
    answer = server.openai.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8000, extra_body={"stop_token_ids": [stop], "return_token_ids": True}
    )
    assert answer.choices[0].text == raw_text(prompt, prompt[:at])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    assert answer.usage is not None
    assert answer.usage.completion_tokens == at + 1


def test_end_of_sequence_ends_the_answer_unless_it_is_ignored() -> None:
    with Server(*SIMULATED, *engine_args(eos_after=4)) as server:
        body = {"model": MODEL, "prompt": "one two three four five six seven", "max_tokens": 12}
        ended = server.openai.completions.create(**body)
        assert ended.choices[0].finish_reason == "stop"
        assert ended.usage is not None
        assert ended.usage.completion_tokens == 4
        going_on = server.openai.completions.create(**body, extra_body={"ignore_eos": True})
        assert going_on.choices[0].finish_reason == "length"
        assert going_on.usage is not None
        assert going_on.usage.completion_tokens == 12


def _byte_fallback_tokenizer() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(piece, -float(at)) for at, piece in enumerate(["▁", "▁the", "▁a", "h", "e", "l", "o", "▁▁", "é", "한"])]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def test_byte_fallback_vocabulary_streams_its_reference(tmp_path: Path) -> None:
    made = _byte_fallback_tokenizer()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "model_max_length": 4096}))
    options = ["--tokenizer", str(tmp_path), "--context-length", "4096", "--served-model-name", "made"]
    with Server(*SIMULATED, *engine_args(tokens_per_step="1,2,3"), *options) as server:
        for text in TEXTS.values():
            prompt = [token for token in made.encode(text + " the").ids if token not in EOS]
            output = echoed(prompt, 2 * len(prompt))
            body = {"model": "made", "prompt": prompt, "max_tokens": len(output)}
            expected = raw_text(prompt, output, made)
            assert _whole(server, **body).text == expected
            assert _streamed(server, **body)[0] == expected
