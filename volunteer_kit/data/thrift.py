"""Thrift's compact protocol, as far as parquet files speak it, read into plain dicts by field number. The protocol is
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md"""

from __future__ import annotations

import struct
from typing import Any

MAX_DEPTH = 12
MAX_KEY = 100  # fields beyond are passed over
MAX_VALUES = 2_000_000  # structs and elements of lists: one byte may stand for an object of a hundred

Fields = dict[int, Any]


class ThriftError(ValueError):
    """Bytes that are no such struct."""


def read_struct(data: bytes) -> tuple[Fields, int]:
    """The struct that `data` begins with, and where it ends. Raises IndexError when it goes on after the end of `data`,
    ThriftError when it is none."""
    return _struct(data, 0, 0, [MAX_VALUES])


def _struct(data: bytes, at: int, depth: int, budget: list[int]) -> tuple[Fields, int]:
    fields: Fields = {}
    key = 0
    _spend(budget, 1, depth)
    while first := data[at]:
        at += 1
        if first >> 4:
            key += first >> 4
        else:
            key, at = _number(data, at)
        kind = first & 15
        if 4 <= kind <= 6:
            value, at = _number(data, at)
        elif kind <= 2:
            value = kind == 1
        else:
            value, at = _value(data, at, kind, depth, budget)
        if key <= MAX_KEY:
            fields[key] = value
    return fields, at + 1


def _spend(budget: list[int], values: int, depth: int) -> None:
    budget[0] -= values
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise ThriftError("too many values, or nested too deep")


def _value(data: bytes, at: int, kind: int, depth: int, budget: list[int]) -> tuple[Any, int]:
    if kind == 8:
        length, at = _varint(data, at)
        if at + length > len(data):
            raise IndexError
        return data[at : at + length], at + length
    if kind == 12:
        return _struct(data, at, depth + 1, budget)
    if kind in (9, 10):
        return _list(data, at, depth + 1, budget)
    if kind in (1, 2, 3):
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _number(data, at)
    if kind == 7:
        if at + 8 > len(data):
            raise IndexError
        return struct.unpack_from("<d", data, at)[0], at + 8
    raise ThriftError(f"no such type: {kind}")


def _list(data: bytes, at: int, depth: int, budget: list[int]) -> tuple[list[Any], int]:
    length, kind = data[at] >> 4, data[at] & 15
    at += 1
    if length == 15:
        length, at = _varint(data, at)
    if length > len(data) - at:  # an element has a byte at least
        raise IndexError
    _spend(budget, length, depth)
    values = []
    for _ in range(length):
        value, at = _value(data, at, kind, depth, budget)
        values.append(value)
    return values, at


def _number(data: bytes, at: int) -> tuple[int, int]:
    raw = data[at]
    at += 1
    if raw > 127:
        raw, at = _varint(data, at - 1)
    return (raw >> 1) ^ -(raw & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ThriftError("a number without end")
