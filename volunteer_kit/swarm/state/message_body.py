"""Read the msgpack bodies of calls between peers, within bounds and with checked types."""

from __future__ import annotations

from typing import Any

import msgpack

from volunteer_kit.swarm.errors import brief

MAX_BODY = 1024  # bytes; a question to a peer has under 200
MAX_ITEMS = 16  # of any list in it
MAX_LISTS = 16  # in it; lists take a byte each, and a microsecond


def open_body(data: bytes, longest: int = MAX_BODY, most: int = MAX_ITEMS, lists: int = MAX_LISTS) -> msgpack.Unpacker:
    """Reads what a stranger packed, piece by piece: numbers, texts, bytes and lists of them, no maps and no extensions.

    :param longest: bytes
    :param most: items of any list
    :param lists: of all lists together
    Raises ValueError for a body that is too long; its `unpack` raises all sorts of errors.
    """
    if len(data) > longest:
        raise ValueError(f"a body of {len(data)} bytes, more than {longest}")
    left = lists

    def count(found: list) -> list:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {lists} lists")
        return found

    size = max(1, longest)
    reader = msgpack.Unpacker(
        max_buffer_size=size, max_array_len=most, max_map_len=0, max_ext_len=0, raw=False, list_hook=count
    )
    reader.feed(data)
    return reader


def unpack_body(data: bytes, longest: int = MAX_BODY, most: int = MAX_ITEMS, lists: int = MAX_LISTS) -> Any:
    """The whole of a body, and nothing behind it. Raises ValueError, with a short text, for anything else."""
    reader = open_body(data, longest, most, lists)
    try:
        found = reader.unpack()
    except Exception as error:  # msgpack has a dozen of them
        raise ValueError(f"a body that cannot be read: {brief(error)}") from None
    if reader.tell() != len(data):
        raise ValueError("a body with something behind it")
    return found


def read_body(
    data: bytes, *types: type | tuple[type, ...], longest: int = MAX_BODY, most: int = MAX_ITEMS
) -> list[Any]:
    """A body that is a list of just these types, in this order; a tuple of types: one of them. A bool is no int.

    Raises ValueError.
    """
    found = unpack_body(data, longest, most)
    if not isinstance(found, list) or len(found) != len(types):
        raise ValueError(f"a body that is no list of {len(types)} values")
    for value, kind in zip(found, types, strict=True):
        if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise ValueError(f"a body with {type(value).__name__} in the place of another type")
    return found
