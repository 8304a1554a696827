"""Shards with every fault of real crawls, and a server that has every fault of real servers."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import socketserver
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from volunteer_kit.data.hosts import HOSTS
from volunteer_kit.data.laion import LaionSource
from volunteer_kit.data.settings import Filters
from volunteer_kit.data.source import LeftOut, Limits, ShardError

SAFE = {"NSFW": "UNLIKELY", "original_width": 64, "original_height": 64}
FAST, DEFAULT = Limits(timeout=20, retries=2), Filters()
SHORT = FAST._replace(timeout=0.5)  # for servers that do not answer; a busy machine is as late


def picture(width: int = 64, height: int = 64, colour: tuple[int, ...] = (200, 30, 30), kind: str = "JPEG") -> bytes:
    data = io.BytesIO()
    Image.new("RGBA" if len(colour) == 4 else "RGB", (width, height), colour).save(data, kind)
    return data.getvalue()


def record(
    key: str, caption: str | None = "a red square", image: bytes | None = b"", **meta: object
) -> dict[str, bytes]:
    """The files of one record; image b"" stands for a good one, None for none."""
    files = {}
    if image is not None:
        files[f"{key}.jpg"] = image or picture()
    if caption is not None:
        files[f"{key}.txt"] = caption.encode()
    files[f"{key}.json"] = json.dumps({"caption": caption, "key": key, **SAFE, **meta}).encode()
    return files


def write_tar(path: Path, *records: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for files in records:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def good_shard(path: Path, count: int, first: int = 0) -> Path:
    """`count` good records; captions and brightness say which is which."""
    made = (
        record(f"{n:06d}", f"picture number {n}", picture(colour=(n % 256, 0, 0), kind="PNG"))
        for n in range(first, first + count)
    )
    return write_tar(path, *made)


class FaultyServer(ThreadingHTTPServer):
    """Serves `folder` under /ok/; other first parts of the path are faults. `asked` has (path, Range) of requests."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.asked, self.stop = folder, [], threading.Event()
        HOSTS.worked(self.url)  # one at this port, of an earlier test, may have failed

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FaultyServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        fault, _, name = self.path.lstrip("/").partition("/")
        asked = self.headers.get("Range")
        earlier = sum(path == self.path for path, _ in self.server.asked)
        self.server.asked.append((self.path, asked))
        with contextlib.suppress(ConnectionError):
            if fault == "status":
                self.send_error(int(name))
            elif fault == "busy" and earlier < 2:
                self.send_error(503)
            elif fault == "redirect":
                self.send_response(302)
                self.send_header("Location", f"file://{self.server.folder / name}")
                self.end_headers()
            elif fault == "endless":
                self._endless()
            else:
                self._send(fault, (self.server.folder / name).read_bytes(), asked)

    def _send(self, fault: str, data: bytes, asked: str | None) -> None:
        start, stop = _range(asked, len(data)) if asked and fault != "norange" else (0, len(data))
        if asked and start >= stop:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        is_part = asked and fault != "norange"
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        data = data[:stop]
        self.send_header("ETag", '"changed"' if fault == "changes" and asked else '"same"')
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if fault == "stall":
            self.wfile.write(data[start : start + 1000])
            self.server.stop.wait(20)
        elif fault == "drip":
            for at in range(start, len(data)):
                self.wfile.write(data[at : at + 1])
                if self.server.stop.wait(0.05):
                    break
        elif fault in ("breaks", "norange", "changes"):
            half = start + max(len(data) // 3, 1)
            self.wfile.write(data[start : len(data) if asked and fault == "norange" else half])
        else:
            self.wfile.write(data[start:])

    def _endless(self) -> None:
        """A tar whose one member never ends."""
        info = tarfile.TarInfo("000.jpg")
        info.size = 8 * 2**30
        self.send_response(200)
        self.end_headers()
        self.wfile.write(info.tobuf(tarfile.GNU_FORMAT))
        while not self.server.stop.is_set():
            self.wfile.write(bytes(2**20))


def _range(asked: str, size: int) -> tuple[int, int]:
    """The part that "bytes=a-b" asks for: [a, b + 1), within the file."""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    return int(first), min(int(last) + 1, size) if last else size


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[FaultyServer]:
    server = FaultyServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.stop.set()
        server.shutdown()
        thread.join()
        server.server_close()


Answer = Callable[[int, str | None], Iterable[bytes]]  # how many requests came before, this one's Range -> pieces


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The address of a server that sends whatever `answer` gives, byte by byte as it is, and hangs up."""
    number, stop = itertools.count(), threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            headers = {}
            while line := self.rfile.readline().strip():
                name, _, value = line.decode("latin1").partition(": ")
                headers[name.lower()] = value
            with contextlib.suppress(OSError):
                for piece in answer(next(number), headers.get("range")):
                    self.wfile.write(piece)
                    if stop.is_set():
                        break

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/x.tar"
            HOSTS.worked(url)
            yield url
        finally:
            stop.set()
            server.shutdown()
            thread.join()


def red_level(image: np.ndarray) -> int:
    return int(image[..., 0].mean().round())


class Found(NamedTuple):
    index: int
    key: str
    caption: str
    image: np.ndarray


def open_source(
    *shards: object, filters: Filters = DEFAULT, limits: Limits = FAST, size: int = 16, **more: Any
) -> LaionSource:
    names = [str(shard) for shard in shards]
    return LaionSource(names, image_size=size, filters=filters, limits=limits, counts=Counter(), **more)


def read(*shards: object, patience: float = 60, start: int = 0, **settings: Any) -> tuple[list[Found], Counter[str]]:
    """All usable records of some shards, and what was left out."""
    source = open_source(*shards, **settings)
    found, counts = [], source.counts
    for shard in source.shards:
        try:
            for raw in source.read(shard, start, None, time.monotonic() + patience):
                try:
                    record = source.use(raw)
                    found.append(Found(raw.index, raw.key, record.caption, record.image))
                except LeftOut as why:
                    counts[str(why)] += 1
        except ShardError as error:
            counts[error.cause] += 1
    return found, counts
