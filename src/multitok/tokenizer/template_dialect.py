"""Which chat templates keep to the part of Jinja in which `minijinja` prints what `jinja2` prints.

The lists hold what was compared and found equal. Known differences outside of them: floats (1e-07, and 3.0 as JSON),
``e``, ``indent`` and ``title``, ``sequence`` as a test, attributes that are also methods of Python's types, methods
that change a value, which the sandbox of `jinja2` refuses, ``varargs``, and some escapes in strings.
"""

from __future__ import annotations

import re

import jinja2
from jinja2 import nodes

_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.Call, nodes.Assign),
    *(nodes.AssignBlock, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair),
    *(nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Concat),
    *(nodes.Compare, nodes.Operand, nodes.Add, nodes.Sub, nodes.Mul, nodes.FloorDiv, nodes.Mod, nodes.Not, nodes.Neg),
    *(nodes.And, nodes.Or, nodes.Break, nodes.Continue),
)
_FILTERS = {
    *("trim", "tojson", "length", "count", "join", "default", "d", "first", "last", "list", "map"),
    *("selectattr", "rejectattr", "select", "reject", "items", "upper", "lower", "string", "replace", "safe"),
    *("reverse", "dictsort"),
}
_TESTS = {
    *("defined", "undefined", "none", "string", "mapping", "iterable", "number", "boolean", "integer", "true"),
    *("false", "in", "eq", "equalto", "ne", "odd", "even", "divisibleby", "==", "!="),
}
_METHODS = {
    *("strip", "lstrip", "rstrip", "split", "startswith", "endswith", "replace", "lower", "upper", "items"),
    *("keys", "values", "get"),
}
_FUNCTIONS = {"raise_exception", "strftime_now", "namespace", "range"}
_OTHER_NAMES = {"varargs", "kwargs", "caller", "self", "cycler", "joiner", "lipsum", "dict"}
# What jinja2 finds on a value when there is no such key.
_ATTRIBUTES = frozenset(name for kind in (dict, list, str, int, tuple) for name in dir(kind))
_LOOP = {
    *("index", "index0", "first", "last", "length", "previtem", "nextitem", "revindex", "revindex0"),
    *("depth", "depth0"),
}
_ESCAPE = re.compile(r"\\(?:[ntr\\'\"]|u[0-9a-fA-F]{4})")
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def outside_of_dialect(environment: jinja2.Environment, source: str, tree: nodes.Template) -> str | None:
    """Return what of a template is not known to print the same, None when nothing is.

    Parameters
    ----------
    environment : Environment
        That of the template.
    source : str
        The template.
    tree : Template
        The same, parsed.
    """
    for line, kind, text in environment.lex(source):
        if kind == "string" and "\\" in _ESCAPE.sub("", text[1:-1]):
            return f"an escape in the string of line {line}"
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    spaces = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_call_of(assign.node, "namespace")
    }
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    for node in _walk(tree):
        fault = _fault(node, macros, spaces, called)
        if fault:
            return f"{fault} in line {node.lineno}"
    return None


def translate(source: str) -> str:
    """Return the template as `minijinja` takes it."""
    # jinja2 does the same to line ends; the tag marks text for training only.
    source = re.sub(r"\r\n|\r", "\n", source)
    return _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)


def _walk(node: nodes.Node) -> list[nodes.Node]:
    return [node, *(below for child in node.iter_child_nodes() for below in _walk(child))]


def _fault(node: nodes.Node, macros: set[str], spaces: set[str], called: set[int]) -> str | None:
    """Say what is not known to print the same in this node alone."""
    match node:
        case nodes.Filter(name=name) if name not in _FILTERS:
            return f"the filter {name}"
        case nodes.Filter(name="default" | "d", kwargs=kwargs) if kwargs:
            return "a named argument of the filter default"
        case nodes.Test(name=name) if name not in _TESTS:
            return f"the test {name}"
        case nodes.Const(value=value) if not isinstance(value, str | bool | int | None):
            return "a number with a fraction"
        case nodes.For(recursive=True):
            return "a recursive loop"
        case nodes.Name(
            name="varargs" | "kwargs" | "caller" | "self" | "cycler" | "joiner" | "lipsum" | "dict" as name
        ):
            return f"the name {name}"
        case nodes.NSRef(attr=attr) if attr.startswith("_"):
            return f"the attribute {attr}"
        case nodes.Call():
            return _call_fault(node, macros)
        case nodes.Getattr(attr=attr) if id(node) not in called:
            return _attribute_fault(node.node, attr, spaces)
        case nodes.Getitem(arg=nodes.Const(value=str() as key)) if key in _ATTRIBUTES or key.startswith("_"):
            return f"the key {key}"
    return None if isinstance(node, _NODES) else f"a node {type(node).__name__}"


def _attribute_fault(value: nodes.Node, attr: str, spaces: set[str]) -> str | None:
    if isinstance(value, nodes.Name) and (value.name in spaces or (value.name == "loop" and attr in _LOOP)):
        return f"the attribute {attr}" if attr.startswith("_") else None
    return f"the attribute {attr}" if attr in _ATTRIBUTES or attr.startswith("_") else None


def _call_fault(call: nodes.Call, macros: set[str]) -> str | None:
    if call.dyn_args is not None or call.dyn_kwargs is not None:
        return "a call with unpacked arguments"
    match call.node:
        case nodes.Name(name="namespace") if call.args or any(pair.key.startswith("_") for pair in call.kwargs):
            return "a namespace made of a value"
        case nodes.Name(name=name) if name in _FUNCTIONS or name in macros:
            return None
        case nodes.Getattr(attr="split") if call.args and not _is_text(call.args[0]):
            return "a separator that is no text"
        case nodes.Getattr(attr="split" | "get" | "replace" | "startswith" | "endswith" as attr) if call.kwargs:
            return f"a named argument of {attr}"
        case nodes.Getattr(attr=attr) if attr in _METHODS:
            return None
        case nodes.Getattr(attr=attr):
            return f"the method {attr}"
    return "a call"


def _is_call_of(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str) and bool(node.value)
