"""Proxies of the environment: this machine is asked directly, and a proxy that fails is named, not its victim."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import requests

from volunteer_kit import http_client
from volunteer_kit.auth.authority_client import AuthorityClient, AuthorityRefused
from volunteer_kit.auth.identity import LoginError, check
from volunteer_kit.data.http_session import Session
from volunteer_kit.doctor import looks
from volunteer_kit.doctor.proxies import proxies, verdict
from volunteer_kit.host.install_cell import download
from volunteer_kit.host.line import proxy_troubles
from volunteer_kit.http_client import Proxy, ProxyTrouble, http_session, proxy_for
from volunteer_kit.run_link import LinkError, fetch_run_file

SECRET = "pass:w@rd"
AWAY = "https://hub.example"


class Recorder(http.server.BaseHTTPRequestHandler):
    """A server or a proxy that notes what it is asked; a proxy refuses tunnels with 502, as one without a line does."""

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.server.seen.append((self.command, self.path, dict(self.headers), self.rfile.read(length).decode()))
        self.send_response(self.server.status, self.server.status == 502 and "No line" or None)
        self.send_header("Content-Length", "2")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"{}")

    do_POST = do_CONNECT = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def recorder(status: int) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    server.seen, server.status = [], status
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture
def net(monkeypatch) -> Iterator[SimpleNamespace]:
    """A server on this machine, a proxy that works but has no line, and the address of one that is dead."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    server, proxy = recorder(200), recorder(502)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{probe.getsockname()[1]}"  # it does not listen; while it is there nobody else does
        yield SimpleNamespace(
            server=server, url=f"http://127.0.0.1:{server.server_port}", proxy=proxy,
            alive=f"http://127.0.0.1:{proxy.server_port}", dead=dead, with_login=f"http://me:{SECRET}@{dead}",
        )  # fmt: skip
    for each in (server, proxy):
        each.shutdown()
        each.server_close()


