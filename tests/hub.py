"""A stand-in for the Hugging Face Hub that the real `huggingface_hub` and `datasets` clients talk to.

    with Hub() as hub:
        hub.add("datasets", "org/name", {"data/train.parquet": data}, gated=True)
        hub.fail("/resolve/", times=2, status=429, retry_after=1)
        with hub.client(tmp_path) as ask:  # a process of its own: the clients read HF_ENDPOINT when imported
            ask(function, argument)

As on the Hub, tables and weights are not sent by the Hub itself: it redirects to another host ("localhost" here), and
that one refuses whoever brings it a token.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.hub_files import Files
from tests.hub_logins import Logins
from tests.hub_parts import App, Asked, Device, Fault, Refused, Repo
from tests.hub_uploads import Uploads


class Hub(ThreadingHTTPServer):
    """A context manager; `asked` has every request, `tokens` who they belong to and who may see what is gated."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("", 0), _Handler)
        self.asked: list[Asked] = []
        self.tokens: dict[str, str] = {}
        self.rights: dict[str, dict[str, Any]] = {}  # of a token: `auth.accessToken` as whoami-v2 gives it
        self.orgs: dict[str, list[str]] = {}  # of a person
        self.expired: set[str] = set()
        self.device = Device()
        self.ids: dict[str, str] = {}  # of a person, if it is not made of the name
        self.app: App | None = None
        self.hides_orgs = False  # from whoami-v2 of an OAuth login
        self.writers: set[str] = set()  # tokens that may make and change repositories
        self.lfs: dict[str, bytes] = {}  # large files that were brought, by SHA-256
        self.commits: list[tuple[str, str, dict[str, Any]]] = []  # (repository, message, its files after it)
        self.admitted: set[str] = set()  # tokens that gated and private repositories are open to
        self.faults: list[Fault] = []
        self._repos: dict[tuple[str, str], Repo] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Hub:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that hang up are part of the play

    def add(
        self,
        kind: str,
        name: str,
        files: Mapping[str, bytes | Path] | Path,
        *,
        revisions: tuple[str, ...] = ("main",),
        gated: bool = False,
        private: bool = False,
    ) -> str:
        """A repository of `kind` "models" or "datasets" from names and contents or a folder; gives its commit."""
        if isinstance(files, Path):
            files = {str(path.relative_to(files)): path for path in sorted(files.rglob("*")) if path.is_file()}
        contents = [path.read_bytes() if isinstance(path, Path) else path for path in files.values()]
        commit = hashlib.sha1(repr([kind, name, *files]).encode() + b"".join(contents)).hexdigest()
        self._repos[kind, name] = Repo(dict(files), commit, revisions, gated, private)
        return commit

    def fail(
        self,
        part: str,
        *,
        times: int,
        status: int | None = None,
        retry_after: int | None = None,
        cut_after: int | None = None,
    ) -> None:
        """The next `times` requests whose path has `part` fail: by status, or cut in the middle of their body."""
        self.faults.append(Fault(part, times, status, retry_after, cut_after))

    def oauth_token(self, name: str, client_id: str, scope: str = "openid profile") -> str:
        """As the Hub's: "hf_oauth_" and a signed JSON Web Token, which it knows from now on."""
        claims = {"scope": scope.split(), "aud": "https://huggingface.co", "client_id": client_id, "sub": name}
        parts = [json.dumps(part).encode() for part in ({"alg": "EdDSA"}, {**claims, "jti": len(self.tokens)})]
        key = Ed25519PrivateKey.from_private_bytes(bytes(32))
        signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
        token = f"hf_oauth_{signed.decode()}.{base64.urlsafe_b64encode(key.sign(signed)).decode().rstrip('=')}"
        self.tokens[token] = name
        return token

    def forget(self) -> None:
        """Of requests and faults."""
        self.asked.clear()
        self.faults.clear()

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """For a process whose Hub this is."""
        left_out = re.compile(r"HF_.*|HUGGING.*|.*_PROXY", re.IGNORECASE)
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
        ours |= {"HF_TOKEN": token} if token else {}
        return {key: value for key, value in os.environ.items() if not left_out.fullmatch(key)} | ours

    @contextlib.contextmanager
    def client(self, home: Path) -> Iterator[Callable[..., Any]]:
        """A process whose Hub this is; calls module-level functions, gives their result or raises what they raise."""
        context = multiprocessing.get_context("spawn")
        with mock.patch.dict(os.environ, self.environment(home), clear=True):
            pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
            pool.submit(os.getpid).result()
        with pool:
            yield lambda function, *args, **named: pool.submit(function, *args, **named).result()

    def note(self, asked: Asked) -> Fault | None:
        with self._lock:
            self.asked.append(asked)
            fault = next((f for f in self.faults if f.times > 0 and f.part in asked.path), None)
            if fault is not None:
                fault.times -= 1
            return fault

    def find(self, kind: str, name: str, revision: str | None, token: str | None) -> Repo:
        """Raises Refused as the Hub does."""
        repo = self._repos.get((kind, name))
        if repo is None or (repo.private and token not in self.admitted):
            raise Refused(404 if token in self.tokens else 401, "RepoNotFound")
        if revision is not None and revision not in (*repo.revisions, repo.commit):
            raise Refused(404, "RevisionNotFound")
        return repo

    def admit(self, repo: Repo, token: str | None) -> None:
        if repo.gated and token not in self.admitted:
            raise Refused(403 if token in self.tokens else 401, "GatedRepo")


class _Handler(Uploads, Logins, Files, BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    wbufsize = 2**16
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        body = self._read_body()
        self._fault = self.server.note(Asked(self.command, self.path, self.headers.get("Range"), token))
        if self._fault and self._fault.status:
            wait = self._fault.retry_after
            return self._say({"error": "no"}, self._fault.status, {"Retry-After": str(wait)} if wait else {})
        try:
            path = unquote(urlsplit(self.path).path)
            if not self._take_upload(path, token, body) and not self._take_login(path, token, body):
                self._show(path, token, body)
        except Refused as why:
            status, code = why.args
            self._say({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _say(self, answer: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(json.dumps(answer).encode(), {"Content-Type": "application/json", **(headers or {})}, status)

    def _send(self, content: bytes | Path, headers: Mapping[str, str], status: int = 200) -> None:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        start, stop = 0, size
        if status == 200 and (match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")):
            start = int(match[1]) if match[1] else max(0, stop - int(match[2]))
            stop = min(stop, int(match[2]) + 1) if match[1] and match[2] else stop
            status, headers = 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        if start > stop:
            return self._say({}, 416, {"Content-Range": f"bytes */{size}"})
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(stop - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        is_cut = self._fault is not None and self._fault.cut_after is not None
        self._write(content, start, min(stop, start + self._fault.cut_after) if is_cut else stop)
        if is_cut:
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    def _write(self, content: bytes | Path, start: int, stop: int) -> None:
        if isinstance(content, bytes):
            self.wfile.write(memoryview(content)[start:stop])
            return
        with open(content, "rb") as file:
            file.seek(start)
            while start < stop and (data := file.read(min(stop - start, 2**20))):
                self.wfile.write(data)
                start += len(data)
