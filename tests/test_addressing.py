"""Servers listen by IPv4 and IPv6, and links to them have brackets where they need some."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import ssl
import threading
import urllib.request

import pytest

from tests.bounded_server import make_certificate
from tests.local_authority import make_authority
from volunteer_kit.addressing import EVERYWHERE, LOCALHOST, listen, loopback, shown
from volunteer_kit.auth.authority.server import serve
from volunteer_kit.host import HostSettings
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.parts import AUTHORITY, other_parts

LOOPBACKS = ("127.0.0.1", "::1")


def has(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


needs_both = pytest.mark.skipif(not all(map(has, LOOPBACKS)), reason="this machine lacks IPv4 or IPv6")


def free_port() -> int:
    """Free in both families, and the system gives it to no other program meanwhile: its own begin at 32768."""
    while True:
        port, six = random.randrange(20_000, 30_000), socket.AF_INET6
        with contextlib.suppress(OSError):
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("::1", port), family=six):
                return port


def close(listening: list[socket.socket]) -> None:
    for one in listening:
        one.close()


@needs_both
@pytest.mark.parametrize("host", [EVERYWHERE, "", LOCALHOST])
def test_a_server_is_called_by_either_family_at_one_port(host):
    listening = listen(host, 0)
    try:
        assert len({one.getsockname()[1] for one in listening}) == 1
        for address, one in zip(LOOPBACKS, listening, strict=True):
            with socket.create_connection((address, one.getsockname()[1]), timeout=60):
                accepted, caller = one.accept()
                accepted.close()
                assert caller[0] == address, "who calls by IPv4 is known by that address, and not by ::ffff:127.0.0.1"
    finally:
        close(listening)


@needs_both
@pytest.mark.parametrize(
    ("host", "callable_at"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("0.0.0.0", "127.0.0.1")]
)
def test_one_address_is_of_one_family(host, callable_at):
    port = free_port()
    listening = listen(host, port)
    try:
        called = []
        for address in LOOPBACKS:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as call:
                called += [address] if call.connect_ex((address, port)) == 0 else []
        assert called == [callable_at]
    finally:
        close(listening)


@needs_both
@pytest.mark.parametrize("host", [EVERYWHERE, LOCALHOST])
def test_a_port_that_another_program_has_in_one_family_is_taken(host):
    port = free_port()
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        with pytest.raises(OSError) as told:
            listen(host, port)
        assert told.value.errno == errno.EADDRINUSE
        with socket.create_server(("127.0.0.1", port)):  # nothing of it stays
            pass


def test_what_is_no_address_of_this_machine_cannot_be_listened_at():
    with pytest.raises(OSError):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [("2001:db8::1", "[2001:db8::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1"), ("nas.lan", "nas.lan")],
)
def test_links_have_brackets_around_ipv6(host, url):
    assert shown(host) == url


@pytest.mark.parametrize("host", [EVERYWHERE, "", "0.0.0.0", LOCALHOST])
def test_all_addresses_are_shown_as_this_machines_own(host):
    assert shown(host) in ("127.0.0.1", "[::1]") and shown(host).strip("[]") == loopback()


@needs_both
def test_an_authority_with_a_certificate_answers_by_either_family(tmp_path):
    """`host` starts it so."""
    cert, private = make_certificate(tmp_path)
    settings = HostSettings(port=8443, tls_cert=str(cert), tls_key=str(private), host_maddrs=("/ip6/::/tcp/31337",))
    parts = {part.name: part.command for part in other_parts(HostFolder(tmp_path / "host"), settings, [])}
    host = parts[AUTHORITY][parts[AUTHORITY].index("--host") + 1]
    authority, ready, stop, at = make_authority(tmp_path), threading.Event(), threading.Event(), []
    how = {"host": host, "tls_cert": cert, "tls_key": private, "stop": stop}
    how["on_ready"] = lambda url: (at.append(url), ready.set())
    thread = threading.Thread(target=serve, args=(authority.app,), kwargs=how)
    thread.start()
    try:
        assert ready.wait(60)
        port, anybodys = int(at[0].rpartition(":")[2]), ssl.create_default_context()
        anybodys.check_hostname, anybodys.verify_mode = False, ssl.CERT_NONE
        for name in ("127.0.0.1", "[::1]"):
            with urllib.request.urlopen(f"https://{name}:{port}/v1/run", timeout=60, context=anybodys) as answer:
                assert answer.status == 200
    finally:
        stop.set()
        thread.join(60)
        authority.storage.close()
