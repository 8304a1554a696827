"""The real dashboard in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

from tests import nursery

ROOT = Path(__file__).parents[1]
RUN = ROOT / "volunteer_kit" / "run_files" / "demo.yaml"
PATIENCE = 120  # s; a busy machine takes long for everything


class Server:
    """`url` ends with a slash; `stop` is SIGTERM and waits."""

    def __init__(self, folder: Path, port: int = 0, run: Path = RUN):
        arguments = [str(run), str(folder), str(port)]
        self.process = nursery.start("volunteer_kit.dashboard.door", arguments, environment=dict(os.environ))
        line = self.process.stdout.readline()
        assert line, "the dashboard ended"
        self.url = json.loads(line)["ready"]["url"]

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rsplit(":", 1)[1])

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.stdout.close()

    def get(self, path: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (small letters), body; of an error, too."""
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except HTTPError as error:
            with error:
                return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()

    def text(self, path: str = "") -> str:
        status, _, body = self.get(path)
        assert status == 200, body
        return body.decode()

    def state(self) -> dict:
        return json.loads(self.text("api/state"))


@contextlib.contextmanager
def dashboard(folder: Path, port: int = 0, run: Path = RUN) -> Iterator[Server]:
    server = Server(folder, port, run)
    try:
        yield server
    finally:
        server.stop()
