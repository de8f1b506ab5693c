"""Answer one question about multitok that an average doesn't.

    python benchmarks/scenario.py flat-cost     CPU per token at 32,000 output tokens against 500
    python benchmarks/scenario.py memory        RSS over 10,000 finished requests
    python benchmarks/scenario.py streams       2,000 streams at once on one worker
    python benchmarks/scenario.py latency       added p99 inter-token delay at half of saturation
    python benchmarks/scenario.py health        /health while 100k-token prompts and a 27 MB body arrive
    python benchmarks/scenario.py bodies        how long /health waits beside bodies of very many small things

Options of `multitok serve` come after --, such as `-- --detokenizer-worker-num 0`.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module

from harness.arguments import add_data_options, add_result_options, environment_of
from harness.machine import describe_machine
from harness.results import write_result
from scenarios.context import Context

from multitok.bench.target import BenchError

NAMES = ("flat-cost", "memory", "streams", "latency", "health", "bodies")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    add_result_options(parser, "multitok")
    add_data_options(parser)
    parser.add_argument("options", nargs="*", help="after --: more options of multitok serve")
    options = parser.parse_args()
    context = Context(environment_of(options), options.scale, options.options)
    machine = describe_machine()
    try:
        figures = import_module(f"scenarios.{options.name.replace('-', '_')}").run(context)
    except BenchError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(figures, indent=1))
    result = {
        "kind": "scenario",
        "label": options.label,
        "scenario": options.name,
        "machine": machine,
        "scale": options.scale,
        "options": options.options,
        "tokenizer": context.data.tokenizer_hash,
        "figures": figures,
    }
    write_result(options.out / f"scenario-{options.name}-{options.label}.json", result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
