from __future__ import annotations

from multitok.messages.columns import Columns, Group, Lengths, Packed, Rows, Shared, columns_of
from multitok.messages.to_detokenizer import BatchTokenIDOutput, OutputExtras


def test_columns_come_in_the_order_of_the_declaration():
    assert tuple(columns_of(BatchTokenIDOutput)) == BatchTokenIDOutput.__struct_fields__
    assert tuple(columns_of(OutputExtras)) == OutputExtras.__struct_fields__


def test_a_declaration_says_how_each_field_splits():
    columns = columns_of(BatchTokenIDOutput)
    assert columns["numbers"] == Rows()
    assert columns["output_ids"] == Packed("output_lengths", 4)
    assert columns["output_lengths"] == Lengths()
    assert columns["rank"] == Shared()
    assert columns["extras"] == Group()
    assert columns_of(OutputExtras)["customized_info"] == Columns()
    assert columns_of(OutputExtras)["output_token_logprobs"] == Rows(optional=True)


def test_what_design_promises_is_declared():
    declared = {*columns_of(BatchTokenIDOutput), *columns_of(OutputExtras)}
    assert declared >= {
        *("finished_reasons", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"),
        *("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs"),
        *("input_token_ids_logprobs", "output_token_ids_logprobs", "spec_verify_ct", "spec_accepted_tokens"),
        *("decoded_texts", "decode_ids", "read_offsets", "output_ids", "retraction_counts", "rank"),
        *("weight_version", "output_hidden_states", "customized_info", "time_stats"),
    }
