"""A run file behind a link: fetched within bounds, kept for the day when its server is down.

A link is the run file's own address, or that of a page of its host: the root, or the dashboard. Behind a page's
address the file is looked for at the same server only.
"""

from __future__ import annotations

import hashlib
import ipaddress
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit, urlunsplit

import requests
import urllib3
import yaml

from volunteer_kit.data.addresses import (
    ANY_ADDRESS,
    AddressPolicy,
    AddressRefused,
    as_address,
    host_and_port,
    is_public,
)
from volunteer_kit.data.http_session import Session
from volunteer_kit.http_client import ProxyTrouble
from volunteer_kit.storage import part_folder, put_in_place

MAX_RUN_FILE = 256 * 1024  # bytes; a stranger wrote it
PATIENCE = 20.0  # s for all of it
ACCEPT = "application/yaml, text/yaml, text/plain;q=0.5, */*;q=0.1"  # a host's root is a page for browsers


class LinkError(Exception):
    """Why the link gave no run file, in words."""


class InsecureLink(LinkError):
    """The link is http:// and leads to another machine."""


class Gone(LinkError):
    """The server says that there is no such file: 404 or 410."""


class LinkedRun(NamedTuple):
    """A run file from a link, and its server, if that is in this machine's own network: IP address and port."""

    path: Path
    endpoint: tuple[str, int] | None


def is_like_a_run(path: Path) -> bool:
    """Whether it has what every run file has: a line `run_id: ...`. A hotel's login page has not."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        return any(key.value == "run_id" for key, _ in root.value)
    except (OSError, ValueError, yaml.YAMLError, RecursionError, AttributeError, TypeError):
        return False


def fetch_run_file(
    url: str, folder: Path, is_run: Callable[[Path], bool] = is_like_a_run, *, allow_http: bool = False
) -> LinkedRun:
    """The file behind an http(s) address, in `folder`. The address may be the file's own, or that of a page of the
    run's host: then the file beside the page is taken, or the one at the server's root. Redirects are not followed.

    An earlier copy is given where the server does not answer or gives something else: an error of a proxy, a redirect,
    a page. Only a 404 or 410 at each place where the file may be says that the run is gone.

    :param is_run: what takes the earlier copy's place must pass; without an earlier copy anything is given, so that
        its mistakes can be told
    :param allow_http: also from another machine by http://, where anybody on the way can change the file
    Raises LinkError.
    """
    kept = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.yaml"
    try:
        host, port = host_and_port(url)
        is_open = url.lower().startswith("http://")
        policy = AddressPolicy("loopback") if is_open and not allow_http else ANY_ADDRESS
        text, connected = _find(candidates(url), policy)
    except AddressRefused as refusal:
        if "another machine" in str(refusal):
            raise InsecureLink(f"{refusal}, and by http:// anybody on the way can change what it sends") from None
        raise LinkError(str(refusal)) from None
    except Gone:
        raise
    except LinkError:
        if kept.is_file():
            return LinkedRun(kept, _endpoint_named(host, port))
        raise
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        if kept.is_file():
            return LinkedRun(kept, _endpoint_named(host, port))
        if isinstance(error, ProxyTrouble):
            raise LinkError(error.in_a_line) from None
        raise LinkError(f"its server does not answer ({type(error).__name__})") from None
    try:
        path, is_new = _keep(text, kept, is_run)
    except OSError as error:
        raise LinkError(f"it cannot be kept in {folder} ({error.strerror or error})") from None
    is_near = connected is not None and not is_public(ipaddress.ip_address(connected[0].partition("%")[0]))
    return LinkedRun(path, connected if is_new and is_near else _endpoint_named(host, port))


def _endpoint_named(host: str, port: int) -> tuple[str, int] | None:
    """Of a link that names an address, or this machine; where a name leads is known once its server gave the file."""
    address = ipaddress.ip_address("127.0.0.1") if host.rstrip(".").lower() == "localhost" else as_address(host)
    return (str(address), port) if address is not None and not is_public(address) else None


def _keep(text: bytes, kept: Path, is_run: Callable[[Path], bool]) -> tuple[Path, bool]:
    """The file, and whether its content is `text`. Raises OSError."""
    had_one = kept.is_file()
    if had_one and kept.read_bytes() == text:
        return kept, True
    kept.parent.mkdir(parents=True, exist_ok=True)
    with part_folder(kept) as part:
        written = part / kept.name
        written.write_bytes(text)
        if is_run(written):
            put_in_place(written, kept)
            return kept, True
        if not had_one:
            kept = kept.with_suffix(".refused.yaml")
            put_in_place(written, kept)
        return kept, False


def candidates(url: str) -> list[str]:
    """Where the run file may be, at the same server: behind the address itself, beside it, and at the root."""
    parts = urlsplit(url)
    itself = urlunsplit(parts._replace(fragment=""))
    if parts.path.lower().endswith((".yaml", ".yml")):
        return [itself]
    page = urlunsplit(parts._replace(query="", fragment=""))
    folder = page if page.endswith("/") else f"{page}/"
    return list(dict.fromkeys([itself, urljoin(folder, "run.yaml"), urljoin(page, "/run.yaml")]))


def _find(urls: list[str], addresses: AddressPolicy) -> tuple[bytes, tuple[str, int] | None]:
    """The first that is no web page, as _get(). Raises LinkError with what each of them was, and what _get() raises if
    the server does not answer."""
    deadline = time.monotonic() + PATIENCE
    tried: list[LinkError] = []
    other: tuple[bytes, tuple[str, int] | None] | None = None  # neither page nor run; its mistakes can be told
    for url in urls:
        try:
            found = _get(url, addresses, deadline)
        except LinkError as error:
            tried.append(error)
            continue
        if found[0].lstrip()[:1] == b"<":
            tried.append(LinkError("it is a web page, not the file itself; on GitHub, take the link of the button Raw"))
        elif b"run_id" in found[0] or len(urls) == 1:
            return found
        else:
            other = other or found
            tried.append(LinkError("it is no run file"))
    if other is not None:
        return other
    if len(tried) == 1:
        raise tried[0]
    kind = Gone if all(isinstance(error, Gone) for error in tried) else LinkError
    told = [f"{url[:300]} ({str(error).partition(';')[0]})" for url, error in zip(urls, tried, strict=True)]
    raise kind(f"no run file was found at {', '.join(told)}")


def _get(url: str, addresses: AddressPolicy, deadline: float) -> tuple[bytes, tuple[str, int] | None]:
    """The body, and the address and port that it came from, where no proxy stood between."""
    with Session(addresses) as session:
        session.deadline = deadline
        asked = {"Accept": ACCEPT, "Accept-Encoding": "identity"}
        with session.get(url, stream=True, timeout=10, headers=asked) as answer:
            if answer.status_code != 200:
                kind = Gone if answer.status_code in (404, 410) else LinkError
                raise kind(f"its server answered HTTP {answer.status_code}")
            text = answer.raw.read(MAX_RUN_FILE + 1)
            announced = answer.headers.get("Content-Length", "")
    if len(text) > MAX_RUN_FILE:
        raise LinkError(f"it has more than {MAX_RUN_FILE} bytes, so it is no run file")
    if announced.isdecimal() and len(text) < (size := int(announced[:9])):
        raise urllib3.exceptions.IncompleteRead(len(text), size - len(text))
    return text, session.connected
