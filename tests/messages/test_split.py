from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from batch_rows import (
    declared,
    draw_row,
    draw_shared,
    field_paths,
    may_be_none,
    put_together,
    shorten_optional_columns,
    used_paths,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from multitok.messages import columns, to_detokenizer, to_tokenizer
from multitok.messages.base import BaseBatchReq, FinishReason
from multitok.messages.codec import FrameDecoder, encode_frame
from multitok.messages.columns import Packed, Rows, columns_of
from multitok.messages.split import (
    check_columns,
    concatenate,
    extract_field_by_index,
    handle_output_by_index,
    split_by_owner,
    take_rows,
)
from multitok.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, OutputExtras
from multitok.messages.to_scheduler import BatchTokenizedGenerateReqInput
from multitok.messages.to_tokenizer import BatchStrOutput

TOKEN = b"12345678"
BATCH_TYPES = sorted(
    {
        value
        for module in (to_detokenizer, to_tokenizer)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseBatchReq)
    },
    key=lambda batch_type: batch_type.__name__,
)
slow_draws = settings(
    max_examples=15,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    # Shrinking batches takes minutes, and a row says enough as it is.
    phases=[Phase.explicit, Phase.generate],
)


def drawn_rows(data: Any, batch_type: type[BaseBatchReq], most: int = 4, fill: float | None = None) -> list[Any]:
    fill = data.draw(st.sampled_from([0.0, 0.4, 1.0])) if fill is None else fill
    shared = draw_shared(data, batch_type, fill)
    return [draw_row(data, batch_type, shared, fill) for _ in range(data.draw(st.integers(1, most)))]


def a_batch(**changes: Any) -> BatchTokenIDOutput:
    """Three rows with 2, 0 and 1 ids."""
    fields: dict[str, Any] = {
        "numbers": [11, 12, 13],
        "http_worker_ipcs": ["w1.1", "w2.1", "w1.1"],
        "output_ids": b"aaaabbbbcccc",
        "output_lengths": [2, 0, 1],
        "first_indexes": [0, 5, 7],
    }
    return BatchTokenIDOutput(**(fields | changes))


def test_every_batch_type_is_under_the_law():
    assert {BatchTokenIDOutput, BatchStrOutput, BatchEmbeddingOutput} <= set(BATCH_TYPES)


@pytest.mark.parametrize("batch_type", BATCH_TYPES)
def test_a_split_row_is_what_its_request_alone_would_have_produced(batch_type):
    used: set[str] = set()
    keys: set[tuple[str, ...]] = set()

    def law(data, fill):
        rows = drawn_rows(data, batch_type, fill=fill)
        batch = put_together(rows)
        for row in rows:
            used.update(used_paths(row))
            extras = getattr(row, "extras", None)
            keys.add(tuple(sorted(extras.customized_info or ())) if extras else ())
        for given_batch in (batch, shorten_optional_columns(batch)):
            assert [handle_output_by_index(given_batch, i) for i in range(len(rows))] == rows
        assert concatenate(rows) == batch
        # Any rows, in any order.
        order = data.draw(st.permutations(range(len(rows))))
        some = order[: data.draw(st.integers(1, len(rows)))]
        assert take_rows(batch, list(some)) == put_together([rows[i] for i in some])

    # Rows with all fields in use are not left to chance.
    for fill in (1.0, None):
        slow_draws(given(st.data(), st.just(fill))(law))()
    for path in sorted(field_paths(batch_type)):
        assert path in used, f"no example sets {path} to something else than its default"
    if "extras" in batch_type.__struct_fields__:
        assert max(map(len, keys)) > 1, "no row has several columns of customized_info"


@pytest.mark.parametrize("batch_type", BATCH_TYPES)
def test_the_wire_changes_nothing_of_a_batch_or_its_rows(batch_type):
    decoder: FrameDecoder[Any] = FrameDecoder(TOKEN, batch_type)

    @slow_draws
    @given(st.data())
    def round_trip(data):
        rows = drawn_rows(data, batch_type, most=3)
        for message in (*rows, put_together(rows)):
            frame = bytes(encode_frame(TOKEN, message))
            assert decoder.is_ours(frame)
            assert decoder.decode(frame) == message

    round_trip()


