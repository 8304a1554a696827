"""Bytes and protobufs that no honest peer sends."""

from __future__ import annotations

import struct

import msgpack
from hivemind.proto import averaging_pb2, runtime_pb2

TUPLE, DICTIONARY = 0x40, 0x50  # hivemind's codes of msgpack extensions
LEVELS = 400  # of nesting; half as many end a process whose serializer decodes recursively
FLOAT16, UNIFORM, BLOCKWISE, QUANTILE, MEANSTD, PLAIN, SPARSE = 2, 4, 5, 3, 1, 0, 18


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


# --- tensors ---


def tensor(**fields: object) -> runtime_pb2.Tensor:
    about = {"compression": UNIFORM, "dtype": "float32", "size": [16], "buffer": bytes(16 + 1024), **fields}
    return runtime_pb2.Tensor(**about)


def many_sizes(count: int, size: int = 2**31 - 1) -> runtime_pb2.Tensor:
    return tensor(size=[size] * count)


def long_dtype(megabytes: int = 1, compression: int = PLAIN) -> runtime_pb2.Tensor:
    """A structure of a hundred thousand fields, where a type's name is expected."""
    return tensor(dtype="f4," * (megabytes * 2**20 // 3), compression=compression)


def sparse_bomb(values: int = 2**20) -> runtime_pb2.Tensor:
    """As many bits a value as the codec allows, and all values kept."""
    rice, unary = 31, b"\xff" * (values // 8)
    head = struct.pack("<IIBff", values, values, rice, 0.5, 1.0)
    buffer = head + unary + bytes(values * rice // 8) + bytes(values * 2 // 8)
    return tensor(compression=SPARSE, size=[values], buffer=buffer)


def sparse_zeros(values: int = 2**28) -> runtime_pb2.Tensor:
    """A few bytes that stand for a gigabyte."""
    return tensor(compression=SPARSE, size=[values], buffer=struct.pack("<IIBff", 0, 0, 0, 0.0, 0.0))


def odd_tensors() -> list[runtime_pb2.Tensor]:
    """Codecs that nobody knows, counts that are none, headers that lie."""
    return [
        tensor(compression=99),
        tensor(compression=-1),
        tensor(chunks=-1),
        tensor(chunks=2**31 - 1),
        tensor(size=[2**32 - 1] * 3),
        tensor(size=[2**28], compression=PLAIN, buffer=b""),
        tensor(size=[0] * 64),
        tensor(size=[]),
        tensor(dtype="object", compression=PLAIN),
        tensor(dtype="V1000000000", compression=PLAIN),
        tensor(dtype="complex128", compression=PLAIN),
        tensor(dtype="bfloat16", compression=QUANTILE, buffer=struct.pack("<q", 2**62) + bytes(64)),
        tensor(compression=MEANSTD, buffer=b"\x01"),
        tensor(compression=BLOCKWISE, buffer=struct.pack("<qq", -1, 2**62) + bytes(64)),
        tensor(compression=FLOAT16, dtype="float16", buffer=bytes(7)),
        tensor(requires_grad=True, dtype="int64", compression=PLAIN, buffer=bytes(128)),
    ]


def part(of: runtime_pb2.Tensor, group: bytes = b"", weight: float = 1.0) -> averaging_pb2.AveragingData:
    return averaging_pb2.AveragingData(
        code=averaging_pb2.PART_FOR_AVERAGING, group_id=group, tensor_part=of, weight=weight
    )


def answer(of: runtime_pb2.Tensor) -> averaging_pb2.AveragingData:
    return averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=of)
