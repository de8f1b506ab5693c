"""SGLang's options: what the user wrote after ``--``, and what multitok adds to it; imports no SGLang."""

from __future__ import annotations

from multitok.engines.settings import EngineSettings

# Options of SGLang that multitok says, or that would start what takes multitok's place.
_NOT_HERE = {
    "--model-path": "it is --model, before --",
    "--model": "it is --model, before --",
    "--disaggregation-mode": "it stands before --",
    "--is-embedding": "it follows from the model's files",
    "--tokenizer-worker-num": "it stands before --, and means multitok's",
    "--detokenizer-worker-num": "it stands before --, and means multitok's",
    "--node-rank": "multitok runs on the first node; start SGLang itself on the others",
    "--use-ray": "Ray actors were never tried behind multitok",
    "--grpc-mode": "multitok is the server",
    "--smg-grpc-mode": "multitok is the server",
}


def sglang_command_line(settings: EngineSettings) -> list[str]:
    """Return the arguments for SGLang's own parser.

    Raises
    ------
    ValueError
        An option can't be given here, or the model is none that SGLang could load.
    """
    if settings.options:
        raise ValueError("engine 'sglang' takes SGLang's own options after --, and no --engine-arg")
    if not settings.files.model_path:
        raise ValueError("engine 'sglang' needs a model, not only a tokenizer")
    given = {argument.partition("=")[0] for argument in settings.command_line if argument.startswith("--")}
    for option, reason in _NOT_HERE.items():
        if option in given:
            raise ValueError(f"{option} can't be given after -- to engine 'sglang': {reason}")
    if settings.disaggregation_mode != "null" and settings.rank > 0:
        # Their schedulers would all register as the same ranks at one bootstrap server.
        raise ValueError(
            "engine 'sglang' takes part in a prefill/decode split with one rank only: give SGLang's --dp-size after --"
        )
    added = ["--model-path", settings.files.model_path]
    if settings.files.task == "embed":
        added.append("--is-embedding")
    if settings.disaggregation_mode != "null":
        added += ["--disaggregation-mode", settings.disaggregation_mode]
    for option, value in (
        ("--context-length", settings.context_length),
        ("--max-running-requests", settings.max_running_requests),
    ):
        if value is None:
            continue
        if option in given:
            raise ValueError(f"{option} is given twice: before -- and after it")
        added += [option, str(value)]
    return added + settings.command_line
