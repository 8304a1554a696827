"""Shards in object stores: s3:// and gs://, read by ranges of bytes.

What this machine's user names is read through fsspec, with the logins that its library finds. What somebody else named
(AddressPolicy.is_foreign) is read by the store's public address over plain HTTPS, where no login is sent.
"""

from __future__ import annotations

import io
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from .addresses import without_login
from .errors import DataError
from .hosts import HOSTS
from .source import Limits, ShardError

T = TypeVar("T")
PIECE = 2**20  # bytes of one request; they wait in memory
PATIENCE = 3  # timeouts that a request may take in all
LIST_TIMEOUT = 60.0  # s
MAX_LISTED = 1_000_000  # names
FIRST_PAUSE = 0.5  # s; doubles
_BUCKET = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"


class Store(NamedTuple):
    """:ivar package: what fsspec needs; `plain`: options that send no login; `login`: how this machine gets one"""

    name: str
    package: str
    plain: dict[str, Any]
    login: str


_GOOGLE = Store("Google Cloud Storage", "gcsfs", {"token": "anon"}, "gcloud auth application-default login")
STORES = {
    "s3": Store("S3", "s3fs", {"anon": True}, "aws configure"),
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
}
_plain: set[str] = set()  # schemes for which this machine has no login


def scheme_of(shard: str) -> str | None:
    """"s3", "gs" or "gcs" of an address in a store; None for others."""
    match = re.match(r"(s3|gs|gcs)://", shard, re.IGNORECASE)
    return match[1].lower() if match else None


def bucket_of(shard: str) -> str:
    """"s3://bucket"; what HOSTS remembers."""
    return "/".join(shard.split("/")[:3])


def public_url(shard: str) -> str:
    """The https address at which a store gives a file to everybody. Raises DataError."""
    match = re.fullmatch(rf"\w+://({_BUCKET})/([^?#\\]+)", shard, re.ASCII)
    if match is None or any(part in ("", ".", "..") for part in match[2].split("/")):
        raise DataError(f"{without_login(shard)[:200]!r} is no file in a store.\n1. Write it like s3://BUCKET/PATH.tar")
    bucket, path = match[1], quote(match[2])
    if scheme_of(shard) != "s3":
        return f"https://storage.googleapis.com/{bucket}/{path}"
    if re.search(r"[._]", bucket):  # no certificate is good for such a name
        return f"https://s3.amazonaws.com/{bucket}/{path}"
    return f"https://{bucket}.s3.amazonaws.com/{path}"


def require_store(shard: str) -> None:
    """Raises DataError where the package is lacking that reads a store."""
    import fsspec

    scheme = scheme_of(shard) or ""
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        store = STORES[scheme]
        raise DataError(
            f"Shards of {store.name} ({scheme}://) are read by the package {store.package}, which is not installed.\n"
            f"1. pip install {store.package}"
        ) from None


def list_store(pattern: str) -> list[str]:
    """The files of a store, or of the Hub (hf://), that a pattern with * matches, sorted. Raises DataError."""
    scheme = pattern.partition("://")[0].lower()
    try:
        found = _within(LIST_TIMEOUT, lambda: _unless_nobody(scheme, 10.0, lambda system: system.glob(pattern)))
    except Exception as error:  # each library has its own
        raise DataError(
            f"The shards {pattern!r} cannot be listed: {_in_words(error, scheme)}.\n"
            "1. Or write their names by braces, which needs no list: {00000..00999}.tar"
        ) from None
    if len(found) > MAX_LISTED:
        raise DataError(f"{pattern!r} stands for more than {MAX_LISTED} shards: name fewer.")
    return sorted(f"{scheme}://{str(name).partition('://')[2] or name}" for name in found)


