"""How a batch's field splits into rows: part of the field's declaration, as ``Annotated`` metadata.

A batch is in canonical form when a column that says nothing (all rows None, all lengths 1, a group of such columns) is
None. Producers and `split` keep to it, so that a row taken out of a batch equals the row made alone.
"""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True)
class Rows:
    """A list with one element per row.

    A column may be None. One that is too short is an error, unless `optional`: then the missing rows are None.
    """

    optional: bool = False


@dataclass(frozen=True)
class Lengths:
    """A list with the number of items of each row in the packed columns that name it; None: one item in every row."""


@dataclass(frozen=True)
class Packed:
    """Bytes of fixed-size items; row i has as many as the column `lengths` says."""

    lengths: str
    itemsize: int


@dataclass(frozen=True)
class Shared:
    """One value for the whole batch."""


@dataclass(frozen=True)
class Columns:
    """A dict of `Rows` columns, split per key."""


@dataclass(frozen=True)
class Group:
    """A struct of columns; None when all of them are."""


Column = Rows | Lengths | Packed | Shared | Columns | Group


@functools.cache
def columns_of(batch_type: type[msgspec.Struct]) -> dict[str, Column]:
    """Return the columns of a batch type by field name, in declaration order.

    Raises
    ------
    TypeError
        When a field's declaration doesn't say how it splits.
    """
    columns: dict[str, Column] = {}
    hints: dict[str, Any] = typing.get_type_hints(batch_type, include_extras=True)
    for name in batch_type.__struct_fields__:
        found = [m for m in getattr(hints[name], "__metadata__", ()) if isinstance(m, Column)]
        if len(found) != 1:
            raise TypeError(f"{batch_type.__name__}.{name} must declare one way to split")
        columns[name] = found[0]
    return columns
