"""A detokenizer that begins in the middle of requests: the text before and after it is that of an undisturbed run."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_incremental import decoder_named, id_lists
from test_step import DECODER, batch, only, row, texts
from tokenizers_under_test import NAMES, tokenizer_named

from examples import examples
from multitok.detokenizer.step import DetokenizerStep
from multitok.messages.base import FinishReason
from multitok.messages.to_detokenizer import BatchTokenIDOutput, OutputExtras
from multitok.messages.to_scheduler import DecodeParams
from multitok.messages.to_tokenizer import BatchStrOutput
from parts import pack, unpack

LENGTH = FinishReason("length")
END = FinishReason("abort")


def rows_of(ids: list[int], cuts: list[int], params: DecodeParams, begin: int = 0) -> list[BatchTokenIDOutput]:
    """What a scheduler sends of ids that come in pieces, from the one that begins at `begin`."""
    bounds = sorted({begin, len(ids), *(cut for cut in cuts if begin < cut < len(ids))})
    batches = [
        batch(
            row(
                1,
                ids[start:end],
                start,
                params if start == 0 else None,
                finish=LENGTH if end == len(ids) else None,
                completion_tokens=end if end == len(ids) else None,
            )
        )
        for start, end in pairwise(bounds)
    ]
    return batches


def rebuilding(
    ids: list[int], had: int, text_length: int | None, upto: int, params: DecodeParams
) -> BatchTokenIDOutput:
    """The row that a scheduler sends again: what comes after the ids that the owner has, up to the newest."""
    made = batch(row(1, ids[had:upto], had, params, finish=LENGTH if upto == len(ids) else None))
    made.extras = OutputExtras(decode_ids=[pack(ids[:had])], read_offsets=[text_length])
    return made


class Owner:
    """What an owner has of request 1."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.finish: FinishReason | None = None

    def take(self, output: BatchStrOutput | None) -> None:
        if output is None:
            return
        only(output)
        assert self.finish is None
        assert output.first_indexes == [len(self.ids)]
        assert output.extras is None or output.extras.decode_ids is None
        self.text += output.output_strs[0]
        self.ids += unpack(output.output_ids)
        if output.finished_reasons is not None:
            self.finish = output.finished_reasons[0]


def undisturbed(decoder, ids: list[int], params: DecodeParams) -> Owner:
    owner, step = Owner(), DetokenizerStep([decoder])
    for ids_of_step in rows_of(ids, list(range(len(ids))), params):
        if owner.finish is None:
            owner.take(step(ids_of_step))
    return owner


