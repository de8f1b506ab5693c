"""Kill parts of a server at random under load, and count what becomes of every request.

    make chaos                                     a minute, all modes in turn
    make chaos ARGS="--seconds 1800 --seed 7"      half an hour
    make chaos ARGS="--mode multi --roles tokenizer_worker --signals KILL --others hup"

The status is 1 when something happened that must not.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import msgspec
from server import engine_args

from chaos.plan import ROLES, SIGNALS
from chaos.report import in_words, make_report
from chaos.run import MODES, STEP_MS, Options, carry_out, end_of, expand

_OTHERS = ("pair", "again", "hup", "roll", "ttin", "ttou")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="of the acts and of the load (default: any; it is printed)")
    names = ", ".join(MODES)
    parser.add_argument(
        "--mode", default="all", help=f"of {names}, each with or without +resume (default: %(default)s)"
    )
    parser.add_argument("--roles", type=_words, default=list(ROLES), help=f"which are killed, of {','.join(ROLES)}")
    parser.add_argument("--signals", type=_words, default=list(SIGNALS), help=f"of {','.join(SIGNALS)}")
    parser.add_argument(
        "--others", type=_words, default=list(_OTHERS), help=f"what else is done, of {','.join(_OTHERS)}"
    )
    parser.add_argument("--end", choices=("term", "kill", "random"), default="random", help="how a server is ended")
    parser.add_argument("--clients", type=int, default=60, help="requests at a time (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=600, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=STEP_MS, help="of the simulated engine (default: %(default)g)")
    parser.add_argument("--real-engine", action="store_true", help="the default model, which answers as it did before")
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    parser.add_argument("--log", type=Path, help="file to which the servers' logs are added")
    options = parser.parse_args()
    if options.out is not None:
        # What can't be written is better found out before the run than after it.
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.touch()
    seed = random.SystemRandom().randrange(1 << 16) if options.seed is None else options.seed
    engine = [] if options.real_engine else ["--engine", "simulated", *engine_args(step_ms=options.step_ms)]
    modes = expand(options.mode)
    runs = []
    for i, mode in enumerate(modes):
        run = Options(
            mode=mode,
            seconds=options.seconds / len(modes),
            seed=seed + i,
            roles=[role for role in options.roles if role != "router" or not mode.startswith("single")],
            signals=options.signals,
            others=options.others,
            clients=options.clients,
            longest=options.longest,
            end=end_of(seed + i, options.end),
            engine=engine,
            learn=options.real_engine,
        )
        print(f"{mode}, seed {run.seed}: multitok serve {' '.join(run.command())}", flush=True)
        runs.append(carry_out(run, options.log))
    report = make_report(runs)
    print("\n".join(in_words(report)))
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return int(bool(report.failures))


if __name__ == "__main__":
    raise SystemExit(main())
