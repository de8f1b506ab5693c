"""Finding out what an address is: another multitok, SGLang or vLLM, and what it can do."""

from __future__ import annotations

import msgspec

from multitok.engines.base import EngineInfo
from multitok.engines.remote.api import GREEDY_RESUMABLE, PeerApi, PeerInfo
from multitok.engines.remote.connection import ConnectionPool
from multitok.engines.remote.fetch import fetch
from multitok.engines.remote.generate_api import MultitokApi, SglangApi
from multitok.engines.remote.options import ApiName
from multitok.engines.remote.vllm_api import TOKENS_ROUTE, VllmApi

_TIMEOUT_S = 10.0
_COMMON = [
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop_token_ids", "ignore_eos", "logprobs", "logit_bias"),
]
_SGLANG_FIELDS = ["bootstrap_host", "bootstrap_port", "bootstrap_room"]
# Their own limits are 20 in vLLM by default, and none in SGLang.
_TOP_LOGPROBS = 20
# Of SGLang's longest request: what its scheduler keeps for itself, see `Scheduler.init_req_max_new_tokens` there.
_SGLANG_BEYOND_INPUT = 4


class WrongEngine(ValueError):
    """The address answers, but not as an engine that can be used."""


class NotReady(OSError):
    """It can't be said yet what the address is."""


class _MultitokModel(msgspec.Struct):
    model: str
    engine: EngineInfo
    ranks: list[int]


class _Multitok(msgspec.Struct):
    """Of multitok's /server_info."""

    models: list[_MultitokModel]


class _Sglang(msgspec.Struct):
    """Of SGLang's /server_info."""

    model_path: str
    served_model_name: str | None = None
    version: str = "of unknown version"
    skip_tokenizer_init: bool = False
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    enable_lora: bool | None = None
    is_embedding: bool | None = None
    max_req_input_len: int | None = None
    max_running_requests: int | None = None


class _VllmModel(msgspec.Struct):
    id: str
    owned_by: str | None = None
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _VllmModels(msgspec.Struct):
    data: list[_VllmModel]


async def probe(pool: ConnectionPool, wanted: ApiName) -> PeerApi:
    """Find out what an address is.

    Parameters
    ----------
    pool : ConnectionPool
        To it.
    wanted : str
        What the user says that it is, or 'auto'.

    Raises
    ------
    OSError
        There is no answer, or not yet.
    WrongEngine
        It is something else.
    """
    if wanted != "vllm":
        status, body = await _get(pool, "/server_info")
        if status == 200:
            found = _of_server_info(body)
            if found is not None and wanted in ("auto", found.info.kind):
                return found
            if wanted != "auto":
                raise WrongEngine(f"it is no {wanted}" + (f", but {found.info.kind}" if found else ""))
        elif wanted != "auto":
            raise WrongEngine(f"it is no {wanted}: /server_info answers {status}")
    status, body = await _get(pool, "/v1/models")
    if status != 200:
        raise WrongEngine(f"it is none of multitok, sglang and vllm: /server_info and /v1/models answer {status}")
    return await _of_models(pool, body)


async def _get(pool: ConnectionPool, route: str) -> tuple[int, bytes]:
    status, body = await fetch(pool, "GET", route, b"", _TIMEOUT_S)
    if status in (401, 403):
        raise WrongEngine(f"it does not take the key: {route} answers {status}")
    if status >= 500:
        raise NotReady(f"{route} answers {status}")
    return status, body


def _of_server_info(body: bytes) -> PeerApi | None:
    """Return what a /server_info is of; None: neither of the two."""
    try:
        return _multitok(msgspec.json.decode(body, type=_Multitok))
    except msgspec.DecodeError:
        pass
    try:
        return _sglang(msgspec.json.decode(body, type=_Sglang))
    except msgspec.DecodeError:
        return None


