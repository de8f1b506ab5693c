"""`vllm serve` with its engine core replaced by the replaying one; takes the same options."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if __name__ == "__main__":
    import stub_engine_core
    from vllm.entrypoints.cli.main import main
    from vllm.v1.engine import core

    core.EngineCoreProc.run_engine_core = staticmethod(stub_engine_core.run_engine_core)
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    sys.exit(main())
