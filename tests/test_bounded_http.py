"""Clients that hold what they have: half headers, slow bodies, unread answers, silent handshakes. Real sockets."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.bounded_server import (
    BIG,
    HALF,
    App,
    connect,
    drips,
    established,
    get,
    half_headers,
    is_closed,
    make_certificate,
    read_all,
    serving,
    trusting,
)
from tests.waiting import wait_until
from volunteer_kit.bounded_http import BoundedServer, HttpLimits

PATIENT = HttpLimits(
    connections=100,
    per_address=1000,
    requests_per_s=1e6,
    headers_within=300,
    body_within=300,
    keep_alive=300,
    stalled_within=300,
)
ASK = b"GET %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

# --- more connections than there is room for ---


def test_half_headers_give_way_to_a_newcomer(monkeypatch):
    with serving(App(), PATIENT) as port, half_headers(port, 300) as held:
        for _ in range(20):
            assert get(port) == (200, b"hello")
        assert is_closed(held[0]), "the one that waits longest goes first"
        assert not is_closed(held[-1], within=0.3)


def test_a_kept_alive_client_is_served_while_others_come_and_go():
    """The idlest goes: a client that asks now and then is not it."""
    with serving(App(), PATIENT) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30, source_address=("127.0.0.2", 0))
        with contextlib.closing(client), contextlib.ExitStack() as held:
            for _ in range(10):
                client.request("GET", "/")
                assert client.getresponse().read() == b"hello"
                held.enter_context(half_headers(port, 50))
                assert client.sock is not None


def test_an_address_displaces_its_own_connections_only():
    limits = replace(PATIENT, connections=1000, per_address=10)
    with serving(App(), limits) as port, contextlib.closing(connect(port, HALF, "127.0.0.2")) as other:
        with half_headers(port, 50) as held:
            assert get(port, source="127.0.0.1") == (200, b"hello"), "the same address is served too"
            assert all(is_closed(one) for one in held[:40])
            assert not is_closed(held[-1], within=0.3)
            other.sendall(b"x\r\n\r\n")
            assert other.recv(100).startswith(b"HTTP/1.1 200")


def test_an_address_whose_connections_are_all_busy_gets_no_more():
    app, limits = App(), replace(PATIENT, per_address=3)
    with serving(app, limits) as port, ThreadPoolExecutor(3) as pool:
        busy = [pool.submit(get, port, "/wait", "127.0.0.1") for _ in range(3)]
        for _ in busy:
            assert app.waiting.acquire(timeout=30)
        assert is_closed(connect(port))
        assert get(port) == (200, b"hello")
        app.may.set()
        assert [one.result() for one in busy] == [(200, b"hello")] * 3
        assert get(port, source="127.0.0.1") == (200, b"hello")


def test_behind_a_proxy_the_bound_is_on_requests_under_way_of_the_address_that_it_names():
    app, limits = App(), replace(PATIENT, per_address=3)

    def ask(path: str, who: str) -> int:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(client):
            client.request("GET", path, headers={"X-Forwarded-For": who})
            return client.getresponse().status

    with serving(app, limits, proxies=frozenset({"127.0.0.1"})) as port, ThreadPoolExecutor(6) as pool:
        busy = [pool.submit(ask, "/wait", f"2001:db8::{number}") for number in range(3)]
        for _ in busy:
            assert app.waiting.acquire(timeout=30)
        assert ask("/", "2001:db8::ffff") == 503, "of IPv6, a /64 counts as one"
        assert ask("/", "2001:db8:0:1::1") == 200 == ask("/", "192.0.2.1")
        more = [pool.submit(ask, "/wait", f"192.0.2.{number}") for number in range(3)]
        for _ in more:
            assert app.waiting.acquire(timeout=30)
        app.may.set()
        assert {one.result() for one in busy + more} == {200}
        assert ask("/", "2001:db8::ffff") == 200


def test_requests_of_one_address_wait_for_their_turn_and_those_of_others_do_not():
    with serving(App(), replace(PATIENT, requests_per_s=10)) as port, contextlib.closing(connect(port)) as one:
        began = time.monotonic()
        one.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 29 + ASK % b"/")
        assert read_all(one) and time.monotonic() - began > 0.9, "30 requests: 20 at once, and one every 0.1 s"
    with serving(App(), replace(PATIENT, requests_per_s=0.5)) as port, contextlib.ExitStack() as stack:
        for _ in range(40):  # the last one waits for 78 s, longer than a client does
            stack.enter_context(contextlib.closing(connect(port, ASK % b"/")))
        assert get(port) == (200, b"hello"), "another address waits for none of them"


def test_when_all_are_busy_a_newcomer_is_answered_and_later_served():
    app, limits = App(), replace(PATIENT, connections=8)
    with serving(app, limits) as port, ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(get, port, "/wait", "127.0.0.1") for _ in range(8)]
        for _ in busy:
            assert app.waiting.acquire(timeout=30)
        assert get(port)[0] == 503
        app.may.set()
        assert {one.result()[0] for one in busy} == {200}
        wait_until(lambda: get(port)[0] == 200)


# --- deadlines ---


@pytest.mark.parametrize("start", [b"", b"G", HALF, b"GET / HTTP/1.1\r\n\r\n" + HALF])
def test_headers_have_a_deadline_that_no_byte_begins_anew(start):
    limits = replace(PATIENT, headers_within=0.5, keep_alive=0.5)
    with serving(App(), limits) as port, contextlib.closing(connect(port, start)) as one:
        assert drips(one) if start else is_closed(one)


@pytest.mark.parametrize("path", ["/body", "/"])
@pytest.mark.parametrize("length", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_a_body_has_a_deadline_whether_it_is_read_or_not(path, length):
    app, limits = App(), replace(PATIENT, body_within=0.5, keep_alive=0.3, headers_within=0.3)
    start = f"POST {path} HTTP/1.1\r\nHost: a\r\n{length}\r\n\r\n".encode()
    with serving(app, limits) as port, contextlib.closing(connect(port, start)) as one:
        assert drips(one, b"x" if "Length" in length else b"1\r\nx\r\n")
        assert app.ended.acquire(timeout=30), "the application is told"


def test_a_slow_body_gives_way_to_a_newcomer():
    start = b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n123"
    with serving(App(), replace(PATIENT, connections=8)) as port, contextlib.ExitStack() as stack:
        held = [stack.enter_context(contextlib.closing(connect(port, start))) for _ in range(8)]
        assert get(port) == (200, b"hello")
        wait_until(lambda: any(is_closed(one, 0.05) for one in held))


@pytest.mark.parametrize("path", [b"/parts", b"/big"])
def test_an_answer_that_nobody_reads_has_a_deadline(path):
    app, limits = App(), replace(PATIENT, stalled_within=0.5, bytes_per_s=1e9)
    with serving(app, limits) as port, contextlib.closing(connect(port, ASK % path)) as one:
        assert app.ended.acquire(timeout=30), "of /parts, this is when it was closed"
        if path == b"/parts":
            assert read_all(one) < len(BIG)
        else:
            wait_until(lambda: not established(port))


def test_a_slow_reader_gets_the_time_that_its_bytes_are_worth():
    limits = replace(PATIENT, stalled_within=0.1, keep_alive=0.1, headers_within=2, bytes_per_s=2**18)
    with serving(App(), limits) as port, contextlib.closing(connect(port, ASK % b"/big")) as one:
        time.sleep(3)
        assert read_all(one) > len(BIG), "and headers"


def test_unread_answers_are_bounded_in_total():
    """Those that lie unread for longest go first, long before their deadline."""
    app, limits = App(), replace(PATIENT, unsent_bytes=40 * 2**20)
    with serving(app, limits) as port, contextlib.ExitStack() as stack:
        held = [stack.enter_context(contextlib.closing(connect(port, ASK % b"/big"))) for _ in range(10)]
        for _ in held:
            assert app.ended.acquire(timeout=30)
        assert 1 <= sum(read_all(one) > len(BIG) for one in held) <= 4
        assert get(port) == (200, b"hello")


def test_a_client_that_keeps_asking_keeps_its_connection():
    limits = HttpLimits(headers_within=4, body_within=4, keep_alive=4, stalled_within=4)
    with serving(App(), limits) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(client):
            client.connect()
            sock = client.sock
            for number in range(16):  # 8 s
                client.request("POST" if number % 2 else "GET", "/body", b"x" * (number % 2))
                assert client.getresponse().read() == b"hello"
                assert client.sock is sock
                time.sleep(0.5)


def test_a_stream_lasts_as_long_as_its_viewer_reads():
    app, limits = App(), HttpLimits(headers_within=1, body_within=1, keep_alive=1, stalled_within=1)
    with serving(app, limits) as port:
        one = connect(port, b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n")
        with contextlib.closing(one), contextlib.closing(one.makefile("rb")) as lines:
            until = time.monotonic() + 4
            while time.monotonic() < until:
                assert lines.readline()
            app.may.set()
            assert b"hello" in lines.read()


def test_a_connection_that_is_idle_after_an_answer_is_closed():
    with serving(App(), replace(PATIENT, keep_alive=0.2)) as port:
        assert is_closed(connect(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"))


# --- TLS ---


@pytest.fixture
def certificate(tmp_path) -> Any:
    cert, key = make_certificate(tmp_path)
    return {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}


def test_a_silent_handshake_has_a_deadline(certificate):
    tls = trusting(certificate["ssl_certfile"])
    with serving(App(), replace(PATIENT, headers_within=4), **certificate) as port, ThreadPoolExecutor(4) as pool:
        wrapped = tls.wrap_socket(connect(port), server_hostname="127.0.0.1")
        ends = {
            "no handshake": pool.submit(is_closed, connect(port)),
            "half a handshake": pool.submit(drips, connect(port, b"\x16\x03\x01\x02\x00")),
            "no TLS": pool.submit(is_closed, connect(port, b"GET / HTTP/1.1\r\n\r\n")),
            "TLS, and then no headers": pool.submit(drips, wrapped),
        }
        assert {what: end.result() for what, end in ends.items()} == dict.fromkeys(ends, True)
        assert get(port, tls=tls) == (200, b"hello")


def test_silent_handshakes_give_way_to_a_newcomer(certificate):
    tls = trusting(certificate["ssl_certfile"])
    with serving(App(), replace(PATIENT, connections=20), **certificate) as port, contextlib.ExitStack() as stack:
        held = [stack.enter_context(contextlib.closing(connect(port))) for _ in range(60)]
        assert get(port, tls=tls) == (200, b"hello")
        assert is_closed(held[0]) and not is_closed(held[-1], within=0.3)


# --- nonsense ---


@pytest.mark.parametrize(
    "sent, status",
    [
        (b"\x00\xff" * 1000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 10_000, b"400"),
        (b"GET /" + b"x" * 40_000, b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"nonsense \r\n\r\n" * 5000, b"200"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", b"200"),
        (b"POST /body HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40_000, b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"200"),
    ],
)
def test_nonsense_ends_its_own_connection_only(sent, status):
    limits = replace(PATIENT, keep_alive=0.3, headers_within=5, body_within=0.5)
    with serving(App(), limits) as port:
        with contextlib.closing(connect(port)) as one, contextlib.suppress(ConnectionError):
            one.sendall(sent)
            assert one.recv(12) in (b"HTTP/1.1 " + status, b"")
            assert is_closed(one)
        assert get(port) == (200, b"hello")


def test_headers_that_cost_more_than_their_length_do_not_reach_the_application():
    app = App()
    quoted = 'a="' + "\\\\" * 3000 + '"'
    with serving(app, PATIENT) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(client):
            ranges = "bytes=" + ",".join(f"{n}-{n}" for n in range(1000))
            client.request("GET", "/", headers={"Range": ranges, "Cookie": f"b=1; {quoted}; c=2", "X": '"'})
            assert client.getresponse().status == 200
        headers = dict(app.headers)
        assert b"range" not in headers and headers[b"cookie"] == b"b=1; c=2" and headers[b"x"] == b'"'


# --- files ---

WITHOUT_FILES = """
import os, resource, socket, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
from tests.bounded_server import (
    BIG,
    HALF,
    App,
    connect,
    drips,
    established,
    get,
    half_headers,
    is_closed,
    make_certificate,
    read_all,
    serving,
    trusting,
)
from volunteer_kit.bounded_http import BoundedServer, HttpLimits
listening = socket.create_server(("127.0.0.1", 0))
server = BoundedServer(App(), HttpLimits(), log_level="error")
threading.Thread(target=server.run, kwargs={"sockets": [listening]}).start()
while not server.started:
    time.sleep(0.01)
