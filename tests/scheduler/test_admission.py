from __future__ import annotations

import pytest

from multitok.config import ServerArgs
from multitok.messages.sampling import SamplingParams
from multitok.messages.to_scheduler import TokenizedGenerateReqInput
from multitok.scheduler.admission import TenantUsage, WaitingQueue
from multitok.scheduler.deadlines import Deadlines
from multitok.scheduler.request import ScheduledRequest
from multitok.scheduler.request_table import RequestTable


def request(number: int, priority: int = 0, owner: str = "w1.1", prompt: int = 1, **fields) -> ScheduledRequest:
    message = TokenizedGenerateReqInput(
        number=number,
        input_ids=b"\1\0\0\0" * prompt,
        sampling_params=SamplingParams(max_new_tokens=1),
        priority=priority,
        **fields,
    )
    return ScheduledRequest(message, owner, "d0", 0.0)


def queue_of(*requests: ScheduledRequest) -> WaitingQueue:
    queue = WaitingQueue()
    for waiting in requests:
        queue.push(waiting)
    return queue


def popped(queue: WaitingQueue) -> list[int]:
    return [queue.pop().number for _ in range(len(queue))]


def test_the_first_to_come_is_the_first_to_go():
    assert popped(queue_of(*map(request, [5, 3, 9, 1]))) == [5, 3, 9, 1]


def test_priority_goes_before_arrival():
    queue = queue_of(request(1), request(2, -1), request(3, 7), request(4), request(5, 7))
    assert popped(queue) == [3, 5, 1, 4, 2]


def test_what_had_begun_before_goes_first():
    queue = queue_of(
        request(1, 9), request(2, resumed_ids=b"\1\0\0\0"), request(3), request(4, resumed_ids=b"\1\0\0\0")
    )
    assert queue.next_has_begun
    queue.remove(2)
    assert queue.next_has_begun
    assert queue.pop().number == 4
    assert not queue.next_has_begun
    assert popped(queue) == [1, 3]
    assert not queue.next_has_begun


def test_one_may_leave_from_anywhere():
    queue = queue_of(*map(request, range(1, 6)))
    assert [queue.remove(number).number for number in (3, 1, 5)] == [3, 1, 5]
    assert len(queue) == 2
    assert 3 not in queue
    assert 2 in queue
    assert popped(queue) == [2, 4]


def test_one_who_does_not_wait_cannot_leave():
    queue = queue_of(request(1))
    assert queue.remove(2) is None
    assert queue.remove(1) is not None
    assert queue.remove(1) is None
    assert len(queue) == 0


def test_an_empty_queue_has_no_next():
    queue = queue_of(request(1))
    queue.remove(1)
    with pytest.raises(IndexError):
        queue.pop()


def test_one_who_left_and_came_again_waits_at_the_end():
    queue = queue_of(request(1), request(2))
    queue.remove(1)
    again = request(1)
    queue.push(again)
    assert len(queue) == 2
    assert queue.pop().number == 2
    assert queue.pop() is again
    assert len(queue) == 0


def test_the_requests_that_wait_are_known():
    queue = queue_of(request(1), request(2, owner="w2.1"), request(3))
    assert [waiting.number for waiting in queue] == [1, 2, 3]
    queue.remove(2)
    assert [waiting.number for waiting in queue] == [1, 3]


def test_those_who_left_are_not_kept_in_memory():
    queue = WaitingQueue()
    for number in range(1, 1001):
        queue.push(request(number))
        queue.remove(number)
    assert len(queue._heap) == 0


def test_those_who_left_are_not_kept_in_memory_while_others_wait():
    queue = queue_of(request(0))
    for number in range(1, 1001):
        queue.push(request(number))
        queue.remove(number)
    assert len(queue._heap) < 100
    assert popped(queue) == [0]


def test_the_ids_that_wait_are_counted():
    queue = queue_of(request(1, prompt=3), request(2, prompt=5), request(3, prompt=7))
    assert queue.tokens == 15
    queue.remove(2)
    assert queue.tokens == 10
    assert queue.pop().number == 1
    assert queue.tokens == 7
    queue.pop()
    assert queue.tokens == 0


def due(deadlines: Deadlines, now: float) -> list[int]:
    return [late.number for late in deadlines.overdue(now)]


def test_whoever_has_not_begun_or_ended_in_time_is_overdue_once():
    deadlines = Deadlines()
    requests = {
        1: request(1, queue_timeout=5.0),
        2: request(2, timeout=3.0),
        3: request(3, queue_timeout=2.0, timeout=9.0),
        4: request(4, queue_timeout=2.0),
        5: request(5),
        6: request(6, timeout=1.0),
        7: request(7, queue_timeout=-1.0),
        8: request(8, timeout=float("nan")),
    }
    for one in requests.values():
        deadlines.add(one)
    assert len(deadlines) == 7
    for number in (3, 4):  # these begin in time
        requests[number].admitted = 1.0
    requests[6].is_over = True
    assert due(deadlines, -2.0) == []
    assert due(deadlines, 0.0) == [7, 8]
    assert due(deadlines, 2.5) == []
    assert due(deadlines, 3.0) == [2]
    assert due(deadlines, 100.0) == [1, 3]
    assert len(deadlines) == 0


def test_deadlines_of_requests_that_are_over_are_not_kept_in_memory():
    deadlines = Deadlines()
    kept = request(0, timeout=1000.0)
    deadlines.add(kept)
    for number in range(1, 20_001):
        one = request(number, timeout=500.0)
        deadlines.add(one)
        one.is_over = True
    assert len(deadlines) <= 1024
    assert due(deadlines, 2000.0) == [0]


def test_each_key_has_its_own_limits():
    usage = TenantUsage(2, 100)
    usage.add(7, 40)
    usage.add(8, 90)
    assert usage.problem_of(7, 60) is None
    assert "61 tokens" in usage.problem_of(7, 61)
    usage.add(7, 10)
    assert "2 requests in flight" in usage.problem_of(7, 1)
    assert usage.problem_of(9, 100) is None
    usage.remove(7, 40)
    assert usage.problem_of(7, 90) is None
    # Without keys there is nobody to tell apart.
    for _ in range(5):
        usage.add(0, 1000)
    assert usage.problem_of(0, 1000) is None
    usage.remove(7, 10)
    usage.remove(8, 90)
    assert len(usage) == 0


def test_nothing_of_a_request_is_left_in_the_table_after_its_end():
    table = RequestTable(ServerArgs(max_requests_per_key=3), 1)
    requests = [request(n, rid=f"r-{n}", group="r", tenant=5, timeout=9.0) for n in (1, 2, 3)]
    for one in requests:
        table.add(one)
    assert table.reason_to_refuse(request(4, tenant=5).message)[0] == 429
    running = table.begin_next()
    assert not table.may_begin
    assert [one.number for one in table.named("r")] == [1, 2, 3]
    assert [one.number for one in table.named("r-2")] == [2]
    for one in requests:
        table.end(one, acknowledged=one is running)
    assert sorted(table.unacknowledged) == [2, 3]
    assert (len(table.running), len(table.waiting), list(table.overdue())) == (0, 0, [])
    assert not table._numbers_by_rid and not table._numbers_by_group and not len(table._tenants)
    for number in (2, 3, 4):
        table.acknowledge(number)
    assert table.find(2) is None
