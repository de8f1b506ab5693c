"""A scheduler process with its engine."""

from __future__ import annotations

import gc
import logging

import zmq

from multitok.config import PortArgs, ServerArgs
from multitok.engines.registry import create_engine, parse_engine_args
from multitok.engines.settings import EngineSettings
from multitok.ipc.controlled import Controlled
from multitok.ipc.launcher_channel import LauncherChannel
from multitok.scheduler.scheduler import LoadSlot, Scheduler
from multitok.tokenizer.errors import ModelError
from multitok.tokenizer.model_files import ModelFiles

_log = logging.getLogger(__name__)
# How long a detokenizer that doesn't read can hold up the end.
_LAST_WORDS_MS = 1000


def run_scheduler_process(server_args: ServerArgs, port_args: PortArgs, files: ModelFiles, slot: LoadSlot) -> None:
    """Load the engine and serve until the launcher says stop.

    Parameters
    ----------
    server_args : ServerArgs
        The options of this rank's model.
    port_args : PortArgs
        Where the parts meet, and which rank this is.
    files : ModelFiles
        That model.
    slot : LoadSlot
        This rank's place on the load board.

    Raises
    ------
    ModelError
        The engine can't be made from these options.
    LauncherGone
        The launcher has exited.
    """
    channel = LauncherChannel(port_args.channel_fd)
    controlled = Controlled(channel)
    try:
        settings = EngineSettings(
            files=files,
            options=parse_engine_args(server_args.engine_arg),
            command_line=server_args.engine_command_line,
            max_running_requests=server_args.max_running_requests,
            context_length=server_args.context_length,
            resume=server_args.resume_generation,
            disaggregation_mode=server_args.disaggregation_mode,
            rank=port_args.index,
            ranks=len(port_args.scheduler_ipc_names),
            runtime_dir=port_args.runtime_dir,
        )
        engine = create_engine(server_args.engine, settings)
    except ValueError as error:
        raise ModelError(str(error)) from error
    try:
        scheduler = Scheduler(
            server_args,
            port_args,
            channel=channel,
            engine=engine,
            controlled=controlled,
            model_path=files.model_path,
            slot=slot,
        )
        # What loading left behind never needs to be looked at again.
        gc.collect()
        gc.freeze()
        scheduler.event_loop()
    finally:
        engine.shutdown()
        # The process ends without waiting for anything, and what was sent last is the failure of every request.
        zmq.Context.instance().destroy(linger=_LAST_WORDS_MS)
