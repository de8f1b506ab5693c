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
    CHECKED_FILTERS,
    TooMuch,
    check_filter,
    check_list,
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
_ROUND = "a round"
# Of everything that is made on the way: a body's text comes by a few times.
_MOST_CHARACTERS_IN_ALL = 256 * 1024 * 1024


class TemplateTooLarge(ChatTemplateError):
    """A template makes more than any prompt needs."""


class TemplateTooSlow(TemplateTooLarge):
    """A template needs more time than it was given."""


class _OutOfTime(jinja2.TemplateError):
    pass


class _Meter:
    """What one rendering has used."""

    __slots__ = ("characters", "end", "steps")

    def __init__(self, end: float) -> None:
        self.end = end
        self.steps = 0
        self.characters = 0


class _Current(threading.local):
    # Outside of any rendering, as when constants are worked out, time has no end.
    meter = _Meter(float("inf"))


_current = _Current()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Bound the rendering inside; of two, one in the other, the earlier end counts.

    Raises
    ------
    TemplateTooLarge
        It makes too much, or its time is up.
    """
    outer = _current.meter
    _current.meter = _Meter(min(outer.end, time.monotonic() + seconds))
    try:
        yield
    except _OutOfTime as error:
        raise TemplateTooSlow(str(error)) from None
    except TooMuch as error:
        raise TemplateTooLarge(str(error)) from None
    finally:
        _current.meter = outer


def _step(characters: int = 0) -> None:
    """Count a step, and the text that it makes."""
    meter = _current.meter
    meter.steps += 1
    if meter.steps % _STEPS_PER_LOOK == 0 and time.monotonic() > meter.end:
        raise _OutOfTime("the chat template takes too long")
    meter.characters += characters
    if meter.characters > _MOST_CHARACTERS_IN_ALL:
        raise TooMuch(f"the chat template makes more than {_MOST_CHARACTERS_IN_ALL} characters")


# The next three are filters, since calls of filters cost the least, with names that templates don't use.


@jinja2.pass_context
def _round(context: Context, characters: int) -> None:
    """Begin a round of a loop."""
    # By way of `map` a template can call this after all.
    _step(abs(characters))


def _concatenate(*values: Any) -> str:
    """Do what ``~`` does."""
    texts = [text_of(value) for value in values]
    _step(sum(map(len, texts)))
    return "".join(texts)


def _add(first: Any, *others: Any) -> Any:
    """Do what ``+`` does."""
    result = first
    for other in others:
        result = result + other
    if isinstance(result, str):
        _step(len(result))
    elif isinstance(result, list | tuple):
        check_list(result)
    return result


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds; compile with `compile_bounded`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_output, **options)
        # Text made at random, of any length: nothing for a prompt.
        del self.globals["lipsum"]

    def compile_bounded(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a parsed template, which is changed."""
        self.filters = {
            **{name: _bounded(name, filter_) for name, filter_ in self.filters.items()},
            **{_ROUND: _round, "~": _concatenate, "+": _add},
        }
        for loop in tree.find_all(nodes.For):
            fixed = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.body.insert(0, nodes.ExprStmt(_filter(_ROUND, [nodes.Const(fixed)]), lineno=loop.lineno))
        _replace_operators(tree)
        return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do ``*``, ``**`` or ``%``."""
        check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str):
            _step(len(result))
        return result

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro."""
        check_method(function, args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        _step(len(result) if isinstance(result, str) else 0)
        return result


def _output(value: Any) -> Any:
    """Take what is about to be printed."""
    if isinstance(value, str):
        _step(len(value))
    else:
        _step()
        check_printable(value)
    return value


def _bounded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    # Some take the context or the environment first.
    place = 1 if hasattr(filter_, "jinja_pass_arg") else 0
    checked = name in CHECKED_FILTERS

    @functools.wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if checked:
            check_filter(name, args[place:], kwargs)
        result = filter_(*args, **kwargs)
        _step(len(result) if isinstance(result, str) else 0)
        return result

    return bounded


def _replace_operators(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_replaced(item) for item in value]
        elif isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value))


def _replaced(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    operator = "~" if isinstance(value, nodes.Concat) else "+" if isinstance(value, nodes.Add) else None
    operands = _operands(value) if isinstance(value, nodes.Add) else getattr(value, "nodes", [])
    if operator is None:
        _replace_operators(value)
        return value
    return _filter(operator, [_replaced(operand) for operand in operands], value.lineno)


def _operands(node: nodes.Expr) -> list[nodes.Expr]:
    """What stands in ``a + b + c``, in that order."""
    operands: list[nodes.Expr] = []
    while isinstance(node, nodes.Add):
        operands.insert(0, node.right)
        node = node.left
    return [node, *operands]


def _filter(name: str, args: list[nodes.Expr], line: int = 1) -> nodes.Filter:
    return nodes.Filter(args[0], name, args[1:], [], None, None, lineno=line)
