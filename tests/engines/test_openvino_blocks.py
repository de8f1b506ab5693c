from array import array

from hypothesis import given
from hypothesis import strategies as st

from multitok.engines.openvino_blocks import PartialBlocks

BLOCK = 3


def packed(ids) -> bytes:
    return array("i", ids).tobytes()


# Few ids, so that many sequences begin alike.
sequences = st.lists(st.lists(st.integers(0, 1), max_size=10), max_size=8)


@given(sequences, sequences)
def test_prompts_share_a_key_exactly_where_both_go_on_from_an_ended_sequence(ended, prompts):
    blocks = PartialBlocks(BLOCK)
    for ids in ended:
        blocks.ended(packed(ids))
    keys = [blocks.behind(packed(prompt)) for prompt in prompts]
    for one, its in zip(prompts, keys, strict=True):
        for other, others in zip(prompts, keys, strict=True):
            both = [ids for ids in ended if one[: len(ids)] == ids and other[: len(ids)] == ids]
            assert bool(its & others) == bool(both)


@given(sequences, st.integers(1, 4))
def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(ended, most):
    blocks = PartialBlocks(BLOCK, most)
    for ids in ended:
        blocks.ended(packed(ids))
        assert len(blocks) <= most
    if ended:
        assert blocks.behind(packed(ended[-1]))
