"""Finds out from a chat template whether it takes a message's content as a string or walks over its parts."""

from __future__ import annotations

from typing import Literal

from jinja2 import nodes


def content_format(template: nodes.Template) -> Literal["string", "parts"]:
    """Return 'parts' when some loop of the template runs over a message's content.

    The content is followed through filters, slices, ``set`` and macro arguments, since templates hand it around.
    """
    aliases = _aliases(template)
    loops = template.find_all(nodes.For)
    return "parts" if any(_is_content(loop.iter, aliases) for loop in loops) else "string"


def tests_for_string(template: nodes.Template) -> bool:
    """Whether the template distinguishes a string content by itself (``content is string`` and the like)."""
    aliases = _aliases(template)
    tests = [test for test in template.find_all(nodes.Test) if _is_content(test.node, aliases)]
    return any(test.name in ("string", "iterable", "mapping", "sequence") for test in tests)


def _aliases(template: nodes.Template) -> set[str]:
    """Names that hold a message's content somewhere in the template."""
    macros = {macro.name: [arg.name for arg in macro.args] for macro in template.find_all(nodes.Macro)}
    aliases: set[str] = set()
    while True:
        known = len(aliases)
        for assign in template.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
                aliases.add(assign.target.name)
        for call in template.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                names = macros[call.node.name]
                aliases.update(n for n, arg in zip(names, call.args, strict=False) if _is_content(arg, aliases))
                aliases.update(k.key for k in call.kwargs if k.key in names and _is_content(k.value, aliases))
        if len(aliases) == known:
            return aliases


def _is_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, aliases) or _is_content(node.expr2, aliases)
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
