from __future__ import annotations

import pytest

from multitok.messages.sampling import SamplingParams
from multitok.messages.to_scheduler import TokenizedGenerateReqInput
from multitok.scheduler.admission import WaitingQueue
from multitok.scheduler.request import ScheduledRequest


def request(number: int, priority: int = 0, owner: str = "w1.1") -> ScheduledRequest:
    message = TokenizedGenerateReqInput(
        number=number, input_ids=b"\1\0\0\0", sampling_params=SamplingParams(max_new_tokens=1), priority=priority
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
