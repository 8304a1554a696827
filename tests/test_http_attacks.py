"""The kit's own servers with their default limits, while one address holds all the connections that it gets."""

from __future__ import annotations

import contextlib
import json
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
WITHIN = 15  # s; an honest client is not refused for longer


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