@pytest.mark.parametrize("batch_type", BATCH_TYPES)
def test_each_owner_gets_its_rows_in_their_order(batch_type):
    @slow_draws
    @given(st.data())
    def grouped(data):
        rows = drawn_rows(data, batch_type, most=6)
        owners = data.draw(st.lists(st.sampled_from(["w1.1", "w2.1", None]), min_size=len(rows), max_size=len(rows)))
        rows = [
            msgspec.structs.replace(row, http_worker_ipcs=owner and [owner])
            for row, owner in zip(rows, owners, strict=True)
        ]
        parts = split_by_owner(put_together(rows))
        assert [owner for owner, _ in parts] == list(dict.fromkeys(owners))
        for owner, part in parts:
            mine = [row for row, its_owner in zip(rows, owners, strict=True) if its_owner == owner]
            assert part == put_together(mine)

    grouped()


@pytest.mark.parametrize("owners", [["w1.1"] * 3, [None] * 3, None])
def test_a_batch_of_one_owner_is_passed_on_as_it_is(owners):
    batch = a_batch(http_worker_ipcs=owners)
    ((owner, part),) = split_by_owner(batch)
    assert part is batch
    assert owner == (owners[0] if owners else None)


def test_a_batch_without_rows_goes_to_nobody():
    empty = BatchTokenIDOutput(numbers=[], http_worker_ipcs=[], output_ids=b"", first_indexes=[])
    assert split_by_owner(empty) == []


def test_owners_that_do_not_match_the_rows_are_an_error():
    with pytest.raises(ValueError, match="http_worker_ipcs has 2 rows, the batch 3"):
        split_by_owner(a_batch(http_worker_ipcs=["w1.1", "w2.1"]))


@pytest.mark.parametrize("index", [-1, 3])
def test_a_row_that_is_not_there_is_an_error(index):
    with pytest.raises(IndexError, match=f"row {index} of a batch of 3"):
        handle_output_by_index(a_batch(), index)


@pytest.mark.parametrize("check_length", [True, False])
def test_an_absent_column_gives_none(check_length):
    assert extract_field_by_index(a_batch(), "finished_reasons", 1, check_length) is None
    assert extract_field_by_index(a_batch(), "extras", 1, check_length) is None


def test_a_column_gives_one_row_of_it():
    stop = FinishReason("stop", 2)
    batch = a_batch(finished_reasons=[None, stop, None], rank=4)
    assert extract_field_by_index(batch, "finished_reasons", 1) == [stop]
    assert extract_field_by_index(batch, "finished_reasons", 0) is None
    assert extract_field_by_index(batch, "numbers", 2) == [13]
    assert extract_field_by_index(batch, "rank", 2) == 4


def test_a_short_optional_column_gives_none():
    extras = OutputExtras(output_token_logprobs=[[-0.5, -0.25]])
    assert extract_field_by_index(extras, "output_token_logprobs", 0, check_length=False) == [[-0.5, -0.25]]
    assert extract_field_by_index(extras, "output_token_logprobs", 2, check_length=False) is None
    assert handle_output_by_index(a_batch(extras=extras), 2).extras is None


@pytest.mark.parametrize("name", ["finished_reasons", "prompt_tokens", "completion_tokens", "cached_tokens"])
def test_a_short_required_column_is_an_error_that_names_it(name):
    batch = a_batch(**{name: [None]})
    with pytest.raises(ValueError, match=f"{name} has 1 rows, row 2 was asked for"):
        extract_field_by_index(batch, name, 2)
    with pytest.raises(ValueError, match=name):
        handle_output_by_index(batch, 2)


def test_a_short_required_column_inside_a_group_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="reasoning_tokens has 1 rows, row 1 was asked for"):
        handle_output_by_index(a_batch(extras=OutputExtras(reasoning_tokens=[3])), 1)


