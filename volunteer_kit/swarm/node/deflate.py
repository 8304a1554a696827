"""Compress the messages of a stream one behind the other, so that repeated content costs a few bytes.

A proposal and its certificate hold the same entry with the same signatures, and each message names the same peers.
Messages travel as raw DEFLATE (RFC 1951), flushed behind each, without the four bytes that end a flush (RFC 7692).
"""

from __future__ import annotations

import zlib
from typing import Final

from volunteer_kit.swarm.node.daemon import Closed

WINDOW: Final = -15  # 32 kB, without a header: an entry of some dozens of members
MEMORY: Final = 7  # with the window 192 kB of the sending side, 40 kB of the receiving one
_FLUSHED: Final = b"\x00\x00\xff\xff"


def most_deflated(size: int) -> int:
    """Bytes of a compressed message at most.

    :param size: bytes of the message
    """
    return size + size // 256 + 64


class Deflater:
    """The sending side of a stream."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(wbits=WINDOW, memLevel=MEMORY)

    def deflate(self, message: bytes) -> bytes:
        """The next message as it travels; it must be sent."""
        data = self._stream.compress(message) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        return data.removesuffix(_FLUSHED)


class Inflater:
    """The receiving side of a stream.

    :param most: bytes that a message may have
    """

    def __init__(self, most: int):
        self._stream, self._most = zlib.decompressobj(wbits=WINDOW), most

    def inflate(self, data: bytes) -> bytes:
        """The next message. Raises Closed where it is longer, or is none; nothing longer is ever held."""
        try:
            message = self._stream.decompress(data + _FLUSHED, self._most + 1)
        except zlib.error as error:
            raise Closed(f"a message that cannot be decompressed: {error}") from error
        if len(message) > self._most or self._stream.unconsumed_tail:
            raise Closed(f"a message of more than {self._most} bytes")
        if self._stream.eof:
            raise Closed("a message that ends the stream")
        return message
