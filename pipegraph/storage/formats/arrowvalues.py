"""Converts Arrow columns to Python values, by column type alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pipegraph.errors import ShardError

Convert = Callable[[Any], list[Any]]
"""A column to its values; a null becomes None."""


def arrow_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises for data that is not what it says."""
    arrow = importlib.import_module("pyarrow")
    return (arrow.ArrowException, OSError, MemoryError, ValueError, OverflowError)


def converter(kind: Any, copied: bool = True) -> Convert:
    """How columns of an Arrow type are turned to values.

    Args:
        copied: arrays own their values; else they lie in Arrow's memory where their type allows, and are read-only.

    Raises (from what is returned):
        ShardError: a list of integers has a null inside, for which NumPy has no value.
    """
    arrow = importlib.import_module("pyarrow")
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        stored = converter(kind.storage_type, copied)
        return lambda column: stored(column.storage)
    if types.is_dictionary(kind) and not _is_text_or_bytes(kind.value_type):
        values = converter(kind.value_type, copied)
        return lambda column: values(column.dictionary_decode())
    if _is_nanoseconds(kind):
        return _times
    if _is_array(kind):
        nullable = not types.is_integer(kind.value_type)
        return lambda column: _arrays(column, nullable, copied)
    plain: Convert = lambda column: column.to_pylist()  # noqa: E731
    return plain


def kind_of(kind: Any) -> str:
    """What values of an Arrow type look like: types of one kind can be mixed in a batch."""
    arrow = importlib.import_module("pyarrow")
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return kind_of(kind.storage_type)
    if types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if _is_text_or_bytes(kind):
        return "bytes" if "binary" in str(kind) else "text"
    if types.is_integer(kind):
        return "integer"
    if types.is_floating(kind):
        return "float"
    if _is_array(kind):
        return f"array of {kind.value_type}"
    return str(kind)


def _is_text_or_bytes(kind: Any) -> bool:
    name = str(kind)
    return name.startswith(("string", "large_string", "binary", "large_binary", "fixed_size_binary"))


def _is_nanoseconds(kind: Any) -> bool:
    types = importlib.import_module("pyarrow").types
    timed = types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind)
    return bool(timed and kind.unit == "ns")


def _is_array(kind: Any) -> bool:
    types = importlib.import_module("pyarrow").types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    value = kind.value_type
    return bool(types.is_integer(value) or types.is_floating(value))


def _times(column: Any) -> list[Any]:
    """Python's own types have microseconds only."""
    arrow = importlib.import_module("pyarrow")
    if arrow.types.is_time64(column.type):
        column = column.cast(arrow.int64()).cast(arrow.duration("ns"))
    found = column.to_numpy(zero_copy_only=False)
    return [
        value if valid else None for value, valid in zip(found, column.is_valid().to_pylist(), strict=True)
    ]


def _arrays(column: Any, nullable: bool, copied: bool) -> list[Any]:
    found: list[Any] = []
    for value in column:
        if not value.is_valid:
            found.append(None)
            continue
        numbers = value.values
        if numbers.null_count and not nullable:
            raise ShardError(
                f"a list of {column.type.value_type} has a null inside, for which a NumPy array has no value; write "
                "another number or the column as floats, or leave it out with Load(columns=...)"
            )
        array = numbers.to_numpy(zero_copy_only=False)
        # Copied: Arrow's memory is read-only, and would be kept by each of its rows.
        found.append(array.copy() if copied else array)
    return found
