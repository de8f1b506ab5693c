"""Chat templates that loop or grow without end, and arguments that make harmless ones do so."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from multitok.tokenizer.chat_template import ChatTemplate
from multitok.tokenizer.errors import ChatTemplateError, TemplateError
from multitok.tokenizer.template_limits import MOST_SECONDS, TemplateTooSlow, time_limit

# What a single operation may take beyond the limit, on a machine that does other things.
PATIENCE_S = 5 * MOST_SECONDS
MESSAGES = [{"role": "user", "content": "Hi"}]

ENDLESS = {
    "nested ranges": "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
    "nested ranges that print nothing": (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    ),
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{{ loop([1, 2]) }}{% endfor %}",
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a macro without end": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "map over map": "{{ ([range(90000)] * 90000) | map('sum') | map('string') | join }}",
    "a filter block": "{% for a in range(90000) %}{% filter upper %}{% for b in range(90000) %}{% endfor %}"
    "{% endfilter %}{% endfor %}",
}
DOUBLING = "{% set ns = namespace(s='0123456789') %}{% for i in range(60) %}STEP{% endfor %}{{ ns.s }}"
GROWING = {
    **{
        f"doubling by {step}": DOUBLING.replace("STEP", "{% set ns.s = " + step + " %}")
        for step in (
            "ns.s ~ ns.s", "ns.s + ns.s", "ns.s * 2", "'%s%s' % (ns.s, ns.s)", "'{0}{0}'.format(ns.s)",
            "[ns.s, ns.s] | join", "''.join([ns.s, ns.s])", "ns.s | replace('0', '00')", "ns.s.replace('0', '00')",
            "ns.s.replace('', ns.s)", "ns.s | list | join(ns.s)", "ns.s.join(ns.s | list)", "ns.s | format(ns.s)",
            "ns.s.translate({48: ns.s})", "'{x}{x}'.format_map({'x': ns.s})",
        )
    },
    "doubling by a set block": DOUBLING.replace(
        "STEP", "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"
    ),
    "doubling by a macro": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}"
    + DOUBLING.replace("STEP", "{% set ns.s = f(ns.s) %}"),
    "doubling without a loop": "{% set s = 'x' * 999 %}" + "{% set s = s ~ s %}" * 60 + "{{ s }}",
    "lists in lists": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l, 'x' * i] %}"
    "{% endfor %}{{ ns.l }}",
    "lists in lists as JSON": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l | tojson | length }}",
    "a long list": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "repetition": "{{ 'x' * 10000000000 }}",
    "repetition of a list": "{{ ['x'] * 10000000000 }}",
    "a huge power": "{{ 7 ** (7 ** 9) }}",
    "a huge product": "{% set ns = namespace(n=7) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "padding": "{{ 'x'.center(10000000000) }}{{ 'x'.zfill(10000000000) }}",
    "padding by a filter": "{{ 'x' | center(10000000000) }}",
    "tabs": "{{ ('\t' * 9000).expandtabs(900000000) }}",
    "indentation": "{{ ('\n' * 900000) | indent(900000) }}",
    "a width in a format": "{{ '%10000000000d' % 1 }}",
    "a precision in a format": "{{ '%.10000000000f' % 1 }}",
    "a width of a name in a format": "{{ '%(a)-10000000000d' % {'a': 1} }}",
    "replacing by names": DOUBLING.replace("STEP", "{% set ns.s = ns.s | replace(old='0', new='00') %}"),
    "a width in a format, as a value": "{{ '%*d' % (10000000000, 1) }}",
    "a width in str.format": "{{ '{:10000000000}'.format(1) }}{{ '{:{w}}'.format(1, w=10000000000) }}",
    "batches": "{{ [1] | batch(10000000000, 'x') | list }}",
    "a huge join": "{{ range(90000) | map('string') | join('x' * 900000) }}",
    "a huge join of a method": "{{ ('x' * 900000).join(['x'] * 900000) }}",
    "printing in a loop": "{% set s = 'x' * 9000000 %}{% set x %}{% for i in range(90000) %}{{ s }}{% endfor %}"
    "{% endset %}{{ x | length }}",
    "fixed text in a loop": "{% for i in range(90000) %}" + "x" * 10000 + "{% endfor %}",
    "splitting": "{{ ('x ' * 20000000).split(' ') | length }}",
    "adding up lists": "{{ ([[1] * 90000] * 90000) | sum(start=[]) | length }}",
}  # fmt: skip


def outcome(source: str, fast: bool, **kwargs: Any) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source, None, None, fast=fast).render(MESSAGES, **kwargs)
    assert time.monotonic() - begin < PATIENCE_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_500_000
    return str(caught.value)


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("fast", [False, True])
def test_a_template_that_grows_is_stopped(name: str, fast: bool) -> None:
    outcome(GROWING[name], fast)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_loops_is_stopped(name: str) -> None:
    begin = time.monotonic()
    template = ChatTemplate(ENDLESS[name], None, None)
    with time_limit(0.1), pytest.raises(ChatTemplateError):
        template.render(MESSAGES)
    assert time.monotonic() - begin < PATIENCE_S


def test_there_is_a_limit_without_a_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multitok.tokenizer.chat_template.MOST_SECONDS", 0.1)
    with pytest.raises(TemplateTooSlow, match="takes too long"):
        ChatTemplate(ENDLESS["nested ranges that print nothing"], None, None, fast=False).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "kwargs"),
    [
        ("{{ 'x' * n }}", {"n": 10**12}),
        ("{% for i in range(n) %}x{% endfor %}", {"n": 10**12}),
        ("{{ n ** n }}", {"n": 10**12}),
        ("{{ messages[0].content.center(n) }}", {"n": 10**12}),
        ("{{ pattern % 1 }}", {"pattern": "%1000000000d"}),
        ("{{ pattern.format(1) }}", {"pattern": "{:1000000000}"}),
        ("{{ text.replace('', text) }}", {"text": "x" * 60_000}),
        ("{{ a | join(b) }}", {"a": "x" * 60_000, "b": "x" * 60_000}),
    ],
)
@pytest.mark.parametrize("fast", [False, True])
def test_hostile_arguments_of_a_harmless_template(source: str, kwargs: dict[str, Any], fast: bool) -> None:
    outcome(source, fast, **kwargs)


@pytest.mark.parametrize("source", ["{{ 'x' * 10000000000 | length }}" * 3, "{{ " + "(" * 5000 + ")" * 5000 + " }}"])
def test_compiling_has_bounds_too(source: str) -> None:
    try:
        ChatTemplate(source, None, None)
    except TemplateError:
        return


def test_ordinary_operations_are_what_they_were() -> None:
    source = (
        "{{ 'a' ~ 1 ~ none ~ [1] }}|{{ 2 * 3 }}|{{ 2 ** 10 }}|{{ 'ab' * 2 }}|{{ '%5.1f|%s' % (1.25, 'x') }}|"
        "{{ '**%s** 123456 %%' % 1 }}|{{ '{{\"k\": {}}} 20240101 {:04d}'.format(1, 2) }}|{{ '%(a)s' % {'a': 1} }}|"
        "{{ '{:>6}'.format('x') }}|{{ 'x'.center(5) }}|{{ 'a,b'.split(',') | join('-') }}|{{ [1] + [2] }}|"
        "{{ 'aXb'.replace('X', 'yy') }}|{{ {'a': 1} | tojson }}|"
        "{% for c in 'abc' %}{{ loop.index }}{{ c }}{% endfor %}|"
        "{{ missing }}|{% set x %}a{{ 1 }}{% endset %}{{ x }}|{{ [3, 1] | sort | map('string') | join(',') }}|"
        "{% for a in [[1], [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}|{{ [1, 2] | sum }}"
    )
    text = ChatTemplate(source, None, None, fast=False).render(MESSAGES)
    assert text == (
        "a1None[1]|6|1024|abab|  1.2|x|**1** 123456 %|{\"k\": 1} 20240101 0002|1|     x|  x  |"
        "a-b|[1, 2]|ayyb|{\"a\": 1}|1a2b3c||a1|1,3|123|3"
    )  # fmt: skip
