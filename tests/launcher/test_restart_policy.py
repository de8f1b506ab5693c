from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multitok.launcher.restart_policy import CRASH_LIMIT, HEALTHY_S, RestartPolicy

PART = ("scheduler", 0)


def crash(policy, ready_for=None, part=PART):
    return policy.delay_after_death(part, ready_for, killed_from_outside=False)


def kill(policy, ready_for=None, part=PART):
    return policy.delay_after_death(part, ready_for, killed_from_outside=True)


def test_a_part_that_keeps_crashing_waits_longer_each_time_and_then_is_given_up():
    policy = RestartPolicy()
    assert [crash(policy) for _ in range(CRASH_LIMIT + 1)] == [0, 0.5, 1, 2, 4, None]


def test_a_crash_at_each_first_request_is_a_crash_in_a_row():
    policy = RestartPolicy()
    assert [crash(policy, ready_for=1.0) for _ in range(CRASH_LIMIT + 1)][-1] is None


def test_a_part_that_is_killed_before_it_is_ready_is_given_up_too():
    policy = RestartPolicy()
    assert [kill(policy) for _ in range(CRASH_LIMIT + 1)][-1] is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=100))
def test_a_part_that_is_killed_when_it_is_ready_starts_again_at_once(lives):
    policy = RestartPolicy()
    assert [kill(policy, ready_for) for ready_for in lives] == [0] * len(lives)


@given(st.lists(st.booleans(), max_size=100))
def test_deaths_are_counted_anew_after_a_good_life(crashes):
    policy = RestartPolicy()
    for _ in range(CRASH_LIMIT):
        crash(policy)
    for crashed in crashes:
        assert (crash(policy, HEALTHY_S) if crashed else kill(policy, 0.1)) == 0


def test_parts_are_counted_apart():
    policy = RestartPolicy()
    for _ in range(CRASH_LIMIT):
        crash(policy)
    assert crash(policy, part=("scheduler", 1)) == 0
    assert crash(policy) is None


def test_a_part_that_is_forgiven_is_tried_again():
    policy = RestartPolicy()
    for _ in range(CRASH_LIMIT + 1):
        crash(policy)
    policy.forgive(PART)
    assert crash(policy) == 0
