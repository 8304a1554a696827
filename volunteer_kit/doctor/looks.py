"""Looking at this machine and at a run; what it means is in verdicts.py. Each look ends by itself, or is cut off.

What a look needs beside the standard library it imports itself: without a package the other looks go on.
"""

from __future__ import annotations

import email.utils
import json
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from volunteer_kit.doctor import verdicts
from volunteer_kit.doctor.finding import Finding
from volunteer_kit.doctor.line import Line
from volunteer_kit.packages import lacking, steps, version_of, with_kit_path
from volunteer_kit.process_group import kill_all, note_leader

if TYPE_CHECKING:
    from volunteer_kit.runs import RunConfig

ANSWER_WITHIN = 10.0  # s for one question over HTTP
MAX_BODY = 2**16  # bytes; what an authority says of its run has some hundred


class Look:
    """One check, begun at once in a thread of its own."""

    def __init__(self, name: str, within: float, look: Callable[[], Finding]):
        self.name, self._within = name, within
        self._began = time.monotonic()
        self._found: Finding | None = None
        self._thread = threading.Thread(target=self._run, args=(look,), daemon=True)
        self._thread.start()

    def finding(self) -> Finding:
        """Waits for it, not longer than it may take."""
        self._thread.join(max(0.0, self._began + self._within - time.monotonic()))
        return self._found or verdicts.late(self.name, self._within)

    def _run(self, look: Callable[[], Finding]) -> None:
        try:
            self._found = look()
        except Exception as error:  # a check that cannot be made must not hide the others
            what = str(error).partition("\n")[0][:160] or type(error).__name__
            self._found = Finding(self.name, "warning", f"could not be checked: {what}")


# --- this machine ---


def packages(purpose: str = "train") -> Finding:
    """:param purpose: train or finetune, as the run says"""
    lacks, needed = lacking(purpose, strict=True), lacking(purpose)
    versions = {name: version_of(name) for name in ("torch", "hivemind", "numpy")}
    return verdicts.packages(lacks, needed, versions, "\n".join(steps(lacks, [purpose])))


def host_packages(is_host: bool) -> Finding:
    lacks = [lack for lack in lacking("host") if lack not in lacking("train")]
    return verdicts.host_packages(lacks, "\n".join(steps(lacks, ["host"])), is_host)


def device(within: float) -> Finding:
    found = probe(["device"], within)
    return verdicts.device(found["name"], found["kind"], found["free_gb"], found["problems"])


def memory(parameters: int | None) -> Finding:
    from volunteer_kit.device.machine import usable_memory

    return verdicts.memory(*usable_memory(), parameters)


def disk(folder: Path, parameters: int | None, state_bytes: int | None) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return verdicts.disk(str(folder), shutil.disk_usage(there).free, parameters, state_bytes)


def open_files() -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return verdicts.open_files(float("inf") if hard == resource.RLIM_INFINITY else hard)


def clock(urls: Sequence[str]) -> Finding:
    """Against the first of these that tells the time."""
    import requests

    from volunteer_kit.http_client import http_session

    for url in urls:
        before = time.time()
        with suppress(requests.RequestException):
            answer = http_session().head(url, timeout=ANSWER_WITHIN, allow_redirects=False)
            after = time.time()
            told = (
                email.utils.parsedate_to_datetime(answer.headers.get("Date", "")) if "Date" in answer.headers else None
            )
            if told is not None:  # whole seconds, cut off: on average half a one more
                offset = told.timestamp() + 0.5 - (before + after) / 2
                name = urlsplit(url).hostname or url
                return verdicts.clock(offset, 0.5 + (after - before) / 2, name, _synchronized())
    return verdicts.clock(None, 0.0, "", _synchronized())


def _synchronized() -> bool | None:
    """Whether the system says that its clock follows the network's; None: it does not say."""
    command = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"yes": True, "no": False}.get(said)


class Reply(NamedTuple):
    """:ivar error: what an address does instead of answering well ("does not answer: ..."); None: it answers well
    :ivar status: of HTTP; 0: there was none
    :ivar is_reached: whether the way there is open; None: not known, for a proxy of ours is to blame
    :ivar body: at most MAX_BODY bytes of it, if they were asked for
    """

    error: str | None
    status: int = 0
    is_reached: bool | None = True
    body: bytes = b""


def hub(endpoint: str, needed: bool, line: Line | None = None) -> Finding:
    """:param line: told whether it answers"""
    began = time.monotonic()
    reply = ask(endpoint)
    _note(line, endpoint, "the Hub", reply)
    return verdicts.hub(endpoint, reply.error, time.monotonic() - began, needed, reply.status)


def ask(url: str, body: bool = False) -> Reply:
    """:param body: read what it says, too"""
    import requests

    from volunteer_kit.http_client import ProxyTrouble, http_session, retry_after

    try:
        plain = {"Accept-Encoding": "identity"}  # so that MAX_BODY bounds what arrives, too
        with http_session().get(
            url, headers=plain, timeout=ANSWER_WITHIN, allow_redirects=False, stream=True
        ) as answer:
            said = next(answer.iter_content(MAX_BODY), b"") if body and answer.ok else b""
    except ProxyTrouble as error:
        return Reply(f"cannot be asked: {error.in_a_line}", is_reached=None)
    except requests.exceptions.SSLError as error:
        return Reply(f"has a certificate that is not accepted here ({_reason(error)})")
    except requests.exceptions.Timeout:
        return Reply(f"does not answer within {ANSWER_WITHIN:.0f} s", is_reached=False)
    except requests.RequestException as error:
        return Reply(f"does not answer: {_reason(error)}", is_reached=False)
    if answer.ok:
        return Reply(None, answer.status_code, body=said)
    wait = retry_after(answer.headers.get("Retry-After"))
    return Reply(verdicts.status_words(answer.status_code, wait), answer.status_code)


