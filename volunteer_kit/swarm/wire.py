"""Encode values as bytes, for messages between peers and records of a node, without pickle.

A value is written as msgpack scalars one behind the other, without msgpack's arrays and maps: the type hints say what
comes next. So what a stranger sends cannot nest, and every collection grows only as far as its elements are there.
Texts and bytes that come again are written as the number of their first place. In front stands a number that follows
from the type hints: a kit whose messages have other fields is refused, not misread.
"""

from __future__ import annotations

import math
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack

from volunteer_kit.swarm.sync.certificates import Certificate
from volunteer_kit.swarm.sync.entries import Entry, Opening, RollbackOrder
from volunteer_kit.swarm.sync.log import LogItem

MOST: Final = 1 << 20  # bytes of a message
MOST_TEXT: Final = 512  # bytes of a str
MOST_BITS: Final = 256  # of an int
EXPANSION: Final = 16  # bytes that one byte of a message may stand for, by repetition
SET_BYTES: Final = 64  # of memory that an element of a set takes
ITEM_BYTES: Final = 4096  # that stand for an item of a log: making it takes longer than reading as many

_BIG: Final = MOST_BITS // 8 + 1  # bytes of an int that msgpack has no form for
_UNPACKER: Final = dict(max_array_len=0, max_map_len=0, max_ext_len=0, max_str_len=MOST_TEXT, use_list=True)


class WireError(ValueError):
    """Bytes that are no such value, or a value that has no bytes; str() is the reason in words."""


class _Writer:
    """Collects scalars."""

    __slots__ = ("add", "scalars", "_places", "_count")

    def __init__(self) -> None:
        self.scalars: list[Any] = []
        self.add = self.scalars.append
        self._places: dict[str | bytes, int] = {}
        self._count = 0

    def repeatable(self, value: str | bytes) -> None:
        """Add the value, or where it was before."""
        place = self._places.get(value)
        if place is not None:
            self.add(place)
        else:
            self.add(value)
            self.note(value)

    def note(self, value: str | bytes) -> None:
        """The reader knows this value here, so it need not be written any more."""
        self._places[value] = self._count
        self._count += 1


class _Reader:
    """Hands out scalars.

    :param left: bytes that may still be repeated
    """

    __slots__ = ("take", "note", "_known", "_left")

    def __init__(self, take: Callable[[], Any], left: int):
        self.take = take
        self._known: list[str | bytes] = []
        self.note = self._known.append
        self._left = left

    def repeatable(self, kind: type[str] | type[bytes], found: Any) -> Any:
        """A str or bytes, or where it was before."""
        if type(found) is kind:
            self.note(found)
            return found
        if type(found) is not int or not 0 <= found < len(self._known):
            raise WireError(f"{kind.__name__} expected")
        again = self._known[found]
        if type(again) is not kind:
            raise WireError(f"{kind.__name__} expected")
        self.spend(len(again))
        return again

    def spend(self, size: int) -> None:
        """Something takes more memory than its bytes had."""
        self._left -= size
        if self._left < 0:
            raise WireError("it stands for too much")

    def count(self) -> int:
        """The length of a collection."""
        found = self.take()
        if type(found) is not int or found < 0:
            raise WireError("a length expected")
        return found


class _Plan(NamedTuple):
    """How values of one kind are written and read. Each takes at least one scalar."""

    write: Callable[[Any, _Writer], None]
    read: Callable[[_Reader], Any]
    text: str  # the fields, for the number in front
    accept: Callable[[Any, _Reader], Any] | None = None  # of a kind that is one scalar, and never nil: from that


def encode(value: Any, kind: Any = None) -> bytes:
    """The value's bytes; equal values have equal ones.

    :param kind: the class, union or collection that `decode` is asked for; None: the value's class
    :raises WireError: if a part of it has another type than its hint, or is beyond a bound
    :raises TypeError: for a kind that has no plan
    """
    written: Any = type(value) if kind is None else kind
    plan, number = _numbered(written)
    out = _Writer()
    out.add(number)
    plan.write(value, out)
    pack = msgpack.Packer().pack
    try:
        return b"".join([pack(each) for each in out.scalars])
    except ValueError as error:  # a str that is no Unicode
        raise WireError(f"it cannot be written: {error}") from None


