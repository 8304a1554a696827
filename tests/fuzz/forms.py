"""Mutations that keep an input's form: msgpack, JSON, protobuf, text. Random bytes seldom get past a parser.

Coverage-guided fuzzers know bytes only. A structure-aware mutator parses the input, changes one node of the tree and
writes it again (Serebryany, "Structure-aware fuzzing with libFuzzer", 2019).
"""

from __future__ import annotations

import json
import random
import struct
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

Mutate = Callable[[bytes], bytes]  # the fuzzer's own mutation of bytes
DEPTHS = (1, 3, 20, 300, 2000)  # levels that a node is wrapped in
TUPLE_TYPE = 0x40  # hivemind's extension type of a tuple
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 127, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63),
    0.0, -0.0, 0.5, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), "", "a", "\0", "\ud800", "é" * 40,
    "a" * 5000, b"", b"\0", b"\0" * 8, b"\xff" * 16, b"\x12\x20" + b"p" * 32, b"\0" * 5000, [], {}, [[]], [0] * 3000,
)  # fmt: skip


class Form:
    """Bytes without a form of their own: the fuzzer's mutations are enough."""

    def mutate(self, data: bytes, chance: random.Random, raw: Mutate) -> bytes:
        """Raises any exception for bytes that have not the form."""
        return raw(data)


class _Tree(Form):
    """A form whose values are None, bool, int, float, str, bytes, list, dict."""

    values: Sequence[Any] = VALUES

    def parse(self, data: bytes) -> Any:
        raise NotImplementedError

    def write(self, tree: Any) -> bytes:
        raise NotImplementedError

    def mutate(self, data: bytes, chance: random.Random, raw: Mutate) -> bytes:
        tree = self.parse(data)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            tree = self._change(tree, chance, raw)
        return self.write(tree)

    def _change(self, node: Any, chance: random.Random, raw: Mutate) -> Any:
        if isinstance(node, list) and node and chance.random() < 0.8:
            return self._change_list(list(node), chance, raw)
        if isinstance(node, dict) and node and chance.random() < 0.8:
            return self._change_dict(dict(node), chance, raw)
        if isinstance(node, bytes) and node and chance.random() < 0.5:
            try:
                return self.mutate(node, chance, raw)  # bytes may hold a message of their own
            except Exception:
                return raw(node)
        return self._change_leaf(node, chance, raw)

    def _change_list(self, node: list, chance: random.Random, raw: Mutate) -> Any:
        place, what = chance.randrange(len(node)), chance.random()
        if what < 0.7:
            node[place] = self._change(node[place], chance, raw)
        elif what < 0.78:
            del node[place]
        elif what < 0.86:
            node[place:place] = [node[place]] * chance.choice((1, 2, 50))
        elif what < 0.93:
            node.insert(place, chance.choice(self.values))
        else:
            chance.shuffle(node)
        return node

    def _change_dict(self, node: dict, chance: random.Random, raw: Mutate) -> Any:
        key, what = chance.choice(list(node)), chance.random()
        if what < 0.75:
            node[key] = self._change(node[key], chance, raw)
        elif what < 0.85:
            del node[key]
        elif what < 0.95:
            node[self._change_key(key, chance, raw)] = node[key]
        else:
            node.update({f"{key}{n}": node[key] for n in range(chance.choice((1, 30)))})
        return node

    def _change_key(self, key: Any, chance: random.Random, raw: Mutate) -> Any:
        changed = self._change_leaf(key, chance, raw)
        return changed if isinstance(changed, (str, bytes, int, float)) else key

    def _change_leaf(self, node: Any, chance: random.Random, raw: Mutate) -> Any:
        what = chance.random()
        if what < 0.4:
            return chance.choice(self.values)
        if what < 0.45:
            return self.nest(node, chance.choice(DEPTHS))
        if isinstance(node, bool) or node is None:
            return not node
        if isinstance(node, int):
            return node + chance.choice((-1, 1, -(2**16), 2**16, 2**31, -node, -2 * node))
        if isinstance(node, float):
            return node * chance.choice((-1.0, 0.0, 1e6, 1e-6, 1e300))
        if isinstance(node, str):
            return raw(node.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
        return raw(node) if isinstance(node, bytes) else node

    def nest(self, node: Any, levels: int) -> Any:
        for _ in range(levels):
            node = [node]
        return node


class _MsgPack(_Tree):
    """Of plain msgpack and of hivemind's serializer. A Timestamp is left as bytes."""

    def parse(self, data: bytes) -> Any:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=msgpack.ExtType
        )

    def write(self, tree: Any) -> bytes:
        return msgpack.packb(tree, use_bin_type=True, unicode_errors="surrogatepass")

    def nest(self, node: Any, levels: int) -> Any:
        """Lists, or hivemind's tuples: an extension's bytes hold the next level."""
        if levels % 2:
            return super().nest(node, min(levels, 500))
        data = self.write([node])
        for _ in range(levels):
            data = b"\x91\xc9" + struct.pack(">IB", len(data), TUPLE_TYPE) + data
        return msgpack.ExtType(TUPLE_TYPE, data)


class _Json(_Tree):
    values = tuple(value for value in VALUES if not isinstance(value, bytes)) + (10**400, "\\u0000", "1e999")

    def parse(self, data: bytes) -> Any:
        return json.loads(data)

    def write(self, tree: Any) -> bytes:
        return json.dumps(tree).encode("utf-8", "surrogatepass")

    def nest(self, node: Any, levels: int) -> Any:
        return super().nest(node, min(levels, 200))  # json itself writes no more

    def mutate(self, data: bytes, chance: random.Random, raw: Mutate) -> bytes:
        if chance.random() < 0.01:
            return b"[" * 3000 + data + b"]" * 3000
        return super().mutate(data, chance, raw)


