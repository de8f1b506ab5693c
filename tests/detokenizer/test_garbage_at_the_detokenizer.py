"""Whatever arrives at a detokenizer's address, its loop goes on."""

from __future__ import annotations

import pytest

from garbage import garbage, is_harmless
from multitok.messages.to_detokenizer import BatchTokenIDOutput
from multitok.messages.to_scheduler import DecodeParams
from multitok.messages.to_tokenizer import BatchStrOutput, ToTokenizer
from parts import pack


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_a_detokenizer_goes_on_whatever_it_is_sent(make_site, workers, seed):
    # The last rank: no damaged order is likely to say that it has died.
    site = make_site(workers=workers, ranks=60)
    site.ready_child("detokenizer", ["d0"])
    owner = site.inbox("w1.1", ToTokenizer)
    for frames in garbage(site.token, seed):
        if is_harmless(frames, site.token):
            site.send_frames("d0", frames)
    for first, text in enumerate("abc"):
        site.send(
            "d0",
            BatchTokenIDOutput(
                numbers=[1 << 60],
                http_worker_ipcs=["w1.1"],
                output_ids=pack([ord(text)]),
                first_indexes=[first],
                decode_params=None if first else [DecodeParams()],
                rank=59,
            ),
        )
    heard = ""
    while heard != "abc":
        output = owner.next()
        if isinstance(output, BatchStrOutput) and output.numbers == [1 << 60]:
            heard += output.output_strs[0]
