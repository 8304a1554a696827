"""Which shards there are and how they are opened."""

from __future__ import annotations

import glob
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import braceexpand

from .errors import DataError
from .http_body import READ_AHEAD, HttpBody
from .source import Limits, ShardError

MAX_SHARDS = 1_000_000  # a run file may not expand to more


def expand_shards(patterns: str | Sequence[str]) -> list[str]:
    """Paths, folders, globs, brace patterns and http(s) URLs -> every shard once, in the order given.

    "{00000..00003}.tar" counts up, "*.tar" lists what is there. Raises DataError if nothing is left or a pattern
    cannot be read; a single missing file is not looked for here.
    """
    found: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for name in _braces(pattern):
            found.extend(_places(name, pattern))
            if len(found) > MAX_SHARDS:
                raise DataError(f"{pattern!r} stands for more than {MAX_SHARDS} shards: name fewer.")
    if not found:
        raise DataError(
            f"No shard matches {patterns!r} (in {Path.cwd()}).\n"
            "1. Look whether the files are there: ls -l FOLDER\n"
            "2. Quote patterns, so that the shell leaves them alone: --data 'PATH/{00000..00003}.tar'"
        )
    return list(dict.fromkeys(found))


def _braces(pattern: str) -> Iterator[str]:
    total = 1
    for low, high in re.findall(r"\{(-?\d+)\.\.(-?\d+)", pattern):
        total *= abs(int(high) - int(low)) + 1
    if total > MAX_SHARDS:
        raise DataError(f"{pattern!r} stands for {total} shards, more than {MAX_SHARDS}: name fewer.")
    try:
        yield from itertools.islice(braceexpand.braceexpand(pattern), MAX_SHARDS + 1)
    except ValueError as error:
        raise DataError(f"The pattern {pattern!r} cannot be read: {error}. Write it like 'x/{{0..3}}.tar'.") from None


def _places(name: str, pattern: str) -> list[str]:
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", name)
    if scheme and scheme[1].lower() in ("http", "https"):
        return [name]
    if scheme and (scheme[1].lower() == "pipe" or name[scheme.end() :].startswith("//")):
        raise DataError(
            f"Shards are read from paths and http(s) addresses, not from {scheme[1]}: ({pattern!r}).\n"
            "1. Download them first, or name them by their https address."
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(map(str, path.glob("*.tar")))
    if glob.has_magic(name) and not path.exists():
        return sorted(glob.glob(str(path), recursive=True))
    return [str(path)]


def open_shard(shard: str, limits: Limits, give_up_at: float) -> BinaryIO:
    """A path or http(s) URL -> a stream of its bytes, to be closed. Raises ShardError, now or while it is read."""
    if re.match(r"https?://", shard, re.IGNORECASE):
        return io.BufferedReader(HttpBody(shard, limits, give_up_at), READ_AHEAD)
    try:
        return open(shard, "rb", buffering=READ_AHEAD)
    except FileNotFoundError:
        raise ShardError("missing_shard", "no such file") from None
    except OSError as error:
        raise ShardError("unreachable_shard", error.strerror or str(error)) from None