def _multitok(answer: _Multitok) -> PeerApi:
    # As it chooses for a request that names none.
    model = next((model for model in answer.models if model.engine.task == "generate"), None)
    if model is None:
        raise WrongEngine("it has no model that generates")
    engine = model.engine
    info = PeerInfo(
        kind="multitok",
        version=f"{engine.name} {engine.version}",
        model=_last_part(model.model),
        vocab_size=engine.vocab_size,
        context_length=engine.context_length,
        max_running=engine.max_running_requests * max(1, len(model.ranks)),
        eos_token_ids=engine.eos_token_ids,
        sampling=engine.sampling,
        # Not by a name of its own in /generate; a schema says the same.
        grammars=[kind for kind in engine.grammars if kind != "json_object" or "json_schema" in engine.grammars],
        fields=engine.fields,
        resumable=engine.resumable,
        top_logprobs=engine.top_logprobs,
        simulated=engine.simulated,
    )
    return MultitokApi(info, model.model)


def _sglang(answer: _Sglang) -> PeerApi:
    if answer.is_embedding:
        raise WrongEngine("its model does not generate")
    sampling, grammars = list(_COMMON), []
    if answer.enable_deterministic_inference:
        # Otherwise its sampler doesn't look at seeds.
        sampling.append("seed")
    if not answer.skip_tokenizer_init:
        # What it needs its tokenizer for.
        sampling += ["min_new_tokens", "grammar"]
        grammars = ["json_object", "json_schema", "regex", "ebnf"]
    longest = answer.max_req_input_len
    hint = ""
    if not answer.incremental_streaming_output:
        hint = "it repeats all ids in every event; start it with --incremental-streaming-output"
    elif not answer.skip_tokenizer_init:
        hint = "it makes text that nobody reads; --skip-tokenizer-init saves that, but it can't enforce grammars then"
    info = PeerInfo(
        kind="sglang",
        version=answer.version,
        model=_last_part(answer.served_model_name or answer.model_path),
        context_length=None if longest is None else longest + _SGLANG_BEYOND_INPUT,
        max_running=answer.max_running_requests,
        sampling=sampling,
        grammars=grammars,
        fields=[*_SGLANG_FIELDS, *(["adapter"] if answer.enable_lora else [])],
        resumable=[name for name in GREEDY_RESUMABLE if name in sampling],
        top_logprobs=_TOP_LOGPROBS,
        hint=hint,
    )
    return SglangApi(info)


async def _of_models(pool: ConnectionPool, body: bytes) -> PeerApi:
    try:
        models = msgspec.json.decode(body, type=_VllmModels).data
    except msgspec.DecodeError as error:
        raise WrongEngine(f"/v1/models makes no sense: {error}") from None
    # The others are its adapters.
    base = next((model for model in models if model.owned_by == "vllm" and model.parent is None), None)
    if base is None:
        raise WrongEngine("it is none of multitok, sglang and vllm")
    # Without --enable-scale-out the route is there, and forbidden.
    status, _ = await fetch(pool, "POST", TOKENS_ROUTE, b"{}", _TIMEOUT_S)
    tokens = status not in (401, 403, 404)
    status, answer = await _get(pool, "/version")
    info = PeerInfo(
        kind="vllm",
        version=_version(answer) if status == 200 else "of unknown version",
        model=_last_part(base.id),
        context_length=base.max_model_len,
        sampling=[*_COMMON, "min_new_tokens", "seed", "grammar"],
        grammars=["json_object", "json_schema", "regex", "ebnf"],
        fields=["adapter", "kv_transfer_params"],
        resumable=GREEDY_RESUMABLE,
        top_logprobs=_TOP_LOGPROBS,
        hint="" if tokens else "it makes text that nobody reads; start it with --enable-scale-out or --tokens-only",
    )
    return VllmApi(info, base.id, tokens=tokens)


def _version(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=dict[str, str]).get("version", "of unknown version")
    except msgspec.DecodeError:
        return "of unknown version"


def _last_part(name: str | None) -> str | None:
    """Return what is left of a model's name or path where folders differ from machine to machine."""
    return None if name is None else name.rstrip("/").rpartition("/")[2] or None
