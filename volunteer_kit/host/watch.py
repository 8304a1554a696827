"""One process of a host, for as long as the host runs: started, heard, started again when it dies, ended."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.home import log_end
from volunteer_kit.host.log import BoundedLog
from volunteer_kit.packages import EXIT_CODE as LACKS_PACKAGE
from volunteer_kit.packages import folders_changed, with_kit_path
from volunteer_kit.process_group import kill_all, note_leader, wait_for_exit
from volunteer_kit.storage.socket_folders import remove_stale_folders

# environments are listed by `ps e`, and inherited
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "VOLUNTEER_KIT_DATABASE")
LINE_LIMIT = 2**20  # bytes
LOOK_FOR_PACKAGES = 2.0  # s between two looks for one that a part lacks


class Part(NamedTuple):
    """A process that a host keeps up.

    :param command: a module and its arguments
    :param ready_within: s until its line {"ready": ...}; a start on two busy cores takes half a minute
    :param needs_token: it gets the environment's HF token
    :param environment: its own, for what `ps` must not show
    """

    name: str
    command: tuple[str, ...]
    ready_within: float = 120.0
    needs_token: bool = False
    environment: tuple[tuple[str, str], ...] = ()


class News(NamedTuple):
    """What a watch tells. kind: ready, restarting, failing (it is tried only now and then), warning (of the part
    itself; it goes on), said (good news of the part), over (the part says that a new start would change nothing, and is
    not started again), stop (a signal; of no part)."""

    kind: str
    name: str = ""
    text: str = ""


@dataclass
class Patience:
    """How long to wait before the next start. There is always one: what it lacks, as a disk with room, may come back.

    :param most: starts that may fail within `window` s before it is tried only now and then
    :ivar is_worn: that is so, until a start has lasted longer than `window` s
    """

    most: int = 6
    window: float = 300.0
    first: float = 1.0  # s; doubles with each crash in the window
    longest: float = 60.0
    slow: float = 60.0  # s; now and then, at first; doubles
    slowest: float = 300.0

    def __post_init__(self) -> None:
        self._crashes: deque[float] = deque()
        self._pause = 0.0
        self.is_worn = False

    def crashed(self, now: float, lasted: float = 0.0) -> float:
        """:param lasted: s that it was up
        :returns: s to wait"""
        if self.is_worn and lasted <= self.window:
            self._pause = min(self.slowest, 2 * self._pause)
            return self._pause
        if self.is_worn:
            self.is_worn = False
            self._crashes.clear()
        self._crashes.append(now)
        while self._crashes[0] < now - self.window:
            self._crashes.popleft()
        if len(self._crashes) >= self.most:
            self.is_worn, self._pause = True, self.slow
            return self._pause
        return min(self.longest, self.first * 2 ** (len(self._crashes) - 1))


class Watch:
    """Keeps one Part up, in a thread of its own.

    :param mark: NAME=value in the environment of all processes of this host's folder
    :param tell: gets News; called from threads
    """

    def __init__(
        self, part: Part, log_path: Path, mark: str, tell: Callable[[News], None], patience: Patience | None = None
    ):
        self.part, self.log_path = part, log_path
        self.ready: dict[str, Any] = {}  # what it told when it was up for the first time
        self.starts = 0
        self._mark, self._tell, self._patience = mark, tell, patience or Patience()
        self._log = BoundedLog(log_path)
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # guards _process: no signal to a pid that was given back
        self._is_up, self._stopping, self._error = False, False, ""
        self._was_up = False  # the last start was
        self._up_at = 0.0
        self._told_failing = False
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """There is a process, or will be one again."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process else None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._keep_up, name=f"watch {self.part.name}", daemon=True)
        self._thread.start()

    def begin_stop(self) -> None:
        """SIGTERM, and no restart."""
        self._stopping = True
        self._wake.put(None)
        self._signal(signal.SIGTERM)

    def join(self, timeout: float) -> bool:
        """Whether it is gone."""
        if self._thread is not None:
            self._thread.join(max(0.0, timeout))
        return not self.running

    def kill(self) -> None:
        """SIGKILL; with begin_stop() before it, for good."""
        self._signal(signal.SIGKILL)

    # --- the thread ---

    def _keep_up(self) -> None:
        try:
            while not self._stopping:
                folders = folders_changed()
                code = self._run_once()
                if self._stopping:
                    return
                if code == LACKS_PACKAGE:
                    self._await_packages(folders)
                    continue
                lasted = time.monotonic() - self._up_at if self._was_up else 0.0
                pause = self._patience.crashed(time.monotonic(), lasted)
                self._tell_crash(f"{self.part.name} {self._how_ended(code)}", pause)
                with suppress(queue.Empty):
                    self._wake.get(timeout=pause)
        finally:
            self._log.close()

    def _await_packages(self, folders: tuple[int, ...]) -> None:
        """A new start cannot mend a missing package: it is told once, and waited until one was installed."""
        said = log_end(self.log_path)
        self._tell(News("failing", self.part.name, f"{self.part.name} lacks a package. {self.log_path} says:\n{said}"))
        while not self._stopping and folders_changed() == folders:
            with suppress(queue.Empty):
                self._wake.get(timeout=LOOK_FOR_PACKAGES)

    def _tell_crash(self, what: str, pause: float) -> None:
        """Each, while that is news; when it fails again and again once, until it was up in between."""
        if self._was_up or not self._patience.is_worn:
            self._told_failing = False
        if not self._patience.is_worn:
            self._tell(News("restarting", self.part.name, f"{what}; it starts again in {pause:.0f} s."))
        elif not self._told_failing:
            self._told_failing = True
            seldom = f"from now on it is tried every {pause:.0f} to {self._patience.slowest:.0f} s"
            text = f"{what}, too often: {seldom}. {self.log_path} ends with:\n{log_end(self.log_path)}"
            self._tell(News("failing", self.part.name, text))

    def _run_once(self) -> int | None:
        """Start it and wait until all of it has ended. :returns: its exit code; None: it could not be started."""
        own = f"VOLUNTEER_KIT_PART={secrets.token_hex(16)}"
        self._is_up, self._was_up, self._error = False, False, ""
        with self._lock:
            if self._stopping:
                return None
            try:
                process = self._process = self._start(own)
            except OSError as error:
                self._error = f"could not be started ({error.strerror or error})"
                return None
            self.starts += 1
        late = threading.Timer(self.part.ready_within, self._is_late, (process,))
        readers = [threading.Thread(target=reader, args=(process,), daemon=True) for reader in (self._hear, self._copy)]
        for thread in (late, *readers):
            thread.daemon = True
            thread.start()
        wait_for_exit(process)
        late.cancel()
        kill_all(process.pid, own)
        remove_stale_folders()
        with self._lock:
            self._process = None
        code = process.wait()
        for thread in readers:
            thread.join(timeout=5)
        process.stdin.close()
        self._is_up = False
        return code

    def _start(self, own: str) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if self.part.needs_token or k not in SECRETS}
        environment |= dict(self.part.environment)
        environment |= dict(mark.split("=", 1) for mark in (self._mark, own))
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "volunteer_kit.host.child", *self.part.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=with_kit_path(environment),
            start_new_session=True,
        )
        note_leader(process.pid, self._mark)  # what the parts start in sessions of their own has it too
        return process

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        """Its stdout: one line says that it is up, or why it cannot be; all else belongs into the log."""
        assert process.stdout is not None
        with process.stdout as lines:
            while line := lines.readline(LINE_LIMIT):
                said = _message(line)
                if isinstance(said.get("ready"), dict) and not self._is_up:
                    self._up_at, self.ready = time.monotonic(), said["ready"]
                    self._is_up = self._was_up = True
                    self._tell(News("ready", self.part.name))
                elif isinstance(said.get("warning"), str):
                    self._tell(News("warning", self.part.name, said["warning"]))
                    self._log.write(said["warning"].encode() + b"\n")
                elif isinstance(said.get("said"), str):
                    self._tell(News("said", self.part.name, said["said"]))
                elif isinstance(said.get("over"), str):
                    self._tell(News("over", self.part.name, said["over"]))
                    self._log.write(said["over"].encode() + b"\n")
                    self.begin_stop()
                elif isinstance(said.get("error"), str):
                    self._error = f"says: {said['error'].partition(chr(10))[0][:300]}"
                    self._log.write(said["error"].encode() + b"\n")
                else:
                    self._log.write(line)

    def _copy(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            while line := lines.readline(LINE_LIMIT):
                self._log.write(line)

    def _is_late(self, process: subprocess.Popen[bytes]) -> None:
        if not self._is_up and process is self._process:
            self._error = f"was not up after {self.part.ready_within:.0f} s"
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._process is not None:
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, number)

    def _how_ended(self, code: int | None) -> str:
        if self._error:
            return self._error.rstrip(".")
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL), often the system's answer to a lack of memory"
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"


def _message(line: bytes) -> dict[str, Any]:
    """A line of JSON with an object in it; {} for all others."""
    if not line.startswith(b"{"):
        return {}
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
