"""Bytes that no honest peer sends."""

from __future__ import annotations

import struct

import msgpack

TUPLE, DICTIONARY = 0x40, 0x50  # hivemind's codes of msgpack extensions
LEVELS = 400  # of nesting; half as many end a process whose serializer decodes recursively


def nested(levels: int = LEVELS, code: int = TUPLE) -> bytes:
    """A tuple in a tuple in a tuple ..., as hivemind writes tuples."""
    data = b"\x90"
    for _ in range(levels):
        data = b"\x91\xc9" + struct.pack(">IB", len(data), code) + data
    return data


def nested_word(levels: int = LEVELS) -> bytes:
    """The same, of which the outermost is the extension itself: a subkey, or a regular value."""
    data = nested(levels)
    return b"\xc9" + struct.pack(">IB", len(data), TUPLE) + data


def nested_dictionary(levels: int = LEVELS) -> bytes:
    """A dictionary of the DHT with a nested subkey in it."""
    inner = b"\x93" + msgpack.packb(8) + msgpack.packb(2e9) + b"\x91\x93" + nested_word(levels) + b"\xc4\x01\x01"
    inner += msgpack.packb(2e9)
    return b"\xc9" + struct.pack(">IB", len(inner), DICTIONARY) + inner


def deep_array(levels: int = 100_000) -> bytes:
    return b"\x91" * levels + b"\xc0"


def deep_map(levels: int = 100_000) -> bytes:
    return b"\x81\xa1k" * levels + b"\xc0"


def wide_array(items: int = 1_900_000) -> bytes:
    """One byte an item here, eight and more in memory."""
    return b"\xdd" + struct.pack(">I", items) + b"\x90" * items


def promised_array() -> bytes:
    """An array that says it has four billion items, and has none."""
    return b"\xdd\xff\xff\xff\xff"
