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
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from urllib.parse import parse_qs, quote, unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hub_uploads import Uploads

ELSEWHERE = (".parquet", ".safetensors", ".bin", ".tar")  # files that lie on the other host
REVISION = "refs/[^/]+/[^/]+|[^/]+"
PAGE = 1000  # entries of a listing


class Asked(NamedTuple):
    """A request as it came."""

    method: str
    path: str  # with the query
    range: str | None
    token: str | None


@dataclass
class Repo:
    files: dict[str, bytes | Path]
    commit: str
    revisions: tuple[str, ...]
    gated: bool
    private: bool

    def size(self, name: str) -> int:
        content = self.files[name]
        return content.stat().st_size if isinstance(content, Path) else len(content)


@dataclass
class Fault:
    part: str  # of the path
    times: int
    status: int | None
    retry_after: int | None
    cut_after: int | None  # bytes of a body, then the connection is reset


@dataclass
class App:
    """An OAuth app of a host: what its login page at the Hub gives, and to whom (RFC 6749, RFC 7636)."""

    client_id: str
    person: str = "mona"  # who is logged in at the Hub in this browser
    scope: str = "openid profile"
    codes: dict[str, dict[str, str]] = field(default_factory=dict)  # code -> what the browser brought


@dataclass
class Device:
    """The login in the browser (RFC 8628): what a person does there, and what the Hub then gives."""

    token: str = "hf_from_browser"
    scope: str | None = "openid profile"
    pending: int = 1  # polls until the person has answered
    answer: str = "granted"  # or an OAuth error: access_denied, expired_token
    interval: float = 0.05  # s; the Hub says 5
    expires_in: float = 300.0  # s
    clients: list[str] = field(default_factory=list)  # ids of the apps that asked
    polls: int = 0


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
            pool.submit(os.getpid).result(timeout=60)
        with pool:
            yield lambda function, *args, **named: pool.submit(function, *args, **named).result(timeout=120)

    def note(self, asked: Asked) -> Fault | None:
        with self._lock:
            self.asked.append(asked)
            fault = next((f for f in self.faults if f.times > 0 and f.part in asked.path), None)
            if fault is not None:
                fault.times -= 1
            return fault

    def find(self, kind: str, name: str, revision: str | None, token: str | None) -> Repo:
        """Raises _Refused as the Hub does."""
        repo = self._repos.get((kind, name))
        if repo is None or (repo.private and token not in self.admitted):
            raise _Refused(404 if token in self.tokens else 401, "RepoNotFound")
        if revision is not None and revision not in (*repo.revisions, repo.commit):
            raise _Refused(404, "RevisionNotFound")
        return repo

    def admit(self, repo: Repo, token: str | None) -> None:
        if repo.gated and token not in self.admitted:
            raise _Refused(403 if token in self.tokens else 401, "GatedRepo")


class _Refused(Exception):
    pass


