"""How much an operation of a chat template would make, worked out before it is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sized
from typing import Any

import jinja2
from jinja2.runtime import Undefined

# More than a body may hold.
_MOST_CHARACTERS = 64 * 1024 * 1024
_MOST_ITEMS = 1 << 20
_MOST_BITS = 1 << 13
_MOST_WIDTH = 1 << 16
# A width or precision of more than four digits, or one that is itself a value.
_WIDTH = {
    "%": re.compile(r"%(?:\([^)]*\))?[-+ #0]*\d{0,4}\.?(?:\d{5,}|\*)"),
    "{": re.compile(r"\{[^{}]*:[^{}]*(?:\d{5,}|\{)"),
}
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice"})
# These walk over a text letter by letter, in Python.
_SLOW = frozenset({"urlize", "wordwrap", "striptags", "title", "wordcount", "indent", "list"})
_PRINTING = frozenset({"tojson", "string", "pprint", "escape", "e", "forceescape", "urlencode", "xmlattr", "join"})
CHECKED_FILTERS = _PADDING | _SLOW | _PRINTING | {"replace", "format", "sum"}


class TooMuch(jinja2.TemplateError):
    """A template makes more than any prompt needs."""


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Check what ``*``, ``**`` or ``%`` would make.

    Raises
    ------
    TooMuch
        More than any prompt needs.
    """
    if operator == "%":
        if isinstance(left, str):
            _check_pattern(left, "%", (right,))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * max(right, 0), _MOST_BITS, "a number of {} bits")
    elif isinstance(left, int) and isinstance(right, int):
        _check(left.bit_length() + right.bit_length(), _MOST_BITS, "a number of {} bits")
    else:
        value, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and isinstance(value, str):
            _check(len(value) * times, _MOST_CHARACTERS, "a text of {} characters")
        elif isinstance(times, int) and isinstance(value, list | tuple):
            _check(len(value) * times, _MOST_ITEMS, "a list of {} items")


def check_list(value: Sized) -> None:
    """Check a list that was made."""
    _check(len(value), _MOST_ITEMS, "a list of {} items")


def check_method(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check what a method of a text would make; any other function is let through."""
    # The sandbox wraps `format`.
    function = getattr(function, "__wrapped__", function)
    text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(text, str):
        return
    if name == "replace":
        _check_replace(text, args)
    elif name in ("split", "rsplit", "splitlines"):
        separators = text.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(text) // 4
        _check(separators, _MOST_ITEMS, "a list of {} items")
    elif name == "join":
        _check_join(args[0] if args else (), text)
    elif name == "translate":
        table = args[0] if args and isinstance(args[0], dict) else {}
        longest = max((len(new) for new in table.values() if isinstance(new, str)), default=1)
        _check(len(text) * longest, _MOST_CHARACTERS, "a text of {} characters")
    elif name in ("format", "format_map"):
        _check_pattern(text, "{", (*args, *kwargs.values()))
    elif name in _PADDING:
        times = text.count("\t") if name == "expandtabs" else 1
        _check_widths(args, kwargs, times)


def check_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check what a filter would make of its value, the first of `args`."""
    value = args[0] if args else None
    if name in _PRINTING:
        check_printable(value)
    if name in _SLOW and isinstance(value, str):
        _check(len(value), 4 * _MOST_ITEMS, "too much of {} characters")
    if name == "replace":
        _check_replace(text_of(value), (*args[1:], *(kwargs[key] for key in ("old", "new") if key in kwargs)))
    elif name == "join":
        separator = args[1] if len(args) > 1 else kwargs.get("d", "")
        _check_join(value, separator if isinstance(separator, str) else "")
    elif name == "format":
        _check_pattern(text_of(value), "%", (*args[1:], *kwargs.values()))
    elif name == "sum":
        start = args[2] if len(args) > 2 else kwargs.get("start", 0)
        if not isinstance(start, int | float):
            raise TooMuch("the chat template adds up what are no numbers")
    elif name in _PADDING:
        _check_widths(args[1:], kwargs, text_of(value).count("\n") + 1 if name == "indent" else 1)


def check_printable(value: Any) -> None:
    """Check how long a value is when it is printed, with what it holds several times."""
    size = 0
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            size += 16 * len(item)
            rest += item.keys()
            rest += item.values()
        elif isinstance(item, list | tuple):
            size += 16 * len(item)
            rest += item
        if size > _MOST_CHARACTERS // 4:
            raise TooMuch("the chat template prints a value that is too large")


def text_of(value: Any) -> str:
    """Return a value as text, as when it is printed."""
    if isinstance(value, str):
        return value
    check_printable(value)
    return str(value)


def _check(size: int, most: int, what: str) -> None:
    if size > most:
        raise TooMuch("the chat template makes " + what.format(size))


def _check_replace(text: str, args: tuple[Any, ...]) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        places = text.count(args[0]) if args[0] else len(text) + 1
        _check(len(text) + places * len(args[1]), _MOST_CHARACTERS, "a text of {} characters")


def _check_join(items: Any, separator: str) -> None:
    if isinstance(items, list | tuple):
        length = sum(len(item) for item in items if isinstance(item, str))
        _check(length + len(items) * len(separator), _MOST_CHARACTERS, "a text of {} characters")
    else:
        # An iterator can't be looked into; it has no more items than a range.
        count = len(items) if isinstance(items, Sized) and not isinstance(items, Undefined) else _MOST_ITEMS // 8
        _check(count * len(separator), _MOST_CHARACTERS, "a text of {} characters")


def _check_pattern(pattern: str, mark: str, values: tuple[Any, ...]) -> None:
    # A mark that is doubled is text.
    if _WIDTH[mark].search(pattern.replace(mark * 2, "")):
        raise TooMuch("the chat template uses a format with too large a width")
    check_printable(values)
    length = sum(len(str(value)) for value in values)
    _check(len(pattern) + pattern.count(mark) * length, _MOST_CHARACTERS, "a text of {} characters")


def _check_widths(args: tuple[Any, ...], kwargs: Mapping[str, Any], times: int) -> None:
    widths = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
    _check(max(widths, default=0) * times, _MOST_CHARACTERS if times > 1 else _MOST_WIDTH, "a text of {} characters")
