"""The wire: what a node says comes back as it was, and what a stranger sends never breaks out of its bounds."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.node_words import (
    ACCOUNTS,
    BALLOT,
    BODIES,
    ENTRY,
    GENESIS,
    HASH,
    LEDGER,
    LOG,
    MEMBERS,
    ONE,
    RECORDS,
    TWO,
    behind,
)
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate
from volunteer_kit.swarm.sync.contributions import (
    Accounts,
    AccountsRecord,
)
from volunteer_kit.swarm.sync.entries import Entry, Member, Opening
from volunteer_kit.swarm.sync.messages import (
    Ask,
    AskItems,
    Body,
    Durable,
    Event,
    Items,
    Lead,
    Message,
    Record,
    Refuse,
    Report,
    Snapshot,
    Started,
    Timer,
    TimerFired,
)
from volunteer_kit.swarm.wire import MOST, MOST_TEXT, WireError, decode, encode


class Nothing(NamedTuple):
    """It has no fields."""


@dataclass(frozen=True)
class Everything:
    """One field of each form."""

    table: Mapping[str, tuple[int, int]]
    numbers: dict[int, bytes]
    timer: Timer | None
    flag: bool
    maybe: int | None
    nothings: tuple[Nothing, ...]
    names: frozenset[str]


EVERYTHING = Everything({"b": (1, -2), "a": (3, 4)}, {5: b"x"}, Timer.TICK, False, None, (Nothing(),) * 3, frozenset())


# --- what is said comes back ---


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
@pytest.mark.parametrize("head", [None, TWO.head], ids=["without a head", "with a head"])
def test_each_message_comes_back(body: Body, head: Any) -> None:
    message = Message(head, body)
    assert decode(Message, encode(message)) == message


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_each_record_comes_back(record: Record) -> None:
    assert decode(Record, encode(record, Record)) == record
    assert decode(type(record), encode(record)) == record


def test_parts_come_back() -> None:
    durable = Durable(RECORDS[3], RECORDS[1], RECORDS[2], LEDGER, frozenset({HASH, b"other"}))  # type: ignore[arg-type]
    for value in (durable, ACCOUNTS, ENTRY, GENESIS, GENESIS.membership, *LOG, EVERYTHING, Nothing()):
        assert decode(type(value), encode(value)) == value
    for event in (Started(), TimerFired(Timer.PHASE)):
        assert decode(Event, encode(event, Event)) == event
    kind = tuple[tuple[str, bytes | None], ...]
    assert decode(kind, encode((("a", None), ("b", b"x")), kind)) == (("a", None), ("b", b"x"))


def test_equal_values_have_equal_bytes() -> None:
    assert encode(Certificate(HASH, BALLOT, frozenset("abcdef"))) == encode(
        Certificate(HASH, BALLOT, frozenset("fedcba"))
    )
    table = dict(reversed(list(EVERYTHING.table.items())))
    assert encode(replace(EVERYTHING, table=table)) == encode(EVERYTHING)


@settings(deadline=None)
@given(st.integers(-(1 << 256) + 1, (1 << 256) - 1))
@example(1 << 64)
@example((1 << 64) - 1)
@example(-(1 << 63) - 1)
def test_ints_up_to_256_bits_come_back(number: int) -> None:
    assert decode(int, encode(number)) == number


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=100), st.binary(), st.booleans())
def test_scalars_come_back(number: float, text: str, data: bytes, flag: bool) -> None:
    for value in (number, text, data, flag):
        assert decode(type(value), encode(value)) == value


def test_an_item_that_does_not_follow_travels_whole() -> None:
    odd = replace(TWO, head=TWO.head._replace(sample_cells=0))
    message = Message(None, Items(HASH, (GENESIS, odd, ONE)))
    assert decode(Message, encode(message)) == message


def test_only_the_first_item_has_its_membership() -> None:
    items = [ONE]
    for _ in range(10):
        items.append(behind(items[-1]))
    alone = len(encode(Message(None, Items(None, (ONE,)))))
    assert len(encode(Message(None, Items(None, tuple(items))))) < 6 * alone


# --- what cannot be said ---


@pytest.mark.parametrize(
    "value",
    [
        Lead(BALLOT, 1),  # type: ignore[arg-type]
        Report(BALLOT, MEMBERS[0], True, 1.0, None, None, 0.0),
        Report(BALLOT, MEMBERS[0], 1, math.nan, None, None, 0.0),
        Report(BALLOT, MEMBERS[0], 1, math.inf, None, None, 0.0),
        Ask(Ballot(1 << 256, "a")),
        Ask(Ballot(0, "a" * (MOST_TEXT + 1))),
        Ask(Ballot(0, "ä" * MOST_TEXT)),
        Ask(Ballot(0, "\ud800")),
        Ask((0, "a")),  # type: ignore[arg-type]
        AskItems([HASH]),  # type: ignore[arg-type]
        AskItems(("text",)),  # type: ignore[arg-type]
        Message(None, HASH),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_wrong_types_are_refused(value: Any) -> None:
    with pytest.raises(WireError):
        encode(value)


@pytest.mark.parametrize("kind", [object, list[int], tuple[()], int | tuple[int, ...]], ids=repr)
def test_kinds_without_a_plan_are_named(kind: Any) -> None:
    with pytest.raises(TypeError, match="plan"):
        decode(kind, b"\x01")


# --- what strangers send ---

VALID = [encode(Message(TWO.head, body)) for body in BODIES]
RECORDED = [encode(record, Record) for record in RECORDS]


def refused_or_valid(kind: Any, data: bytes) -> None:
    """Nothing but WireError comes out; what is taken can be said again."""
    try:
        value = decode(kind, data)
    except WireError:
        return
    encode(value, kind)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(Message, data)
    number = VALID[0][:5]
    refused_or_valid(Message, number + data)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(-3, 40),
            st.none(),
            st.booleans(),
            st.binary(max_size=40),
            st.text(max_size=5),
            st.floats(),
            st.just([]),
        )
    )
)
def test_random_scalars_are_refused(scalars: list[Any]) -> None:
    for number in (VALID[0][:5], RECORDED[0][:5]):
        kind = Message if number == VALID[0][:5] else Record
        refused_or_valid(kind, number + b"".join(map(msgpack.packb, scalars)))


@pytest.mark.parametrize("data", VALID, ids=lambda data: str(len(data)))
def test_a_message_that_is_cut_is_refused(data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(Message, data[:length])
    with pytest.raises(WireError):
        decode(Message, data + b"\xc0")


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_message_that_is_changed_is_refused_or_another_one(data: st.DataObject) -> None:
    kind, valid = data.draw(
        st.sampled_from([(Message, each) for each in VALID] + [(Record, each) for each in RECORDED])
    )
    changed = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        size = data.draw(st.integers(0, 6))
        changed[place : place + size] = data.draw(st.binary(max_size=6))
    refused_or_valid(kind, bytes(changed))


@pytest.mark.parametrize(
    "attack",
    [
        b"\x91" * 100_000,  # nested arrays
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32
        b"\xdf\xff\xff\xff\xff",  # a map of 2**32
        b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
        b"\xdb\xff\xff\xff\xff",  # a str of 4 GiB
        b"\xd9\xff" + b"\xff" * 255,  # a str that is no UTF-8
        b"\xda\x04\x00" + b"a" * 1024,  # a str that is too long
        b"\xc7\x00\x05",  # an extension
        b"\xd6\xff\x00\x00\x00\x01",  # a time
        b"\xc1",  # what msgpack never uses
        b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
        b"\x90",
        b"\x80",
    ],
    ids=lambda attack: attack[:4].hex(),
)
def test_msgpack_that_no_value_has_is_refused(attack: bytes) -> None:
    for kind in (int, str, bytes, float, bool, tuple[int, ...], Message, Snapshot):
        number = encode(GENESIS.membership)[:5] if kind is not Message else VALID[0][:5]
        for data in (attack, number + attack):
            with pytest.raises(WireError):
                decode(kind, data)
    with pytest.raises(WireError):
        decode(tuple[bytes, ...], encode((HASH,), tuple[bytes, ...])[:6] + attack)


def test_lengths_that_are_not_true_are_refused() -> None:
    kind = tuple[Nothing, ...]
    number = encode((), kind)[:5]
    for length in (3, 1 << 40, -1):
        with pytest.raises(WireError):
            decode(kind, number + msgpack.packb(length) + b"\xc0\xc0")


def test_what_comes_twice_is_refused() -> None:
    names, table = frozenset[str], Mapping[str, int]
    for kind, scalars in (
        (names, [2, "a", "a"]),
        (names, [2, "a", 0]),
        (table, [2, "a", 1, "a", 2]),
        (AccountsRecord, None),
    ):
        if scalars is not None:
            number = encode(frozenset() if kind is names else {}, kind)[:5]
            data = number + b"".join(map(msgpack.packb, scalars))
            with pytest.raises(WireError):
                decode(kind, data)
    for record in (
        AccountsRecord((("a", ((1, 1, 0), (1, 2, 0))),), ()),
        AccountsRecord((("a", ()), ("a", ())), ()),
        AccountsRecord((), (("a", 1), ("a", 2))),
    ):
        with pytest.raises(WireError):
            decode(Accounts, encode(record))


def test_a_message_that_is_too_long_is_not_read() -> None:
    data = encode(AskItems((bytes(MOST),)))
    with pytest.raises(WireError):
        decode(AskItems, data)
    assert decode(AskItems, data, most=2 * MOST) == AskItems((bytes(MOST),))
    with pytest.raises(WireError):
        decode(AskItems, b"")
    with pytest.raises(WireError):
        decode(AskItems, None)  # type: ignore[arg-type]


def test_another_version_of_the_kit_is_not_misread() -> None:
    with pytest.raises(WireError, match="version"):
        decode(Message, encode(Refuse(BALLOT, True)))
    with pytest.raises(WireError, match="version"):
        decode(Lead, encode(Refuse(BALLOT, True)))  # it has the same fields, by other names


# --- what a message can cost ---


SMALL = MOST // 16  # bytes


def most_memory(kind: Any, data: bytes) -> int:
    """Bytes while it is decoded, at most."""
    tracemalloc.start()
    try:
        refused_value(kind, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused_value(kind: Any, data: bytes) -> None:
    try:
        decode(kind, data, SMALL)
    except WireError:
        pass


def test_a_text_that_is_repeated_does_not_stand_for_much() -> None:
    long = "x" * MOST_TEXT
    members = tuple(Member(long, long, True) for _ in range(200_000))
    with pytest.raises(WireError, match="too much"):
        decode(Opening, encode(Opening(0, 0, 0, HASH, 0, members)))


def test_memberships_that_are_repeated_do_not_stand_for_much() -> None:
    many = frozenset(map(str, range(20_000)))
    item = replace(GENESIS, membership=replace(GENESIS.membership, banned=many, founders=many))
    items = [item]
    for _ in range(60):
        head = items[-1].head
        entry = Entry(*head.order, head.epoch, head.lineage, BALLOT, HASH, (), (), 0)
        items.append(items[-1].after_entry(entry, Certificate(entry.lineage, BALLOT, frozenset())))
    data = encode(Items(None, tuple(items)))
    with pytest.raises(WireError, match="too much"):
        decode(Items, data)


@pytest.mark.parametrize(
    ("kind", "repeated"),
    [
        (tuple[Nothing, ...], [None]),
        (tuple[Member, ...], ["", "", True, False]),
        (tuple[tuple[Member, ...], ...], [0]),
        (tuple[Accounts, ...], [0, 0]),
        (tuple[float, ...], [1.5]),
        (tuple[frozenset[int], ...], [1, 300]),
        (tuple[Mapping[int, Mapping[int, int]], ...], [1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_small_things_do_not_take_much_memory(kind: Any, repeated: list[Any]) -> None:
    number = encode((), kind)[:5]
    again = b"".join(map(msgpack.packb, repeated))
    count = (SMALL - 10) // len(again)
    data = number + msgpack.packb(count) + again * count
    decode(kind, data, SMALL)
    assert most_memory(kind, data) < 150 * SMALL


def test_a_log_of_very_many_items_is_refused() -> None:
    items = [GENESIS]
    for _ in range(5000):
        head = items[-1].head
        entry = Entry(*head.order, head.epoch, head.lineage, BALLOT, b"", (), (), 0)
        items.append(items[-1].after_entry(entry, Certificate(b"", BALLOT, frozenset())))
    data = encode(Items(None, tuple(items)))
    assert len(data) < MOST
    with pytest.raises(WireError, match="too much"):
        decode(Items, data)
