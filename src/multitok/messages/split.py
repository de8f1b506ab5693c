"""Taking rows out of a batch, for any batch type, derived from its declaration (`columns`).

Law: ``handle_output_by_index(batch, i)`` equals what request i alone would have produced.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from multitok.messages.base import BaseBatchReq
from multitok.messages.columns import Columns, Group, Lengths, Packed, Rows, Shared, columns_of

_Batch = TypeVar("_Batch", bound=BaseBatchReq)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def extract_field_by_index(output: msgspec.Struct, field: str, index: int, check_length: bool = True) -> Any:
    """Return one row of one column, as a column of one row.

    Parameters
    ----------
    output : BaseBatchReq or column group
        The batch.
    field : str
        Name of the column.
    index : int
        Row, from 0.
    check_length : bool
        False for a column that may be shorter than the batch, as log probabilities are.

    Returns
    -------
    object
        None for an absent column, and for a short one with ``check_length=False``.

    Raises
    ------
    ValueError
        A required column is too short; the message names it.
    """
    return _take_column(output, field, [index], check_length)


def handle_output_by_index(output: _Batch, i: int) -> _Batch:
    """Return row `i` of a batch as a batch of its own.

    Raises
    ------
    ValueError
        A required column is too short.
    IndexError
        The batch has no row `i`.
    """
    if not 0 <= i < len(output.numbers):
        raise IndexError(f"row {i} of a batch of {len(output.numbers)}")
    return take_rows(output, [i])


def split_by_owner(output: _Batch) -> list[tuple[str | None, _Batch]]:
    """Split a batch into one batch per owner, in order of first appearance; rows keep their order.

    A batch of one owner is returned as it is.
    """
    owners = output.http_worker_ipcs
    if owners is None:
        return [(None, output)]
    if len(owners) != len(output.numbers):
        raise ValueError(f"http_worker_ipcs has {len(owners)} rows, the batch {len(output.numbers)}")
    if not owners:
        return []
    if owners.count(owners[0]) == len(owners):
        return [(owners[0], output)]
    rows: dict[str | None, list[int]] = {}
    for i, owner in enumerate(owners):
        rows.setdefault(owner, []).append(i)
    return [(owner, take_rows(output, indexes)) for owner, indexes in rows.items()]


def take_rows(output: _Batch, indexes: list[int]) -> _Batch:
    """Return the rows `indexes` of a batch, in that order, in canonical form."""
    return _take_group(output, indexes)


def concatenate(batches: list[_Batch]) -> _Batch:
    """Return the rows of several batches of one type as one batch, in canonical form; the inverse of splitting.

    What is shared by a batch's rows is taken from the first batch that has it.
    """
    return _join_groups(batches, [len(batch.numbers) for batch in batches])


def _join_groups(groups: list[_Struct], sizes: list[int]) -> _Struct:
    group_type = type(groups[0])
    joined: dict[str, Any] = {}
    for name, column in columns_of(group_type).items():
        values = [getattr(group, name) for group in groups]
        present = [value for value in values if value is not None]
        if not present:
            continue
        match column:
            case Rows():
                joined[name] = _join_rows(values, sizes)
            case Lengths():
                joined[name] = [n for value, size in zip(values, sizes, strict=True) for n in value or [1] * size]
            case Packed():
                joined[name] = b"".join(present)
            case Shared():
                joined[name] = present[0]
            case Columns():
                keys = dict.fromkeys(key for value in present for key in value)
                joined[name] = {key: _join_rows([(v or {}).get(key) for v in values], sizes) for key in keys}
            case Group():
                empty = type(present[0])()
                joined[name] = _join_groups([value or empty for value in values], sizes)
    return group_type(**joined)


def _join_rows(values: list[list[Any] | None], sizes: list[int]) -> list[Any]:
    rows: list[Any] = []
    for value, size in zip(values, sizes, strict=True):
        rows += [None] * size if value is None else value + [None] * (size - len(value))
    return rows


def check_columns(batch: BaseBatchReq) -> None:
    """Check that the columns of a batch agree on its rows.

    Raises
    ------
    ValueError
        One has more or fewer; the message names it.
    """
    _check_group(batch, len(batch.numbers))


def _check_group(group: msgspec.Struct, rows: int) -> None:
    for name, column in columns_of(type(group)).items():
        value = getattr(group, name)
        if value is None:
            continue
        match column:
            case Rows(optional=optional):
                wrong = len(value) > rows if optional else len(value) != rows
            case Lengths():
                wrong = len(value) != rows or min(value, default=0) < 0
            case Packed(lengths=lengths, itemsize=itemsize):
                items = getattr(group, lengths)
                wrong = len(value) != itemsize * (rows if items is None else sum(items))
            case Columns():
                wrong = any(len(rows_of_key) > rows for rows_of_key in value.values())
            case Group():
                _check_group(value, rows)
                continue
            case Shared():
                continue
        if wrong:
            raise ValueError(f"{name} does not fit a batch of {rows} rows")


def _take_group(output: _Struct, indexes: list[int]) -> _Struct:
    taken = {}
    for name, column in columns_of(type(output)).items():
        if getattr(output, name) is not None:
            required = not (isinstance(column, Rows) and column.optional)
            taken[name] = _take_column(output, name, indexes, required)
    return type(output)(**taken)


def _take_column(output: msgspec.Struct, name: str, indexes: list[int], check_length: bool) -> Any:
    value = getattr(output, name)
    if value is None:
        return None
    match columns_of(type(output))[name]:
        case Rows():
            return _take_rows_column(name, value, indexes, check_length)
        case Lengths():
            lengths = _take_rows_column(name, value, indexes, check_length)
            return None if lengths is None or lengths.count(1) == len(lengths) else lengths
        case Packed(lengths=lengths_name, itemsize=itemsize):
            return _take_packed(name, value, getattr(output, lengths_name), itemsize, indexes)
        case Shared():
            return value
        case Columns():
            rows = {k: _take_rows_column(f"{name}[{k!r}]", v, indexes, check_length) for k, v in value.items()}
            return {k: v for k, v in rows.items() if v is not None} or None
        case Group():
            group = _take_group(value, indexes)
            return None if all(getattr(group, field) is None for field in group.__struct_fields__) else group


def _take_rows_column(name: str, value: list[Any], indexes: list[int], check_length: bool) -> list[Any] | None:
    try:
        rows = [value[i] for i in indexes]
    except IndexError:
        if check_length:
            raise ValueError(f"{name} has {len(value)} rows, row {max(indexes)} was asked for") from None
        rows = [value[i] if i < len(value) else None for i in indexes]
    return None if rows.count(None) == len(rows) else rows


def _take_packed(name: str, value: bytes, lengths: list[int] | None, itemsize: int, indexes: list[int]) -> bytes:
    if lengths is None:
        spans = [(i * itemsize, (i + 1) * itemsize) for i in indexes]
    else:
        ends = list(accumulate(lengths))
        if max(indexes) >= len(ends):
            raise ValueError(f"{name} has lengths of {len(ends)} rows, row {max(indexes)} was asked for")
        spans = [((ends[i] - lengths[i]) * itemsize, ends[i] * itemsize) for i in indexes]
    if max(end for _, end in spans) > len(value):
        raise ValueError(f"{name} has {len(value)} bytes, too few for row {max(indexes)}")
    return b"".join([value[start:end] for start, end in spans])
