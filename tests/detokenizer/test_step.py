from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from multitok.detokenizer.incremental import TextDecoder
from multitok.detokenizer.step import DetokenizerStep
from multitok.messages.base import FinishReason
from multitok.messages.to_detokenizer import BatchTokenIDOutput, OutputExtras, TimeStats
from multitok.messages.to_scheduler import DecodeParams
from multitok.messages.to_tokenizer import BatchStrOutput
from parts import EOS, VOCAB_SIZE, byte_tokenizer, pack, unpack

LENGTH = FinishReason("length")
STREAM = DecodeParams()
DECODER = TextDecoder.from_tokenizer(byte_tokenizer())


@pytest.fixture
def step():
    return DetokenizerStep([DECODER] * 8)


def row(
    number: int, text: str | bytes | list[int], first: int, params: DecodeParams | None = None, **end: Any
) -> dict[str, Any]:
    """What a step has for one request; its ids are the bytes of the text."""
    ids = list(text.encode()) if isinstance(text, str) else list(text)
    return {"number": number, "ids": ids, "first": first, "params": params, **end}


def batch(*rows: dict[str, Any], **fields: Any) -> BatchTokenIDOutput:
    """The batch of one step, as a scheduler makes it."""

    def column(name: str) -> list[Any] | None:
        values = [r.get(name) for r in rows]
        return None if values.count(None) == len(values) else values

    lengths = [len(r["ids"]) for r in rows]
    extras = OutputExtras(output_token_logprobs=column("logprobs"), output_top_logprobs=column("top"))
    return BatchTokenIDOutput(
        numbers=[r["number"] for r in rows],
        http_worker_ipcs=[r.get("owner", "w1.1") for r in rows],
        output_ids=b"".join(pack(r["ids"]) for r in rows),
        output_lengths=None if lengths.count(1) == len(lengths) else lengths,
        first_indexes=[r["first"] for r in rows],
        decode_params=column("params"),
        finished_reasons=column("finish"),
        prompt_tokens=column("prompt_tokens"),
        completion_tokens=column("completion_tokens"),
        cached_tokens=column("cached"),
        extras=None if extras == OutputExtras() else extras,
        **fields,
    )


def texts(output: BatchStrOutput | None) -> dict[int, str]:
    return {} if output is None else dict(zip(output.numbers, output.output_strs, strict=True))


def only(output: BatchStrOutput | None) -> BatchStrOutput:
    """An output of one row."""
    assert output is not None
    assert len(output.numbers) == 1
    return output


def test_ids_become_text_and_everything_else_is_passed_on(step):
    ids = batch(
        row(1, "H", 0, STREAM, logprobs=[-0.5]), row(2, "W", 0, STREAM, owner="w2.1"), row(3, "x", 0, STREAM), rank=2
    )
    output = step(ids)
    assert output.output_strs == ["H", "W", "x"]
    for name in ids.__struct_fields__:
        if name != "decode_params":
            assert getattr(output, name) == getattr(ids, name), name
    # The fast path: nothing was taken apart.
    assert output.output_ids is ids.output_ids
    assert output.numbers is ids.numbers
    assert texts(step(batch(row(1, "i", 1), row(2, "o", 1), row(3, "y", 1)))) == {1: "i", 2: "o", 3: "y"}


def test_several_tokens_per_step_are_one_text(step):
    assert texts(step(batch(row(1, "Hel", 0, STREAM), row(2, "W", 0, STREAM)))) == {1: "Hel", 2: "W"}
    output = step(batch(row(1, "lo", 3), row(2, "orld", 1)))
    assert texts(output) == {1: "lo", 2: "orld"}
    assert output.output_lengths == [2, 4]


def test_a_character_comes_when_it_is_complete(step):
    first, *rest = "🦜".encode()
    said = [texts(step(batch(row(1, [first], 0, STREAM))))[1]]
    said += [texts(step(batch(row(1, [byte], i))))[1] for i, byte in enumerate(rest, start=1)]
    assert said == ["", "", "", "🦜"]


def test_an_open_character_is_given_out_at_the_end(step):
    step(batch(row(1, "🦜".encode()[:2], 0, STREAM)))
    output = only(step(batch(row(1, "!", 2, finish=LENGTH, completion_tokens=3))))
    assert output.output_strs == [byte_tokenizer().decode([*"🦜".encode()[:2], ord("!")])]
    assert len(step) == 0