def test_a_dict_of_columns_is_split_per_key():
    extras = OutputExtras(customized_info={"score": [0.5, None, 0.25], "path": [None, [1, 2], None]})
    assert extract_field_by_index(extras, "customized_info", 0) == {"score": [0.5]}
    assert extract_field_by_index(extras, "customized_info", 1) == {"path": [[1, 2]]}
    short = OutputExtras(customized_info={"score": [0.5], "path": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"customized_info\['score'\] has 1 rows"):
        extract_field_by_index(short, "customized_info", 2)


def test_packed_items_are_split_by_their_lengths():
    batch = a_batch()
    assert [extract_field_by_index(batch, "output_ids", i) for i in range(3)] == [b"aaaabbbb", b"", b"cccc"]
    assert [extract_field_by_index(batch, "output_lengths", i) for i in range(3)] == [[2], [0], None]
    one_each = a_batch(output_lengths=None)
    assert [extract_field_by_index(one_each, "output_ids", i) for i in range(3)] == [b"aaaa", b"bbbb", b"cccc"]


def test_too_few_packed_bytes_or_lengths_are_an_error_that_names_the_column():
    with pytest.raises(ValueError, match="output_ids has 8 bytes, too few for row 2"):
        extract_field_by_index(a_batch(output_ids=b"aaaabbbb"), "output_ids", 2)
    with pytest.raises(ValueError, match="output_ids has lengths of 2 rows, row 2"):
        extract_field_by_index(a_batch(output_lengths=[2, 1]), "output_ids", 2)


@pytest.mark.parametrize("batch_type", BATCH_TYPES)
def test_a_column_that_may_be_absent_may_be_empty_in_a_row(batch_type):
    """Else a row that lacks it could not be told apart in a batch where another row has it."""
    for name, (kind, column) in declared(batch_type).items():
        if isinstance(column, columns.Rows) and may_be_none(kind):
            (list_type,) = [part for part in kind.__args__ if part is not type(None)]
            assert may_be_none(list_type.__args__[0]), name


def test_a_field_that_does_not_say_how_it_splits_is_a_type_error():
    class Undeclared(BaseBatchReq, kw_only=True):
        weights: list[float]

    class Twice(BaseBatchReq, kw_only=True):
        weights: Annotated[list[float], Rows(), Packed("numbers", 4)]

    with pytest.raises(TypeError, match=r"Undeclared\.weights must declare one way to split"):
        columns_of(Undeclared)
    with pytest.raises(TypeError, match=r"Twice\.weights"):
        columns_of(Twice)
    with pytest.raises(TypeError, match=r"BatchTokenizedGenerateReqInput\.batch"):
        handle_output_by_index(BatchTokenizedGenerateReqInput(numbers=[1], batch=[]), 0)


def test_concatenating_fills_what_a_batch_lacks():
    one = handle_output_by_index(a_batch(extras=OutputExtras(output_token_logprobs=[[-1.0, -2.0]])), 0)
    joined = concatenate([one, a_batch(rank=3)])
    assert joined.numbers == [11, 11, 12, 13]
    assert joined.output_lengths == [2, 2, 0, 1]
    assert joined.extras == OutputExtras(output_token_logprobs=[[-1.0, -2.0], None, None, None])
    assert handle_output_by_index(joined, 0) == one


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"first_indexes": [0]}, "first_indexes"),
        ({"output_ids": b"\0" * 4}, "output_ids"),
        ({"output_lengths": [2]}, "output_lengths"),
        ({"output_lengths": [3, -1]}, "output_lengths"),
        ({"finished_reasons": [None] * 3}, "finished_reasons"),
        ({"extras": OutputExtras(reasoning_tokens=[1])}, "reasoning_tokens"),
        ({"extras": OutputExtras(customized_info={"a": [1, 2, 3]})}, "customized_info"),
    ],
)
def test_columns_that_disagree_are_an_error_that_names_one(change, field):
    batch = BatchTokenIDOutput(
        numbers=[1, 2],
        http_worker_ipcs=["w1.1"] * 2,
        output_ids=b"\0" * 8,
        first_indexes=[0, 0],
        extras=OutputExtras(output_token_logprobs=[[0.5]], customized_info={"a": [1]}),
    )
    check_columns(batch)
    with pytest.raises(ValueError, match=field):
        check_columns(msgspec.structs.replace(batch, **change))
