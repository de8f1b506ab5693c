"""What a body's refusal says."""

from __future__ import annotations

import msgspec
import pytest

from multitok.http.admin.control import PauseRequest
from multitok.http.decode import decode_body
from multitok.tokenizer.requests import RequestError


def test_a_word_that_is_not_allowed_is_refused_with_those_that_are():
    with pytest.raises(RequestError) as caught:
        decode_body(msgspec.json.Decoder(PauseRequest), b'{"mode": "stop"}')
    assert caught.value.status == 400
    assert caught.value.message == "mode: Invalid enum value 'stop'; it is one of 'wait', 'abort', 'keep', 'in_place'"
