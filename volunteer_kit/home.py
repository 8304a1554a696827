"""One run's folder on this machine: what a volunteer who comes back goes on from.

Identity, totals, place in the stream, peers met, pictures, the worker's log, and a status file for those who look from
another process. One process at a time trains in it: it holds the lock.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MAX_FILE = 1 << 20  # bytes of a file that is read back
MAX_KNOWN_PEERS = 16
SHORT_WHILE = 86400.0  # s; longer than most outages, and shorter than until somebody comes again with an old kit
MAX_LOG, LOG_KEPT = 10_000_000, 1_000_000  # bytes; what is kept of a log that has grown longer


@dataclass
class Totals:
    """What this machine has given to the run, in all its stays."""

    samples: int = 0  # that entered applied steps
    epochs: int = 0  # applied steps that held some of them
    seconds: float = 0.0  # of training
    rounds: dict[str, Any] = field(default_factory=dict)  # of averaging, as swarm/failures.py counts them


class Home:
    """A folder; made when something is written.

    :param path: None: of its own for every run and its settings, below $VOLUNTEER_KIT_HOME or ~/.cache/volunteer_kit
    """

    def __init__(self, path: str | Path | None, run_id: str = "", fingerprint: str = ""):
        cache = os.environ.get("VOLUNTEER_KIT_HOME")
        self.root = Path(cache) if cache else Path.home() / ".cache/volunteer_kit"
        self.path = Path(path) if path else self.root / "runs" / f"{run_id}-{fingerprint[:8]}"
        self._lock: int | None = None

    @property
    def identity(self) -> Path:
        return self.path / "identity.key"

    @property
    def log(self) -> Path:
        return self.path / "worker.log"

    @property
    def stream(self) -> Path:
        return self.path / "stream.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    @property
    def left_over(self) -> Path:
        return self.path / "left_over.bin"

    @property
    def tuned(self) -> Path:
        """Of the machine, not of the run: what the tuner found."""
        return self.root / "tuned"

    # --- who trains here ---

    def lock(self, name: str = "volunteer", patience: float = 0.0) -> bool:
        """Be the one who trains here, waiting `patience` s for another to go. False if that one stays.

        The system lets go when the holder dies. A worker's own lock, "worker", is held by all that were forked from it
        too: of a killed kernel's worker the peer is still saying goodbye, under the identity that the next worker has.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return False
                time.sleep(0.1)
        self._lock = descriptor
        return True

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- what is kept ---

    def totals(self) -> Totals:
        saved = self._read("totals.json")
        try:
            samples, epochs, seconds = int(saved["samples"]), int(saved["epochs"]), float(saved["seconds"])
        except (KeyError, TypeError, ValueError):
            return Totals()
        rounds = saved.get("rounds")
        return Totals(samples, epochs, seconds, rounds if isinstance(rounds, dict) else {})

    def save_totals(self, totals: Totals) -> None:
        """Raises OSError."""
        self._write("totals.json", asdict(totals))

    def known_peers(self) -> list[str]:
        """Addresses of peers met before, for the day when the first peers are gone."""
        peers = self._read("peers.json").get("peers", [])
        fine = [p for p in peers if isinstance(p, str) and p.startswith("/") and "/p2p/" in p and len(p) < 300]
        return fine[:MAX_KNOWN_PEERS]

    def save_known_peers(self, peers: list[str]) -> None:
        """Raises OSError."""
        self._write("peers.json", {"peers": peers[:MAX_KNOWN_PEERS]})

    def was_here(self, fingerprint: str) -> bool:
        """Whether this machine was in the run with these settings a short while ago: what begins now is a restart."""
        last = self._read("stay.json")
        when = last.get("time")
        recently = isinstance(when, (int, float)) and abs(time.time() - when) < SHORT_WHILE
        return recently and last.get("fingerprint") == fingerprint

    def save_stay(self, fingerprint: str) -> None:
        """It is in the run now. Raises OSError."""
        self._write("stay.json", {"fingerprint": fingerprint, "time": round(time.time())})

    def status(self) -> dict[str, Any]:
        """What the process that trains here last showed; {} if there is nothing."""
        return self._read("status.json")

    def save_status(self, status: Mapping[str, Any]) -> None:
        """Raises OSError."""
        self._write("status.json", status)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            with (self.path / name).open(encoding="utf-8") as file:
                found = json.loads(file.read(MAX_FILE))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        """Whole or not at all: the machine may go away at any moment."""
        self.path.mkdir(parents=True, exist_ok=True)
        part = tempfile.NamedTemporaryFile("w", dir=self.path, prefix=name, delete=False, encoding="utf-8")  # noqa: SIM115
        try:
            with part:  # on a full disk it is closing that fails
                json.dump(values, part)
            os.replace(part.name, self.path / name)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


# --- a worker's log ---


def open_log(path: Path) -> io.FileIO:
    """To append to. What has grown too long loses its beginning first; where nothing can be written it goes nowhere."""
    try:
        _cut(path)
        return io.FileIO(path, "a")
    except OSError:
        return io.FileIO(os.devnull, "a")


def _cut(path: Path) -> None:
    """Within the file itself: a full disk has no room for another."""
    if not path.is_file() or path.stat().st_size <= MAX_LOG:
        return
    with path.open("r+b") as log:
        log.seek(-LOG_KEPT, os.SEEK_END)
        end = log.read()
        log.seek(0)
        log.write(end.partition(b"\n")[2] or end)
        log.truncate()


def log_end(path: Path) -> str:
    """Its last lines, for a message; "" where there are none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  | {line[:200]}" for line in lines[-5:])
