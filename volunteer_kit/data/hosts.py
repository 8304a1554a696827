"""Which servers have failed lately, so that their other shards are not asked for at once."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from .source import ShardError

FIRST_PAUSE = 2.0  # s; doubles with every failure in a row
LONGEST_PAUSE = 600.0  # s, also where a server asks for more
ALONE_PAUSE = 4.0  # s at most where there is no other server to turn to
MAX_HOSTS = 10_000  # remembered


class _Failures(NamedTuple):
    number: int  # in a row
    until: float  # clock; not asked before
    asked_for: bool  # the server named the pause itself
    why: str


class Hosts:
    """What a process remembers of servers; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failed: dict[str, _Failures] = {}

    def check(self, url: str) -> None:
        """Raises ShardError as long as the server behind `url` is left alone."""
        host = host_of(url)
        with self._lock:
            failures = self._failed.get(host or "")
        if failures is not None and (left := failures.until - self._clock()) > 0:
            raise ShardError("unreachable_shard", f"{failures.why}; {host} is left alone for {left:.0f} s more")

    def failed(self, url: str, why: str, asked_for: float = 0.0) -> None:
        """The server behind `url` did not give what it has; it asked to be left alone for `asked_for` seconds."""
        host = host_of(url) or ""
        with self._lock:
            number = 1 + (self._failed[host].number if host in self._failed else 0)
            pause = min(max(FIRST_PAUSE * 2 ** min(number - 1, 20), asked_for), LONGEST_PAUSE)
            self._failed[host] = _Failures(number, self._clock() + pause, asked_for >= pause, why)
            while len(self._failed) > MAX_HOSTS:
                del self._failed[next(iter(self._failed))]

    def is_doubtful(self, url: str) -> bool:
        """Whether the server behind `url` failed when it was last asked."""
        with self._lock:
            return (host_of(url) or "") in self._failed

    def worked(self, url: str) -> None:
        """The server behind `url` is well again."""
        with self._lock:
            self._failed.pop(host_of(url) or "", None)

    def pause(self, hosts: Collection[str | None]) -> float:
        """Seconds until the first of `hosts` may be asked; it is allowed from then on. 0 if one of them may be asked
        now. Who has nowhere else to go waits no longer than ALONE_PAUSE, but as long as the server itself said."""
        now = self._clock()
        with self._lock:
            failed = [(host, self._failed.get(host or "")) for host in hosts]
            if not failed or any(failures is None or failures.until <= now for _, failures in failed):
                return 0.0
            for host, failures in failed:
                if not failures.asked_for:
                    until = min(failures.until, now + ALONE_PAUSE)
                    self._failed[host or ""] = failures._replace(until=until)
            return max(0.0, min(self._failed[host or ""].until for host, _ in failed) - now)


HOSTS = Hosts()


def host_of(shard: str) -> str | None:
    """Host and port of an address, or what stands in their place in a store's; None for a path."""
    if re.match(r"(s3|gs|gcs)://", shard, re.IGNORECASE):
        return "/".join(shard.split("/")[:3])
    if re.match(r"hf://", shard, re.IGNORECASE):
        shard = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not shard.lower().startswith(("http://", "https://")):
        return None
    try:
        return urlsplit(shard).netloc.rpartition("@")[2].lower()
    except ValueError:  # no address; whoever opens it says so
        return shard


def hosts_of(shards: Iterable[str]) -> frozenset[str | None]:
    """Where a list of shards lies; None stands for this machine."""
    return frozenset(map(host_of, shards))


def wait_for_a_host(hosts: Collection[str | None], give_up_at: float, known: Hosts = HOSTS) -> None:
    """Where all of `hosts` are left alone, wait for the first one, but not past `give_up_at` (time.monotonic())."""
    pause = known.pause(hosts)
    if 0 < pause < give_up_at - time.monotonic():
        time.sleep(pause)