def test_the_prompts_tail_is_no_part_of_the_text(step):
    tail = DecodeParams(prompt_tail=pack(list("é".encode()[:1])))
    assert texts(step(batch(row(1, "é".encode()[1:], 0, tail)))) == {1: "é"}


def test_the_end_of_a_request_takes_its_state_away(step):
    step(batch(row(1, "a", 0, STREAM), row(2, "b", 0, STREAM)))
    assert len(step) == 2
    output = step(batch(row(1, "b", 1, finish=LENGTH, prompt_tokens=4, completion_tokens=2, cached=1), row(2, "c", 1)))
    assert output.finished_reasons == [LENGTH, None]
    assert (output.prompt_tokens, output.completion_tokens) == ([4, None], [2, None])
    assert output.cached_tokens == [1, None]
    assert len(step) == 1


def test_an_end_id_is_counted_but_not_seen(step):
    for params in (STREAM, DecodeParams(skip_special_tokens=False), DecodeParams(stop=["zz"])):
        finish = FinishReason("stop", ord("!"))
        output = only(step(batch(row(1, "yes!", 0, params, finish=finish, completion_tokens=4))))
        assert output.output_strs == ["yes"]
        assert unpack(output.output_ids) == list(b"yes!")
        assert output.completion_tokens == [4]
        assert output.finished_reasons == [finish]
        assert len(step) == 0


def test_special_tokens_show_only_where_they_are_wanted(step):
    output = step(batch(row(1, [EOS], 0, STREAM), row(2, [EOS], 0, DecodeParams(skip_special_tokens=False))))
    assert texts(output) == {1: "", 2: "<eos>"}


# Stop strings

STOP = DecodeParams(stop=["END"])


def test_text_that_may_begin_a_stop_string_is_held_back(step):
    assert texts(step(batch(row(1, "aE", 0, STOP)))) == {1: "a"}
    assert texts(step(batch(row(1, "N", 2)))) == {1: ""}
    assert texts(step(batch(row(1, "x", 3)))) == {1: "ENx"}
    assert texts(step(batch(row(1, "E", 4)))) == {1: ""}
    assert texts(step(batch(row(1, "y", 5, finish=LENGTH)))) == {1: "Ey"}
    assert texts(step(batch(row(2, "E", 0, STOP, finish=LENGTH)))) == {2: "E"}
    assert len(step) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_ids_and_log_probabilities_at_the_token_that_completes_it(step, stream):
    params = DecodeParams(stop=["END", "never"], stream=stream)
    pieces = ["ab", "E", "NDxyz"]
    said: list[BatchStrOutput] = []
    first = 0
    for piece in pieces:
        logprobs = [-(first + i) / 8 for i in range(len(piece))]
        top = [[(ord(c), -0.5)] for c in piece]
        output = step(batch(row(1, piece, first, None if first else params, logprobs=logprobs, top=top)))
        said += [] if output is None else [output]
        first += len(piece)
    last = said[-1]
    assert "".join(o.output_strs[0] for o in said) == "ab"
    assert [i for o in said for i in unpack(o.output_ids)] == list(b"abEND")
    assert [p for o in said for p in o.extras.output_token_logprobs[0]] == [-i / 8 for i in range(5)]
    assert [t for o in said for t in o.extras.output_top_logprobs[0]] == [[(ord(c), -0.5)] for c in "abEND"]
    assert last.finished_reasons == [FinishReason("stop", "END")]
    assert last.completion_tokens == [5]
    assert len(said) == (3 if stream else 1)


def test_late_ids_after_a_stop_string_are_dropped_in_silence_until_the_schedulers_last_word(step, caplog):
    step(batch(row(1, "END", 0, STOP)))
    for first in range(3, 6):
        assert step(batch(row(1, "x", first))) is None
    assert len(step) == 1
    assert step(batch(row(1, [], 6, finish=FinishReason("abort"), completion_tokens=6))) is None
    assert len(step) == 0
    assert caplog.text == ""


def test_late_ids_of_one_request_do_not_touch_another(step):
    step(batch(row(1, "END", 0, STOP), row(2, "a", 0, STREAM)))
    output = step(batch(row(1, "x", 3), row(2, "b", 1, logprobs=[-0.25])))
    assert texts(output) == {2: "b"}
    assert unpack(output.output_ids) == [ord("b")]
    assert output.extras.output_token_logprobs == [[-0.25]]


def test_a_stop_string_in_the_last_row_needs_no_tombstone(step):
    output = only(step(batch(row(1, "aEND!", 0, STOP, finish=LENGTH, completion_tokens=5))))
    assert output.output_strs == ["a"]
    assert output.finished_reasons == [FinishReason("stop", "END")]
    assert output.completion_tokens == [4]
    assert len(step) == 0


