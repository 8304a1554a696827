"""Which shards there are and how they are opened."""

from __future__ import annotations

import glob
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import braceexpand

from volunteer_kit.storage.places import expanded

from .addresses import ANY_ADDRESS, AddressPolicy, without_login
from .errors import DataError
from .hosts import HOSTS
from .http_body import READ_AHEAD, HttpBody
from .hub_access import hub_addresses, hub_url
from .local_files import kind_of, list_files, open_regular
from .source import Limits, ShardError
from .stores import StoreBody, list_store, public_url, require_store, scheme_of

MAX_SHARDS = 1_000_000  # a run file may not expand to more
MAX_PATTERN = 2000  # characters; an address with a long access token has a thousand
MAX_BRACES = 4  # in one pattern; each more makes every name slower to write out
MAX_NAMES = 2**27  # characters of all names together, which stay in memory


def expand_shards(patterns: str | Sequence[str], addresses: AddressPolicy = ANY_ADDRESS) -> list[str]:
    """Paths, folders, globs, brace patterns, and URLs by http(s), hf, s3, gs -> every shard once, in the order given.

    "{00000..00003}.tar" counts up, "*.tar" lists what is there. A store's URL that somebody else named (`addresses`)
    becomes its public address. Raises DataError if nothing is left or a pattern cannot be read; a single missing file
    is not looked for here.
    """
    found: list[str] = []
    left = MAX_NAMES
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for name in each_name(pattern):
            left -= len(name)
            if left < 0:
                raise DataError(f"The names of the shards have more than {MAX_NAMES} characters together: name fewer.")
            found.extend(_places(name, pattern, addresses))
            if len(found) > MAX_SHARDS:
                raise DataError(f"{pattern!r} stands for more than {MAX_SHARDS} shards: name fewer.")
    if not found:
        raise DataError(
            f"No shard matches {patterns!r} (in {Path.cwd()}).\n"
            "1. Look whether the files are there: ls -l FOLDER\n"
            "2. Quote patterns, so that the shell leaves them alone: --data 'PATH/{00000..00003}.tar'"
        )
    return list(dict.fromkeys(found))


def each_name(pattern: str) -> Iterator[str]:
    """A pattern's names, its braces expanded; nothing is looked for. Raises DataError."""
    if len(pattern) > MAX_PATTERN or pattern.count("{") > MAX_BRACES:
        raise DataError(
            f"The pattern {pattern[:100]!r} is too long: {MAX_PATTERN} characters and {MAX_BRACES} braces at most.\n"
            "1. Write it as several patterns, one a line."
        )
    total = 1
    for low, high in re.findall(r"\{(-?\d+)\.\.(-?\d+)", pattern):
        total *= abs(int(high) - int(low)) + 1
    if total > MAX_SHARDS:
        raise DataError(f"{pattern!r} stands for {total} shards, more than {MAX_SHARDS}: name fewer.")
    try:
        yield from itertools.islice(braceexpand.braceexpand(pattern), MAX_SHARDS + 1)
    except ValueError as error:
        raise DataError(f"The pattern {pattern!r} cannot be read: {error}. Write it like 'x/{{0..3}}.tar'.") from None


def _places(name: str, pattern: str, addresses: AddressPolicy) -> list[str]:
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", name)
    if scheme and scheme[1].lower() in ("http", "https"):
        return [name]
    if is_address(name):
        return remote_places(name, addresses)
    if scheme and (scheme[1].lower() == "pipe" or name[scheme.end() :].startswith("//")):
        raise DataError(
            "Shards are read from paths, http(s) addresses, the Hub (hf://) and stores (s3://, gs://), not from "
            f"{scheme[1]}: ({without_login(pattern)!r}).\n"
            "1. Download them first, or name them by their https address."
        )
    path = expanded(name)
    if path.is_dir():
        return _in_folder(path)
    if glob.has_magic(name) and not path.exists():
        return list_files(str(path))
    if os.path.exists(path) and (kind := kind_of(path)) is not None:
        raise DataError(
            f"{str(path)!r} is {kind}, and a shard is a regular file.\n"
            "1. Name the tar files themselves, or the folder that holds them: --data FOLDER"
        )
    return [str(path)]