class StoreBody(io.RawIOBase):
    """The bytes [start, stop) of a file in a store, fewer where it ends before. A request that fails is made again,
    from the byte where it failed, with growing pauses. Raises ShardError, when it is read."""

    def __init__(self, shard: str, limits: Limits, give_up_at: float, start: int, stop: int | None) -> None:
        self._shard, self._limits, self._scheme = shard, limits, scheme_of(shard) or ""
        self._patience = give_up_at - time.monotonic()  # s for one read; training between two reads does not count
        self._start, self._at, self._stop = start, start, stop
        self._size: int | None = None  # of the file, once it is known
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        if not self._piece:
            self._piece = memoryview(self._next_piece(time.monotonic() + self._patience))
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def _next_piece(self, give_up_at: float) -> bytes:
        if self._size is None:
            about = self._patiently(lambda system: system.info(self._shard), give_up_at)
            if about.get("type") != "file" or type(about.get("size")) is not int:
                raise ShardError("missing_shard", "there is no file of this name in the store")
            self._size = about["size"]
            if self._start > self._size:
                raise ShardError("cut_shard", f"it ends after {self._size} bytes, before byte {self._start}")
        stop = min(self._at + PIECE, self._size, self._size if self._stop is None else self._stop)
        if stop <= self._at:
            return b""
        data = self._patiently(
            lambda system: system.cat_file(self._shard, start=self._at, end=stop), give_up_at, stop - self._at
        )
        self._at += len(data)
        HOSTS.worked(self._shard)
        return data

    def _patiently(self, call: Callable[[Any], T], give_up_at: float, length: int | None = None) -> T:
        """What `call` gives, so many bytes if a `length` is asked for, after some attempts. Raises ShardError."""
        pause = FIRST_PAUSE
        for attempt in range(self._limits.retries + 1):
            timeout = max(0.2, min(PATIENCE * self._limits.timeout, give_up_at - time.monotonic()))
            try:
                found = _within(timeout, lambda: _unless_nobody(self._scheme, self._limits.timeout, call))
                if length is None or len(found) == length:  # type: ignore[arg-type]
                    return found
                error: Exception = OSError("the store gave another range than was asked for")
            except FileNotFoundError:
                raise ShardError("missing_shard", "there is no file of this name in the store") from None
            except Exception as problem:  # each library has its own
                error = problem
            is_last = attempt == self._limits.retries or time.monotonic() + pause > give_up_at
            if is_last or isinstance(error, PermissionError | ImportError):
                break
            time.sleep(pause * (0.5 + random.random()))
            pause *= 2
        why = _in_words(error, self._scheme)
        if not isinstance(error, PermissionError | ImportError):
            HOSTS.failed(self._shard, why)
        raise ShardError("unreachable_shard" if self._at == self._start else "cut_shard", why) from None


def _filesystem(scheme: str, timeout: float) -> Any:
    import fsspec

    options: dict[str, Any] = STORES[scheme].plain if scheme in _plain else {}  # of hf:// huggingface_hub's own
    if scheme == "s3":  # attempts are counted here
        waits = {"connect_timeout": timeout, "read_timeout": timeout, "retries": {"max_attempts": 1}}
        options = {"anon": False, **options, "config_kwargs": waits}
    return fsspec.filesystem(scheme, **options)


def _unless_nobody(scheme: str, timeout: float, call: Callable[[Any], T]) -> T:
    """`call` with a filesystem, and once more without a login where this machine has none: much is public."""
    try:
        return call(_filesystem(scheme, timeout))
    except Exception as error:
        if scheme not in STORES or scheme in _plain or type(error).__name__ != "NoCredentialsError":
            raise
    _plain.add(scheme)
    return call(_filesystem(scheme, timeout))


def _within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` gives. Raises what it raises, and TimeoutError: a library's own waits may begin anew with each
    byte."""
    outcome: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]


def _in_words(error: BaseException, scheme: str) -> str:
    """Without the error's own words, which may hold keys and signed addresses."""
    store = STORES.get(scheme)
    if isinstance(error, ImportError) and store:
        return f"the package {store.package} is not installed: pip install {store.package}"
    if isinstance(error, PermissionError):
        login = store.login if store else "hf auth login"
        return f"this machine may not read it; log in with an account that may: {login}"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "no answer in time"
    return f"the store cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})"
