"""From the decoder in tokenizer.json to stages.

`build_stages` knows every decoder of `tokenizers` up to 0.23. It says None for what can't be done without the whole
text (a regular expression over a fused token) or is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders

from multitok.detokenizer.stages import (
    ByteFallbackStage,
    ByteLevelStage,
    CtcStage,
    FirstStage,
    LastStage,
    MapStage,
    ReplacePartStage,
    Stage,
    StripPartStage,
    TokenMap,
)


def token_map(stage: dict[str, Any]) -> TokenMap | None:
    """Return what a stage makes of one token, if that is all that it looks at.

    Parameters
    ----------
    stage : dict
        The stage as in tokenizer.json.

    Returns
    -------
    callable or None
        None for a stage that looks at more than one token.
    """
    match stage["type"]:
        case "Replace":
            pattern, by = stage["pattern"], stage["content"]
            if what := pattern.get("String"):
                return lambda token: token.replace(what, by)
            # A regular expression means what the reference's own engine says.
            replace = decoders.Replace(tokenizers.Regex(pattern["Regex"]) if "Regex" in pattern else "", by)
            return lambda token: replace.decode([token])
        case "Strip":
            # Not by the library's own: it crashes where a token has too few characters for both ends.
            return lambda token: "".join(StripPartStage(stage["content"], stage["start"], stage["stop"]).push([token]))
    return None


# What WordPiece's and CTC's cleanup replaces, in this order.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _replacing(pairs: Sequence[tuple[str, str]]) -> TokenMap:
    def replace(token: str) -> str:
        for what, by in pairs:
            token = token.replace(what, by)
        return token

    return replace


def first_and_other(stage: dict[str, Any] | None) -> tuple[TokenMap, TokenMap] | None:
    """Return what a stage makes of the first token and of any other, if it looks at one token and its place.

    Parameters
    ----------
    stage : dict or None
        The stage as in tokenizer.json; None stands for having no decoder.

    Returns
    -------
    tuple of two callables, or None
        None for any other kind of stage.
    """
    match stage and stage["type"]:
        case None:
            return str, lambda token: " " + token
        case "Metaspace":
            assert stage is not None
            mark = stage["replacement"]
            lead = " " if stage.get("prepend_scheme", "always") == "never" else ""
            return lambda token: token.replace(mark, lead), lambda token: token.replace(mark, " ")
        case "WordPiece":
            assert stage is not None
            prefix = stage["prefix"]
            clean = _replacing(_CLEANUP if stage["cleanup"] else ())

            def other(token: str) -> str:
                return clean(token.removeprefix(prefix) if token.startswith(prefix) else " " + token)

            return clean, other
    return None


def _ctc_pairs(stage: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [(stage["pad_token"], "")]
    if stage["cleanup"]:
        pairs += [*_CLEANUP, (stage["word_delimiter_token"], " ")]
    return pairs


def _token_stage(stage: dict[str, Any] | None) -> Callable[[], Stage] | None:
    """Return what makes a stage that sees single tokens."""
    if pair := first_and_other(stage):
        first, other = pair
        return lambda: FirstStage(first, other)
    assert stage is not None
    if function := token_map(stage):
        return lambda: MapStage(function)
    match stage["type"]:
        case "ByteFallback":
            return ByteFallbackStage
        case "ByteLevel":
            return ByteLevelStage
        case "Fuse":
            return lambda: MapStage(str)
        case "BPEDecoder":
            suffix = stage["suffix"]
            return lambda: LastStage(_replacing([(suffix, " ")]), _replacing([(suffix, "")]))
        case "CTC":
            clean = _replacing(_ctc_pairs(stage))
            return lambda: CtcStage(clean)
    return None


def _part_stages(stage: dict[str, Any]) -> list[Callable[[], Stage]] | None:
    """Return what makes the stages that see the parts of the one fused token."""
    pairs: list[tuple[str, str]]
    match stage["type"]:
        case "Fuse":
            pairs = []
        case "Strip":
            return [lambda: StripPartStage(stage["content"], stage["start"], stage["stop"])]
        case "Replace" if stage["pattern"].get("String"):
            pairs = [(stage["pattern"]["String"], stage["content"])]
        case "Metaspace":
            pairs = [(stage["replacement"], " " if stage.get("prepend_scheme", "always") == "never" else "")]
        case "WordPiece":
            pairs = list(_CLEANUP) if stage["cleanup"] else []
        case "BPEDecoder":
            pairs = [(stage["suffix"], "")]
        case "CTC":
            pairs = _ctc_pairs(stage)
        case _:
            return None
    if not all(what for what, _ in pairs):
        return None
    return [_replace_part(what, by) for what, by in pairs]


def _replace_part(what: str, by: str) -> Callable[[], Stage]:
    return lambda: ReplacePartStage(what, by)


def build_stages(stages: Sequence[dict[str, Any] | None]) -> list[Callable[[], Stage]] | None:
    """Return what makes the stages of one state.

    Parameters
    ----------
    stages : sequence of (dict or None)
        Stages as in tokenizer.json, sequences flattened; None stands for having no decoder.

    Returns
    -------
    list of callables, or None
        None where the decoder can't be followed piece by piece.
    """
    out: list[Callable[[], Stage]] = []
    fused = False
    for stage in stages:
        if fused:
            made = None if stage is None else _part_stages(stage)
            if made is None:
                return None
            out += made
        else:
            single = _token_stage(stage)
            if single is None:
                return None
            out.append(single)
            fused = stage is not None and stage["type"] in {"ByteLevel", "Fuse"}
    return out