@st.composite
def runs(draw, name: str):
    """Ids, how they are decoded, and how many of them come at a time; stop strings that the text holds, or nearly."""
    ids = draw(id_lists(name, 16).filter(bool))
    tail = draw(st.just([]) | id_lists(name, 4))
    skip = draw(st.booleans())
    text = tokenizer_named(name).decode(ids, skip_special_tokens=skip)
    pieces = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(
        lambda at: text[at[0] : at[0] + at[1]]
    )
    stop = draw(st.none() | st.lists(st.one_of(pieces, st.text(min_size=1, max_size=2)).filter(bool), max_size=3))
    params = DecodeParams(
        prompt_tail=pack(tail),
        stop=stop or None,
        skip_special_tokens=skip,
        min_new_tokens=draw(st.just(0) | st.integers(0, len(ids))),
        stream=draw(st.booleans()),
    )
    return ids, params, draw(st.lists(st.integers(1, len(ids)), max_size=6))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(
    deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
def test_text_before_and_after_a_rebuild_is_that_of_an_undisturbed_run(name, data):
    ids, params, cuts = data.draw(runs(name))
    decoder = decoder_named(name)
    expected = undisturbed(decoder, ids, params)

    owner, first = Owner(), DetokenizerStep([decoder])
    before = rows_of(ids, cuts, params)
    for ids_of_step in before[: data.draw(st.integers(0, len(before) - 1))]:
        owner.take(first(ids_of_step))
        if owner.finish is not None:
            break
    if owner.finish is None:
        second = DetokenizerStep([decoder], life=2)
        had, upto = len(owner.ids), data.draw(st.integers(len(owner.ids), len(ids)))
        # Rows of the step in between, which nobody can decode yet.
        assert second(batch(row(1, ids[had:upto], had))) is None
        owner.take(second(rebuilding(ids, had, len(owner.text), upto, params)))
        for ids_of_step in rows_of(ids, cuts, params, upto) if upto < len(ids) else []:
            if owner.finish is None:
                ids_of_step.decode_params = None
                owner.take(second(ids_of_step))
    assert (owner.text, owner.ids, owner.finish) == (expected.text, expected.ids, expected.finish)


STREAM, HELD = DecodeParams(), DecodeParams(stream=False)


@pytest.fixture
def step():
    return DetokenizerStep([DECODER], life=2)


def test_a_rebuilt_row_takes_the_place_of_a_state_and_of_a_tombstone(step):
    stop = DecodeParams(stop=["END"])
    step(batch(row(1, "wrong", 0, HELD), row(2, "aEND", 0, stop)))
    made = batch(row(1, "cd", 2, STREAM), row(2, "ND", 2, stop))
    made.extras = OutputExtras(decode_ids=[pack(list(b"ab")), pack(list(b"aE"))], read_offsets=[2, 1])
    output = step(made)
    assert texts(output) == {1: "cd", 2: ""}
    offsets = dict(zip(output.numbers, output.extras.read_offsets, strict=True))
    assert offsets == {1: 2, 2: 1}
    ends = dict(zip(output.numbers, output.finished_reasons, strict=True))
    assert ends == {1: None, 2: FinishReason("stop", "END")}
    assert texts(step(batch(row(1, "e", 4)))) == {1: "e"}


@pytest.mark.parametrize("decode_ids", [pack(list(b"abc")), b"abc", pack([10**9])])
def test_text_that_can_not_be_made_again_fails_its_request_alone(step, caplog, decode_ids):
    step(batch(row(2, "x", 0, STREAM)))
    made = batch(row(1, "d", 3, STREAM), row(2, "y", 1))
    made.extras = OutputExtras(decode_ids=[decode_ids, None], read_offsets=[2, None])
    output = step(made)
    assert texts(output) == {1: "", 2: "y"}
    ends = dict(zip(output.numbers, output.finished_reasons, strict=True))
    assert ends[2] is None
    assert (ends[1].type, ends[1].status) == ("error", 500)
    assert "request 1 can't be begun" in caplog.text
    assert step(batch(row(1, "e", 4))) is None
    step(batch(row(1, [], 5, finish=END), row(2, [], 2, finish=END)))
    assert len(step) == 0


def test_a_prompts_tail_that_is_none_fails_its_request_alone(step):
    output = step(batch(row(1, "a", 0, DecodeParams(prompt_tail=b"abc")), row(2, "b", 0, STREAM)))
    assert texts(output) == {1: "", 2: "b"}


def test_a_later_life_skips_rows_whose_requests_it_has_not_begun_but_no_last_word(step, caplog):
    assert step(batch(row(1, "x", 5))) is None
    assert step(batch(row(1, "x", 6, finish=LENGTH))) is None
    assert only(step(batch(row(1, [], 7, finish=END)))).finished_reasons == [END]
    assert len(step) == 0
    assert caplog.text == ""


# Deaths


def test_the_death_of_a_scheduler_takes_the_state_of_its_requests_away_and_no_other():
    step = DetokenizerStep([DECODER, DECODER])
    stop = DecodeParams(stop=["END"])
    step(batch(row(1, "a", 0, STREAM), row(2, "END", 0, stop), row(3, "a", 0, HELD), rank=0, life=1))
    step(batch(row(4, "a", 0, STREAM), row(5, "END", 0, stop), rank=1, life=1))
    assert len(step) == 5
    step.rank_died(0, 1)
    assert len(step) == 2
    # What it had said before that comes late, and is nobody's business any more.
    assert step(batch(row(1, "b", 1), rank=0, life=1)) is None
    assert step(batch(row(6, "b", 0, STREAM), rank=0, life=1)) is None
    assert texts(step(batch(row(4, "b", 1), rank=1, life=1))) == {4: "b"}
    # A request that goes on at the next life, or at another rank.
    for number, rank, life in ((1, 0, 2), (3, 1, 1)):
        made = batch(row(number, "c", 1, STREAM), rank=rank, life=life)
        made.extras = OutputExtras(decode_ids=[pack([ord("a")])], read_offsets=[1])
        assert texts(step(made)) == {number: "c"}
    step.rank_died(0, 2)
    step.rank_died(1, 1)
    assert len(step) == 0


def test_the_death_of_a_life_leaves_what_the_next_one_has_begun():
    """It may be told late: rows come another way."""
    step = DetokenizerStep([DECODER])
    stop = DecodeParams(stop=["END"])
    step(batch(row(1, "a", 0, STREAM), row(2, "END", 0, stop), rank=0, life=1))
    step(batch(row(3, "a", 0, STREAM), row(4, "END", 0, stop), rank=0, life=2))
    for _ in range(2):
        step.rank_died(0, 1)
        assert len(step) == 2
    assert texts(step(batch(row(3, "b", 1), row(4, "b", 3), rank=0, life=2))) == {3: "b"}


def test_the_death_of_an_owner_takes_all_of_its_requests_away(caplog):
    w1, w2 = (1 << 18 | 1) << 36, (2 << 18 | 1) << 36
    step = DetokenizerStep([DECODER])
    stop = DecodeParams(stop=["END"])
    theirs = [row(w1 + 1, "a", 0, STREAM), row(w1 + 2, "END", 0, stop), row(w1 + 3, "a", 0, HELD)]
    step(batch(*theirs, row(w2 + 1, "x", 0, STREAM, owner="w2.1")))
    assert step.owners == {"w1.1", "w2.1"}
    step.owner_died("w1.1")
    assert len(step) == 1
    late = [row(w1 + 1, "b", 1), row(w1 + 2, "b", 3), row(w1 + 4, "b", 0, STREAM), row(w1 + 3, [], 1, finish=END)]
    assert texts(step(batch(*late, row(w2 + 1, "y", 1, owner="w2.1")))) == {w2 + 1: "y"}
    assert len(step) == 1
    assert step.owners == {"w2.1"}
    assert caplog.text == ""


def test_a_stop_string_that_ends_after_the_least_number_of_tokens_counts_wherever_it_begins():
    step = DetokenizerStep([DECODER])
    params = DecodeParams(stop=["END"], min_new_tokens=5)
    assert texts(step(batch(row(1, "EN", 0, params)))) == {1: ""}
    assert texts(step(batch(row(1, "DE", 2)))) == {1: "END"}
    output = only(step(batch(row(1, "ND", 4))))
    assert (output.output_strs, output.finished_reasons) == ([""], [FinishReason("stop", "END")])
    assert output.completion_tokens == [6]