class _Handler(Uploads, BaseHTTPRequestHandler):
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
            self._route(unquote(urlsplit(self.path).path), token, body)
        except _Refused as why:
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

    def _route(self, path: str, token: str | None, body: bytes) -> None:
        if self._take_upload(path, token, body):
            return
        if path == "/api/whoami-v2":
            self._whoami(token)
        elif path in ("/oauth/device", "/oauth/token"):
            form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
            is_code = form.get("grant_type") == "authorization_code"
            answer = self._device if path == "/oauth/device" else self._code_token if is_code else self._device_token
            answer(form)
        elif path == "/oauth/authorize":
            self._authorize({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})
        elif path == "/oauth/userinfo":
            self._userinfo(token)
        elif match := re.fullmatch(r"/cdn/(models|datasets)/(.+?)/-/(.+)", path):
            if token or parse_qs(urlsplit(self.path).query).get("signature") != ["yes"]:
                raise _Refused(400, "OnlyOneAuthMechanismAllowed")
            self._send(self.server._repos[match[1], match[2]].files[match[3]], {"ETag": '"other"'})
        elif match := re.fullmatch(rf"/(?:(datasets)/)?(.+?)/resolve/({REVISION})/(.+)", path):
            self._resolve(match[1] or "models", *match.groups()[1:], token)
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)/auth-check", path):
            self.server.admit(self.server.find(match[1], match[2], None, token), token)
            self._say({})
        elif match := re.fullmatch(rf"/api/(models|datasets)/(.+?)/(tree|paths-info)/({REVISION})(.*)", path):
            repo = self.server.find(match[1], match[2], match[4], token)
            self._tree(repo, match[5].strip("/")) if match[3] == "tree" else self._paths(repo, body)
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)(?:/(refs)|/revision/(.+))?", path):
            repo = self.server.find(match[1], match[2], match[4], token)
            self._say(_refs(repo) if match[3] else _about(match[2], repo))
        else:
            raise _Refused(404, "NotFound")

    def _whoami(self, token: str | None) -> None:
        hub = self.server
        if token in hub.expired:
            message = 'User Access Token "mine" is expired'
            return self._say({"error": message}, 401, {"X-Error-Message": message})
        if token not in hub.tokens:
            message = "Invalid credentials in Authorization header"
            return self._say({"error": message}, 401, {"X-Error-Message": message})
        name = hub.tokens[token]
        orgs = [{"type": "org", "name": org, "roleInOrg": "read"} for org in hub.orgs.get(name, [])]
        if hub.hides_orgs and token.startswith("hf_oauth_"):
            orgs = []
        auth = {"type": "access_token", "accessToken": hub.rights[token]} if token in hub.rights else {}
        self._say({"type": "user", "id": hub.ids.get(name, f"id-{name}"), "name": name, "orgs": orgs, "auth": auth})

    def _userinfo(self, token: str | None) -> None:
        name = self.server.tokens.get(token or "")
        if name is None or not token.startswith("hf_oauth_"):
            return self._say({"error": "no"}, 401)
        orgs = [{"sub": org, "name": org.title(), "preferred_username": org} for org in self.server.orgs.get(name, [])]
        self._say({"sub": f"id-{name}", "preferred_username": name, "orgs": orgs})

    def _authorize(self, query: dict[str, str]) -> None:
        """The person agrees at once."""
        app = self.server.app
        if app is None or query["client_id"] != app.client_id or query["code_challenge_method"] != "S256":
            return self._say({"error": "invalid_client"}, 400)
        code = f"secret-code-{len(app.codes)}"
        app.codes[code] = query
        back = f"{query['redirect_uri']}?code={code}&state={quote(query['state'])}"
        self._say({}, 302, {"Location": back})

    def _code_token(self, form: dict[str, str]) -> None:
        app = self.server.app
        begun = app.codes.pop(form["code"], None) if app else None
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if begun is None or begun["code_challenge"] != challenge or begun["redirect_uri"] != form["redirect_uri"]:
            return self._say({"error": "invalid_grant"}, 400)
        token = self.server.oauth_token(app.person, app.client_id, app.scope)
        self._say({"access_token": token, "token_type": "bearer", "expires_in": 28800, "scope": app.scope})

    def _device(self, form: dict[str, str]) -> None:
        device = self.server.device
        device.clients.append(form["client_id"])
        link = f"{self.server.url}/oauth/device/verify"
        answer = {"device_code": "secret-device-code", "user_code": "52AT-FLYZ", "verification_uri": link}
        answer["verification_uri_complete"] = f"{link}?user_code=52AT-FLYZ"
        self._say(answer | {"expires_in": device.expires_in, "interval": device.interval})

    def _device_token(self, form: dict[str, str]) -> None:
        device = self.server.device
        device.polls += 1
        if form.get("device_code") != "secret-device-code" or form.get("client_id") != device.clients[-1]:
            return self._say({"error": "invalid_grant"}, 400)
        if device.polls <= device.pending:
            return self._say({"error": "authorization_pending"}, 400)
        if device.answer != "granted":
            return self._say({"error": device.answer}, 400)
        scope = {} if device.scope is None else {"scope": device.scope}
        self._say({"access_token": device.token, "token_type": "bearer", "expires_in": 2592000, **scope})

    def _resolve(self, kind: str, name: str, revision: str, file: str, token: str | None) -> None:
        repo = self.server.find(kind, name, revision, token)
        self.server.admit(repo, token)
        headers = {"X-Repo-Commit": repo.commit}
        if file not in repo.files:
            return self._say({"error": "EntryNotFound"}, 404, {**headers, "X-Error-Code": "EntryNotFound"})
        etag = f'"{hashlib.sha1((repo.commit + file).encode()).hexdigest()}"'
        if not file.endswith(ELSEWHERE):
            return self._send(repo.files[file], {**headers, "ETag": etag})
        place = f"http://localhost:{self.server.server_address[1]}/cdn/{kind}/{name}/-/{quote(file)}?signature=yes"
        linked = {"X-Linked-Size": str(repo.size(file)), "X-Linked-Etag": etag, "Location": place}
        self._say({}, 302, {**headers, **linked})

    def _tree(self, repo: Repo, folder: str) -> None:
        query = parse_qs(urlsplit(self.path).query)
        is_deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = {}
        for name in sorted(repo.files):
            parts = name.split("/")
            for depth in range(1, len(parts) + 1):
                path = "/".join(parts[:depth])
                parent = "/".join(parts[: depth - 1])
                if parent == folder or (is_deep and (not folder or parent.startswith(folder + "/"))):
                    entries[path] = _entry(repo, path)
        if folder and not entries and folder not in repo.files:
            raise _Refused(404, "EntryNotFound")
        first = int(query.get("cursor", ["0"])[0])
        more = f"{self.server.url}{urlsplit(self.path).path}?recursive={is_deep}&cursor={first + PAGE}"
        headers = {"Link": f'<{more}>; rel="next"'} if first + PAGE < len(entries) else {}
        self._say(list(entries.values())[first : first + PAGE], headers=headers)

    def _paths(self, repo: Repo, body: bytes) -> None:
        is_json = "json" in (self.headers.get("Content-Type") or "")
        paths = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
        known = {"/".join(name.split("/")[:n]) for name in repo.files for n in range(1, name.count("/") + 2)}
        self._say([_entry(repo, path) for path in paths if path in known])

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


def _entry(repo: Repo, path: str) -> dict[str, Any]:
    oid = hashlib.sha1(path.encode()).hexdigest()
    if path not in repo.files:
        return {"type": "directory", "path": path, "oid": oid, "size": 0}
    return {"type": "file", "path": path, "oid": oid, "size": repo.size(path)}


def _refs(repo: Repo) -> dict[str, Any]:
    branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": repo.commit} for name in repo.revisions]
    return {"branches": branches, "converts": [], "tags": [], "pullRequests": []}


def _about(name: str, repo: Repo) -> dict[str, Any]:
    files = [{"rfilename": file} for file in repo.files]
    return {"_id": repo.commit[:24], "id": name, "sha": repo.commit, "private": repo.private, "siblings": files} | {
        "gated": "manual" if repo.gated else False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
    }  # fmt: skip
