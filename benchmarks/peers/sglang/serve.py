"""Start SGLang's own server around the replaying scheduler; takes the options of `python -m sglang.launch_server`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stub_scheduler import run_stub_scheduler

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_stub_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
