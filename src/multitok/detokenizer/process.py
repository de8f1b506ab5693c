"""The detokenizer process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from tokenizers import Tokenizer

from multitok.config import PortArgs, ServerArgs
from multitok.detokenizer.incremental import TextDecoder
from multitok.detokenizer.manager import DetokenizerManager
from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel

_log = logging.getLogger(__name__)


def run_detokenizer_process(
    server_args: ServerArgs,
    port_args: PortArgs,
    detokenizer_manager_class: type[DetokenizerManager] = DetokenizerManager,
    *,
    beat: Callable[[float], None],
) -> None:
    """Run a detokenizer until the launcher says stop.

    Parameters
    ----------
    server_args : ServerArgs
        The user's options; ``tokenizer_worker_num`` decides which loop runs.
    port_args : PortArgs
        Where the parts meet, and which detokenizer this is.
    detokenizer_manager_class : type
        What runs.
    beat : callable
        Called at least every second while the loop goes round, with the seconds that it was late.

    Raises
    ------
    LauncherGone
        The launcher has exited.
    """
    channel = LauncherChannel(port_args.channel_fd)
    controlled = Controlled(channel)
    decoders = [
        TextDecoder.from_tokenizer(Tokenizer.from_file(model.tokenizer_file), model.vocab_size)
        for model in port_args.models
    ]
    for model, decoder in zip(port_args.models, decoders, strict=True):
        _log.info("%s: decoding by %s", model.name, decoder.strategy)
    # What loading left behind, tables of 100,000 entries among it, never needs to be looked at again.
    gc.collect()
    gc.freeze()
    manager = detokenizer_manager_class(
        server_args, port_args, channel=channel, controlled=controlled, decoders=decoders, beat=beat
    )
    if server_args.multi:
        manager.multi_http_worker_event_loop()
    else:
        manager.event_loop()