taken = []
while True:
    try:
        taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
print(listening.getsockname()[1], flush=True)
before = time.process_time()
os.read(0, 1)
print(time.process_time() - before, flush=True)
for one in taken:
    os.close(one)
os.read(0, 1)
server.should_exit = True
"""


def test_without_a_free_file_it_waits_and_goes_on():
    how: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WITHOUT_FILES], **how) as process:
        try:
            port = int(process.stdout.readline())
            with contextlib.closing(connect(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")) as one:
                one.settimeout(2)
                with pytest.raises(TimeoutError):
                    one.recv(1)
                process.stdin.write("x")
                process.stdin.flush()
                assert float(process.stdout.readline()) < 1, "s of the processor in 2 s: it does not spin"
                one.settimeout(30)
                assert one.recv(12) == b"HTTP/1.1 200"
            assert get(port) == (200, b"hello")
            process.stdin.write("x")
            process.stdin.close()
            errors = process.stderr.read()
            assert errors.count("can be accepted") <= 1 and "Traceback" not in errors, errors
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_it_takes_as_many_connections_as_it_may_have_files():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000))\n"
        "from volunteer_kit.bounded_http import Gate, HttpLimits\n"
        "print(Gate(None, HttpLimits()).connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    most, files = map(int, done.stdout.split())
    assert files == 1000 and 500 < most < 1000


def test_it_ends_in_time_while_clients_hold_on(certificate):
    app = App()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = BoundedServer(app, PATIENT, log_level="critical", timeout_graceful_shutdown=1, **certificate)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    tls = trusting(certificate["ssl_certfile"])
    with contextlib.ExitStack() as stack:
        for sent in (None, b"", HALF, ASK % b"/wait", ASK % b"/big"):
            one = stack.enter_context(contextlib.closing(connect(port)))
            if sent is not None:
                wrapped = stack.enter_context(contextlib.closing(tls.wrap_socket(one, server_hostname="127.0.0.1")))
                wrapped.sendall(sent)
        assert app.waiting.acquire(timeout=30)
        server.should_exit = True
        thread.join(120)
        app.may.set()
        assert not thread.is_alive()
