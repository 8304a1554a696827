"""A BoundedServer in a thread, and clients that misbehave, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from tests.local_authority import RUN, key
from volunteer_kit.auth.access_token import KeyFolder
from volunteer_kit.bounded_http import BoundedServer, HttpLimits
from volunteer_kit.run_reader import RUN_FILES

BIG = b"0123456789abcdef" * 2**20  # 16 MB, more than the kernel's buffers hold
HALF = b"GET / HTTP/1.1\r\nHost: a\r\nX-Half: "


class App:
    """/ answers at once, /body when the body is there, /wait when it may, /big with BIG, /parts with BIG in parts,
    /events until it may. `ended`: released by each call that ends."""

    def __init__(self) -> None:
        self.may, self.waiting, self.ended = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
        self.events = 0
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = scope["headers"]
        body = b"hello"
        try:
            if scope["path"] == "/body":
                while (message := await receive())["type"] == "http.request" and message["more_body"]:
                    pass
            elif scope["path"] == "/big":
                body = BIG
            elif scope["path"] == "/wait":
                self.waiting.release()
                while not self.may.is_set():
                    await asyncio.sleep(0.01)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while scope["path"] == "/events":
                self.events += 1
                await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
                await asyncio.sleep(0.05)
                if self.may.is_set():
                    break
            if scope["path"] == "/parts":
                for begin in range(0, len(BIG), 2**18):
                    await send({"type": "http.response.body", "body": BIG[begin : begin + 2**18], "more_body": True})
            await send({"type": "http.response.body", "body": body})
        finally:
            self.ended.release()


@contextlib.contextmanager
def serving(app: Any, limits: HttpLimits, **options: Any) -> Iterator[int]:
    """Gives the port."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = BoundedServer(app, limits, log_level="error", timeout_graceful_shutdown=2, **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def connect(port: int, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))
    made.sendall(sent)
    return made


@contextlib.contextmanager
def half_headers(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent half a header and stay open, as far as the server lets them."""
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            with contextlib.suppress(ConnectionError):
                made.append(connect(port, HALF))
        yield made
    finally:
        for one in made:
            one.close()


def get(port: int, path: str = "/", source: str = "127.0.0.2", tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """Status and body, as an honest client from another address sees them."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=(source, 0))
    if tls is not None:
        client = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, source_address=(source, 0), context=tls)
    with contextlib.closing(client):
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, answer.read()


def is_closed(one: socket.socket, within: float = 30.0) -> bool:
    """Has the server closed it? Reads what it sent until then, and waits `within` s at most."""
    one.settimeout(within)
    deadline = time.monotonic() + within
    try:
        while time.monotonic() < deadline:
            if not one.recv(65_536):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def read_all(one: socket.socket) -> int:
    """How many bytes come until the connection is closed."""
    read = 0
    with contextlib.suppress(ConnectionError):
        while data := one.recv(2**20):
            read += len(data)
    return read


def drips(one: socket.socket, data: bytes = b"x", every: float = 0.1, within: float = 30.0) -> bool:
    """Sends `data` again and again; was the connection closed before `within` s were over?"""
    deadline = time.monotonic() + within
    one.settimeout(every)
    while time.monotonic() < deadline:
        try:
            one.sendall(data)
            if not one.recv(65_536):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def established(port: int) -> int:
    """How many connections this process's server holds."""
    process = psutil.Process()
    look = getattr(process, "net_connections", None) or process.connections  # the name before psutil 6
    connections = look("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in connections)


def authority_run(folder: Path) -> tuple[Path, Path]:
    """:returns: a run file with an authority, and its host's folder, which has the keys"""
    public_key = KeyFolder(folder / "host" / "keys").create(RUN)
    run = folder / "run.yaml"
    about = f"{{url: 'http://127.0.0.1:8400', public_key: '{public_key}', users: [anna]}}"
    run.write_text(f"{(RUN_FILES / 'demo.yaml').read_text()}\nauthority: {about}\n")
    return run, folder / "host"


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def make_certificate(folder: Path, number: int = 0, address: str = "127.0.0.1") -> tuple[Path, Path]:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, own = datetime.datetime.now(datetime.timezone.utc), x509.DNSName("localhost")
    ours = x509.IPAddress(ipaddress.ip_address(address))
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key(number).public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([own, ours]), critical=False).sign(key(number), hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key(number).private_bytes(pem, *plain))
    assert ssl.create_default_context(cafile=str(folder / "cert.pem"))
    return folder / "cert.pem", folder / "key.pem"
