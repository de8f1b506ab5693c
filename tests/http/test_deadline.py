"""A deadline calls back when its time has come, whatever the loop's timer does."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from multitok.http.deadline import Deadline

WAIT = 20.0


@pytest.mark.parametrize("runner", [uvloop.run, asyncio.run])
def test_it_can_be_moved_either_way(runner) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[float] = asyncio.Queue()
        deadline = Deadline(loop, lambda: due.put_nowait(loop.time()))
        for earlier, later in ((100.0, 0.02), (0.02, 0.06)):
            began = loop.time()
            deadline.set(earlier)
            deadline.set(later)
            assert await asyncio.wait_for(due.get(), WAIT) - began > later - 0.002
        deadline.set(0.01)
        deadline.clear()
        other: asyncio.Future[None] = loop.create_future()
        loop.call_later(0.05, other.set_result, None)
        await other
        assert due.empty()
        # The timer is where it was; it is set anew.
        deadline.set(0.01)
        await asyncio.wait_for(due.get(), WAIT)
        deadline.set(0.01)
        deadline.close()
        other = loop.create_future()
        loop.call_later(0.05, other.set_result, None)
        await other
        assert due.empty()

    runner(main())


def test_moving_it_later_does_not_touch_the_loop() -> None:
    class Loop:
        armed = 0

        def time(self) -> float:
            return 0.0

        def call_at(self, *_: object) -> None:
            self.armed += 1

    loop = Loop()
    deadline = Deadline(loop, lambda: None)  # type: ignore[arg-type]
    for seconds in (5, 6, 7, 75, 30, 75):
        deadline.set(seconds)
    assert loop.armed == 1
