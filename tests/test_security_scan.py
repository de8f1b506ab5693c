"""Nothing in the sources turns data into code: no pickle and its like, no eval, no shell, no class that data names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import multitok

SOURCES = Path(multitok.__file__).parent

# Modules, and names of modules, that nobody may import or use.
MODULES = frozenset(
    {
        "pickle",
        "_pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "marshal",
        "shelve",
        "joblib",
        "jsonpickle",
        "xmlrpc",
        "code",
    }
)
NAMES = frozenset(
    {
        *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__"),
        *("torch.load", "numpy.load", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
        *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"),
        *("multiprocessing.connection.Client", "multiprocessing.connection.Listener", "multiprocessing.managers"),
        *("pydoc.locate", "pkgutil.resolve_name", "logging.config.listen", "tempfile.mktemp"),
    }
)
# Methods whose name says enough: pyzmq's pickling and Python sockets, msgspec's and ctypes' are not among them.
METHODS = frozenset({"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle", "unsafe_load"})
# Arguments that turn a harmless call into another, with the values that are harmless.
ARGUMENTS = {"trust_remote_code": False, "shell": False, "allow_pickle": False}
_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})


def findings(source: str) -> list[str]:
    """What of a source is forbidden; names are followed through imports and assignments."""
    tree = ast.parse(source)
    names: dict[str, str] = {name: f"builtins.{name}" for name in _BUILTINS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (value := _resolved(node.value, names)):
            names |= {target.id: value for target in node.targets if isinstance(target, ast.Name)}
    return [f"line {getattr(node, 'lineno', 0)}: {fault}" for node in ast.walk(tree) for fault in _faults(node, names)]


def _resolved(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (value := _resolved(node.value, names)):
        return f"{value}.{node.attr}"
    return None


def _faults(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _is_forbidden(alias.name))
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if _is_forbidden(name) or alias.name in METHODS:
                yield name
    elif isinstance(node, ast.Name | ast.Attribute):
        name = _resolved(node, names)
        if name and _is_forbidden(name):
            yield name
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.attr
    elif isinstance(node, ast.Call):
        yield from _call_faults(node, names)


def _call_faults(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg in ARGUMENTS:
            harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is ARGUMENTS[keyword.arg]
            if not harmless:
                yield keyword.arg
    name = _resolved(call.func, names) or (call.func.id if isinstance(call.func, ast.Name) else "")
    argument = call.args[0] if call.args else None
    if name == "importlib.import_module" and not isinstance(argument, ast.Constant):
        yield "a module that data names"
    elif name in ("getattr", "__builtins__"):
        named = call.args[1] if len(call.args) > 1 else None
        if isinstance(named, ast.Constant) and named.value in METHODS | _BUILTINS:
            yield str(named.value)
    elif (
        name == "importlib.import_module" and isinstance(argument, ast.Constant) and _is_forbidden(str(argument.value))
    ):
        yield str(argument.value)


def _is_forbidden(name: str) -> bool:
    return name.partition(".")[0] in MODULES or any(name == known or name.startswith(known + ".") for known in NAMES)


def test_the_sources_hold_nothing_of_the_kind() -> None:
    files = sorted(SOURCES.rglob("*.py"))
    assert len(files) > 100
    found = {str(path.relative_to(SOURCES)): faults for path in files if (faults := findings(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import pickle as p\np.loads(b'')",
        "from pickle import loads",
        "from pickle import loads as harmless\nharmless(b'')",
        "import marshal",
        "import dill, os",
        "import shelve\nshelve.open('x')",
        "eval('1')",
        "f = eval\nf('1')",
        "import builtins\nbuiltins.exec('')",
        "import builtins as b\nb.eval('')",
        "getattr(__builtins__, 'eval')('1')",
        "exec(compile('', '', 'exec'))",
        "__import__('os')",
        "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained('x', trust_remote_code=True)",
        "load(trust_remote_code=flag)",
        "import torch\ntorch.load('x')",
        "from torch import load\nload('x')",
        "import torch as t\nt.load('x')",
        "import numpy as np\nnp.load('x')",
        "import yaml\nyaml.load('x')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "from subprocess import Popen\nPopen('ls', shell=1)",
        "import os\nos.system('ls')",
        "socket.recv_pyobj()",
        "socket.send_pyobj(1)",
        "getattr(socket, 'recv_pyobj')()",
        "import importlib\nimportlib.import_module(name)",
        "import importlib\nimportlib.import_module('pickle')",
        "def f():\n    from pickle import loads\n    return loads",
    ],
)
def test_the_scan_finds_what_is_planted(tmp_path: Path, planted: str) -> None:
    path = tmp_path / "planted.py"
    path.write_text(planted)
    assert findings(path.read_text())


@pytest.mark.parametrize(
    "harmless",
    [
        "import ast\nast.literal_eval('1')",
        "import json\njson.load(open('x'))",
        "import re\nre.compile('x')",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "class A:\n    def eval(self): ...\nA().eval()",
        "load(trust_remote_code=False)",
        "import importlib\nimportlib.import_module('json')",
    ],
)
def test_the_scan_lets_the_harmless_pass(harmless: str) -> None:
    assert not findings(harmless)


def test_no_message_has_a_field_for_a_class() -> None:
    """What the wire holds are plain values of declared types."""
    from multitok.messages import to_child, to_detokenizer, to_launcher, to_scheduler, to_tokenizer

    structs = {
        struct
        for module in (to_child, to_detokenizer, to_launcher, to_scheduler, to_tokenizer)
        for struct in vars(module).values()
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
    }
    assert len(structs) > 10
    for struct in structs:
        # A type that msgspec has no codec of its own for, as it would take a hook to make an object of.
        assert "Custom" not in {type(part).__name__ for part in _types_of(msgspec.inspect.type_info(struct))}, struct


def _types_of(info: object, seen: set[int] | None = None) -> Iterator[object]:
    seen = set() if seen is None else seen
    if id(info) in seen:
        return
    seen.add(id(info))
    yield info
    for value in (getattr(info, name) for name in getattr(info, "__struct_fields__", ())):
        for part in value if isinstance(value, tuple) else (value,):
            if type(part).__module__ == "msgspec.inspect":
                yield from _types_of(part, seen)
