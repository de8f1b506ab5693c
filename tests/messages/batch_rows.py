"""Batches of any type, drawn and put together by nothing but their declarations.

`rows_of` draws batches of one row, in canonical form. `put_together` is the reference for what many of them are
together: it is written out here and shares no code with `messages.split`.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal

import msgspec
from hypothesis import strategies as st

from multitok.messages import columns

NUMBER = st.integers(0, 2**64 - 1)
ANYTHING = st.one_of(st.integers(-5, 5), st.text(max_size=3), st.lists(st.floats(0, 1), max_size=2), st.booleans())


def declared(struct: type[msgspec.Struct]) -> dict[str, tuple[Any, Any]]:
    """Type and way to split of each field."""
    hints = typing.get_type_hints(struct, include_extras=True)
    result = {}
    for name in struct.__struct_fields__:
        assert typing.get_origin(hints[name]) is Annotated, f"{struct.__name__}.{name}"
        kind, *metadata = typing.get_args(hints[name])
        (column,) = [m for m in metadata if type(m).__module__ == columns.__name__]
        result[name] = (kind, column)
    return result


def may_be_none(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)


def without_none(kind: Any) -> Any:
    if not may_be_none(kind):
        return kind
    (rest,) = [part for part in typing.get_args(kind) if part is not type(None)]
    return rest


def default_of(struct: type[msgspec.Struct], name: str) -> Any:
    field = next(f for f in msgspec.structs.fields(struct) if f.name == name)
    return field.default


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type; None never at the top."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(part) for part in arguments if part is not type(None)])
    if origin is Annotated:
        return values(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=2)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0, 2**31 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=3),
        bytes: st.binary(max_size=4),
        bool: st.booleans(),
        Any: ANYTHING,
    }
    return simple[kind]


def draw_shared(data: Any, struct: type[msgspec.Struct], fill: float) -> dict[str, Any]:
    """Values that all rows of a batch have in common, by name; see `draw_row`."""
    shared: dict[str, Any] = {}
    for name, (kind, column) in declared(struct).items():
        if isinstance(column, columns.Shared):
            default = default_of(struct, name)
            some = values(without_none(kind)).filter(lambda value, default=default: value != default)
            shared[name] = data.draw(some if fill == 1.0 else st.just(default) | some)
        elif isinstance(column, columns.Group):
            shared |= draw_shared(data, without_none(kind), fill)
    return shared


def draw_row(data: Any, struct: type[msgspec.Struct], shared: dict[str, Any], fill: float) -> Any:
    """A batch of one row; `fill` is the share of the columns that are in use: with 1, all of them."""
    fields: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for name, (kind, column) in declared(struct).items():
        inner = without_none(kind)
        used = not may_be_none(kind) or data.draw(st.floats(0, 1)) < fill
        if isinstance(column, columns.Shared):
            fields[name] = shared[name]
        elif isinstance(column, columns.Lengths):
            lengths[name] = data.draw(st.integers(0, 3))
            fields[name] = None if lengths[name] == 1 else [lengths[name]]
        elif isinstance(column, columns.Group):
            group = draw_row(data, inner, shared, fill if used else 0.0)
            fields[name] = None if all(getattr(group, f) is None for f in group.__struct_fields__) else group
        elif isinstance(column, columns.Columns):
            some_keys = st.sets(st.sampled_from(["a", "b", "é"]), min_size=2 if fill == 1.0 else 0)
            keys = data.draw(some_keys) if used else ()
            fields[name] = {key: [data.draw(ANYTHING)] for key in sorted(keys)} or None
        elif isinstance(column, columns.Rows):
            element = without_none(typing.get_args(inner)[0])
            one = NUMBER if name == "numbers" else values(element)
            fields[name] = [data.draw(one)] if used else None
        else:
            assert isinstance(column, columns.Packed)
    for name, (_, column) in declared(struct).items():
        if isinstance(column, columns.Packed):
            size = lengths[column.lengths] * column.itemsize
            fields[name] = data.draw(st.binary(min_size=size, max_size=size))
    return struct(**fields)


def put_together(rows: list[Any]) -> Any:
    """The batch that these rows are together; a row may be None, where a group is absent in it."""
    struct = next(type(row) for row in rows if row is not None)
    fields: dict[str, Any] = {}
    for name, (_, column) in declared(struct).items():
        cells = [None if row is None else getattr(row, name) for row in rows]
        if isinstance(column, columns.Packed):
            fields[name] = b"".join(cells)
        elif isinstance(column, columns.Shared):
            fields[name] = next((cell for cell in cells if cell is not None), None)
        elif isinstance(column, columns.Columns):
            keys = {key for cell in cells if cell is not None for key in cell}
            fields[name] = {key: [(cell or {}).get(key, [None])[0] for cell in cells] for key in keys} or None
        elif all(cell is None for cell in cells):
            fields[name] = None
        elif isinstance(column, columns.Group):
            fields[name] = put_together(cells)
        elif isinstance(column, columns.Lengths):
            fields[name] = [1 if cell is None else cell[0] for cell in cells]
        else:
            assert isinstance(column, columns.Rows)
            fields[name] = [None if cell is None else cell[0] for cell in cells]
    return struct(**fields)


def shorten_optional_columns(batch: Any) -> Any:
    """The batch with the missing values at the end of its optional columns left out, as log probabilities may come."""
    changes: dict[str, Any] = {}
    for name, (_, column) in declared(type(batch)).items():
        value = getattr(batch, name)
        if isinstance(column, columns.Group) and value is not None:
            changes[name] = shorten_optional_columns(value)
        elif isinstance(column, columns.Rows) and column.optional and value is not None:
            changes[name] = value[: max(i for i, cell in enumerate(value) if cell is not None) + 1]
    return msgspec.structs.replace(batch, **changes)


def field_paths(struct: type[msgspec.Struct]) -> set[str]:
    """The names of all fields, those of groups included."""
    paths: set[str] = set()
    for name, (kind, column) in declared(struct).items():
        paths.add(name)
        if isinstance(column, columns.Group):
            paths |= {f"{name}.{inner}" for inner in field_paths(without_none(kind))}
    return paths


def used_paths(batch: Any) -> set[str]:
    """The names of the fields that say something else than their default."""
    paths: set[str] = set()
    for name, (_, column) in declared(type(batch)).items():
        value = getattr(batch, name)
        if value == default_of(type(batch), name) or value in (None, b"", []):
            continue
        paths.add(name)
        if isinstance(column, columns.Group):
            paths |= {f"{name}.{inner}" for inner in used_paths(value)}
    return paths
