"""A shard behind a URL, or a part of it, read as a file: connections that break go on where they broke."""

from __future__ import annotations

import io
import random
import re
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin

import requests
import urllib3

from volunteer_kit.http_client import ProxyTrouble

from .addresses import AddressRefused
from .hosts import HOSTS
from .http_session import Session
from .hub_access import forget_login, hub_login, refusal
from .source import Limits, ShardError

READ_AHEAD = 64 * 1024  # bytes
MIN_SPEED = 1000.0  # bytes/s; a server below this is left for others
SLOW_AFTER = 3  # timeouts; before that, nobody is called slow
MAX_REDIRECTS = 5
MAX_WAIT = 30.0  # s between two attempts; a server that asks for more is left for others
RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
HOPELESS = (
    requests.exceptions.InvalidSchema,
    requests.exceptions.InvalidURL,
    requests.exceptions.MissingSchema,
    ValueError,  # requests' answer to a Location that is no address
)
REFUSED = "a run from a link reads from public addresses only"
BROKEN = (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError)


class HttpBody(io.RawIOBase):
    """The bytes [start, stop) behind a URL, fewer where it ends before. A connection that breaks is opened again where
    it broke, with growing pauses. Raises ShardError, when it is read.

    :param session: connections that are used again; None: one of its own
    """

    def __init__(
        self,
        url: str,
        limits: Limits,
        give_up_at: float,
        start: int = 0,
        stop: int | None = None,
        session: Session | None = None,
    ) -> None:
        self._url, self._limits = url, limits
        self._patience = give_up_at - time.monotonic()  # s for one read; training between two reads does not count
        self._give_up_at = give_up_at
        self._session = session or Session(limits.addresses)
        self._response: requests.Response | None = None
        self._asked = url  # the last address of a chain of redirects
        self._start, self._at, self._stop = start, start, stop  # first byte, next byte, byte after the last
        self._total: int | None = None  # bytes of the whole file, where the server says so
        self._until: int | None = None  # where this answer ends, where the server says so
        self._etag: str | None = None
        self._is_over = self._is_praised = False
        self._attempts = 0
        self._got, self._spent = 0, 0.0  # bytes of this connection and the seconds they took

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        self._give_up_at = time.monotonic() + self._patience
        while not self._is_over and self._left(self._stop, self._total) != 0:
            try:
                if self._response is None:
                    self._open()
                    continue
                left = self._left(self._stop, self._total, self._until)
                data = self._receive(len(buffer) if left is None else min(len(buffer), left))
                if not data:
                    self._end_of_answer()
            except AddressRefused as error:
                self._hang_up()
                raise ShardError("refused_shard", f"{error}; {REFUSED}") from None
            except BROKEN as error:
                self._pause(error)
                continue
            buffer[: len(data)] = data
            self._at += len(data)
            if self._got > READ_AHEAD or self._left(self._stop, self._total) == 0:
                self._praise()
            return len(data)
        return 0

    def _left(self, *ends: int | None) -> int | None:
        """Bytes up to the first of `ends`; None if none of them is known."""
        known = [end for end in ends if end is not None]
        return max(0, min(known) - self._at) if known else None

    def _receive(self, size: int) -> bytes:
        """Up to `size` bytes, empty at the end. A server that drips never runs into the timeout, so it is timed."""
        raw = self._response.raw
        read = getattr(raw, "read1", raw.read)  # read1 comes back with what there is
        started = time.monotonic()
        self._session.deadline = started + SLOW_AFTER * self._limits.timeout
        data = (read(size, decode_content=False) or b"") if size else b""
        if len(data) > size:  # a chunk of negative length makes http.client read too much
            raise requests.ConnectionError("the server sent a damaged answer")
        self._spent += time.monotonic() - started
        self._got += len(data)
        if self._got > 2**20:
            self._attempts = 1  # it works again
        if self._spent > SLOW_AFTER * self._limits.timeout and self._got < MIN_SPEED * self._spent:
            why = f"slower than {MIN_SPEED:.0f} bytes/s"
            HOSTS.failed(self._url, why)
            raise ShardError("unreachable_shard", why)
        return data

    def _end_of_answer(self) -> None:
        if left := self._left(self._until):
            raise requests.ConnectionError(f"the connection broke, {left} bytes before the end of the answer")
        if self._left(self._stop, self._total) and self._until is not None:
            raise requests.ConnectionError("the server sent fewer bytes than it was asked for")
        self._is_over = True
        self._praise()

    def _praise(self) -> None:
        if not self._is_praised:
            HOSTS.worked(self._url)
        self._is_praised = True

    def _open(self) -> None:
        headers = {"Accept-Encoding": "identity"}
        if self._at or self._stop is not None:
            headers["Range"] = f"bytes={self._at}-{'' if self._stop is None else self._stop - 1}"
            if self._etag:
                headers["If-Range"] = self._etag
        self._attempts += 1
        response = self._response = self._get(headers)
        if why := refusal(self._asked, response):
            raise ShardError("unreachable_shard", why)
        if response.status_code in (404, 410):
            raise ShardError("missing_shard", f"HTTP {response.status_code}")
        if response.status_code == 416 and "Range" in headers:
            self._beyond_the_end(response)
            return
        if response.status_code not in (200, 206) and response.status_code not in RETRY_STATUS:
            raise ShardError("unreachable_shard", f"HTTP {response.status_code} {response.reason[:80]}")
        response.raise_for_status()
        self._got, self._spent = 0, 0.0
        self._align(response, headers.get("Range"))

    def _get(self, headers: dict[str, str]) -> requests.Response:
        url, sign = self._url, hub_login(self._url)
        for _ in range(2 + MAX_REDIRECTS):
            self._limits.addresses.check_url(url)  # as it is written; requests changes it, a port 0 for instance
            timeout = max(0.2, min(self._limits.timeout, self._give_up_at - time.monotonic()))
            self._session.deadline = time.monotonic() + SLOW_AFTER * timeout
            login = {"auth": sign} if sign else {}
            response = self._session.get(url, headers=headers, stream=True, timeout=timeout, **login)
            self._asked = url
            if sign and response.status_code == 401:
                forget_login()
                response.close()
                sign = None
                continue
            if not response.is_redirect:
                return response
            response.close()
            url = urljoin(url, response.headers["Location"])
            sign = sign and hub_login(url)  # once elsewhere, never again: a server could send us back to the Hub
            if not re.match(r"https?://", url, re.IGNORECASE):
                raise ShardError("unreachable_shard", f"the server sends us on to {url[:80]!r}, not an http(s) address")
        raise ShardError("unreachable_shard", f"more than {MAX_REDIRECTS} redirects")

    def _align(self, response: requests.Response, asked: str | None) -> None:
        """Learn what the answer is a part of, and come to the byte that is needed next."""
        etag = response.headers.get("ETag")
        if response.status_code == 206:
            first, self._until, total = _content_range(response)
            if asked is None or first != self._at:
                raise ShardError("unreachable_shard", "the server answered with another range than was asked for")
        else:
            first, total = 0, _number(response.headers.get("Content-Length"))
            self._until = total
        changed = self._etag and self._etag != etag or None not in (self._total, total) and self._total != total
        if changed:
            raise ShardError("cut_shard", "the file changed on the server while it was read")
        if total is not None and total < self._at:
            raise ShardError("cut_shard", f"it ends after {total} bytes, before byte {self._at}")
        self._etag, self._total = self._etag or etag, total if total is not None else self._total
        left = self._at - first
        while left:  # a server that does not know Range
            if time.monotonic() > self._give_up_at:
                raise ShardError("unreachable_shard", "the server sends whole files only, which takes too long")
            skipped = len(self._receive(min(left, READ_AHEAD)))
            if not skipped:
                raise requests.ConnectionError(f"the file has fewer than {self._at} bytes")
            left -= skipped

    def _beyond_the_end(self, response: requests.Response) -> None:
        match = re.fullmatch(r"bytes \*/(\d{1,18})", response.headers.get("Content-Range", ""), re.ASCII)
        if match is None or int(match[1]) > self._at:
            raise ShardError("unreachable_shard", f"HTTP 416 for a range from byte {self._at}")
        if int(match[1]) < self._at:
            raise ShardError("cut_shard", f"it ends after {match[1]} bytes, before byte {self._at}")
        self._is_over = True

    def _pause(self, error: Exception) -> None:
        """Wait before the next attempt, or raise ShardError after the last."""
        self._hang_up()
        asked_for = _retry_after(error)
        pause = max(min(0.5 * 2 ** (self._attempts - 1) * (0.5 + random.random()), MAX_WAIT), asked_for)
        late = pause > MAX_WAIT or time.monotonic() + pause > self._give_up_at
        is_new = self._at == self._start
        retries = 0 if is_new and HOSTS.is_doubtful(self._url) else self._limits.retries
        if self._attempts > retries or late or isinstance(error, HOPELESS):
            why = _in_words(error)
            if not isinstance(error, HOPELESS):
                HOSTS.failed(self._url, why, asked_for)
            cause = "unreachable_shard" if is_new else "cut_shard"
            attempts = f"{self._attempts} attempt{'s' * (self._attempts != 1)}"
            raise ShardError(cause, f"{why} ({attempts})") from error
        time.sleep(pause)

    def _hang_up(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        if not self.closed:
            self._hang_up()
            self._session.close()
        super().close()


def _content_range(response: requests.Response) -> tuple[int, int, int | None]:
    """First byte, byte after the last, bytes of the whole file where the server says so."""
    header = response.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", header, re.ASCII)
    first, last, total = (int(match[1]), int(match[2]), _number(match[3])) if match else (0, -1, None)
    if not (first <= last and (total is None or last < total)):
        raise ShardError("unreachable_shard", f"the server sent a range that makes no sense: {header[:80]!r}")
    return first, last + 1, total


def _retry_after(error: Exception) -> float:
    """Seconds that the server asks us to wait: a number or a date."""
    response = getattr(error, "response", None)
    header = response.headers.get("Retry-After", "") if response is not None else ""
    if (seconds := _number(header)) is not None:
        return float(seconds)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _number(header: str | None) -> int | None:
    return int(header) if header is not None and re.fullmatch(r"\d{1,18}", header, re.ASCII) else None


def _in_words(error: Exception) -> str:
    if isinstance(error, ProxyTrouble):
        return error.in_a_line
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"HTTP {error.response.status_code} {error.response.reason[:80]}"
    if isinstance(error, requests.Timeout) or "timed out" in str(error).lower():
        return "no answer in time"
    if "refused" in str(error).lower():
        return "connection refused"
    if "resolve" in str(error).lower() or "name or service" in str(error).lower():
        return "the server's name cannot be resolved: no network, or a wrong name"
    return f"{type(error).__name__}: {str(error)[:120]}"
