"""Which addresses are connected to for a run that somebody else wrote: the check on the address itself."""

from __future__ import annotations

import http.server
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from volunteer_kit.data.addresses import AddressPolicy, AddressRefused, as_address, host_and_port, is_public
from volunteer_kit.data.http_body import HttpBody
from volunteer_kit.data.http_session import Session
from volunteer_kit.data.shards import open_shard
from volunteer_kit.data.source import Limits, ShardError

PUBLIC = AddressPolicy("public")
NEAR = "own network"


class Server(http.server.ThreadingHTTPServer):
    """Answers every path with its number; `asked` has what came: (path, Host, Authorization)."""

    def __init__(self, redirect: str | None = None) -> None:
        self.asked: list[tuple[str, str | None, str | None]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = self.headers
                self.server.asked.append((self.path, headers.get("Host"), headers.get("Authorization")))
                if redirect:
                    self.send_response(302)
                    self.send_header("Location", redirect)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(200)
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"data")

            do_CONNECT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        yield one
        one.shutdown()


def limits(policy: AddressPolicy) -> Limits:
    return Limits(timeout=60, retries=0, addresses=policy)


def read(url: str, policy: AddressPolicy) -> bytes:
    with open_shard(url, limits(policy), time.monotonic() + 120) as shard:
        return shard.read()


def refusal(url: str, policy: AddressPolicy = PUBLIC) -> str:
    with pytest.raises(ShardError) as caught:
        read(url, policy)
    assert caught.value.cause == "refused_shard"
    return str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "100.100.100.200", "192.0.0.1", "198.18.0.1", "192.0.2.1", "203.0.113.1", "224.0.0.1", "239.255.255.250",
        "240.0.0.1", "255.255.255.255",
        "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1", "2002:7f00:1::", "2002:c0a8:101::1", "2001:0:0:0:0:0:80ff:fffe",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_internet(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_addresses_of_the_internet(address):
    assert is_public(ipaddress.ip_address(address))


def test_an_address_of_this_machine_is_not_public_wherever_it_is_from(monkeypatch):
    card = psutil.net_if_addrs()
    first = next(iter(card.values()))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [first[0]._replace(address="93.184.216.34")]})
    assert not is_public(ipaddress.ip_address("93.184.216.34"))


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0x7f.1", "127.0.0.1.", "[::ffff:7f00:1]", "[::1]"]
)
def test_every_spelling_of_this_machine_is_refused_without_a_connection(host, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", None)
    assert NEAR in refusal(f"http://{host}:8000/x.tar")
    assert as_address(host.strip("[]")) is not None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://localhost:8000/x", NEAR),
        ("http://localhost.:8000/x", NEAR),
        ("http://router/x", NEAR),
        ("http://printer.local/x", NEAR),
        ("https://git.corp/x", NEAR),
        ("http://a.localhost/x", NEAR),
        ("http://user:secret@93.184.216.34/x", "holds a login"),
        ("http://user@93.184.216.34/x", "holds a login"),
        ("http://93.184.216.34:22/x", "port 22"),
        ("http://93.184.216.34:25/x", "port 25"),
        ("http://93.184.216.34:6000/x", "port 6000"),
        ("http://93.184.216.34:0/x", "port 0"),
        ("https://:443/x", "no address"),
    ],
)
def test_what_an_address_says_is_checked_before_any_look_up(url, words, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", None)
    message = refusal(url)
    assert words in message and "secret" not in message


@pytest.mark.parametrize("url", ["ftp://a.example/x", "file:///etc/passwd", "gopher://a.example", "http://[x", "x"])
def test_other_schemes_are_refused(url):
    with pytest.raises(AddressRefused):
        host_and_port(url)


def test_a_name_that_leads_here_is_refused_where_it_is_connected(server, monkeypatch):
    """Its owner says where it leads, each time it is looked up."""
    look_up = socket.getaddrinfo
    answers = iter(["93.184.216.34", "127.0.0.1", "127.0.0.1", "127.0.0.1"])
    asked = []

    def rebinding(host, *args, **kwargs):
        if host != "data.example.org" or kwargs.get("flags"):
            return look_up(host, *args, **kwargs)
        asked.append(host)
        return look_up(next(answers), *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    assert PUBLIC.resolve("data.example.org", 80) == ["93.184.216.34"], "what a check before the connection sees"
    asked.clear()
    assert "data.example.org (127.0.0.1)" in refusal(f"http://data.example.org:{server.port}/x")
    assert len(asked) == 1 and server.asked == []


def test_one_look_up_decides_and_the_name_is_what_the_server_sees(server, monkeypatch):
    look_up = socket.getaddrinfo

    def both(host, port, *args, **kwargs):
        if host != "data.example.org" or kwargs.get("flags"):
            return look_up(host, port, *args, **kwargs)
        return [*look_up("10.0.0.1", port, *args, **kwargs), *look_up("127.0.0.1", port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    policy = AddressPolicy("public", ("127.0.0.1", server.port))
    assert read(f"http://data.example.org:{server.port}/x.tar", policy) == b"data"
    assert server.asked == [("/x.tar", f"data.example.org:{server.port}", None)]


def test_the_server_of_the_link_itself_may_be_near_and_no_other_port_of_it(server):
    policy = AddressPolicy("public", ("127.0.0.1", server.port))
    assert read(f"{server.url}/x", policy) == b"data"
    with Server() as other:
        assert NEAR in refusal(f"{other.url}/x", policy)
        assert other.asked == []
        other.shutdown()


def test_every_redirect_is_checked(server):
    with Server(redirect=f"{server.url}/latest/meta-data") as first:
        policy = AddressPolicy("public", ("127.0.0.1", first.port))
        assert NEAR in refusal(f"{first.url}/x", policy)
        assert len(first.asked) == 1 and server.asked == []
        first.shutdown()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:81/x", "http://2130706433/x", "http://localhost/x", "https://router/x", "http://[::1]/x"]
)
def test_a_proxy_is_not_asked_for_what_may_not_be_read(server, monkeypatch, url):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, server.url)
    monkeypatch.setenv("no_proxy", "")
    assert NEAR in refusal(url)
    assert server.asked == []


def test_a_proxy_is_asked_for_public_servers_and_for_names_that_only_it_can_look_up(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")

    def no_dns(host, *args, **kwargs):
        if host == "data.example.org":
            raise socket.gaierror("no DNS here")
        return look_up(host, *args, **kwargs)

    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", no_dns)
    assert read("http://93.184.216.34/x", PUBLIC) == b"data"
    assert read("http://data.example.org/x", PUBLIC) == b"data"
    assert [path for path, *_ in server.asked] == ["http://93.184.216.34/x", "http://data.example.org/x"]


def test_passwords_of_netrc_are_not_sent_to_hosts_that_a_stranger_names(server, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert read(f"{server.url}/x", AddressPolicy("public", ("127.0.0.1", server.port))) == b"data"
    assert server.asked[0][2] is None


def test_addresses_that_the_user_chose_are_read_as_before(server):
    assert read(f"{server.url}/x", AddressPolicy()) == b"data"
    with HttpBody(f"{server.url}/x", Limits(), time.monotonic() + 120) as body:
        assert body.read(2) == b"da"


def test_a_session_says_where_it_was_connected(server):
    with Session() as session:
        session.deadline = time.monotonic() + 120
        assert session.get(f"http://localhost:{server.port}/x", timeout=60).content == b"data"
        assert session.connected == ("127.0.0.1", server.port)
