"""Bounds on what a chat template may do: it is a program that came with a model, and may loop or grow without end.

`jinja2` has no bounds of its own. Here each round of a loop, each call, filter and output of a template is a step that
counts the text it makes and now and then looks at the clock; what makes much out of little in one go, such as
``'a' * n``, is worked out first. `minijinja` counts by itself (`FUEL`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multitok.tokenizer.errors import ChatTemplateError
from multitok.tokenizer.template_sizes import (
    MOST_CHARACTERS,
    TooMuch,
    check_filter,
    check_method,
    check_operator,
    check_printable,
    text_of,
)

# Of minijinja, which takes about 20 ms for it: more than what is rendered in the event loop needs.
FUEL = 1_000_000
# Seconds in the event loop, and in a thread: templates need some milliseconds for a thousand messages.
INLINE_SECONDS = 0.02
MOST_SECONDS = 5.0
_STEPS_PER_LOOK = 16


class TemplateTooLarge(ChatTemplateError):
    """A template makes more than any prompt needs."""


class TemplateTooSlow(TemplateTooLarge):
    """A template needs more time than it was given."""


class _OutOfTime(jinja2.TemplateError):
    pass


class _Meter(threading.local):
    """What the rendering in this thread has used; outside of any there is no end, as when constants are worked out."""

    end = float("inf")
    steps = 0
    characters = 0


_meter = _Meter()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Bound the rendering inside; of two, one in the other, the earlier end counts.

    Raises
    ------
    TemplateTooLarge
        It makes too much, or its time is up.
    """
    outer = _meter.end
    _meter.end, _meter.characters = min(outer, time.monotonic() + seconds), 0
    try:
        yield
    except _OutOfTime as error:
        raise TemplateTooSlow(str(error)) from None
    except TooMuch as error:
        raise TemplateTooLarge(str(error)) from None
    finally:
        _meter.end, _meter.characters = outer, 0


def step(characters: int = 0) -> None:
    """Count a step, and the text that it makes. Compiled templates call this too."""
    _meter.steps += 1
    if _meter.steps % _STEPS_PER_LOOK == 0 and time.monotonic() > _meter.end:
        raise _OutOfTime("the chat template takes too long")
    _meter.characters += characters
    if _meter.characters > MOST_CHARACTERS:
        raise TooMuch(f"the chat template makes more than {MOST_CHARACTERS} characters")


def concatenate(*values: Any) -> str:
    """Do what ``~`` does; compiled templates call this."""
    texts = [text_of(value) for value in values]
    step(sum(map(len, texts)))
    return "".join(texts)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds; compile with `compile_bounded`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_output, **options)
        # Text made at random, of any length: nothing for a prompt.
        del self.globals["lipsum"]

    def compile_bounded(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a parsed template, which is changed."""
        self.filters = {
            name: filter_ if hasattr(filter_, "is_bounded") else _bounded(name, filter_)
            for name, filter_ in self.filters.items()
        }
        _count_rounds(tree)
        return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do ``+``, ``*``, ``**`` or ``%``."""
        check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str):
            step(len(result))
        return result

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro."""
        if function is step or function is concatenate:
            return function(*args)
        step()
        check_method(function, args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, str):
            step(len(result))
        return result


def _output(value: Any) -> Any:
    """Take what is about to be printed."""
    if isinstance(value, str):
        step(len(value))
    else:
        step()
        check_printable(value)
    return value


def _bounded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    # Some take the context or the environment first.
    place = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @functools.wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        step()
        check_filter(name, args[place:], kwargs)
        result = filter_(*args, **kwargs)
        if isinstance(result, str):
            step(len(result))
        return result

    bounded.is_bounded = True  # type: ignore[attr-defined]
    return bounded


def _count_rounds(tree: nodes.Template) -> None:
    """Let each round of a loop count with the text that stands in it, and ``~`` with what it makes."""
    for loop in tree.find_all(nodes.For):
        fixed = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
        loop.body.insert(0, nodes.ExprStmt(_call(step, [nodes.Const(fixed)]), lineno=loop.lineno))
    _replace_concatenations(tree)


def _replace_concatenations(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_replaced(item) for item in value]
        elif isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value))


def _replaced(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concatenations(value)
    return _call(concatenate, value.nodes, value.lineno) if isinstance(value, nodes.Concat) else value


def _call(function: Callable[..., Any], args: list[nodes.Expr], line: int = 1) -> nodes.Call:
    name = nodes.ImportedName(f"{__name__}.{function.__name__}")
    return nodes.Call(name, args, [], None, None, lineno=line)
