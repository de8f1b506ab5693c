"""Whatever arrives at an owner's address, its requests go on."""

from __future__ import annotations

import asyncio

import pytest
from owner_under_test import owner_of, text_rows, until

from garbage import garbage
from multitok.messages.base import FinishReason


@pytest.mark.parametrize("seed", range(3))
def test_an_owner_goes_on_whatever_it_is_sent(make_site, seed):
    async def main() -> None:
        async with owner_of(make_site()) as owner:
            number, call, sink = await owner.start_one()
            owner.deliver(text_rows((number, "a", 0, None)))
            for frames in garbage(owner.site.token, seed):
                owner.site.send_frames("w1.1", frames)
            owner.deliver(text_rows((number, "b", 1, FinishReason("length"))))
            await until(lambda: call.ended)
            assert sink.text == "ab"

    asyncio.run(main())
