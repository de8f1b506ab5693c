"""SGLang 0.5.23's own HTTP front end around a scheduler whose next id follows from the last.

    STUB_TOKENS=FILE python tests/engines/sglang_peer.py --model-path FOLDER --skip-tokenizer-init --port 30000 ...

For `real_remote.py`, in an environment that has SGLang; not a part of `make test`. Beside what the scheduler of
benchmarks/peers/sglang does, this one knows end-of-sequence and stop ids, log probabilities and aborts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers" / "sglang"))

import stub_scheduler

EOS = 2


class ChainScheduler(stub_scheduler.StubScheduler):
    """Makes each id from the one before, so that a request can go on from its ids."""

    def _handle(self, message: Any) -> None:
        if isinstance(message, self._io.AbortReq):
            for request in self._running:
                if message.abort_all or request.message.rid.startswith(message.rid):
                    request.limit = -1
        elif isinstance(message, self._io.GetInternalStateReq):
            self._channel.forward(self._io.GetInternalStateReqOutput(internal_state={}))
        else:
            super()._handle(message)

    def _step(self) -> None:
        output = self._new_output()
        wants_logprobs = any(request.message.return_logprob for request in self._running)
        if wants_logprobs:
            output.return_logprob = True
            output.__post_init__()
        unfinished = []
        for request in self._running:
            sampling = request.message.sampling_params
            # What `_add` takes new ids from: the prompt, and behind it what was made.
            self._ids, request.offset = request.message.input_ids, request.prompt_tokens
            token = 100 + (self._ids[-1] * 7 + 13) % 40_000
            stops = set(sampling.stop_token_ids or ()) | (set() if sampling.ignore_eos else {EOS})
            if request.limit >= 0:
                request.made += 1
                self._ids.append(token)
            finish = None
            if request.limit < 0:
                finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            elif token in stops:
                finish = {"type": "stop", "matched": token}
            elif request.made >= request.limit:
                finish = {"type": "length", "length": request.made}
            self._add(output, request, False)
            output.finished_reasons[-1] = finish
            if wants_logprobs:
                self._add_logprobs(output, request)
            if finish is None:
                unfinished.append(request)
        self._running = unfinished
        if output.rids:
            output.time_stats = None
            self._channel.send(output.to_payload(dp_rank=None, is_idle_batch=False))

    def _add_logprobs(self, output: Any, request: Any) -> None:
        chosen = list(output.output_ids[-1]) if request.message.return_logprob else []
        tops = range(request.message.top_logprobs_num or 0)
        output.input_token_logprobs_val.append([])
        output.input_token_logprobs_idx.append([])
        output.input_top_logprobs_val.append([])
        output.input_top_logprobs_idx.append([])
        output.output_token_logprobs_val.append([-0.01 * (1 + token % 50) for token in chosen])
        output.output_token_logprobs_idx.append(chosen)
        output.output_top_logprobs_val.append([[-0.01 * (1 + token % 50) - rank for rank in tops] for token in chosen])
        output.output_top_logprobs_idx.append([[token + rank for rank in tops] for token in chosen])
        output.output_token_ids_logprobs_val.append([])
        output.output_token_ids_logprobs_idx.append([])


def run_chain_scheduler(*arguments: Any, **named: Any) -> None:
    stub_scheduler.StubScheduler = ChainScheduler
    stub_scheduler.run_stub_scheduler(*arguments, **named)


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_chain_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
