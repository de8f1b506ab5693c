"""All addresses together: what they promise in common, and the wait for them at the start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from multitok.engines.base import EngineInfo
from multitok.engines.remote.api import PeerInfo
from multitok.engines.remote.options import RemoteOptions
from multitok.engines.remote.peer import Peer
from multitok.engines.remote.probe import WrongEngine
from multitok.engines.settings import EngineSettings

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_DEFAULT_RUNNING = 256


class Fleet:
    """The addresses.

    Parameters
    ----------
    options : RemoteOptions
        The user's.
    settings : EngineSettings
        The tokenizer's side: its vocabulary, end-of-sequence ids and context.
    on_down : callable
        Called with an address that has gone silent.

    Attributes
    ----------
    peers : list of Peer
        One per address.
    """

    def __init__(self, options: RemoteOptions, settings: EngineSettings, on_down: Callable[[Peer], None]) -> None:
        self._options = options
        self._settings = settings
        self._info: EngineInfo | None = None
        self.peers = [Peer(a, options, accept=self._accept, on_down=on_down) for a in options.addresses]

    @property
    def any_is_up(self) -> bool:
        """Whether there is anybody to send requests to."""
        return any(peer.up for peer in self.peers)

    async def start(self) -> EngineInfo:
        """Wait until one of them answers, and say what they can do together.

        Raises
        ------
        ValueError
            None does in time, or one is no engine that fits.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.wait
        said: dict[Peer, str] = {}
        while True:
            await asyncio.gather(*(self._ask(peer) for peer in self.peers if not peer.up))
            missing = [peer for peer in self.peers if not peer.up]
            if len(missing) < len(self.peers):
                break
            for peer in missing:
                if said.get(peer) != peer.problem:
                    said[peer] = peer.problem
                    _log.info("waiting for %s: %s", peer.url, peer.problem)
            if loop.time() >= deadline:
                problems = "; ".join(f"{peer.url}: {peer.problem}" for peer in missing)
                raise ValueError(f"engine 'remote': no engine has answered for {self._options.wait:g} s: {problems}")
            await asyncio.sleep(min(_RETRY_S, max(0.01, deadline - loop.time())))
        for peer in missing:
            _log.warning("%s is down: %s; it is used as soon as it answers", peer.url, peer.problem)
        self._info = info = self._promise([peer.api.info for peer in self.peers if peer.api is not None])
        for peer in self.peers:
            if peer.api is not None:
                _log.info("%s is up: %s %s", peer.url, peer.api.info.kind, peer.api.info.version)
        return info

    async def _ask(self, peer: Peer) -> None:
        try:
            await peer.find_out()
        except WrongEngine as error:
            raise ValueError(f"engine 'remote': {peer.url}: {error}") from None
        except OSError:
            # `peer.problem` says why.
            return

    def _accept(self, info: PeerInfo) -> None:
        """Refuse an engine with another model than the tokenizer's or the other addresses', or that can do less."""
        files = self._settings.files
        if info.vocab_size is not None and info.vocab_size < files.vocab_size:
            raise WrongEngine(f"its vocabulary has {info.vocab_size} ids, but the tokenizer's {files.vocab_size}")
        ends = info.eos_token_ids
        if ends and files.eos_token_ids and not set(ends) & set(files.eos_token_ids):
            raise WrongEngine(
                f"its end-of-sequence ids are {ends}, but the tokenizer's {files.eos_token_ids}: is it another model?"
            )
        for other in self.peers:
            if other.api is not None and other.api.info is not info:
                self._compare(info, other)
        promised = self._info
        if promised is None:
            return
        lacking = [
            *sorted(set(promised.sampling) - set(info.sampling)),
            *sorted(set(promised.grammars) - set(info.grammars)),
            *sorted(set(promised.fields) - set(info.fields)),
            *sorted(set(promised.resumable) - set(info.resumable)),
        ]
        if lacking:
            raise WrongEngine(f"it lacks {', '.join(lacking)}, which the engines that were up at the start have")
        if info.context_length is not None and info.context_length < promised.context_length:
            raise WrongEngine(f"its context of {info.context_length} is shorter than {promised.context_length}")
        if info.top_logprobs < promised.top_logprobs:
            raise WrongEngine(f"it gives {info.top_logprobs} top log probabilities, not {promised.top_logprobs}")

    @staticmethod
    def _compare(info: PeerInfo, other: Peer) -> None:
        assert other.api is not None
        known = other.api.info
        pairs = [
            ("a vocabulary of {} ids", info.vocab_size, known.vocab_size),
            ("the model {!r}", info.model, known.model),
        ]
        for what, mine, theirs in pairs:
            if mine is not None and theirs is not None and mine != theirs:
                raise WrongEngine(f"it has {what.format(mine)}, but {other.url} has {what.format(theirs)}")

    def _promise(self, infos: list[PeerInfo]) -> EngineInfo:
        """Return what all of them can do."""
        settings = self._settings
        lengths = [
            length
            for length in (
                settings.context_length,
                settings.files.context_length,
                *(info.context_length for info in infos),
            )
            if length is not None
        ]
        if not lengths:
            raise ValueError(
                "neither the engine nor the tokenizer says how long a context may be; give --context-length"
            )

        def common(lists: list[list[str]]) -> list[str]:
            return [name for name in lists[0] if all(name in other for other in lists)]

        running = [self._options.max_running or info.max_running or _DEFAULT_RUNNING for info in infos]
        grammars = common([info.grammars for info in infos])
        sampling = common([info.sampling for info in infos])
        ends = {token for info in infos for token in info.eos_token_ids or ()}
        return EngineInfo(
            name="remote",
            version=", ".join(sorted({f"{info.kind} {info.version}" for info in infos})),
            task="generate",
            simulated=any(info.simulated for info in infos),
            vocab_size=settings.files.vocab_size,
            context_length=min(lengths),
            eos_token_ids=sorted(ends) or settings.files.eos_token_ids,
            sampling=sampling if grammars else [name for name in sampling if name != "grammar"],
            grammars=grammars if "grammar" in sampling else [],
            top_logprobs=min(info.top_logprobs for info in infos),
            # Those that are down will take as many.
            max_running_requests=sum(running) + max(running) * (len(self.peers) - len(infos)),
            fields=common([info.fields for info in infos]),
            resumable=[name for name in common([info.resumable for info in infos]) if name in sampling],
        )
