from __future__ import annotations

from array import array
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multitok.messages.prefix_hashes import BLOCK_TOKENS, HASH_BYTES, MOST_BLOCKS, prefix_hashes
from multitok.messages.to_scheduler import Header, Kind
from multitok.router.policies import LeastWorkPolicy, PrefixAffinityPolicy, RoundRobinPolicy, make_policy
from multitok.router.prefix_ranks import PrefixRanks
from multitok.router.rank_loads import RankLoads, RankWork

EXPECTED = 100


def request(prompt_length: int = 10, token_limit: int = 50, hashes: bytes | None = None) -> Header:
    return Header(Kind.GENERATE, 1, "w1.1", prompt_length=prompt_length, token_limit=token_limit, prefix_hashes=hashes)


class Ranks:
    """Ranks that say of themselves what the test wants."""

    def __init__(self, *tokens: int) -> None:
        self.said = [RankWork(0, its, EXPECTED) for its in tokens]

    def read(self, rank: int) -> RankWork:
        return self.said[rank]

    def loads(self) -> RankLoads:
        return RankLoads(len(self.said), self.read)


def choices(policy, count: int, up=(0, 1, 2), header: Header | None = None) -> list[int]:
    """Ranks of requests that come one after the other."""
    chosen = []
    for _ in range(count):
        rank = policy.choose(header or request(), up)
        policy.sent(rank, header or request())
        chosen.append(rank)
    return chosen


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def chain(*blocks: int) -> bytes:
    """Hashes of a prompt whose blocks are each one id, again and again."""
    hashes = prefix_hashes(b"".join(ids(block) * BLOCK_TOKENS for block in blocks))
    assert hashes is not None
    return hashes


def test_ranks_come_in_turn():
    assert choices(RoundRobinPolicy(), 7) == [0, 1, 2, 0, 1, 2, 0]
    assert choices(RoundRobinPolicy(), 4, up=(1, 2)) == [1, 2, 1, 2]


@pytest.mark.parametrize("name", ["least-work", "prefix-affinity"])
def test_the_rank_with_the_least_work_is_taken_until_it_has_as_much_as_the_others(name):
    policy = make_policy(name, 3, Ranks(180, 0, 1000).read)
    # 60 tokens each: the prompt, and the limit that is lower than what is expected.
    assert choices(policy, 4) == [1, 1, 1, 0]
    assert policy.choose(request(), [2]) == 2


@pytest.mark.parametrize("name", ["least-work", "prefix-affinity"])
def test_equal_ranks_come_in_turn(name):
    assert choices(make_policy(name, 3, Ranks(0, 0, 0).read), 6) == [0, 1, 2, 0, 1, 2]


def test_an_output_counts_with_what_is_expected_and_not_with_its_limit():
    ranks = Ranks(0, 0)
    policy = LeastWorkPolicy(ranks.loads())
    assert policy.choose(request(10, 100_000), (0, 1)) == 0
    policy.sent(0, request(10, 100_000))
    policy.sent(1, request(109, 0))
    assert policy.choose(request(), (0, 1)) == 1


def test_what_could_not_be_sent_does_not_count():
    policy = LeastWorkPolicy(Ranks(0, 1).loads())
    policy.sent(0, request())
    policy.taken_back(0, 1)
    assert policy.choose(request(), (0, 1)) == 0


def test_a_new_life_has_no_work():
    ranks = Ranks(0, 30)
    policy = LeastWorkPolicy(ranks.loads())
    policy.sent(0, request())
    assert policy.choose(request(), (0, 1)) == 1
    policy.rank_started(0)
    assert policy.choose(request(), (0, 1)) == 0


@given(st.lists(st.tuples(st.sampled_from(["send", "take", "end", "restart"]), st.integers(1, 500)), max_size=60))
def test_work_is_what_a_rank_has_and_what_is_on_its_way_to_it(events):
    """However far behind the rank is."""
    ranks = Ranks(0)
    loads = ranks.loads()
    pipe: deque[int] = deque()
    has: deque[int] = deque()
    taken = 0
    for event, size in events:
        if event == "send":
            loads.sent(0, request(size, 10**6))
            pipe.append(size + EXPECTED)
        elif event == "take" and pipe:
            has.append(pipe.popleft())
            taken += 1
        elif event == "end" and has:
            has.popleft()
        elif event == "restart":
            pipe.clear()
            has.clear()
            taken = 0
        ranks.said[0] = RankWork(taken, sum(has), EXPECTED)
        if event == "restart":
            loads.rank_started(0)
        assert loads.work(0) == sum(pipe) + sum(has)