class Protobuf(Form):
    """A message of one type; bytes in it are of form `inner`."""

    def __init__(self, kind: Any, inner: Form | None = None) -> None:
        self.kind, self.inner = kind, inner or Form()

    def mutate(self, data: bytes, chance: random.Random, raw: Mutate) -> bytes:
        message = self.kind.FromString(data)
        for _ in range(chance.choice((1, 1, 2, 4))):
            self._change(message, chance, raw)
        return message.SerializeToString()

    def _change(self, message: Any, chance: random.Random, raw: Mutate) -> None:
        one = chance.choice(message.DESCRIPTOR.fields)
        value = getattr(message, one.name)
        repeated = one.is_repeated if hasattr(one, "is_repeated") else one.label == one.LABEL_REPEATED
        if one.message_type is not None:
            inner = chance.choice(list(value) or [value.add()]) if repeated else value
            self._change(inner, chance, raw)
        elif repeated:
            values = list(value)
            place = chance.randrange(len(values) + 1)
            if values and chance.random() < 0.3:
                del values[min(place, len(values) - 1)]
            elif values and chance.random() < 0.5:
                values[place:place] = [chance.choice(values)] * chance.choice((1, 1, 8, 600))
            else:
                changed = self._scalar(one, chance.choice(values or [None]), chance, raw)
                values[place : place + chance.choice((0, 1))] = [changed]
            del value[:]
            value.extend(values)
        else:
            setattr(message, one.name, self._scalar(one, value, chance, raw))

    def _scalar(self, one: Any, value: Any, chance: random.Random, raw: Mutate) -> Any:
        if one.cpp_type == one.CPPTYPE_STRING:
            data = value.encode() if isinstance(value, str) else value or b""
            if one.type == one.TYPE_STRING:
                return chance.choice((raw(data).decode("utf-8", "replace"), "", "float32", "a" * 3000))
            if chance.random() < 0.2:
                return chance.choice((b"", b"\0" * 3000))
            try:
                return self.inner.mutate(data, chance, raw)
            except Exception:  # the bytes have not the form of the inner message
                return raw(data)
        if one.cpp_type in (one.CPPTYPE_DOUBLE, one.CPPTYPE_FLOAT):
            return chance.choice([v for v in VALUES if isinstance(v, float)] + [float(value or 0) + 1])
        if one.cpp_type == one.CPPTYPE_BOOL:
            return not value
        low, high = _BOUNDS[one.cpp_type]
        number = chance.choice((0, 1, -1, 2, 3, 2**16, 2**31 - 1, 2**31, 2**62, low, high, (value or 0) + 1))
        return min(max(number, low), high)


_BOUNDS = {1: (-(2**31), 2**31 - 1), 2: (-(2**63), 2**63 - 1), 3: (0, 2**32 - 1), 4: (0, 2**64 - 1), 8: (0, 2**31 - 1)}


class Text(Form):
    """Text; now and then one of `words` comes in."""

    def __init__(self, *words: str) -> None:
        self.words = tuple(word.encode() for word in words)

    def mutate(self, data: bytes, chance: random.Random, raw: Mutate) -> bytes:
        if chance.random() < 0.4:
            return raw(data)
        place, word = chance.randrange(len(data) + 1), chance.choice(self.words)
        times = chance.choice((1, 1, 1, 2, 40))
        return data[:place] + word * times + data[place + chance.choice((0, 0, len(word), 10)) :]


class Framed(Form):
    """A length, then JSON of that length, then the rest: safetensors and the cache's blocks."""

    def __init__(self, length: str) -> None:
        self.length = struct.Struct(length)

    def mutate(self, data: bytes, chance: random.Random, raw: Mutate) -> bytes:
        head = self.length.size
        size = self.length.unpack_from(data)[0]
        text, rest = data[head : head + size], data[head + size :]
        text = JSON.mutate(text, chance, raw)
        return self.length.pack(len(text)) + text + (raw(rest) if rest and chance.random() < 0.2 else rest)


class _Tar(Form):
    """A tar whose headers have right checksums after a mutation."""

    def mutate(self, data: bytes, chance: random.Random, raw: Mutate) -> bytes:
        changed = bytearray(raw(data) if chance.random() < 0.5 else self._move_blocks(data, chance))
        for at in range(0, len(changed) - 511, 512):
            if changed[at + 257 : at + 262] == b"ustar":
                sums = tarfile.calc_chksums(bytes(changed[at : at + 512]))
                changed[at + 148 : at + 156] = b"%06o\0 " % sums[0]
        return bytes(changed)

    def _move_blocks(self, data: bytes, chance: random.Random) -> bytes:
        blocks = [bytearray(data[at : at + 512]) for at in range(0, len(data), 512)]
        block = chance.choice(blocks)
        what = chance.random()
        if what < 0.3:
            block[124:136] = b"%011o\0" % chance.choice((0, 1, 511, 512, 513, 2**20, 2**33 - 1))
        elif what < 0.6 and len(block) > 156:
            block[156] = ord(chance.choice("0123456xgLKVSD7"))
        elif what < 0.8:
            blocks.insert(chance.randrange(len(blocks)), block)
        else:
            blocks.remove(block)
        return b"".join(blocks)


RAW, MSGPACK, JSON, TAR = Form(), _MsgPack(), _Json(), _Tar()
