"""Bodies of calls: what a stranger packs is read within bounds, or refused in few words."""

from __future__ import annotations

import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from volunteer_kit.swarm.state.message_body import MAX_BODY, open_body, read_body, unpack_body

NONE = type(None)


@pytest.mark.parametrize("words", [[b"id", 3, 2.5], [b"", -1, 7], [b"x" * 900, 2**64 - 1, float("inf")]])
def test_what_is_asked_for_is_read(words):
    assert read_body(msgpack.packb(words), bytes, int, (int, float)) == words


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([b"id", 3]),
        msgpack.packb([b"id", 3, 2.5, 4]),
        msgpack.packb([b"id", True, 2.5]),
        msgpack.packb(["id", 3, 2.5]),
        msgpack.packb([b"id", 3, None]),
        msgpack.packb([[b"id"], 3, 2.5]),
        msgpack.packb({b"id": 1, 3: 2, 2.5: 3}),
        msgpack.packb(b"three"),
        msgpack.packb(7),
        msgpack.packb([b"id", 3, 2.5]) + b"\x00",
        msgpack.packb([b"id", 3, 2.5])[:-1],
        msgpack.packb([b"id", 3, msgpack.ExtType(5, b"x")]),
        msgpack.packb([b"id", 3, msgpack.Timestamp(1)]),
        msgpack.packb([bytes(MAX_BODY), 3, 2.5]),
        b"\xdd\xff\xff\xff\xff",
        b"\x93" * 1000,
    ],
    ids=lambda data: data[:12].hex(),
)
def test_all_else_is_one_error_of_few_words(data):
    with pytest.raises(ValueError) as refused:
        read_body(data, bytes, int, (int, float))
    assert len(str(refused.value)) < 300


@given(st.binary(max_size=2 * MAX_BODY))
def test_whatever_comes(data):
    try:
        read_body(data, bytes, int, (int, NONE))
    except ValueError:
        pass


@pytest.mark.parametrize(
    "data, bounds",
    [
        (b"\xdd" + (230_000).to_bytes(4, "big") + (b"\x98" + b"\x90" * 8) * 230_000, {"lists": 2**17}),
        (b"\xdd" + (2**21).to_bytes(4, "big") + bytes(2**21), {"lists": 2**17}),
        ((b"\xdd" + (2**20).to_bytes(4, "big")) * 1000 + bytes(2**20), {"lists": 2**17}),
        (b"\xdf" + (2**20).to_bytes(4, "big") + bytes(2**21), {"lists": 2**17}),
        (b"\xda\xff\xff" + b"\xff" * 2**16, {}),
    ],
    ids=["two million lists", "two million numbers", "a thousand promises of a million", "a map", "no text"],
)
def test_a_large_body_is_refused_before_it_is_there(data, bounds):
    began = time.process_time()
    with pytest.raises(ValueError):
        unpack_body(data, 2**22, 2**20, **bounds)
    assert time.process_time() - began < 1.0


def test_a_body_is_read_piece_by_piece():
    reader = open_body(msgpack.packb([b"round", 2, [1, [2]]]))
    assert (reader.read_array_header(), reader.unpack(), reader.unpack(), reader.unpack()) == (3, b"round", 2, [1, [2]])
    with pytest.raises(ValueError, match="more than"):
        open_body(bytes(MAX_BODY + 1))