def test_a_login_for_this_machine_never_passes_a_proxy(net, monkeypatch):
    monkeypatch.setenv("http_proxy", net.alive)
    AuthorityClient(net.url).post("/v1/join", {"hf_token": "hf_secret"})
    assert net.proxy.seen == [] and "hf_secret" in net.server.seen[0][3]
    for host in ("127.0.0.1", "localhost", "127.8.8.8", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"):
        assert proxy_for(f"http://{host}:1/x") is None, host
    assert proxy_for("http://nas.lan/x") == Proxy("http_proxy", net.alive)


@pytest.mark.parametrize("make", [http_session, Session], ids=["the kit's", "the data's"])
def test_each_session_asks_this_machine_directly_and_names_a_dead_proxy(net, monkeypatch, make, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", net.with_login)
    monkeypatch.setenv("ALL_PROXY", net.with_login)
    with make() as session:
        session.deadline = float("inf")
        assert session.get(net.url, timeout=60).status_code == 200
        for url, variable in (("http://far.example/", "HTTP_PROXY"), ("https://far.example/", "ALL_PROXY")):
            with pytest.raises(ProxyTrouble) as caught:
                session.get(url, timeout=60)
            text = str(caught.value) + caught.value.in_a_line
            assert variable in text and "far.example" in text and f"unset {variable}" in text
            assert "me:***@" in text and SECRET not in text and "w@rd" not in text
    if make is http_session:
        assert "Authorization" not in net.server.seen[0][2], "~/.netrc is not read"


def test_certificates_of_the_environment_hold(net, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere/ca.pem")
    with pytest.raises(OSError, match="CA certificate bundle.*/nowhere"):
        http_session().get("https://127.0.0.1:9/", timeout=60)


@pytest.mark.parametrize(
    ("value", "url", "reason"),
    [
        ("{dead}", "http://far.example/", "does not answer (Connection refused)"),
        ("http://{dead}", "https://far.example/", "does not answer (Connection refused)"),
        ("http://no-such-host.invalid:3128", "https://far.example/", "its name cannot be resolved"),
        ("{alive}", "https://far.example/", "passes nothing on (Tunnel connection failed: 502 No line)"),
        ("nonsense://u:{secret}/{secret}@h", "https://far.example/", "is no address of a proxy"),
    ],
)
def test_what_is_wrong_with_a_proxy(net, monkeypatch, value, url, reason):
    value = value.format(dead=net.dead, alive=net.alive, secret=SECRET)
    monkeypatch.setenv("all_proxy", value)
    with pytest.raises(ProxyTrouble) as caught:
        http_session().get(url, timeout=60)
    assert reason in str(caught.value) and SECRET not in str(caught.value)


def test_a_proxy_that_asks_for_a_login_is_named_and_no_servers_answer_is_changed(net, monkeypatch):
    net.proxy.status = 407
    monkeypatch.setenv("http_proxy", net.alive)
    with pytest.raises(ProxyTrouble, match="asks for a login"):
        http_session().get("http://far.example/", timeout=60)
    net.proxy.status = 404
    assert http_session().get("http://far.example/", timeout=60).status_code == 404
    monkeypatch.delenv("http_proxy")
    with pytest.raises(requests.ConnectionError) as caught:
        http_session().get(f"http://{net.dead}/", timeout=60)
    assert not isinstance(caught.value, ProxyTrouble)


def test_an_authority_a_link_and_the_hub_blame_the_proxy(net, monkeypatch, tmp_path):
    monkeypatch.setenv("https_proxy", net.with_login)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", AWAY)
    named = f"the proxy http://me:***@{net.dead} that https_proxy names does not answer"
    with pytest.raises(AuthorityRefused, match="https_proxy") as refused:
        AuthorityClient("https://authority.example").get("/v1/run")
    assert named in str(refused.value).replace("The", "the", 1) and refused.value.kind == "away"
    with pytest.raises(LinkError) as link:
        fetch_run_file("https://run.example/run.yaml", tmp_path)
    assert named in str(link.value)
    trouble = http_client.blamed_on_proxy(AWAY, ConnectionError())
    assert trouble is not None and named in trouble.in_a_line
    (told,) = proxy_troubles("https://host.example", "https://host.example/dashboard/")
    assert named in told.replace("The", "the", 1) and "it lets nobody in" in told
    assert http_client.blamed_on_proxy(net.url) is None


def test_the_hubs_own_client_asks_this_machine_directly_and_its_login_error_names_a_dead_proxy(net):
    """In a process of its own: the Hub's client keeps the environment that it saw first."""
    code = (
        "from volunteer_kit.auth import identity\nidentity.PAUSES = ()\n"
        "try: identity.check('hf_secret')\nexcept OSError as error: print(error.kind, error)"
    )

    def told(**environment: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
        return run.stdout

    told(HF_ENDPOINT=net.url, http_proxy=net.alive, https_proxy=net.alive)
    assert net.proxy.seen == [] and any("hf_secret" in str(asked) for asked in net.server.seen)
    words = told(HF_ENDPOINT=AWAY, https_proxy=net.with_login)
    assert words.startswith("network The proxy http://me:***@") and "https_proxy" in words and SECRET not in words


def test_the_install_cell_asks_this_machine_directly_and_names_the_proxy(net, monkeypatch):
    monkeypatch.setenv("http_proxy", net.with_login)
    for url, words in ((net.url, "not a wheel"), ("http://far.example/kit", f"through the proxy {net.dead} of http_p")):
        with pytest.raises(Exception, match=words) as caught:
            download([url], "0" * 64)
        assert SECRET not in str(caught.value)


def test_the_doctor_looks_at_the_proxies(net, monkeypatch):
    assert proxies([AWAY]).level == "ok"
    monkeypatch.setenv("https_proxy", net.with_login)
    monkeypatch.setenv("http_proxy", net.alive)
    found = proxies([AWAY, net.url])
    assert found.level == "problem" and f"https_proxy=http://me:***@{net.dead} does not answer" in found.text
    assert "hub.example through https_proxy" in found.text and "127.0.0.1 directly" in found.text
    assert f"http_proxy={net.alive} answers" in found.text and "unset https_proxy" in found.way_out
    assert "https_proxy" in looks.hub(AWAY, True).text
    monkeypatch.setenv("no_proxy", "hub.example")
    assert proxies([AWAY]).level == "warning", "nothing goes through it"
    assert verdict({}, {AWAY: None}).level == "ok"


@pytest.mark.parametrize(("text", "seconds"), [("120", 120), ("999999999999", 3600), ("", None), ("soon", None),
                                               ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("-5", None)])  # fmt: skip
def test_retry_after(text, seconds):
    assert http_client.retry_after(text) == seconds


def test_the_line_is_blamed_where_no_proxy_is(net, monkeypatch):
    monkeypatch.setattr("volunteer_kit.auth.identity.PAUSES", ())
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://{net.dead}")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://{net.dead}")
    with pytest.raises(LoginError) as caught:
        check("hf_abc")
    assert "proxy" not in str(caught.value).splitlines()[0]
