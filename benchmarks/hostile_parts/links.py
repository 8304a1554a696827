"""Runs the kit's command line on a run file by link, and sees what it does to the volunteer's machine."""

from __future__ import annotations

import ctypes
import ctypes.util
import http.server
import io
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.hostile_parts.attack import Attack, Case, Outcome
from benchmarks.hostile_parts.link_attacks import Scene, Trap
from volunteer_kit.process_group import kill_all
from volunteer_kit.run_reader import find_run_file

IN_OPEN, IN_ACCESS, IN_ISDIR = 0x20, 0x1, 0x40000000
EVENT = struct.Struct("iIII")
PICTURES = 40


class Watched:
    """Files of a folder that anybody opens, by the kernel's own word (inotify)."""

    def __init__(self, folder: Path):
        libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
        self._file = libc.inotify_init1(os.O_NONBLOCK)
        if self._file < 0 or libc.inotify_add_watch(self._file, os.fsencode(folder), IN_OPEN | IN_ACCESS) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def opened(self) -> list[str]:
        """Names since the last time; folders that were listed are not among them."""
        found: dict[str, None] = {}
        with suppress(BlockingIOError):
            while data := os.read(self._file, 2**16):
                start = 0
                while start < len(data):
                    _, mask, _, size = EVENT.unpack_from(data, start)
                    name = data[start + EVENT.size : start + EVENT.size + size].rstrip(b"\0").decode()
                    if name and not mask & IN_ISDIR:
                        found[name] = None
                    start += EVENT.size + size
        return list(found)

    def close(self) -> None:
        os.close(self._file)


class Server:
    """Over HTTP on loopback; `asked` has the paths."""

    def __init__(self, body: bytes = b""):
        self.asked: list[str] = []
        self.body = body
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                self.send_response(200 if outer.body else 404)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def private_pictures(folder: Path) -> None:
    """A shard of pictures that belong to nobody but the volunteer."""
    import webdataset
    from PIL import Image

    about = b'{"NSFW":"UNLIKELY","original_width":64,"original_height":64}'
    with webdataset.TarWriter(str(folder / "photos.tar"), encoder=False) as tar:
        for number in range(PICTURES):
            picture = io.BytesIO()
            Image.new("RGB", (64, 64), (number, 0, 0)).save(picture, "PNG")
            files = {"png": picture.getvalue(), "txt": b"a secret of mine %d" % number, "json": about}
            tar.write({"__key__": f"{number:03}", **files})


def try_link(attack: Attack, case: Case, folder: Path, environment: dict[str, str], stop: threading.Event) -> Outcome:
    """One attack, in a folder of its own."""
    private, written = folder / "private", folder / "written"
    for path in (folder, private, folder / "room"):
        path.mkdir()
    private_pictures(private)
    inner, run = Server(), Server()
    scene = Scene(private, inner.url, written, folder / "mark", folder / "room")
    trap: Trap = attack.perform(scene)
    watched = Watched(private)
    watched.opened()
    outcome = Outcome(attack, case)
    try:
        text = _run_file(trap).encode()
        run.body = text
        (folder / "run.yaml").write_bytes(text)

        def is_over() -> bool:
            return _seen(outcome, scene, watched, inner) or stop.is_set()

        _run(attack, trap, run, folder, environment, outcome, is_over)
        _seen(outcome, scene, watched, inner)
    finally:
        watched.close()
        inner.close()
        run.close()
    return outcome


def _run_file(trap: Trap) -> str:
    """The emoji run, or a fine-tune, that says what the trap wants."""
    if "model" in trap.run:
        values: dict[str, Any] = {
            "run_id": "tuned", "optimizer": {"lr": 1e-3, "warmup_epochs": 1, "total_epochs": 9}, "target_batch_size": 8,
            **trap.run,
        }  # fmt: skip
        return yaml.safe_dump(values)
    kind = trap.run["data"].get("kind", "shards")
    values = yaml.safe_load(find_run_file("demo" if kind == "scenes" else "emoji").read_text())
    values["data"] |= trap.run["data"]
    return yaml.safe_dump(values)


def _run(
    attack: Attack,
    trap: Trap,
    run: Server,
    folder: Path,
    environment: dict[str, str],
    outcome: Outcome,
    is_over: Callable[[], bool],
) -> None:
    """Until it has ended, `is_over` (it has done harm), or its time is."""
    where = f"{run.url}/run.yaml" if trap.by_link else str(folder / "run.yaml")
    join = ["-m", "volunteer_kit.cli", "join", where, "--yes", "--new-swarm", "--home", str(folder / "home")]
    join += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--max-hours", "0.01"]
    command = ["-c", trap.script, str(folder / "run.yaml")] if trap.script else join
    mark = f"VOLUNTEER_KIT_HOSTILE_LINK={folder.name}-{os.getpid()}"
    name, _, value = mark.partition("=")
    own = {name: value, "VOLUNTEER_KIT_HOME": str(folder / "kit"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-u", *command], stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, text=True,
            env={**environment, **own}, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            with suppress(OSError):
                process.stdin.write(trap.typed)
                process.stdin.close()
            deadline = time.monotonic() + attack.seconds
            while process.poll() is None and time.monotonic() < deadline and not is_over():
                time.sleep(0.2)
            code = process.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            kill_all(process.pid, mark)
            process.wait()
        said.seek(0)
        lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    how = "still at it" if code is None else f"exit code {code}"
    outcome.answer = f"{how}: {' / '.join(lines[-3:])[:300]}"


def _seen(outcome: Outcome, scene: Scene, watched: Watched, inner: Server) -> bool:
    """Has it done harm by now?"""
    outcome.files = list(dict.fromkeys([*outcome.files, *watched.opened()]))
    outcome.files += [f"{scene.inner}{path}" for path in inner.asked if f"{scene.inner}{path}" not in outcome.files]
    if scene.written.exists() and "the host's cache_dir" not in outcome.files:
        outcome.files.append("the host's cache_dir")
    if scene.mark.exists() and not outcome.code:
        outcome.code.append("the mark was written")
    return bool(outcome.files or outcome.code)
