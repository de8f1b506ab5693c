"""Every option and its default, once: `ServerArgs` is what the user chose, `PortArgs` what a process binds.

Both cross to the children as msgpack in shared memory; the command line (`cli.options`) is derived from the
annotations here.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
RoutingPolicyName = Literal["prefix-affinity", "least-work", "round-robin"]
_HIDDEN = "(hidden)"


class OptionError(ValueError):
    """An option can't be used, or a file that it names; the message is for the user."""


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of ``multitok serve``."""

    model: Annotated[
        list[str],
        Meta(
            description="GGUF file, OpenVINO folder, Hugging Face folder or hub id (default: SmolLM2-135M-Instruct); "
            "repeatable, then with the names that clients use: chat=PATH"
        ),
    ] = []
    model_arg: Annotated[
        list[str],
        Meta(description="option of one of the models, chat:context-length=4096; repeatable (docs/deployment.md)"),
    ] = []
    served_model_name: Annotated[
        str | None, Meta(description="name in /v1/models and in answers, of a single model")
    ] = None
    tokenizer: Annotated[
        str | None, Meta(description="folder with tokenizer.json, in place of the model's own tokenizer")
    ] = None
    engine: Annotated[
        str,
        Meta(
            description="openvino, vllm, sglang; remote: engines that run elsewhere, over HTTP; or simulated: runs no "
            "model, for tests and benchmarks (docs/engines.md)"
        ),
    ] = "openvino"
    engine_arg: Annotated[
        list[str],
        Meta(description="KEY=VALUE option of the engine itself, or of one model's: chat:KEY=VALUE; repeatable"),
    ] = []
    # On the command line, what stands after ``--``.
    engine_command_line: list[str] = []
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 30000
    tokenizer_worker_num: Annotated[
        int, Meta(ge=1, le=256, description="HTTP workers; 1 is single mode, without a router")
    ] = 1
    detokenizer_worker_num: Annotated[
        int, Meta(ge=0, le=64, description="detokenizer processes; 0: each HTTP worker decodes for itself")
    ] = 1
    data_parallel_size: Annotated[int, Meta(ge=1, le=64, description="schedulers, each with its own engine")] = 1
    routing_policy: Annotated[
        RoutingPolicyName,
        Meta(description="which scheduler a request goes to, where there are several (docs/deployment.md)"),
    ] = "prefix-affinity"
    disaggregation_mode: Annotated[
        Literal["null", "prefill", "decode"],
        Meta(description="role in a prefill/decode split, for an engine that takes part (docs/deployment.md)"),
    ] = "null"
    context_length: Annotated[
        PositiveInt | None, Meta(description="most prompt plus output ids; default: the model's")
    ] = None
    max_running_requests: Annotated[
        PositiveInt | None, Meta(description="requests in the engine at once, per rank; default: the engine's")
    ] = None
    max_queued_requests: Annotated[
        int, Meta(ge=0, description="requests waiting for the engine, per rank; past it a client gets 503")
    ] = 2048
    max_queued_tokens: Annotated[
        PositiveInt | None,
        Meta(description="prompt ids waiting for the engine, per rank; past it a client gets 503 (default: no limit)"),
    ] = None
    request_timeout: Annotated[
        PositiveFloat | None, Meta(description="seconds that a request may take in all (default: no limit)")
    ] = None
    queue_timeout: Annotated[
        PositiveFloat | None,
        Meta(description="seconds that a request may wait for the engine; then 503 (default: no limit)"),
    ] = None
    when_paused: Annotated[
        Literal["hold", "refuse"],
        Meta(description="what becomes of requests that come during /pause_generation: they wait, or get 503"),
    ] = "hold"
    max_requests_per_key: Annotated[
        PositiveInt | None,
        Meta(description="requests in flight per API key and rank; past it 429 (default: no limit)"),
    ] = None
    max_tokens_per_key: Annotated[
        PositiveInt | None,
        Meta(description="prompt ids plus token limits in flight per API key and rank; past it 429"),
    ] = None
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 32 * 1024 * 1024
    max_header_bytes: Annotated[int, Meta(ge=1024, description="largest request head: line and headers")] = 64 * 1024
    max_prompts: Annotated[int, Meta(ge=1, description="most prompts in one request, and most choices n")] = 2048
    max_prompt_tokens: Annotated[
        PositiveInt | None, Meta(description="most ids of one prompt; default: what the context has room for")
    ] = None
    max_stop_strings: Annotated[int, Meta(ge=0, description="most stop strings, and most stop ids")] = 64
    max_logit_bias: Annotated[int, Meta(ge=0, description="most logit_bias entries")] = 1024
    max_request_id_length: Annotated[int, Meta(ge=1, description="longest X-Request-Id or rid, characters")] = 256
    keep_alive_timeout: Annotated[int, Meta(ge=1, description="seconds an idle connection is kept")] = 75
    receive_timeout: Annotated[
        PositiveFloat, Meta(description="seconds that a request's head, and each further MB of its body, may take")
    ] = 30.0
    slow_client_timeout: Annotated[
        PositiveFloat, Meta(description="seconds that a client may leave its stream unread before it is dropped")
    ] = 30.0
    api_key: Annotated[list[str], Meta(description="key that clients must show; repeatable")] = []
    api_key_file: Annotated[str | None, Meta(description="file with such keys, one per line")] = None
    admin_api_key: Annotated[
        str | None, Meta(description="key for the control routes; default: those of --api-key")
    ] = None
    ssl_certfile: Annotated[str | None, Meta(description="TLS certificate chain, PEM; read anew on SIGHUP")] = None
    ssl_keyfile: Annotated[str | None, Meta(description="TLS private key, PEM")] = None
    cors_origin: Annotated[
        list[str], Meta(description="origin whose web pages may call the API, or *; repeatable (default: none)")
    ] = []
    resume_generation: Annotated[
        bool,
        Meta(description="go on with running requests after a scheduler's death, where that is exact"),
    ] = False
    hang_timeout: Annotated[
        PositiveFloat, Meta(description="seconds of silence after which a process counts as dead and is replaced")
    ] = 30.0
    step_timeout: Annotated[
        PositiveFloat, Meta(description="seconds that one engine step may take before the scheduler counts as dead")
    ] = 300.0
    drain_timeout: Annotated[
        float, Meta(ge=0, description="seconds that running requests get to finish after SIGTERM")
    ] = 30.0
    start_timeout: Annotated[float, Meta(gt=0, description="seconds that the parts get to become ready")] = 600.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe messages shown")
    ] = "info"
    cache_dir: Annotated[
        str | None, Meta(description="where converted tokenizers are kept; default: the user's cache directory")
    ] = None

    @property
    def multi(self) -> bool:
        """Whether there are several HTTP workers, and so a router."""
        return self.tokenizer_worker_num > 1

    def without_keys(self) -> ServerArgs:
        """Return these options as they may be shown: with a mark in place of each key."""
        return msgspec.structs.replace(
            self,
            api_key=[_HIDDEN] * len(self.api_key),
            admin_api_key=_HIDDEN if self.admin_api_key is not None else None,
            engine_arg=[f"api_key={_HIDDEN}" if arg.startswith("api_key=") else arg for arg in self.engine_arg],
        )


# What each model may have of its own (--model-arg); the options themselves hold for all others.
MODEL_OPTIONS = (
    "tokenizer",
    "engine",
    "engine_command_line",
    "data_parallel_size",
    "context_length",
    "max_running_requests",
    "max_queued_requests",
    "max_queued_tokens",
    "request_timeout",
    "queue_timeout",
    "max_requests_per_key",
    "max_tokens_per_key",
    "max_prompt_tokens",
    "resume_generation",
    "step_timeout",
)


class ModelPorts(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as far as every part has to know it.

    Attributes
    ----------
    name : str
        Name that it is served under.
    tokenizer_file : str
        Its tokenizer.json.
    vocab_size : int
        Ids are below it; may exceed the tokenizer's, where the model's table is padded.
    ranks : list of int
        The ranks that serve it.
    """

    name: str
    tokenizer_file: str
    vocab_size: int
    ranks: list[int]


class PortArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Where the parts of one start meet, and which part this process is.

    Attributes
    ----------
    runtime_dir : str
        Private directory (0700) of the unix sockets; address ``x`` is the socket ``runtime_dir/x``.
    start_token : bytes
        8 random bytes in front of every frame of this start.
    models : list of ModelPorts
        What is served; messages name a model by its place in this list.
    router_ipc_name : str or None
        Address that HTTP workers send requests to; None in single mode, where they go to the schedulers directly.
    control_ipc_name : str or None
        Address for control replies: the router's; None in single mode, where they go straight to their owner.
    scheduler_ipc_names : list of str
        Input address of each rank's scheduler; ranks are numbered over all models.
    detokenizer_ipc_names : list of str
        Input address of each detokenizer; empty when owners decode for themselves.
    index, life : int
        Which one of its role this process is, and which life of it.
    slot : int
        Of an HTTP worker its place on the load board.
    channel_fd : int
        Descriptor of this process's channel to the launcher.
    listen_fds : dict of str to int
        Listening sockets that were passed to this process, by address; ``http`` is the shared HTTP socket.
    """

    runtime_dir: str
    start_token: bytes
    models: list[ModelPorts]
    router_ipc_name: str | None
    control_ipc_name: str | None
    scheduler_ipc_names: list[str]
    detokenizer_ipc_names: list[str]
    index: int = 0
    life: int = 1
    slot: int = 0
    channel_fd: int = -1
    listen_fds: dict[str, int] = {}

    def endpoint(self, address: str) -> str:
        """ZeroMQ endpoint of a short address."""
        return f"ipc://{self.runtime_dir}/{address}"

    @property
    def model_of_rank(self) -> list[int]:
        """Which of the models each rank serves."""
        models = {rank: index for index, model in enumerate(self.models) for rank in model.ranks}
        return [models[rank] for rank in range(len(self.scheduler_ipc_names))]
