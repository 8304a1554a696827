"""The members of a tar stream one after the other.

tarfile and webdataset read whole members and headers of any size into memory, which a hostile shard can use; here
every length is checked first. Nothing is extracted and nothing is unpickled.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from .source import Limits, ShardError

BLOCK = 512  # bytes, of tar
MAX_NAME = 64 * 1024  # bytes of a tar's extended header; names are some tens of bytes
READ_AHEAD = 64 * 1024  # bytes


class Member(NamedTuple):
    """A file in a shard; `data` is None when it is larger than allowed."""

    name: str
    data: bytes | None


def read_members(
    stream: BinaryIO, limits: Limits, is_wanted: Callable[[str], bool], go_on: Callable[[], None] = lambda: None
) -> Iterator[Member]:
    """The wanted regular files of an uncompressed tar, in order. Links, devices and everything else are passed by.
    Raises ShardError ("empty_shard", "bad_shard", "cut_shard") after the members that could be read; `go_on` is
    called before every read and may raise one too."""
    tar = _Tar(stream, limits, go_on)
    renamed: dict[str, str] = {}  # what extended headers say about the next member
    while (header := tar.header()) is not None:
        if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            renamed |= _extended(header.type, tar.read(header.size, MAX_NAME))
            continue
        if not header.isreg() and header.type in tarfile.SUPPORTED_TYPES:
            if header.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
                tar.skip(header.size)
            else:  # links and folders have no data
                renamed = {}
            continue
        name, size = renamed.get("path", header.name), header.size
        if renamed.get("size", "").isdigit():
            size = int(renamed["size"])
        renamed = {}
        if header.type == tarfile.GNUTYPE_SPARSE or not header.isreg() or not is_wanted(name):
            tar.skip(size)
        elif size > limits.member_bytes:
            tar.skip(size)
            yield Member(name, None)
        else:
            yield Member(name, tar.read(size, limits.member_bytes))


class _Tar:
    """Headers and data of a tar stream, every read bounded."""

    def __init__(self, stream: BinaryIO, limits: Limits, go_on: Callable[[], None]) -> None:
        self._stream, self._limits, self._go_on, self._at = stream, limits, go_on, 0

    def header(self) -> tarfile.TarInfo | None:
        """The next member's header, None at the end mark."""
        first = self._at == 0
        block = self._pull(BLOCK)
        self._count(len(block))
        if first and not block:
            raise ShardError("empty_shard", "the file is empty")
        if first and block.count(0) == BLOCK:
            raise ShardError("empty_shard", "no files in it")
        if len(block) < BLOCK:
            if first:
                raise ShardError("bad_shard", "not a tar file")
            raise ShardError("cut_shard", f"it ends after {self._at} bytes without the end mark of a tar")
        if block.count(0) == BLOCK:
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            what = "not a tar file" if first else f"damaged after {self._at - BLOCK} bytes"
            raise ShardError("bad_shard", f"{what} ({error})") from None
        if header.size < 0:
            raise ShardError("bad_shard", f"a member of {header.size} bytes")
        return header

    def read(self, size: int, limit: int) -> bytes:
        if size > limit:
            raise ShardError("bad_shard", f"an extended header of {size} bytes")
        padded = -(-size // BLOCK) * BLOCK
        self._count(padded)
        data = self._pull(padded)
        if len(data) < size:
            raise ShardError("cut_shard", f"it ends after {self._at - padded + len(data)} bytes, inside a member")
        return data[:size]

    def skip(self, size: int) -> None:
        padded = -(-size // BLOCK) * BLOCK
        self._count(padded)
        if self._stream.seekable():
            self._stream.seek(padded, io.SEEK_CUR)
            return
        while padded:
            done = len(self._pull(min(padded, READ_AHEAD)))
            if not done:
                raise ShardError("cut_shard", "it ends inside a member")
            padded -= done

    def _pull(self, size: int) -> bytes:
        self._go_on()
        try:
            return self._stream.read(size)
        except OSError as error:
            raise ShardError("unreachable_shard", error.strerror or str(error)) from None

    def _count(self, size: int) -> None:
        self._at += size
        if self._at > self._limits.shard_bytes:
            raise ShardError("bad_shard", f"larger than {self._limits.shard_bytes / 2**30:g} GiB")


def _extended(kind: bytes, data: bytes) -> dict[str, str]:
    """What a GNU long name or a pax header says: "path" and "size"."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    found = {}
    while match := re.match(rb"(\d{1,6}) ([^=]+)=", data):
        length = int(match[1])
        if not match.end() < length <= len(data):
            raise ShardError("bad_shard", "a damaged extended header")
        key = match[2].decode("utf-8", "replace")
        if key in ("path", "size"):
            found[key] = data[match.end() : length - 1].decode("utf-8", "surrogateescape")
        data = data[length:]
    return found