def test_requests_that_share_a_prefix_stay_on_one_rank():
    ranks = Ranks(0, 0, 0)
    policy = PrefixAffinityPolicy(ranks.loads())
    homes: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    for last_block in range(10, 15):
        for system_prompt, home in homes.items():
            (rank,) = choices(policy, 1, header=request(512, 20, chain(system_prompt, last_block)))
            home.add(rank)
            # Each is done before the next one comes.
            ranks.said[rank] = RankWork(ranks.said[rank].taken + 1, 0, EXPECTED)
    assert sorted(map(sorted, homes.values())) == [[0], [1], [2]]


def test_a_long_shared_prefix_is_worth_waiting_for_and_a_short_one_is_not():
    ranks = Ranks(500, 0)
    policy = PrefixAffinityPolicy(ranks.loads())
    policy.sent(0, request(0, 0, chain(1, 2, 3, 4)))
    assert policy.choose(request(1024, 0, chain(1, 2, 9, 9)), (0, 1)) == 0
    assert policy.choose(request(1024, 0, chain(1, 8, 9, 9)), (0, 1)) == 1
    assert policy.choose(request(1024, 0, None), (0, 1)) == 1


def test_a_rank_that_took_a_prefix_over_has_seen_it_too():
    ranks = Ranks(5000, 0)
    policy = PrefixAffinityPolicy(ranks.loads())
    policy.sent(0, request(0, 0, chain(1, 2)))
    assert choices(policy, 1, (0, 1), request(512, 0, chain(1, 2))) == [1]
    ranks.said = [RankWork(1, 400, 0), RankWork(1, 400, 0)]
    assert {policy.choose(request(512, 0, chain(1, 2)), (0, 1)) for _ in range(4)} == {0, 1}


def test_a_new_life_has_seen_nothing():
    policy = PrefixAffinityPolicy(Ranks(500, 0).loads())
    policy.sent(0, request(0, 0, chain(1, 2, 3)))
    assert policy.choose(request(768, 0, chain(1, 2, 3)), (0, 1)) == 0
    policy.rank_started(0)
    assert policy.choose(request(768, 0, chain(1, 2, 3)), (0, 1)) == 1


def test_prefixes_are_forgotten_from_their_ends_and_the_oldest_first():
    prefixes = PrefixRanks(most_blocks=4)
    prefixes.add(chain(1, 2, 3), 0)
    prefixes.add(chain(7), 1)
    assert prefixes.tokens_seen(chain(1, 2, 3)) == {0: 3 * BLOCK_TOKENS}
    prefixes.add(chain(8), 1)
    assert prefixes.tokens_seen(chain(1, 2, 3)) == {0: 2 * BLOCK_TOKENS}
    prefixes.add(chain(1), 2)
    prefixes.add(chain(9), 1)
    assert prefixes.tokens_seen(chain(1, 2, 3)) == {0: BLOCK_TOKENS, 2: BLOCK_TOKENS}
    assert len(prefixes) == 4


@pytest.mark.parametrize("hashes", [None, b"", b"short"])
def test_a_prompt_without_whole_blocks_is_known_nowhere(hashes):
    assert PrefixRanks().tokens_seen(hashes) == {}


blocks = st.lists(st.integers(0, 2), max_size=MOST_BLOCKS + 2)


@given(blocks, blocks, st.integers(0, BLOCK_TOKENS - 1))
def test_prompts_have_as_many_hashes_in_common_as_whole_blocks(one, other, rest):
    def hashes(its):
        return prefix_hashes(b"".join(ids(block) * BLOCK_TOKENS for block in its) + ids(5) * rest) or b""

    common = 0
    while common < min(len(one), len(other), MOST_BLOCKS) and one[common] == other[common]:
        common += 1
    a, b = hashes(one), hashes(other)
    assert len(a) == HASH_BYTES * min(len(one), MOST_BLOCKS)
    same = 0
    while same < min(len(a), len(b)) and a[same : same + HASH_BYTES] == b[same : same + HASH_BYTES]:
        same += HASH_BYTES
    assert same == HASH_BYTES * common
