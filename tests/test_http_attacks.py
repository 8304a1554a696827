"""The kit's own servers with their default limits, while one address holds all the connections that it gets."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.bounded_server import HALF, authority_run, connect, get
from tests.dashboard_server import dashboard
from tests.fake_journal import hostile_journal

SERVE = "import sys; from volunteer_kit.authority_door import serve_authority; import functools; "
SERVE += "serve_authority(sys.argv[1], folder=sys.argv[2], port=0, say=functools.partial(print, flush=True))"
MOST = 2100  # connections; the authority takes 2,000
WITHIN = 45  # s; an honest client is not refused for longer


@contextlib.contextmanager
def authority(folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    command = [sys.executable, "-c", SERVE, *map(str, authority_run(folder))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())["ready"]["port"], psutil.Process(process.pid)
        finally:
            process.kill()


@contextlib.contextmanager
def shown_dashboard(folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    with dashboard(hostile_journal(folder)) as server:
        yield server.port, psutil.Process(server.process.pid)


@pytest.fixture(scope="module", params=[(authority, b"/v1/run"), (shown_dashboard, b"/api/state")])
def server(request, tmp_path_factory) -> Iterator[tuple[int, bytes, psutil.Process]]:
    """Port, a path that anybody may ask, and the process."""
    serve, path = request.param
    with serve(tmp_path_factory.mktemp("server")) as (port, process):
        assert get(port, path.decode())[0] == 200
        yield port, path, process


@pytest.fixture
def how_many() -> Iterator[int]:
    """As many connections as this process may hold, MOST at most."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], MOST + 500), before[1]))
    yield min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(HALF, id="half headers"),
        pytest.param(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n", id="bodies that do not come"),
        pytest.param(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" * 20, id="answers that nobody reads"),
    ],
)
def test_one_address_keeps_nobody_out(server, how_many, sent):
    port, path, process = server
    before = process.memory_info().rss
    sent = sent.replace(b"%s", path)
    with contextlib.ExitStack() as held:
        for _ in range(how_many):
            with contextlib.suppress(ConnectionError):
                held.callback(connect(port, sent).close)
        for _ in range(3):
            began = time.monotonic()
            assert get(port, path.decode())[0] == 200
            assert time.monotonic() - began < WITHIN
        assert process.memory_info().rss - before < 200e6


def post(path: str, kind: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nOrigin: http://127.0.0.1:8400\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def ask(path: str, headers: str = "Host: a\r\n") -> bytes:
    return f"GET {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode("latin1")


JSON, FORM, PARTS = "application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="a"; filename="f"\r\n\r\nb\r\n'
HOSTS = ("[", "[::1", "", "x" * 9000, "a:b", "\xff")
QUOTED = "Host: a\r\nCookie: vk_moderator=" + '"' + "\\\\" * 7500 + '"\r\n'
COSTLY = {
    "deep lists": post("/v1/join", JSON, b"[" * 16_000),
    "deep lists, closed": post("/v1/join", JSON, b"[" * 8000 + b"]" * 8000),
    "deep objects": post("/v1/join", JSON, b'{"a":' * 2700),
    "a huge int": post("/v1/join", JSON, b'{"time":' + b"9" * 16_000 + b"}"),
    "a huge float": post("/v1/join", JSON, b'{"time":1e999999999}'),
    "half a character": post("/v1/join", JSON, b'{"run_id":"\\ud800","hf_token":"\\ud800"}'),
    "no text": post("/v1/join", JSON, b'{"run_id":"\xff\xfe"}'),
    "many fields": post("/moderate/sign-in", FORM, b"&".join(b"a%d=b" % number for number in range(2000))),
    "many separators": post("/moderate/sign-in", FORM, b"&" * 16_000),
    "many files": post("/moderate/sign-in", PARTS, PART * 230 + b"--x--"),
    "a file for a token": post("/moderate/sign-in", PARTS, PART.replace(b'"a"', b'"token"') + b"--x--"),
    "no parts": post("/moderate/sign-in", PARTS, b"-" * 16_000),
    "a long boundary": post("/moderate/sign-in", PARTS + "x" * 5000, b"-" * 16_000),
    "quotes": post("/moderate/sign-in", f'{FORM}; a="' + '\\"' * 5000, b"a=b"),
    "a long query": ask("/v1/bans?" + "&".join(f"a{number}" for number in range(2000))),
    "a huge number": ask("/v1/bans?known=" + "9" * 12_000),
    "many cookies": ask("/moderate", "Host: a\r\nCookie: " + "; ".join(f"a{n}=b" for n in range(1500)) + "\r\n"),
    "quoted cookies": ask("/moderate", QUOTED),
    "quoted cookies of a viewer": ask("/api/state", QUOTED),
    "ranges": ask("/moderate/style.css", "Host: a\r\nRange: bytes=" + ",".join(f"{n}-" for n in range(2000)) + "\r\n"),
    "ranges of a file": ask("/static/page.js", "Host: a\r\nRange: bytes=" + "0-," * 3000 + "\r\n"),
    "a long path": ask("/" + "x" * 12_000),
    "a long file name": ask("/static/" + "x" * 12_000),
    "slashes": ask("/" * 12_000),
    "upwards": ask("/static/" + "%2e%2e/" * 20 + "etc/passwd"),
    "a null byte": ask("/static/%00"),
    "no utf-8": ask("/static/%ff%fe%ed%a0%80"),
    "a huge picture": ask("/pictures/" + "9" * 5000 + "-1.png"),
    "tags": ask("/", "Host: a\r\nIf-None-Match: " + "x," * 6000 + "\r\n"),
    "a date": ask("/static/page.js", "Host: a\r\nIf-Modified-Since: Mon, 99 Foo 9999999999999 00:00:00 GMT\r\n"),
    **{f"host {name[:9]}": ask("/moderate", f"Host: {name}\r\n") for name in HOSTS},
}  # fmt: skip


@pytest.mark.parametrize("sent", COSTLY.values(), ids=COSTLY)
def test_no_request_breaks_a_server_or_holds_it(server, sent):
    port, path, process = server
    before = sum(process.cpu_times()[:2])
    with contextlib.closing(connect(port, sent)) as one:
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := one.recv(65_536):
                answer += data
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
    assert statuses and all(b"200" <= status < b"500" for status in statuses), answer[:200]
    assert len(answer) < 50_000, "nothing of a request is repeated"
    assert get(port, path.decode())[0] == 200
    assert sum(process.cpu_times()[:2]) - before < 5, "the server computes for seconds"
