"""A run file behind a link: a stranger's server gives it, or anything else."""

from __future__ import annotations

import http.server
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import urllib3

from volunteer_kit.run_link import MAX_RUN_FILE, LinkError, fetch_run_file
from volunteer_kit.run_reader import RUN_FILES, RunError
from volunteer_kit.runs import load_run

DEMO = (RUN_FILES / "demo.yaml").read_bytes()
PAGE = b"<!doctype html><html></html>"
PAGES: dict[str, tuple[int, bytes]] = {
    "/": (200, PAGE),
    "/dashboard/": (200, PAGE),
    "/elsewhere/run.yaml": (200, DEMO),
    "/alone/": (200, b"fine\n"),
    "/run.yaml": (200, DEMO),
    "/page.yaml": (200, PAGE),
    "/large.yaml": (200, b"#" * (MAX_RUN_FILE + 1)),
    "/moved.yaml": (302, b""),
    "/binary.yaml": (200, b"\xff\xfe\x00"),
    "/portal.yaml": (200, b"Welcome to the hotel.\nRoom: 12\n"),
}
FAULTS: dict[str, str] = {}  # path -> "cut", "reset", or another page's name
CUT_AT = 100  # bytes of what was announced
RESET = struct.pack("ii", 1, 0)  # SO_LINGER


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fault = FAULTS.get(self.path, "")
            status, body = PAGES.get(f"/{fault}.yaml") or PAGES.get(self.path) or (404, b"")
            self.send_response(status)
            self.send_header("Location", "/run.yaml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:CUT_AT] if fault in ("cut", "reset") else body)
            if fault == "reset":
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.connection.close()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


def test_a_link_is_a_run_and_an_earlier_copy_does_while_its_server_is_down(server, tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    assert load_run(f"{server}/run.yaml") == load_run("demo")
    (kept,) = (tmp_path / "run_files").iterdir()
    dead = "http://127.0.0.1:9/run.yaml"
    with pytest.raises(LinkError, match="does not answer"):
        fetch_run_file(dead, tmp_path / "run_files")
    monkeypatch.setattr("volunteer_kit.run_link._get", _refuses)
    assert load_run(f"{server}/run.yaml") == load_run("demo") and kept.read_bytes() == DEMO


def _refuses(*_: object) -> bytes:
    raise ConnectionError


@pytest.mark.parametrize("fault", ["cut", "reset", "portal", "page"])
def test_what_is_not_the_whole_run_does_not_take_its_place(server, tmp_path, monkeypatch, fault):
    kept = fetch_run_file(f"{server}/run.yaml", tmp_path).path
    monkeypatch.setitem(FAULTS, "/run.yaml", fault)
    assert fetch_run_file(f"{server}/run.yaml", tmp_path).path == kept
    assert kept.read_bytes() == DEMO and os.listdir(tmp_path) == [kept.name]


@pytest.mark.parametrize(
    "answers",
    [
        {"/": (502, b""), "/run.yaml": (502, b"")},  # a proxy before a dead host
        {"/": (503, PAGE), "/run.yaml": (404, b"")},
        {"/": (302, b""), "/run.yaml": (302, b"")},  # a portal
        {"/": (511, PAGE), "/run.yaml": (511, PAGE)},
        {"/": (200, PAGE), "/run.yaml": (404, b"")},
        {"/": (200, PAGE), "/run.yaml": (403, b"")},
        {"/": (200, b"It works!\n"), "/run.yaml": (404, b"")},
        {"/": (200, b"#" * (MAX_RUN_FILE + 1)), "/run.yaml": (429, b"")},
    ],
)
@pytest.mark.parametrize("link", ["", "/run.yaml"])
def test_the_earlier_copy_does_where_a_proxy_or_a_portal_answers(server, tmp_path, monkeypatch, answers, link):
    kept = fetch_run_file(server + link, tmp_path).path
    for path, answer in answers.items():
        monkeypatch.setitem(PAGES, path, answer)
    if link and answers[link][0] == 404:
        with pytest.raises(LinkError, match="HTTP 404"):
            fetch_run_file(server + link, tmp_path)
    else:
        assert fetch_run_file(server + link, tmp_path).path == kept
    assert kept.read_bytes() == DEMO and os.listdir(tmp_path) == [kept.name]


@pytest.mark.parametrize("status", [404, 410])
@pytest.mark.parametrize("link", ["", "/run.yaml"])
def test_a_run_that_was_taken_away_is_gone(server, tmp_path, monkeypatch, status, link):
    fetch_run_file(server + link, tmp_path)
    for path in ("/", "/run.yaml"):
        monkeypatch.setitem(PAGES, path, (status, b""))
    with pytest.raises(LinkError, match=f"HTTP {status}"):
        fetch_run_file(server + link, tmp_path)


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_what_breaks_off_is_told_where_there_is_no_earlier_copy(server, tmp_path, monkeypatch, fault):
    monkeypatch.setitem(FAULTS, "/run.yaml", fault)
    with pytest.raises(LinkError, match="does not answer"):
        fetch_run_file(f"{server}/run.yaml", tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_server_that_falls_silent_is_as_one_that_is_down(server, tmp_path, monkeypatch):
    kept = fetch_run_file(f"{server}/run.yaml", tmp_path).path

    def falls_silent(url: str, *_: object) -> bytes:
        raise urllib3.exceptions.ReadTimeoutError(None, url, "timed out")

    monkeypatch.setattr("volunteer_kit.run_link._get", falls_silent)
    assert fetch_run_file(f"{server}/run.yaml", tmp_path).path == kept


def test_a_newer_file_takes_the_place_of_an_older_one(server, tmp_path, monkeypatch):
    kept = fetch_run_file(f"{server}/run.yaml", tmp_path).path
    monkeypatch.setitem(PAGES, "/run.yaml", (200, DEMO + b"# newer\n"))
    assert fetch_run_file(f"{server}/run.yaml", tmp_path).path == kept and kept.read_bytes().endswith(b"# newer\n")
    monkeypatch.setitem(PAGES, "/run.yaml", (200, b"run_id: broken\n"))
    assert fetch_run_file(f"{server}/run.yaml", tmp_path, is_run=lambda path: False).path == kept
    assert kept.read_bytes().endswith(b"# newer\n")


def test_a_folder_that_cannot_be_written_is_told(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LinkError, match="cannot be kept in"):
        fetch_run_file(f"{server}/run.yaml", tmp_path / "file")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/gone.yaml", "HTTP 404"),
        ("/moved.yaml", "HTTP 302"),
        ("/page.yaml", "a web page"),
        ("/large.yaml", "no run file"),
        ("/binary.yaml", "UTF-8"),
        ("/portal.yaml", "YAML"),
    ],
)
def test_anything_else_is_told(server, tmp_path, monkeypatch, path, words):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    with pytest.raises(RunError, match=words):
        load_run(server + path)


@pytest.mark.parametrize(
    "address",
    ["", "/", "/#join", "/?from=a-friend", "/dashboard", "/dashboard/", "/dashboard/#leaderboard", "/run.yaml",
     "/run.yaml#top", "/elsewhere", "/elsewhere/", "/alone/"],
)  # fmt: skip
def test_the_address_of_each_of_a_hosts_pages_is_the_runs(server, tmp_path, address):
    found = fetch_run_file(server + address, tmp_path)
    assert found.path.read_bytes() == DEMO and found.endpoint == ("127.0.0.1", int(server.rpartition(":")[2]))


def test_a_link_that_names_a_file_is_looked_for_nowhere_else(server, tmp_path):
    with pytest.raises(LinkError, match="HTTP 404"):
        fetch_run_file(f"{server}/gone.yaml", tmp_path)


def test_what_was_tried_is_told(server, tmp_path, monkeypatch):
    monkeypatch.delitem(PAGES, "/run.yaml")
    with pytest.raises(LinkError) as told:
        fetch_run_file(f"{server}/dashboard/", tmp_path)
    for part in ("/dashboard/ (it is a web page", "/dashboard/run.yaml (its server", f"{server}/run.yaml (", "404"):
        assert part in str(told.value)


def test_a_login_page_before_all_addresses_leaves_the_earlier_copy(server, tmp_path, monkeypatch):
    kept = fetch_run_file(server, tmp_path).path
    for path in ("/", "/run.yaml"):
        monkeypatch.setitem(PAGES, path, (200, PAGE))
    assert fetch_run_file(server, tmp_path).path == kept and kept.read_bytes() == DEMO
