"""Check hivemind's msgpack messages against bounds before it decodes them.

hivemind decodes a tuple, and a dictionary of the DHT, by a call from C into Python and back, once per level: about 200
nested levels, 1.6 kB, overflow the stack and end the process, and no `except` helps. A list may also claim 2^32 items,
for which msgpack makes room at once. So every message is walked first, without recursion and without making an object.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

MAX_NESTING = 32  # levels of lists, maps, tuples and dictionaries together; hivemind's own and ours have up to 8
MAX_ITEMS = 2**16  # items of all lists and maps of a message; an optimizer's state has some 20,000
MAX_RECORD_ITEMS = 512  # items of a record of the DHT; ours have 470 at most. Each wrong field takes 60 us
MAX_MESSAGE = 2**23  # bytes; p2pd passes on up to 4 MiB in one message
MAX_RECORDS = 5000  # under one key of the DHT; 1 MiB holds what 2,000 peers say of themselves

TUPLE, DICTIONARY = 0x40, 0x50  # hivemind's extension types; nothing else of the kind is ever sent
# bytes after the first one, by the first one: of values of a fixed size
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes and text: bytes that tell their length
_EXTENSION = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSION = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_LISTS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}


class OutOfBounds(ValueError):
    """A message that no peer of ours would send. It was not decoded."""


def check_bounds(message: bytes, max_items: int = MAX_ITEMS) -> None:
    """Raises OutOfBounds unless `message` is one msgpack object within MAX_NESTING, `max_items` and MAX_MESSAGE."""
    if len(message) > MAX_MESSAGE:
        raise OutOfBounds(f"a message of {len(message)} bytes, where {MAX_MESSAGE} are allowed")
    at, items = 0, 0
    # of each open container: items still to come, the byte at which it must end, and whether it is a message of its own
    open_frames = [(1, len(message), True)]
    try:
        while open_frames:
            left, end, is_message = open_frames.pop()
            if left == 0:
                if is_message and at != end:
                    raise OutOfBounds(f"{end - at} bytes behind the end of a message")
                continue
            open_frames.append((left - 1, end, is_message))
            first = message[at]
            at += 1
            count = None  # of the items of a container
            if first < 0x80 or first >= 0xE0:
                pass
            elif first < 0x90:
                count = 2 * (first & 15)
            elif first < 0xA0:
                count = first & 15
            elif first < 0xC0:
                at += first & 31
            elif first in _FIXED:
                at += _FIXED[first]
            elif first in _SIZED:
                at, size = _number(message, at, _SIZED[first])
                at += size
            elif first in _LISTS:
                at, count = _number(message, at, _LISTS[first])
            elif first in _MAPS:
                at, count = _number(message, at, _MAPS[first])
                count *= 2
            elif first in _EXTENSION or first in _FIXED_EXTENSION:
                size = _FIXED_EXTENSION.get(first)
                if size is None:
                    at, size = _number(message, at, _EXTENSION[first])
                kind = message[at]
                at += 1
                if kind != TUPLE and not (kind == DICTIONARY and len(open_frames) == 1):
                    raise OutOfBounds(f"extension type {kind} at level {len(open_frames)}")
                if at + size > end:
                    raise OutOfBounds("an extension that is longer than its message")
                open_frames.append((1, at + size, True))
            else:
                raise OutOfBounds(f"0x{first:02x} begins no msgpack value")
            if at > end:
                raise OutOfBounds("a value that is longer than its message")
            if count is not None:
                items += count
                if items > max_items or count > end - at:
                    raise OutOfBounds(f"a message of more than {min(items, max_items)} items")
                open_frames.append((count, end, False))
            if len(open_frames) > MAX_NESTING:
                raise OutOfBounds(f"a message nested deeper than {MAX_NESTING} levels")
    except IndexError:
        raise OutOfBounds("a message that is cut off") from None


def _number(message: bytes, at: int, size: int) -> tuple[int, int]:
    """A length of `size` bytes -> where the next byte is, and the length."""
    return at + size, int.from_bytes(message[at : at + size], "big")


def unpack_dictionary(packed: bytes) -> DictionaryDHTValue:
    """A dictionary of the DHT as another peer sends it. Raises ValueError unless each record has a name, bytes and a
    finite expiration. How many records it may hold is ours to say: hivemind takes the sender's word for it."""
    found = msgpack.unpackb(packed, raw=False)  # the walk over the whole message went through here
    if not (isinstance(found, list) and len(found) == 3 and isinstance(found[2], list)):
        raise OutOfBounds("a dictionary of another form")
    if len(found[2]) > MAX_RECORDS:
        raise OutOfBounds(f"a dictionary of {len(found[2])} records, where {MAX_RECORDS} are allowed")
    dictionary = DictionaryDHTValue()
    with dictionary.freeze():
        for record in found[2]:
            if not (isinstance(record, list) and len(record) == 3 and is_record(*record)):
                raise OutOfBounds("a dictionary with something that is no record")
            try:
                dictionary.store(*record)
            except TypeError:  # names of different types cannot be put in an order
                raise OutOfBounds("a dictionary with names of different types") from None
    return dictionary


def is_record(subkey: Any, value: Any, expiration: Any) -> bool:
    """May this stand in a dictionary of the DHT? A NaN would never expire, and break the order of the others."""
    hashable = isinstance(subkey, (str, bytes, int, float)) or subkey is None
    return hashable and isinstance(value, bytes) and isinstance(expiration, float) and math.isfinite(expiration)


def bound_serializer() -> None:
    """Give hivemind's serializer these bounds, in this process and those that it forks."""
    decode = MSGPackSerializer.loads
    if getattr(decode, "is_bounded", False):
        return

    def loads(message: bytes) -> Any:
        check_bounds(message)
        return decode(message)

    loads.is_bounded = True
    MSGPackSerializer.loads = staticmethod(loads)
    DictionaryDHTValue.unpackb = staticmethod(unpack_dictionary)


class DecodableValidator(RecordValidatorBase):
    """Refuses records whose value cannot be decoded, for one of them would break each reading of its whole key, and
    those of more than MAX_RECORD_ITEMS."""

    priority = 5  # after the validators that take a signature off, before those that look at fields

    def validate(self, record: DHTRecord) -> bool:
        try:
            check_bounds(record.value, MAX_RECORD_ITEMS)
            MSGPackSerializer.loads(record.value)
        except Exception:  # msgpack has a dozen of them
            return False
        return True