def test_a_stop_string_that_the_end_completes_is_found(step):
    """The end of the text gives out what the decoder held back, here the sign of an open character."""
    params = DecodeParams(stop=["a�"])
    output = only(step(batch(row(1, b"a\xf0", 0, params, finish=LENGTH, completion_tokens=2))))
    assert output.output_strs == [""]
    assert output.finished_reasons == [FinishReason("stop", "a�")]
    assert output.completion_tokens == [2]
    assert len(step) == 0


def test_no_stop_string_counts_before_the_least_number_of_tokens(step):
    params = DecodeParams(stop=["x"], min_new_tokens=4)
    assert texts(step(batch(row(1, "x", 0, params)))) == {1: "x"}
    assert texts(step(batch(row(1, "xa", 1)))) == {1: "xa"}
    output = only(step(batch(row(1, "bcx", 3))))
    assert output.output_strs == ["bc"]
    assert output.finished_reasons == [FinishReason("stop", "x")]
    assert output.completion_tokens == [6]


def test_a_stop_string_counts_at_the_least_number_of_tokens(step):
    params = DecodeParams(stop=["x"], min_new_tokens=3)
    output = only(step(batch(row(1, "xxxx", 0, params))))
    assert output.output_strs == ["xx"]
    assert output.completion_tokens == [3]


# stream=False

HELD = DecodeParams(stream=False)


def test_without_streaming_everything_comes_in_one_row_at_the_end(step):
    assert step(batch(row(1, "a", 0, HELD, logprobs=[-1.0], top=[[(1, -1.0)]], cached=7))) is None
    assert step(batch(row(1, "bc", 1, logprobs=[-2.0, -3.0], top=[[(2, -2.0)], [(3, -3.0)]]))) is None
    end = batch(
        row(
            1,
            "d!",
            3,
            logprobs=[-4.0, -5.0],
            top=[[(4, -4.0)], []],
            finish=FinishReason("stop", ord("!")),
            prompt_tokens=9,
            completion_tokens=5,
            cached=0,
        ),
        rank=1,
    )
    end.extras.time_stats = [TimeStats(1.0, 2.0, 3.0, 4.0)]
    output = only(step(end))
    assert output == BatchStrOutput(
        numbers=[1],
        http_worker_ipcs=["w1.1"],
        output_ids=pack(list(b"abcd!")),
        output_lengths=[5],
        first_indexes=[0],
        rank=1,
        finished_reasons=[FinishReason("stop", ord("!"))],
        prompt_tokens=[9],
        completion_tokens=[5],
        cached_tokens=[7],
        extras=OutputExtras(
            output_token_logprobs=[[-1.0, -2.0, -3.0, -4.0, -5.0]],
            output_top_logprobs=[[[(1, -1.0)], [(2, -2.0)], [(3, -3.0)], [(4, -4.0)], []]],
            time_stats=[TimeStats(1.0, 2.0, 3.0, 4.0)],
        ),
        output_strs=["abcd"],
    )
    assert len(step) == 0


def test_cached_tokens_counted_at_the_end_are_kept(step):
    step(batch(row(1, "a", 0, HELD)))
    output = only(step(batch(row(1, "b", 1, finish=LENGTH, cached=5))))
    assert output.cached_tokens == [5]


def test_what_only_an_earlier_row_says_is_kept(step):
    first = batch(row(1, "a", 0, HELD))
    first.extras = OutputExtras(
        input_token_logprobs=[[-0.5]], retraction_counts=[1], customized_info={"score": [1], "path": ["a"]}
    )
    step(first)
    last = batch(row(1, "b", 1, finish=LENGTH))
    last.extras = OutputExtras(retraction_counts=[2], customized_info={"score": [3]})
    output = only(step(last))
    assert output.extras == OutputExtras(
        input_token_logprobs=[[-0.5]], retraction_counts=[2], customized_info={"score": [3], "path": ["a"]}
    )


def test_streaming_and_held_requests_share_a_step(step):
    assert texts(step(batch(row(1, "a", 0, HELD), row(2, "b", 0, STREAM)))) == {2: "b"}
    output = step(batch(row(1, "c", 1, finish=LENGTH), row(2, "d", 1)))
    assert texts(output) == {1: "ac", 2: "d"}
    ends = dict(zip(output.numbers, output.finished_reasons, strict=True))
    assert ends == {1: LENGTH, 2: None}
    assert dict(zip(output.numbers, output.output_lengths, strict=True)) == {1: 2, 2: 1}


