"""The standard workloads, and sessions made from them."""

from __future__ import annotations

import msgspec

from multitok.bench.prompts import PromptMaker
from multitok.bench.requests import Body, Settings
from multitok.bench.target import BenchError

# So many different texts; numbers in front make more prompts of them. Long ones take long to cut.
_TEXTS = 256
_TEXT_TOKENS = 400_000
_CHATS = 8


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, how often and by how many.

    Attributes
    ----------
    input_tokens, output_tokens : int
        Of a request, chat template included; with several turns, of what each turn adds.
    clients : int
        Of the closed loop.
    sessions, warmup : int
        How many are measured, and sent before that.
    turns : int
        Requests of a session: a chat that grows.
    system_tokens : int
        Of the system prompt that all chats share.
    long_share, long_tokens, long_output_tokens : float, int, int
        Share of prompts that are long, and how long.
    """

    name: str
    input_tokens: int
    output_tokens: int
    stream: bool
    clients: int
    sessions: int
    warmup: int
    turns: int = 1
    system_tokens: int = 0
    long_share: float = 0.0
    long_tokens: int = 0
    long_output_tokens: int = 0

    def scaled(self, scale: float) -> Workload:
        """Return it with more or fewer sessions, but never fewer than two per client."""
        return msgspec.structs.replace(self, sessions=max(2 * self.clients, round(self.sessions * scale)))

    def describe(self) -> str:
        """Return it in words."""
        parts = [f"{self.input_tokens:,}-token prompts, {self.output_tokens} out"]
        if self.turns > 1:
            parts = [f"chats of {self.turns} turns, shared system prompt of {self.system_tokens}, {parts[0]} per turn"]
        if self.long_share:
            parts = [f"{1 - self.long_share:.0%} {parts[0]}; {self.long_share:.0%} {self.long_tokens:,}-token prompts"]
        parts += ["stream" if self.stream else "no stream", f"{self.clients} clients"]
        return ", ".join(parts)


_A = Workload(name="A", input_tokens=128, output_tokens=64, stream=True, clients=64, sessions=1024, warmup=128)
_B = Workload(name="B", input_tokens=8000, output_tokens=16, stream=False, clients=16, sessions=384, warmup=32)
_C = Workload(name="C", input_tokens=32, output_tokens=512, stream=True, clients=64, sessions=192, warmup=64)
_D = Workload(
    name="D",
    input_tokens=64,
    output_tokens=64,
    stream=True,
    clients=16,
    sessions=48,
    warmup=16,
    turns=20,
    system_tokens=512,
)
_E = Workload(
    name="E",
    input_tokens=128,
    output_tokens=64,
    stream=True,
    clients=32,
    sessions=320,
    warmup=32,
    long_share=0.1,
    long_tokens=100_000,
    long_output_tokens=16,
)
STANDARD = {workload.name: workload for workload in (_A, _B, _C, _D, _E)}


def fit_context(workload: Workload, context_length: int | None) -> Workload:
    """Return the workload with its long prompts cut to what the model takes."""
    if context_length is None or not workload.long_share:
        return workload
    # Some room, since a template or a tokenizer that isn't split by digits may add a little.
    most = context_length - workload.long_output_tokens - 64
    return msgspec.structs.replace(workload, long_tokens=min(workload.long_tokens, most))


def make_sessions(workload: Workload, maker: PromptMaker, settings: Settings, overhead: int) -> list[list[Body]]:
    """Return different sessions of a workload, no more than it takes to be varied.

    Parameters
    ----------
    workload : Workload
        What is asked.
    maker : PromptMaker
        Makes the texts.
    settings : Settings
        Of all requests.
    overhead : int
        Tokens that the chat template adds to a message.
    """
    if workload.turns > 1:
        return _chats(workload, maker, settings)
    # A long template, or one token per digit of a prompt's number, may leave a short prompt too little room.
    tokens = max(workload.input_tokens - overhead, maker.shortest)
    count = min(workload.sessions, _TEXTS, max(4, _TEXT_TOKENS // tokens))
    short = [[settings.body(maker.prompt(tokens), workload.output_tokens)] for _ in range(count)]
    if not workload.long_share:
        return short
    longs = [
        settings.body(maker.prompt(workload.long_tokens - overhead), workload.long_output_tokens)
        for _ in range(max(2, _TEXT_TOKENS // workload.long_tokens))
    ]
    # Every tenth session is long, whichever clients happen to take them.
    every = round(1 / workload.long_share)
    place = iter(range(count))
    return [
        [longs[k // every % len(longs)]] if k % every == every - 1 else short[next(place)]
        for k in range(count - count % every)
    ]


def _chats(workload: Workload, maker: PromptMaker, settings: Settings) -> list[list[Body]]:
    """Return chats whose answers are made up beforehand, so that every server gets the same prompts."""
    if settings.api != "chat":
        raise BenchError(f"workload {workload.name} is made of chats; use --api chat")
    system = {"role": "system", "content": maker.text(workload.system_tokens)}
    chats: list[list[Body]] = []
    for _ in range(min(workload.sessions, _CHATS)):
        messages = [system]
        chat: list[Body] = []
        for turn in range(workload.turns):
            tokens = workload.input_tokens
            messages.append({"role": "user", "content": maker.text(tokens) if turn else maker.prompt(tokens)})
            chat.append(settings.body(messages, workload.output_tokens))
            messages.append({"role": "assistant", "content": maker.text(workload.output_tokens)})
        chats.append(chat)
    return chats
