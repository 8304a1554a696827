"""A run file behind a link: a stranger's server gives it, or anything else."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from volunteer_kit.run_link import MAX_RUN_FILE, LinkError, fetch_run_file
from volunteer_kit.run_reader import RUN_FILES, RunError
from volunteer_kit.runs import load_run

DEMO = (RUN_FILES / "demo.yaml").read_bytes()
PAGES: dict[str, tuple[int, bytes]] = {
    "/run.yaml": (200, DEMO),
    "/page": (200, b"<!doctype html><html></html>"),
    "/large": (200, b"#" * (MAX_RUN_FILE + 1)),
    "/elsewhere": (302, b""),
    "/binary": (200, b"\xff\xfe\x00"),
}


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = PAGES.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Location", "/run.yaml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

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
    monkeypatch.setattr("volunteer_kit.run_link._get", lambda url: (_ for _ in ()).throw(ConnectionError()))
    assert load_run(f"{server}/run.yaml") == load_run("demo") and kept.read_bytes() == DEMO


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/gone", "HTTP 404"),
        ("/elsewhere", "HTTP 302"),
        ("/page", "a web page"),
        ("/large", "no run file"),
        ("/binary", "UTF-8"),
    ],
)
def test_anything_else_is_told(server, tmp_path, monkeypatch, path, words):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    with pytest.raises(RunError, match=words):
        load_run(server + path)
