"""Compress the head of an answer.

An answer names every member by its id, and both sides know the group. So the ids of the group, in their order, are the
preset dictionary of a raw DEFLATE stream (RFC 1951), and each name costs a few bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from volunteer_kit.swarm.sync.contributions import Answer
from volunteer_kit.swarm.wire import MOST, WireError, decode, encode

_RAW: Final = -15  # zlib's word for no header, and a window of 32 kB


class AnswerHead(NamedTuple):
    """The head before an answer's bytes. No answer: the reducer got no part that counts."""

    answer: Answer | None
    signature: bytes = b""  # of the reducer, under the answer
    credential: bytes = b""  # the reducer's; empty: the member has it


def encode_head(head: AnswerHead, group: Sequence[str]) -> bytes:
    """Encode the head as it travels.

    :param group: peer ids of the round's members, in its order
    """
    return deflate_once(encode(head), _dictionary(group))


def decode_head(data: bytes, group: Sequence[str]) -> AnswerHead:
    """Decode what `encode_head` wrote for the same group; `data` may be a stranger's.

    :raises WireError: for anything else
    """
    try:
        written = inflate_once(data, _dictionary(group), MOST)
    except ValueError as error:
        raise WireError(str(error)) from error
    head: AnswerHead = decode(AnswerHead, written)
    return head


def _dictionary(group: Sequence[str]) -> bytes:
    return encode(tuple(group), tuple[str, ...])  # with what stands before each id in a message


def deflate_once(data: bytes, dictionary: bytes) -> bytes:
    """One piece of data, compressed by itself.

    :param dictionary: what the other side knows and the data may repeat; of more than 32 kB the end counts
    """
    stream = zlib.compressobj(level=9, wbits=_RAW, zdict=dictionary)
    return stream.compress(data) + stream.flush()


def inflate_once(data: bytes, dictionary: bytes, most: int) -> bytes:
    """Decompress what `deflate_once` compressed with this dictionary; `data` may be a stranger's.

    :param most: bytes of the result; nothing longer is ever held
    :raises ValueError: for anything else
    """
    stream = zlib.decompressobj(wbits=_RAW, zdict=dictionary)
    try:
        found = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"it cannot be decompressed: {error}") from error
    if len(found) > most:
        raise ValueError(f"it has more than {most} bytes")
    if not stream.eof or stream.unused_data:
        raise ValueError("it does not end where its bytes end")
    return found
