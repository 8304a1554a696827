"""A shard behind a URL, read as a file: connections that break go on where they broke."""

from __future__ import annotations

import io
import random
import time

import requests
import urllib3

from .source import Limits, ShardError

READ_AHEAD = 64 * 1024  # bytes
MIN_SPEED = 1000.0  # bytes/s; a server below this for three timeouts is left for others
MAX_REDIRECTS = 5
HOPELESS = (
    requests.exceptions.InvalidSchema,  # a redirect to file:// ends here too
    requests.exceptions.InvalidURL,
    requests.exceptions.MissingSchema,
    requests.exceptions.TooManyRedirects,
)
RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpBody(io.RawIOBase):
    """The bytes behind a URL. A connection that breaks is opened again where it broke, with growing pauses."""

    def __init__(self, url: str, limits: Limits, give_up_at: float) -> None:
        self._url, self._limits = url, limits
        self._patience = give_up_at - time.monotonic()  # s for one read; training between two reads does not count
        self._give_up_at = give_up_at
        self._session = requests.Session()
        self._session.max_redirects = MAX_REDIRECTS
        self._response: requests.Response | None = None
        self._at = 0  # bytes read
        self._length: int | None = None  # bytes in all, where the server says so
        self._etag: str | None = None
        self._attempts = 0
        self._got, self._spent = 0, 0.0  # bytes of this connection and the seconds they took

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        self._give_up_at = time.monotonic() + self._patience
        while True:
            try:
                if self._response is None:
                    self._open()
                data = self._receive(len(buffer))
                if not data and self._length is not None and self._at < self._length:
                    raise requests.ConnectionError(f"the connection broke after {self._at} of {self._length} bytes")
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                self._pause(error)
                continue
            buffer[: len(data)] = data
            self._at += len(data)
            return len(data)

    def _receive(self, size: int) -> bytes:
        """Up to `size` bytes, empty at the end. A server that drips never runs into the timeout, so it is timed."""
        raw = self._response.raw
        read = getattr(raw, "read1", raw.read)  # read1 comes back with what there is
        started = time.monotonic()
        data = read(size, decode_content=False)
        self._spent += time.monotonic() - started
        self._got += len(data)
        if self._got > 2**20:
            self._attempts = 1  # it works again
        if self._spent > 3 * self._limits.timeout and self._got < MIN_SPEED * self._spent:
            raise ShardError("unreachable_shard", f"slower than {MIN_SPEED:.0f} bytes/s")
        return data

    def _open(self) -> None:
        headers = {"Accept-Encoding": "identity"}
        if self._at:
            headers["Range"] = f"bytes={self._at}-"
            if self._etag:
                headers["If-Range"] = self._etag
        self._attempts += 1
        timeout = max(0.2, min(self._limits.timeout, self._give_up_at - time.monotonic()))
        response = self._session.get(self._url, headers=headers, stream=True, timeout=timeout)
        if response.status_code in (404, 410):
            raise ShardError("missing_shard", f"HTTP {response.status_code}")
        if response.status_code not in (200, 206) and response.status_code not in RETRY_STATUS:
            raise ShardError("unreachable_shard", f"HTTP {response.status_code} {response.reason}")
        response.raise_for_status()
        self._response = response
        self._got, self._spent = 0, 0.0
        self._align(response)

    def _align(self, response: requests.Response) -> None:
        """Bring the body to the byte where the last connection broke."""
        if self._at and self._etag and self._etag != response.headers.get("ETag"):
            raise ShardError("cut_shard", "the file changed on the server while it was read")
        if response.status_code == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {self._at}-"):
                raise ShardError("unreachable_shard", "the server answered with another range than was asked for")
            return
        length = response.headers.get("Content-Length", "")
        self._length = int(length) if length.isdigit() else None
        self._etag = response.headers.get("ETag")
        left = self._at
        while left:
            skipped = len(self._receive(min(left, READ_AHEAD)))
            if not skipped:
                raise requests.ConnectionError("the server sent less than before")
            left -= skipped

    def _pause(self, error: Exception) -> None:
        """Wait before the next attempt, or raise ShardError after the last."""
        retry_after = self._retry_after(error)
        self._hang_up()
        pause = max(0.5 * 2 ** (self._attempts - 1) * (0.5 + random.random()), retry_after)
        late = time.monotonic() + pause > self._give_up_at
        if self._attempts > self._limits.retries or late or isinstance(error, HOPELESS):
            cause = "cut_shard" if self._at else "unreachable_shard"
            attempts = f"{self._attempts} attempt{'s' * (self._attempts != 1)}"
            raise ShardError(cause, f"{_in_words(error)} ({attempts})") from error
        time.sleep(pause)

    @staticmethod
    def _retry_after(error: Exception) -> float:
        response = getattr(error, "response", None)
        value = response.headers.get("Retry-After", "") if response is not None else ""
        return min(float(value), 30.0) if value.isdigit() else 0.0

    def _hang_up(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        if not self.closed:
            self._hang_up()
            self._session.close()
        super().close()


def _in_words(error: Exception) -> str:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"HTTP {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout) or "timed out" in str(error).lower():
        return "no answer in time"
    if "refused" in str(error).lower():
        return "connection refused"
    if "resolve" in str(error).lower() or "name or service" in str(error).lower():
        return "the server's name cannot be resolved: no network, or a wrong name"
    return f"{type(error).__name__}: {str(error)[:120]}"
