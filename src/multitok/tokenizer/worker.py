"""TokenizerWorker: one of N HTTP workers, behind the router."""

from __future__ import annotations

from typing import Any

import msgspec

from multitok.config import ServerArgs
from multitok.ipc.sender_wrapper import attach_multi_http_worker_info
from multitok.messages.base import BaseBatchReq, BaseReq
from multitok.tokenizer.manager import TokenizerManager


class TokenizerWorker(TokenizerManager):
    """`TokenizerManager` as one of several: the router chooses ranks, and no bootstrap server is started here.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options.
    *args, **kwargs
        As for `TokenizerManager`.
    """

    def __init__(self, server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
        # With the mode null no bootstrap server is started; /server_info tells the real one.
        super().__init__(msgspec.structs.replace(server_args, disaggregation_mode="null"), *args, **kwargs)
        self.server_args = server_args

    def attach_multi_http_worker_info(self, message: BaseReq | BaseBatchReq) -> None:
        """Stamp this worker's address on a message."""
        attach_multi_http_worker_info(self.tokenizer_ipc_name, message)
