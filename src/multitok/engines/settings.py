"""What an engine is made from: the model, and what the user wants of it."""

from __future__ import annotations

import msgspec

from multitok.tokenizer.model_files import ModelFiles


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is made from.

    Attributes
    ----------
    files : ModelFiles
        The model.
    options : dict of str to str
        The engine's own options, ``--engine-arg``.
    command_line : list of str
        What stands after ``--``: options in the words of the engine that is behind an adapter.
    max_running_requests : int or None
        Most requests that it works on at once; None leaves it to the engine.
    context_length : int or None
        A shorter context than the model's; None takes the model's.
    resume : bool
        Requests are to be resumed after this process's death: an engine that can do so only without something that
        makes it faster does without, unless `options` say otherwise.
    disaggregation_mode : str
        ``prefill`` or ``decode`` in a prefill/decode split, else ``null``.
    rank, ranks : int
        Which of several engines this is, and how many there are: each needs devices of its own.
    runtime_dir : str or None
        Private directory (0700) of the start, for unix sockets; None lets an engine that needs one make its own.
    """

    files: ModelFiles
    options: dict[str, str] = {}
    command_line: list[str] = []
    max_running_requests: int | None = None
    context_length: int | None = None
    resume: bool = False
    disaggregation_mode: str = "null"
    rank: int = 0
    ranks: int = 1
    runtime_dir: str | None = None

    def known_context_length(self) -> int:
        """Return the most ids of a request.

        Raises
        ------
        ValueError
            Neither the user nor the model's files say it.
        """
        length = self.context_length or self.files.context_length
        if length is None:
            raise ValueError("the model's files don't say how long a context may be; give --context-length")
        return length
