"""hivemind's messages are walked before they are decoded: no stranger's bytes end a process or fill its memory."""

from __future__ import annotations

import random
import struct
import subprocess
import sys

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time

from volunteer_kit.swarm.leases.records import MAX_HELD, MAX_SPANS, LeaseRecord
from volunteer_kit.swarm.net.serializer import (
    MAX_ITEMS,
    MAX_MESSAGE,
    MAX_NESTING,
    MAX_RECORD_ITEMS,
    MAX_RECORDS,
    DecodableValidator,
    OutOfBounds,
    bound_serializer,
    check_bounds,
)


@pytest.fixture(autouse=True)
def bounded():
    bound_serializer()


def nested(levels: int, code: int = 0x40) -> bytes:
    """Tuples in tuples: hivemind's extension type."""
    data = b"\x90"
    for _ in range(levels):
        data = b"\x91\xc9" + struct.pack(">IB", len(data), code) + data
    return data


def test_deep_tuples_do_not_end_the_process():
    """In a process of its own: without the bound it dies by a signal, which no `except` catches."""
    program = (
        "import sys\nfrom hivemind.utils import MSGPackSerializer\n"
        "from volunteer_kit.swarm.net import fork_safety  # as every process that speaks\n"
        "fork_safety.bound_serializer()\n"
        "try:\n    MSGPackSerializer.loads(sys.stdin.buffer.read())\n"
        "except ValueError as error:\n    print(len(str(error)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=nested(5000), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert 0 < int(done.stdout) < 200


@pytest.mark.parametrize("levels", [16, 200, 3000])
@pytest.mark.parametrize("code", [0x40, 0x50])
def test_deep_extensions_are_refused(levels, code):
    with pytest.raises(OutOfBounds):
        MSGPackSerializer.loads(nested(levels, code))


@pytest.mark.parametrize("first", [b"\x91", b"\x81\xa1k", b"\xdc\x00\x01", b"\xde\x00\x01\xa1k"])
def test_deep_lists_and_maps_are_refused(first):
    assert MSGPackSerializer.loads(first * (MAX_NESTING - 1) + b"\x01")
    with pytest.raises(OutOfBounds, match="nested"):
        MSGPackSerializer.loads(first * MAX_NESTING + b"\x01")


def test_a_claim_of_many_items_takes_no_memory():
    """msgpack makes room for what a list says that it holds, as often as lists are nested."""
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdc\xff\xff" * 20):
        with pytest.raises(OutOfBounds):
            MSGPackSerializer.loads(claim + b"\x01" * 1000)
    with pytest.raises(OutOfBounds):
        MSGPackSerializer.loads(msgpack.packb([[0] * 1000] * (MAX_ITEMS // 1000 + 1)))
    with pytest.raises(OutOfBounds):
        MSGPackSerializer.loads(msgpack.packb(bytes(MAX_MESSAGE)))


@pytest.mark.parametrize(
    "message",
    [
        b"", b"\xc1", b"\x91", b"\xc4", b"\xc4\x05ab", b"\xd9\xff", b"\xcd\x01", b"\x01\x01", b"\xd4\x51\x00",
        b"\xd7\xff12345678", b"\xc9\xff\xff\xff\xff\x40\x90", b"\x91\xc7\x01\x40\x90\x01", b"\xc7\x02\x40\x90\x90",
        b"\x92\xc7\x02\x40\x90\x90", b"\x92\xc7\x01\x40\x90", b"\x91\xc7\x01\x50\x90", b"\xc7\x03\x40\x92\x01",
    ],
)  # fmt: skip
def test_what_is_no_whole_message_is_refused(message):
    with pytest.raises(OutOfBounds):
        MSGPackSerializer.loads(message)


def some_value(dice: random.Random, level: int = 0):
    size = dice.choice([0, 1, 5, 40, 300, 70_000 if level < 2 else 20])
    makers = [
        lambda: dice.choice([None, True, False, 1.5, -1, 127, 128, 2**63, -(2**63), 2**64 - 1]),
        lambda: dice.randbytes(size),
        lambda: "y" * size,
        lambda: [some_value(dice, level + 1) for _ in range(min(size, 20))],
        lambda: {str(i): some_value(dice, level + 1) for i in range(min(size, 20))},
        lambda: tuple(some_value(dice, level + 1) for _ in range(min(size, 20))),
    ]
    return dice.choice(makers[: 6 if level < 4 else 3])()


def test_what_hivemind_packs_is_within_bounds_and_comes_back_equal():
    dice = random.Random(3)
    for _ in range(300):
        value = some_value(dice)
        assert MSGPackSerializer.loads(MSGPackSerializer.dumps(value)) == value


def test_every_cut_and_every_changed_byte_is_decoded_or_refused():
    whole = MSGPackSerializer.dumps([(1, b"ab", "c"), {"d": [1.5, None]}, (("e",), 2**40)])
    for at in range(len(whole)):
        with pytest.raises(OutOfBounds):
            check_bounds(whole[:at])
        for byte in range(256):
            try:
                MSGPackSerializer.loads(whole[:at] + bytes([byte]) + whole[at + 1 :])
            except (ValueError, TypeError):  # TypeError: a list as the key of a map
                pass


def packed(*records, maxsize=None) -> bytes:
    """A dictionary of the DHT as a stranger would pack it."""
    payload = MSGPackSerializer.dumps([maxsize, 1e18, [list(record) for record in records]])
    return msgpack.packb(msgpack.ExtType(0x50, payload))


def test_a_dictionary_comes_with_its_records_and_nothing_else():
    until = get_dht_time() + 60
    found = MSGPackSerializer.loads(packed((b"a", b"1", until), ("b", b"2", until - 1), maxsize=1))
    assert isinstance(found, DictionaryDHTValue) and dict(found.items()).keys() == {b"a", "b"}
    assert found.latest_expiration_time == until and found.maxsize == float("inf"), "the sender's word is not taken"


@pytest.mark.parametrize(
    "record",
    [
        (b"a", b"1", float("nan")), (b"a", b"1", float("inf")), (b"a", b"1", 5), (b"a", "text", 1e12), (b"a", b"1"),
        ([1], b"1", 1e12), ({}, b"1", 1e12), (b"a", b"1", 1e12, 4), (b"a", None, 1e12), ((1, 2), b"1", 1e12),
    ],
)  # fmt: skip
def test_a_dictionary_with_something_else_in_it_is_refused(record):
    with pytest.raises(ValueError):
        MSGPackSerializer.loads(packed((b"good", b"1", 1e12), record))


def test_a_dictionary_with_names_of_different_types_is_refused():
    """Two that expire together would be compared, which ends in a TypeError wherever that happens."""
    with pytest.raises(ValueError):
        MSGPackSerializer.loads(packed((b"a", b"1", 1e12), ("a", b"1", 1e12), (5, b"1", 1e12)))


def test_a_dictionary_of_many_records_is_refused():
    until = get_dht_time() + 60
    assert len(MSGPackSerializer.loads(packed(*((b"%d" % i, b"", until) for i in range(MAX_RECORDS))))) == MAX_RECORDS
    with pytest.raises(OutOfBounds, match="records"):
        MSGPackSerializer.loads(packed(*((b"%d" % i, b"", until) for i in range(MAX_RECORDS + 1))))
    for other in (5, [], [1, 2], {"a": 1}, [None, 1.0, {}], [None, 1.0, [5]]):
        with pytest.raises(ValueError):
            MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(0x50, msgpack.packb(other))))


VALUES = [(b"\x01", True), (b"\xc1", False), (nested(300), False), (b"", False)]
VALUES += [(msgpack.packb([1] * MAX_RECORD_ITEMS), True), (msgpack.packb([1] * (MAX_RECORD_ITEMS + 1)), False)]


@pytest.mark.parametrize("value, is_fine", VALUES)
def test_a_value_that_nobody_can_decode_is_not_kept(value, is_fine):
    assert DecodableValidator().validate(DHTRecord(b"key", b"subkey", value, 1e12)) == is_fine


def test_the_longest_record_that_a_peer_writes_is_within_bounds():
    span, spans = [(0, 2**31)], {"done": MAX_SPANS, "seen": MAX_SPANS, "held": MAX_HELD}
    lists = {name: span * count for name, count in spans.items()}
    record = LeaseRecord(peer_id=bytes(34), used=0, until=1e9, **lists)
    assert DecodableValidator().validate(DHTRecord(b"key", b"subkey", MSGPackSerializer.dumps(record.dict()), 1e12))