def _note(line: Line | None, url: str, role: str, reply: Reply) -> None:
    """:param role: of whom `url` is, with its article"""
    from volunteer_kit.http_client import host_of, is_on_this_machine

    if line is not None and reply.is_reached is not None and not is_on_this_machine(url):
        line.note(f"{role} ({host_of(url)})", reply.is_reached)


def _reason(error: BaseException) -> str:
    """The innermost words of a nested error."""
    text = str(error)
    found = re.search(r"\[Errno -?\d+\] ([^)'\"]+)|certificate verify failed: ([^(]+)", text)
    return (found[1] or found[2]).strip() if found else type(error).__name__


# --- a run ---


def first_peers_and_reach(
    addresses: Sequence[str], port: int, within: float, is_host: bool, may_ask: bool, line: Line | None = None
) -> tuple[Finding, Finding]:
    """By one p2pd for both.

    :param port: to listen on; 0: any
    :param may_ask: the port is ours to be tried
    :param line: told whether those on other machines answer
    """
    if not addresses:
        nobody = verdicts.reach(False, "nobody is named who could call this machine", {}, is_host=is_host)
        return verdicts.first_peers({}, is_host), nobody
    try:
        found = probe(["peer", str(port), "may_ask" if may_ask else "may_not_ask", *addresses], within)
    except subprocess.TimeoutExpired:
        return verdicts.late("first peers", within), verdicts.late("reachable", within)
    elsewhere = [why for address, why in found["results"].items() if address not in found["here"]]
    if line is not None and elsewhere:
        line.note("the run's first peers", not all(elsewhere))
    why_not = "the running host has the port"
    if may_ask:
        why_not = "peers call public addresses only" if found["is_local"] else "there is no peer to ask"
    return (
        verdicts.first_peers(found["results"], is_host),
        verdicts.reach(found["client_mode"], found["why"], found["answers"], found["situation"], why_not, is_host),
    )


def situation() -> str:
    """The kind of line or machine, in words; "" without a network."""
    from volunteer_kit.addressing import LISTEN
    from volunteer_kit.swarm.net.reachability import look_at_machine

    machine = look_at_machine(LISTEN)
    return machine.in_words if machine.has else ""


def authority(config: RunConfig, line: Line | None = None) -> tuple[Finding, str | None]:
    """:param line: told whether it answers
    :returns: and the version of the host's kit; "" where it tells none, None where it does not answer"""
    from volunteer_kit.auth.access_token import Trust

    assert config.authority is not None
    url = config.authority.url.rstrip("/")
    try:
        Trust.of(config.run_id, config.authority.public_key)
    except ValueError as error:
        return Finding("authority", "problem", f"public_key: {error}", "Ask the host for its run file."), None
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        text = f"{url} is not https, and logins would pass in clear text"
        return Finding("authority", "problem", text, "Ask the host for its address with https."), None
    reply = ask(f"{url}/v1/run", body=True)
    _note(line, url, "the authority", reply)
    days = None
    if reply.error is None and parts.scheme == "https":
        days = (_certificate_end(parts.hostname or "", parts.port or 443) - time.time()) / 86_400
    kit = _kit_in(reply.body) if reply.error is None else None
    return verdicts.authority(url, reply.error, days, reply.status), kit


def _kit_in(said: bytes) -> str:
    """The version that an authority tells; "" where it tells none."""
    from volunteer_kit.swarm.records.kits import VERSION

    try:
        kit = json.loads(said)["kit"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return kit if isinstance(kit, str) and re.match(VERSION, kit) else ""


def _certificate_end(host: str, port: int) -> float:
    """s since 1970. Raises OSError."""
    context = ssl.create_default_context()
    bundle = os.environ.get("REQUESTS_CA_BUNDLE")
    if bundle:
        context.load_verify_locations(bundle)
    with socket.create_connection((host, port), timeout=ANSWER_WITHIN) as plain:
        with context.wrap_socket(plain, server_hostname=host) as line:
            return ssl.cert_time_to_seconds(line.getpeercert()["notAfter"])


def probe(words: Sequence[str], within: float) -> dict:
    """probe.py's line; it and all that it started are ended after `within` s. Raises TimeoutExpired, OSError."""
    process = subprocess.Popen(
        [sys.executable, "-m", "volunteer_kit.doctor.probe", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**with_kit_path(os.environ), "HIVEMIND_LOGLEVEL": "CRITICAL"}, start_new_session=True,
    )  # fmt: skip
    note_leader(process.pid)
    try:
        out, error = process.communicate(timeout=within)
    finally:
        kill_all(process.pid)
        process.wait()
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        lines = error.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise OSError(lines[-1][:160]) from None