def decode(kind: Any, data: bytes, most: int = MOST) -> Any:
    """The value of this kind that `encode` wrote; `data` may be a stranger's.

    :param most: bytes; a value takes up to about a hundred times as much memory
    :raises WireError: for anything else
    :raises TypeError: for a kind that has no plan
    """
    plan, number = _numbered(kind)
    if not isinstance(data, bytes) or not 0 < len(data) <= most:
        raise WireError("it is empty or too long")
    try:
        unpacker = msgpack.Unpacker(read_size=len(data), max_buffer_size=len(data), max_bin_len=len(data), **_UNPACKER)
        unpacker.feed(data)
        if unpacker.unpack() != number:
            raise WireError("it is of another version of the kit, or something else")
        value = plan.read(_Reader(unpacker.unpack, EXPANSION * most))
        if unpacker.tell() != len(data):
            raise WireError("something follows it")
    except WireError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"it cannot be read: {type(error).__name__}") from None
    return value


# --- plans ---


@cache
def _numbered(kind: Any) -> tuple[_Plan, int]:
    plan = _plan(kind)
    return plan, zlib.crc32(plan.text.encode())


@cache
def _plan(kind: Any) -> _Plan:
    if kind in _SCALARS:
        return _SCALARS[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union_plan(inner)
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return _chain_plan() if inner[0] is LogItem else _tuple_plan(_plan(inner[0]))
        return _row_plan(tuple(map(_plan, inner)))
    if origin is frozenset:
        return _set_plan(_plan(inner[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_plan(_plan(inner[0]), _plan(inner[1]))
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return _enum_plan(kind)
        if hasattr(kind, "as_record"):
            return _as_record_plan(kind)
        if is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            return _record_plan(kind)
    raise TypeError(f"{kind} has no plan: it is no dataclass, NamedTuple, enum, union, collection or scalar")


def _scalar_plan(write: Callable[[Any, _Writer], None], accept: Callable[[Any, _Reader], Any], text: str) -> _Plan:
    return _Plan(write, lambda data: accept(data.take(), data), text, accept)


def _bool_plan() -> _Plan:
    def write(value: Any, out: _Writer) -> None:
        if type(value) is not bool:
            raise WireError(f"bool expected, not {type(value).__name__}")
        out.add(value)

    def accept(found: Any, data: _Reader) -> Any:
        if type(found) is not bool:
            raise WireError("bool expected")
        return found

    return _scalar_plan(write, accept, "bool")


def _none_plan() -> _Plan:
    def write(value: Any, out: _Writer) -> None:
        if value is not None:
            raise WireError(f"None expected, not {type(value).__name__}")
        out.add(None)

    def read(data: _Reader) -> Any:
        if data.take() is not None:
            raise WireError("None expected")

    return _Plan(write, read, "None")


def _int_plan() -> _Plan:
    def write(value: Any, out: _Writer) -> None:
        if type(value) is not int:
            raise WireError(f"int expected, not {type(value).__name__}")
        if -(1 << 63) <= value < 1 << 64:
            out.add(value)
        elif value.bit_length() <= MOST_BITS:
            out.add(value.to_bytes(_BIG, "big", signed=True))
        else:
            raise WireError(f"an int beyond {MOST_BITS} bits")

    def accept(found: Any, data: _Reader) -> Any:
        if type(found) is int:
            return found
        if type(found) is not bytes or len(found) != _BIG:
            raise WireError("int expected")
        value = int.from_bytes(found, "big", signed=True)
        if -(1 << 63) <= value < 1 << 64 or value.bit_length() > MOST_BITS:
            raise WireError("an int in a form that it has not")
        return value

    return _scalar_plan(write, accept, "int")


def _float_plan() -> _Plan:
    def write(value: Any, out: _Writer) -> None:
        if type(value) not in (float, int) or not math.isfinite(value):
            raise WireError("a finite float expected")
        out.add(float(value))

    def accept(found: Any, data: _Reader) -> Any:
        if type(found) is not float or not math.isfinite(found):
            raise WireError("a finite float expected")
        return found

    return _scalar_plan(write, accept, "float")


def _repeatable_plan(kind: type[str] | type[bytes]) -> _Plan:
    def write(value: Any, out: _Writer) -> None:
        if type(value) is not kind:
            raise WireError(f"{kind.__name__} expected, not {type(value).__name__}")
        if isinstance(value, str) and len(value) > MOST_TEXT // 4 and len(value.encode(errors="replace")) > MOST_TEXT:
            raise WireError(f"a str beyond {MOST_TEXT} bytes")
        out.repeatable(value)

    def accept(found: Any, data: _Reader) -> Any:
        return data.repeatable(kind, found)

    return _scalar_plan(write, accept, kind.__name__)


_SCALARS: Final[Mapping[Any, _Plan]] = {
    bool: _bool_plan(),
    type(None): _none_plan(),
    int: _int_plan(),
    float: _float_plan(),
    str: _repeatable_plan(str),
    bytes: _repeatable_plan(bytes),
}


def _enum_plan(kind: type[Enum]) -> _Plan:
    members = {each.value: each for each in kind}
    value_kind: Any = type(next(iter(members)))
    plan = _plan(value_kind)
    inner = plan.accept
    if inner is None:
        raise TypeError(f"{kind} has no plan: its values are no scalars")

    def write(value: Any, out: _Writer) -> None:
        if type(value) is not kind:
            raise WireError(f"{kind.__name__} expected, not {type(value).__name__}")
        plan.write(value.value, out)

    def accept(found: Any, data: _Reader) -> Any:
        member = members.get(inner(found, data))
        if member is None:
            raise WireError(f"{kind.__name__} expected")
        return member

    return _scalar_plan(write, accept, f"{kind.__name__}{sorted(members)}")


def _record_plan(kind: Any) -> _Plan:
    """A dataclass or NamedTuple: its fields in their order. One without fields is a nil."""
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind)] if is_dataclass(kind) else list(kind._fields)
    plans = [_plan(hints[name]) for name in names]
    text = ",".join(f"{name}:{plan.text}" for name, plan in zip(names, plans, strict=True))
    writes = tuple((name, plan.write) for name, plan in zip(names, plans, strict=True))
    reads = tuple(plan.read for plan in plans)

    def write(value: Any, out: _Writer) -> None:
        if type(value) is not kind:
            raise WireError(f"{kind.__name__} expected, not {type(value).__name__}")
        if not writes:
            out.add(None)
        for name, each in writes:
            each(getattr(value, name), out)

    def read(data: _Reader) -> Any:
        if not reads and data.take() is not None:
            raise WireError(f"{kind.__name__} expected")
        return kind(*[each(data) for each in reads])

    return _Plan(write, read, f"{kind.__name__}({text})")


def _as_record_plan(kind: Any) -> _Plan:
    """A class that says by `as_record` what it consists of; its `from_record` raises ValueError."""
    plan = _plan(get_type_hints(kind.as_record)["return"])

    def write(value: Any, out: _Writer) -> None:
        if type(value) is not kind:
            raise WireError(f"{kind.__name__} expected, not {type(value).__name__}")
        plan.write(value.as_record(), out)

    def read(data: _Reader) -> Any:
        return kind.from_record(plan.read(data))

    return _Plan(write, read, plan.text)


def _union_plan(kinds: tuple[Any, ...]) -> _Plan:
    """The place of the class in the union, then the value; a scalar or None needs no place."""
    plans = [_plan(kind) for kind in kinds]
    text = "|".join(plan.text for plan in plans)
    if len(kinds) == 2 and kinds[1] is type(None) and plans[0].accept is not None:
        return _scalar_or_none_plan(plans[0].write, plans[0].accept, text)
    if not all(isinstance(kind, type) for kind in kinds):
        raise TypeError(f"{kinds} has no plan: a collection in a union")
    tags = {kind: (place, plan.write) for place, (kind, plan) in enumerate(zip(kinds, plans, strict=True))}
    reads = tuple(plan.read for plan in plans)

    def write(value: Any, out: _Writer) -> None:
        if type(value) not in tags:
            raise WireError(f"{type(value).__name__} is not in the union")
        place, each = tags[type(value)]
        out.add(place)
        each(value, out)

    def read(data: _Reader) -> Any:
        place = data.count()
        if place >= len(reads):
            raise WireError("it is not in the union")
        return reads[place](data)

    return _Plan(write, read, text)


def _scalar_or_none_plan(
    write_scalar: Callable[[Any, _Writer], None], accept: Callable[[Any, _Reader], Any], text: str
) -> _Plan:
    def write(value: Any, out: _Writer) -> None:
        if value is None:
            out.add(None)
        else:
            write_scalar(value, out)

    def read(data: _Reader) -> Any:
        found = data.take()
        return None if found is None else accept(found, data)

    return _Plan(write, read, text)


def _tuple_plan(plan: _Plan) -> _Plan:
    def write(value: Any, out: _Writer) -> None:
        if type(value) is not tuple:
            raise WireError(f"tuple expected, not {type(value).__name__}")
        out.add(len(value))
        for each in value:
            plan.write(each, out)

    def read(data: _Reader) -> Any:
        return tuple(_read_each(plan, data))

    return _Plan(write, read, f"[{plan.text}]")


def _read_each(plan: _Plan, data: _Reader) -> list[Any]:
    """Each element takes a scalar, so a length that is not true ends with the bytes."""
    found = []
    for _ in range(data.count()):
        found.append(plan.read(data))
    return found


def _row_plan(plans: tuple[_Plan, ...]) -> _Plan:
    """A tuple of fixed length."""
    if not plans:
        raise TypeError("the empty tuple has no plan")

    def write(value: Any, out: _Writer) -> None:
        if type(value) is not tuple or len(value) != len(plans):
            raise WireError(f"a tuple of {len(plans)} expected")
        for each, plan in zip(value, plans, strict=True):
            plan.write(each, out)

    def read(data: _Reader) -> Any:
        return tuple([plan.read(data) for plan in plans])

    return _Plan(write, read, f"({','.join(plan.text for plan in plans)})")


def _set_plan(plan: _Plan) -> _Plan:
    def write(value: Any, out: _Writer) -> None:
        if type(value) is not frozenset:
            raise WireError(f"frozenset expected, not {type(value).__name__}")
        out.add(len(value))
        for each in sorted(value):
            plan.write(each, out)

    def read(data: _Reader) -> Any:
        found = _read_each(plan, data)
        unique = frozenset(found)
        if len(unique) < len(found):
            raise WireError("an element comes twice")
        return unique

    return _Plan(write, read, f"{{{plan.text}}}")


def _mapping_plan(key: _Plan, value: _Plan) -> _Plan:
    def write(mapping: Any, out: _Writer) -> None:
        if not isinstance(mapping, Mapping):
            raise WireError(f"a mapping expected, not {type(mapping).__name__}")
        out.add(len(mapping))
        for each in sorted(mapping):
            key.write(each, out)
            value.write(mapping[each], out)

    def read(data: _Reader) -> Any:
        found: dict[Any, Any] = {}
        for place in range(data.count()):
            each = key.read(data)
            found[each] = value.read(data)
            if len(found) <= place:
                raise WireError("a key comes twice")
        return found

    return _Plan(write, read, f"{{{key.text}:{value.text}}}")


# --- logs ---


def _chain_plan() -> _Plan:
    """Items of a log. Head and membership follow from the item before, so only the first item has them in full."""
    whole, step = _plan(LogItem), _plan(Entry | Opening | RollbackOrder)
    certificate, signers = _plan(Certificate), _plan(frozenset[str])

    def write(value: Any, out: _Writer) -> None:
        if type(value) is not tuple:
            raise WireError(f"tuple expected, not {type(value).__name__}")
        out.add(len(value))
        before: LogItem | None = None
        for item in value:
            if type(item) is not LogItem:
                raise WireError(f"LogItem expected, not {type(item).__name__}")
            follows = before is not None and _behind(before, item.step, item.certificate, item.signers) == item
            out.add(follows)
            if follows:
                step.write(item.step, out)
                out.note(item.head.lineage)
                if isinstance(item.step, Entry):
                    certificate.write(item.certificate, out)
                elif isinstance(item.step, Opening):
                    signers.write(item.signers, out)
            else:
                whole.write(item, out)
            before = item

    def read(data: _Reader) -> Any:
        items: list[LogItem] = []
        for _ in range(data.count()):
            follows = data.take()
            if follows is True and items:
                items.append(read_behind(items[-1], data))
            elif follows is False:
                items.append(whole.read(data))
            else:
                raise WireError("it follows nothing")
        return tuple(items)

    def read_behind(before: LogItem, data: _Reader) -> LogItem:
        membership = before.membership
        groups = sum(map(len, membership.recent))
        sizes = len(membership.founders) + len(membership.banned) + len(membership.entries) + groups
        data.spend(ITEM_BYTES + SET_BYTES * sizes)
        taken = step.read(data)
        data.note(taken.lineage)
        proof = certificate.read(data) if isinstance(taken, Entry) else None
        by = signers.read(data) if isinstance(taken, Opening) else frozenset()
        item = _behind(before, taken, proof, by)
        assert item is not None
        return item

    return _Plan(write, read, f"chain[{whole.text}]")


def _behind(
    before: LogItem,
    step: Entry | Opening | RollbackOrder | None,
    certificate: Certificate | None,
    signers: frozenset[str],
) -> LogItem | None:
    if isinstance(step, Entry) and certificate is not None:
        return before.after_entry(step, certificate)
    if isinstance(step, Opening):
        return before.after_opening(step, signers)
    if isinstance(step, RollbackOrder):
        return before.after_order(step)
    return None