def test_an_aborted_request_gives_out_what_it_held(step):
    step(batch(row(1, "ab", 0, HELD)))
    output = only(step(batch(row(1, [], 2, finish=FinishReason("abort"), completion_tokens=2))))
    assert (output.output_strs, output.first_indexes) == (["ab"], [0])
    assert output.finished_reasons == [FinishReason("abort")]
    assert len(step) == 0


# What goes wrong


def test_an_error_in_one_row_fails_only_its_request(step, caplog):
    step(batch(row(1, "a", 0, STREAM), row(2, "a", 0, STREAM), row(3, "a", 0, STREAM)))
    output = step(batch(row(1, "b", 1), row(2, [VOCAB_SIZE + 5], 1), row(3, "c", 1)))
    assert texts(output) == {1: "b", 2: "", 3: "c"}
    ends = dict(zip(output.numbers, output.finished_reasons, strict=True))
    assert (ends[1], ends[3]) == (None, None)
    assert (ends[2].type, ends[2].status) == ("error", 500)
    assert dict(zip(output.numbers, output.output_lengths, strict=True)) == {1: 1, 2: 0, 3: 1}
    assert "request 2: its ids can't be decoded" in caplog.text
    # It is over for its owner; the others go on.
    assert texts(step(batch(row(1, "d", 2), row(2, "x", 2), row(3, "e", 2)))) == {1: "d", 3: "e"}
    assert step(batch(row(2, [], 3, finish=FinishReason("abort")))) is None
    assert len(step) == 2


def test_an_error_in_the_last_row_leaves_nothing_behind(step):
    output = only(step(batch(row(1, [VOCAB_SIZE + 5], 0, STREAM, finish=LENGTH))))
    assert output.finished_reasons[0].type == "error"
    assert len(step) == 0


def test_ids_without_their_beginning_fail_the_request_once(step, caplog):
    output = only(step(batch(row(1, "x", 5))))
    assert output.finished_reasons == [FinishReason("error", None, 500, "the beginning of the answer was lost")]
    assert (output.output_strs, output.output_ids) == ([""], b"")
    assert "request 1" in caplog.text
    assert step(batch(row(1, "y", 6))) is None
    assert step(batch(row(1, [], 7, finish=FinishReason("abort")))) is None
    assert len(step) == 0


@pytest.mark.parametrize("finish", [FinishReason("abort"), FinishReason("error", None, 500, "the engine failed")])
def test_the_end_of_a_request_that_never_began_reaches_its_owner(step, finish):
    output = only(step(batch(row(1, [], 0, finish=finish, prompt_tokens=3, completion_tokens=0))))
    assert output.finished_reasons == [finish]
    assert (output.output_strs, output.completion_tokens) == ([""], [0])
    assert len(step) == 0


def test_no_rows_are_no_output(step):
    assert step(batch()) is None


def test_the_state_is_empty_when_many_requests_have_ended_in_every_way(step):
    for number in range(1, 61):
        params = DecodeParams(stop=["END"] if number % 3 else None, stream=bool(number % 2))
        step(batch(row(number, "abE", 0, params)))
        if number % 4 == 0:
            step(batch(row(number, [], 3, finish=FinishReason("abort"))))
        elif number % 4 == 1:
            step(batch(row(number, "ND", 3)))
            step(batch(row(number, "x", 5)))
            step(batch(row(number, "", 6, finish=LENGTH)))
        elif number % 4 == 2:
            step(batch(row(number, [VOCAB_SIZE], 3)))
            step(batch(row(number, "x", 4, finish=LENGTH)))
        else:
            step(batch(row(number, "ND", 3, finish=LENGTH)))
    assert len(step) == 0


def test_ids_are_decoded_by_the_model_of_the_rank_that_made_them():
    words = Tokenizer(models.WordLevel({"zero": 0, "one": 1, "two": 2}, unk_token="zero"))
    words.decoder = decoders.WordPiece(prefix="##")
    step = DetokenizerStep([DECODER, TextDecoder.from_tokenizer(words), DECODER])
    for rank, text in ((0, "\x01\x02"), (1, "one two"), (2, "\x01\x02")):
        first = step(batch(row(10 + rank, [1], 0, STREAM), rank=rank))
        last = step(batch(row(10 + rank, [2], 1, finish=LENGTH), rank=rank))
        assert texts(first)[10 + rank] + texts(last)[10 + rank] == text
