"""The members of a tar stream one after the other.

tarfile and webdataset read whole members and headers of any size into memory, which a hostile shard can use; here
every length is checked first. Nothing is extracted and nothing is unpickled.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from .source import Limits, ShardError

BLOCK = 512  # bytes, of tar
UNPACK = "a shard is read by ranges of bytes, so unpack it"
OTHERS = {  # how files begin that are often named in the place of a tar, and what to do
    b"\x1f\x8b": f"it is gzipped; {UNPACK}: gzip -d FILE.tar.gz",
    b"BZh": f"it is packed by bzip2; {UNPACK}: bzip2 -d FILE",
    b"\xfd7zXZ\0": f"it is packed by xz; {UNPACK}: xz -d FILE",
    b"\x28\xb5\x2f\xfd": f"it is packed by zstd; {UNPACK}: zstd -d FILE",
    b"PK\x03\x04": "it is a zip archive; make a tar of it",
    b"PAR1": "it is a parquet file; put it on the Hub, and name it with kind: hub",
    b"version https://git-lfs": "it is a pointer of Git LFS, not the file: git lfs pull",
    b"<!DOCTYPE": "it is a web page; look at the address in a browser",
    b"<html": "it is a web page; look at the address in a browser",
}
MAX_NAME = 64 * 1024  # bytes of a tar's extended header; names are some tens of bytes
READ_AHEAD = 64 * 1024  # bytes


class Member:
    """A file in a shard. Its bytes are read at once or never: before the next member is asked for."""

    def __init__(self, name: str, size: int, at: int, tar: _Tar, is_file: bool = True) -> None:
        self.name, self.size, self.is_file = name, size, is_file
        self.at = at  # byte of the tar where its headers begin; reading can begin anew from here
        self.is_read = False
        self._tar = tar
        self._held: bytes | None = None

    def read(self) -> bytes | None:
        """Its bytes, None if they are more than allowed. Raises ShardError."""
        if self._held is not None or self.size > self._tar.limits.member_bytes:
            return self._held
        self.is_read = True
        return self._tar.read(self.size, self.size)

    def hold(self) -> None:
        """Read it now; `read` gives its bytes later, after other members too. Raises ShardError."""
        self._held = self.read()


def read_members(
    stream: BinaryIO,
    limits: Limits,
    is_wanted: Callable[[str], bool],
    go_on: Callable[[], None] = lambda: None,
    at: int = 0,
    links: bool = False,
) -> Iterator[Member]:
    """The wanted regular files of an uncompressed tar, in order; `stream` begins at its byte `at`. Folders, devices and
    everything else are passed by; with `links` all but folders come too, without data. Raises ShardError
    ("empty_shard", "bad_shard", "cut_shard") after the members that could be read; `go_on` is called before every read
    and may raise one too."""
    tar = _Tar(stream, limits, go_on, at)
    renamed: dict[str, str] = {}  # what extended headers say about the next member
    begin = at
    while (header := tar.header()) is not None:
        if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            renamed |= _extended(header.type, tar.read(header.size, MAX_NAME))
            continue
        if header.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):  # about a tar or a link, between the others
            tar.skip(header.size)
            continue
        name, size = renamed.get("path", header.name), header.size
        if re.fullmatch(r"\d{1,18}", renamed.get("size", ""), re.ASCII):
            size = int(renamed["size"])
        renamed = {}
        if not header.isreg() and header.type in tarfile.SUPPORTED_TYPES:
            size = 0  # links and folders have no data
        is_file = header.isreg() and header.type != tarfile.GNUTYPE_SPARSE
        member = Member(name, size, begin, tar, is_file)
        if (is_file or (links and not header.isdir())) and is_wanted(name):
            yield member
        if not member.is_read:
            tar.skip(size)
        begin = tar.at


class _Tar:
    """Headers and data of a tar stream, every read bounded."""

    def __init__(self, stream: BinaryIO, limits: Limits, go_on: Callable[[], None], at: int) -> None:
        self.limits, self.at = limits, at
        self._stream, self._go_on = stream, go_on

    def header(self) -> tarfile.TarInfo | None:
        """The next member's header, None at the end mark."""
        first = self.at == 0
        block = self._pull(BLOCK)
        self._count(len(block))
        if first and not block:
            raise ShardError("empty_shard", "the file is empty")
        if first and block.count(0) == BLOCK:
            raise ShardError("empty_shard", "no files in it")
        if len(block) < BLOCK:
            if first:
                raise ShardError("bad_shard", f"not a tar file{_what_else(block)}")
            raise ShardError("cut_shard", f"it ends after {self.at} bytes without the end mark of a tar")
        if block.count(0) == BLOCK:
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            what = f"not a tar file{_what_else(block)}" if first else f"damaged after {self.at - BLOCK} bytes"
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
            raise ShardError("cut_shard", f"it ends after {self.at - padded + len(data)} bytes, inside a member")
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
        self.at += size
        if self.at > self.limits.shard_bytes:
            raise ShardError("bad_shard", f"larger than {self.limits.shard_bytes / 2**30:g} GiB")


def _what_else(beginning: bytes) -> str:
    return next((f": {what}" for magic, what in OTHERS.items() if beginning.lower().startswith(magic.lower())), "")


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
