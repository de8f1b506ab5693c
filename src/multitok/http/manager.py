"""What the routes need of `TokenizerManager`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from multitok.engines.base import EngineInfo
from multitok.messages.control import ControlOperation, ControlState
from multitok.messages.to_child import ControlReqOutput
from multitok.tokenizer.requests import EmbeddingInput, EmbeddingSink, GenerateInput, GenerateSink, Submission


class ChatTemplate(Protocol):
    """A model's chat template."""

    @property
    def keeps_text(self) -> bool:
        """Whether the prompt holds the text of the last message."""
        ...

    def render(
        self,
        messages: list[dict[str, Any]],
        large: bool = False,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render a conversation, a large one in a thread; a `ValueError` carries words for the client."""
        ...


class Control(Protocol):
    """The way to the control plane."""

    @property
    def state(self) -> ControlState:
        """What operators have set."""
        ...

    async def operate(self, operation: ControlOperation, timeout: float) -> ControlReqOutput:
        """Have an operation carried out, within so many seconds; may raise `RequestError`."""
        ...


class Model(Protocol):
    """One of the models that are served."""

    @property
    def index(self) -> int:
        """Its place among them."""
        ...

    @property
    def name(self) -> str:
        """Name in answers and in /v1/models."""
        ...

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine can do."""
        ...

    @property
    def context_length(self) -> int:
        """Most prompt plus output ids."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        ...

    def is_up(self) -> bool:
        """Whether it can be used."""
        ...

    def check_text(self, text: str) -> None:
        """Refuse a text that no prompt can hold; raises `RequestError`."""
        ...

    async def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[bytes]:
        """Packed int32 ids of texts; may raise `RequestError`."""
        ...

    async def detokenize(self, prompts: list[bytes], skip_special_tokens: bool = True) -> list[str]:
        """Texts of packed int32 ids, which have been checked."""
        ...

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of one id."""
        ...


class Manager(Protocol):
    """The part of `TokenizerManager` that HTTP uses.

    Sinks are called from the event loop's thread, and never from inside `submit` itself.
    """

    @property
    def models(self) -> Sequence[Model]:
        """All that is served."""
        ...

    @property
    def created(self) -> int:
        """Unix time for /v1/models."""
        ...

    @property
    def control(self) -> Control:
        """The way to the control plane."""
        ...

    def submit(self, request: GenerateInput, sink: GenerateSink) -> Submission:
        """Start a generation; may raise `RequestError`."""
        ...

    def submit_embedding(self, request: EmbeddingInput, sink: EmbeddingSink) -> Submission:
        """Start an embedding; may raise `RequestError`."""
        ...

    def server_info(self) -> dict[str, object]:
        """Return what /server_info shows."""
        ...

    def admin_state(self) -> dict[str, object]:
        """Return what /admin/state shows."""
        ...
