"""Columns of a table as Python values: text, numbers, bytes, and integers by the row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["text", "value", "bytes", "codes", "image"]


WANTED = {  # in words, of what a column has to hold
    "text": "text",
    "value": "text, numbers or yes and no",
    "bytes": "bytes",
    "codes": "bytes or lists of integers",
    "image": 'bytes or a struct with "bytes"',
}


def suits(kind: pa.DataType, wanted: Kind) -> bool:
    """Whether a column of this type can hold what is wanted of it."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    is_bytes = _is_bytes(kind)
    if wanted == "text":  # some writers (Impala, older Sparks) do not say that their bytes are text
        return _is_text(kind) or is_bytes
    if wanted == "value":
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        return _is_text(kind) or is_bytes or is_number or types.is_boolean(kind) or types.is_null(kind)
    if wanted == "codes":
        return is_bytes or (_is_list(kind) and types.is_integer(kind.value_type))
    if wanted == "image" and types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and suits(kind.field(place).type, "bytes")
    return is_bytes


def values_of(column: pa.Array, wanted: Kind | None = None) -> list[Any]:
    """One Python value a row; None where there is none. Lists of integers become arrays of their own; bytes become text
    where text is wanted or may be wanted ("text", "value"), and decimals become floats."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if _is_text(kind) or (_is_bytes(kind) and wanted in ("text", "value")):
        raw = column.cast(pa.large_binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "replace") for value in raw]
    if types.is_decimal(kind):
        return column.cast(pa.float64()).to_pylist()
    if _is_list(kind) and types.is_integer(kind.value_type):
        return _arrays(column)
    return column.to_pylist()


def _is_text(kind: pa.DataType) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    from pyarrow import types

    is_plain = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return is_plain or types.is_binary_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    from pyarrow import types

    is_plain = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_plain or types.is_list_view(kind) or types.is_large_list_view(kind)


def _arrays(column: pa.Array) -> list[np.ndarray | None]:
    rows: list[np.ndarray | None] = []
    for n in range(len(column)):
        values = column[n].values
        if values is None:
            rows.append(None)
        elif values.null_count:
            rows.append(np.zeros(0, np.int64))  # a gap in the codes: of no use, whatever the others are
        else:
            rows.append(values.to_numpy(zero_copy_only=False).copy())  # of its own: not all of the batch stays with it
    return rows
