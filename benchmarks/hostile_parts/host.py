"""`volunteer-kit host` in a process of its own, with all that it starts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from benchmarks.hostile_parts.ports import lasting_port
from benchmarks.hostile_parts.processes import HonestPeer, limit_files
from volunteer_kit.process_group import kill_all

UP = 180.0  # s
LEASH = "volunteer_kit.host.child"  # it ends when this process does, however that ends


class Host:
    """
    :param with_authority: False: it is the first peer and nothing else
    """

    def __init__(self, folder: Path, run_file: Path, environment: dict[str, str], with_authority: bool):
        self.folder, self.with_authority = folder / "host", with_authority
        self.port, self.board = lasting_port(), lasting_port()
        self.said: list[str] = []
        self._mark = f"VOLUNTEER_KIT_HOSTILE={folder.name}-{os.getpid()}"
        name, _, value = self._mark.partition("=")
        self.identity = self.folder / "identity.key"
        command = [sys.executable, "-u", "-m", LEASH, "volunteer_kit.cli", "host", str(run_file)]
        command += ["--host-maddrs", f"/ip4/127.0.0.1/tcp/{lasting_port()}"]
        if with_authority:
            command += ["--folder", str(self.folder), "--port", str(self.port), "--dashboard-port", str(self.board)]
        else:
            self.folder.mkdir(exist_ok=True)
            command += ["--no-authority", "--identity-path", str(self.identity)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**environment, name: value}, start_new_session=True,
        )  # fmt: skip
        limit_files(self.process.pid)

    def wait_until_up(self) -> None:
        alarm = threading.Timer(UP, self.process.kill)
        alarm.start()
        for line in self.process.stdout:
            self.said.append(line)
            if "Ctrl-C stops it" in line:
                break
        alarm.cancel()
        if not self.said or "Ctrl-C stops it" not in self.said[-1]:
            raise RuntimeError("The host did not start:\n" + "".join(self.said)[-3000:])
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.said.append(line)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.board}"

    @property
    def run_file(self) -> Path:
        return self.folder / "run.yaml"

    def address(self) -> str:
        """The first peer's address in an open run."""
        return re.search(r"--initial-peers (\S+)", "".join(self.said))[1]

    def part(self, word: str) -> int | None:
        """The pid of the process whose command line has this word."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if word in child.cmdline():
                        return child.pid
        return None

    def honest(self) -> list[HonestPeer]:
        if not self.with_authority:
            return [HonestPeer("first peer", lambda: self.process.pid, self.identity)]
        monitor = self.folder / "monitor" / "identity.key"
        return [
            HonestPeer("first peer", lambda: self.part("volunteer_kit.host_peer"), self.identity),
            HonestPeer("monitor", lambda: self.part("monitor"), monitor, has_node=True),
        ]

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        kill_all(self.process.pid, self._mark)
        self.process.wait()
