"""Fuzz for a chosen time: ``python tests/fuzz/run.py --seconds 60 [TARGET ...]``, or ``make fuzz``.

With atheris the draws are steered by coverage of multitok; without it they are random. What is found ends its target
with a traceback. Seeds that reached something new are kept in the corpus folder and used again.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

_HERE = Path(__file__).parent
sys.path += [str(_HERE), str(_HERE.parent), *(str(_HERE.parent / folder) for folder in ("messages", "http"))]
NAMES = ("message_decoder", "splitter", "detokenizer_step", "request_parser")
# Bytes that a draw may use.
_LONGEST = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*NAMES, []], help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="in all")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"), help="folder of seeds")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    targets = args.targets or NAMES
    if args.inside:
        _fuzz(targets[0], args.seconds, args.corpus)
        return 0
    failed = 0
    for name in targets:
        print(f"== {name}", flush=True)
        # The fuzzer ends its process.
        command = [sys.executable, __file__, name, "--inside", "--seconds", str(max(1, args.seconds // len(targets)))]
        failed += subprocess.run([*command, "--corpus", str(args.corpus)], check=False).returncode != 0
    print(f"{len(targets) - failed} of {len(targets)} targets found nothing")
    return 1 if failed else 0


def _fuzz(name: str, seconds: int, corpus: Path) -> None:
    try:
        import atheris
    except ImportError:
        _fuzz_at_random(name, seconds)
        return
    # Which request could not be served is no news here.
    logging.disable()
    with atheris.instrument_imports(include=["multitok"]):
        import targets
    folder = corpus / name
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        # From nothing it is a long way to inputs that are long enough for a draw.
        for i in range(32):
            (folder / f"seed{i}").write_bytes(random.Random(i).randbytes(_LONGEST))
    one_input = targets.TARGETS[name].hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    options = [f"-max_total_time={seconds}", f"-max_len={_LONGEST}", "-len_control=0", "-rss_limit_mb=4096"]
    options += [f"-artifact_prefix={corpus}/{name}-", "-timeout=60", "-print_final_stats=1", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(folder)], one_input)
    atheris.Fuzz()


def _fuzz_at_random(name: str, seconds: int) -> None:
    import targets

    one_input = targets.TARGETS[name].hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        one_input(os.urandom(_LONGEST))
        count += 1
    print(f"{count} executions at random: atheris is not installed")


if __name__ == "__main__":
    sys.exit(main())