def remote_places(name: str, addresses: AddressPolicy) -> list[str]:
    """Shards that an hf://, s3:// or gs:// URL names; not listed where somebody else named it. Raises DataError."""
    store = scheme_of(name)
    name += "*.tar" if name.endswith("/") else ""
    if store and not addresses.is_foreign:
        require_store(name)
    if glob.has_magic(name):
        if addresses.is_foreign:
            raise DataError(
                f"A run from a link names its shards one by one, and {without_login(name)[:100]!r} would have to be "
                "listed.\n"
                "1. The host writes the names by braces: {00000..00999}.tar"
            )
        return list_store(name)
    if store is None:
        hub_url(name)
        return [name]
    url = public_url(name)
    return [url if addresses.is_foreign else name]


def _in_folder(path: Path) -> list[str]:
    folder = glob.escape(str(path))
    found = list_files(os.path.join(folder, "*.[tT][aA][rR]"))
    if not found and (packed := [*list_files(os.path.join(folder, "*.tar.*")), *list_files(f"{folder}/*.tgz")]):
        raise DataError(
            f"The folder {str(path)!r} has no .tar, but {len(packed)} packed ones ({os.path.basename(packed[0])}), and "
            "shards are read by ranges of bytes.\n"
            "1. Unpack them: gzip -d FOLDER/*.tar.gz"
        )
    return found


def catalogue_of(kind: str, shards: Sequence[str]) -> str:
    """A short name of a list of shards: the same for the same list in another folder, under another mirror or with
    other access tokens in its addresses (what follows a "?")."""
    names = [shown(shard) for shard in shards]
    common = len(os.path.commonprefix(names)) if len(names) > 1 else len(names[0]) if names else 0
    cut = names[0].rfind("/", 0, common) + 1 if names else 0
    text = json.dumps([kind, [name[cut:] for name in names]])
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def open_shard(shard: str, limits: Limits, give_up_at: float, start: int = 0, stop: int | None = None) -> BinaryIO:
    """A path or URL -> a stream of its bytes [start, stop), fewer where it ends before; to be closed.
    Raises ShardError, now or while it is read; at once for a server that failed a moment ago (hosts.py)."""
    if is_address(shard):
        HOSTS.check(shard)
        return io.BufferedReader(_body(shard, limits, give_up_at, start, stop), READ_AHEAD)
    try:
        file = open_regular(shard, READ_AHEAD)
        file.seek(start)
    except FileNotFoundError:
        raise ShardError("missing_shard", "no such file") from None
    except OSError as error:
        raise ShardError("unreachable_shard", error.strerror or str(error)) from None
    return file if stop is None else io.BufferedReader(_Part(file, stop - start), READ_AHEAD)


def _body(shard: str, limits: Limits, give_up_at: float, start: int, stop: int | None) -> io.RawIOBase:
    try:
        if scheme_of(shard) and not limits.addresses.is_foreign:
            return StoreBody(shard, limits, give_up_at, start, stop)
        if scheme_of(shard):
            shard = public_url(shard)
        elif shard.lower().startswith("hf:"):
            shard, limits = hub_url(shard), limits._replace(addresses=hub_addresses(limits.addresses))
    except DataError as error:
        raise ShardError("missing_shard", str(error).splitlines()[0]) from None
    return HttpBody(shard, limits, give_up_at, start, stop)


class _Part(io.RawIOBase):
    """The next `length` bytes of a file."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file, self._left = file, length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        count = self._file.readinto(memoryview(buffer)[: max(0, self._left)])
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def shown(shard: str) -> str:
    """A shard as people and logs may see it: without the password or the ?key=... that an address may carry."""
    return without_login(shard.split("?")[0]) if is_address(shard) else shard


def is_address(shard: str) -> bool:
    """Whether a shard is read over the network; else it is a path."""
    return re.match(r"(https?|hf|s3|gs|gcs)://", shard, re.IGNORECASE) is not None
