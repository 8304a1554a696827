"""One run's folder on this machine: what a volunteer who comes back goes on from.

Identity, totals, place in the stream, peers met, pictures, the worker's log, and a status file for those who look from
another process. One process at a time trains in it: it holds the lock.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from volunteer_kit.storage import DamagedFile, keep_aside, part_folder, read_json, write_whole
from volunteer_kit.storage.locks import LockFile, who_holds
from volunteer_kit.storage.places import NoHome, kit_folder, make_folder

MAX_KNOWN_PEERS = 16
SHORT_WHILE = 86400.0  # s; longer than most outages, and shorter than until somebody comes again with an old kit
LEAST_ROOM = 2**20  # bytes; a key, totals and the log need some hundred KB, and grow
MAX_COUNT = 2**53  # of samples; a larger number is no count
MAX_LOG, LOG_KEPT = 10_000_000, 1_000_000  # bytes; what is kept of a log that has grown longer

logger = logging.getLogger(__name__)


@dataclass
class Totals:
    """What this machine has given to the run, in all its stays."""

    samples: int = 0  # that entered applied steps
    epochs: int = 0  # applied steps that held some of them
    seconds: float = 0.0  # of training
    rounds: dict[str, Any] = field(default_factory=dict)  # of averaging, as swarm/records/failures.py counts them
    # samples and steps that do not count yet: the opening of the branch that they are on -> (samples, steps)
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def waiting_samples(self) -> int:
        """Samples that only the members of a branch have, which may lose."""
        return sum(samples for samples, _ in self.waiting.values())


class Home:
    """A folder; made when something is written.

    :param path: None: of its own for every run and its settings, below $VOLUNTEER_KIT_HOME or ~/.cache/volunteer_kit

    Raises NoHome without `path` for a user without a home folder.
    """

    def __init__(self, path: str | Path | None, run_id: str = "", fingerprint: str = ""):
        self.path = Path(path) if path else kit_folder() / "runs" / f"{run_id}-{fingerprint[:8]}"
        self._lock: LockFile | None = None

    @property
    def root(self) -> Path:
        """The kit's folder of this machine; where the user has no home, this one."""
        try:
            return kit_folder()
        except NoHome:
            return self.path

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
    def tuned(self) -> Path:
        """Of the machine, not of the run: what the tuner found."""
        return self.root / "tuned"

    # --- who trains here ---

    def lock(self, name: str = "volunteer", patience: float = 0.0) -> bool:
        """Be the one who trains here, waiting `patience` s for another to go. False if that one stays. Raises OSError.

        The system lets go when the holder dies. A worker's own lock, "worker", is held by all that were forked from it
        too: of a killed kernel's worker the peer is still saying goodbye, under the identity that the next worker has.
        """
        make_folder(self.path)
        lock, deadline = LockFile(self.path / f"{name}.lock"), time.monotonic() + patience
        while not lock.acquire():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        self._lock = lock
        return True

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def who_holds(self, name: str = "volunteer") -> str:
        """A line about the process that trains here, where it may be on another machine; "" else."""
        return who_holds(self.path / f"{name}.lock")

    def require_room(self) -> None:
        """Raises OSError, in words, where the disk is full: what this machine gives could not be kept there."""
        self.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path).free
        try:
            with part_folder(self.path / "room") as part:  # what a disk says of itself may be wrong
                write_whole(part / "room", bytes(LEAST_ROOM))
        except OSError as error:
            place = shlex.quote(str(self.path))
            raise OSError(
                f"The folder {self.path}, which keeps who you are in this run, has no room: "
                f"{error.strerror or error}, {free / 1e6:,.1f} MB are free.\n"
                f"1. Make room: df -h {place}\n"
                "2. Or name a folder on another disk: --home FOLDER, or join_swarm(..., home=FOLDER)\n"
                "3. Or move all of the kit's: export VOLUNTEER_KIT_HOME=FOLDER"
            ) from None

    # --- what is kept ---

    def totals(self, warn: Callable[[str], None] = logger.warning) -> Totals:
        """What was saved. If that is damaged, it is kept aside, and the counts go on from what was last shown.

        :param warn: told so in words
        """
        path = self.path / "totals.json"
        try:
            return read_json(path, _totals_of)
        except FileNotFoundError:
            return Totals()
        except DamagedFile as error:
            found = self._last_shown()
            aside = keep_aside(path)
            counts = (
                f"They go on from what was last shown, {found.samples:,} samples."
                if found.samples
                else ("They begin at 0 again.")
            )
            warn(f"What this machine has given to the run cannot be read from {path} ({error.reason}).{aside} {counts}")
            with contextlib.suppress(OSError):
                self.save_totals(found)
            return found

    def _last_shown(self) -> Totals:
        """By the picture that was drawn of the training last."""
        shown = self.status()
        try:
            return Totals(_count(shown["my_samples"]), _count(shown["my_epochs"]))
        except (ValueError, KeyError):
            return Totals()

    def save_totals(self, totals: Totals) -> None:
        """Raises OSError."""
        self._write("totals.json", asdict(totals))

    def known_peers(self) -> list[str]:
        """Addresses of peers met before, for the day when the first peers are gone."""
        peers = self._read("peers.json").get("peers", [])
        peers = peers if isinstance(peers, list) else []
        fine = [p for p in peers if isinstance(p, str) and p.startswith("/") and "/p2p/" in p and len(p) < 300]
        return fine[:MAX_KNOWN_PEERS]

    def save_known_peers(self, peers: list[str]) -> None:
        """Raises OSError."""
        self._write("peers.json", {"peers": peers[:MAX_KNOWN_PEERS]})

    def was_here(self, fingerprint: str) -> bool:
        """Whether this machine was in the run with these settings a short while ago: what begins now is a restart."""
        last = self._read("stay.json")
        when = last.get("time")
        recently = isinstance(when, int | float) and 0 <= when < MAX_COUNT and abs(time.time() - when) < SHORT_WHILE
        return recently and last.get("fingerprint") == fingerprint

    def save_stay(self, fingerprint: str) -> None:
        """It is in the run now. Raises OSError."""
        self._write("stay.json", {"fingerprint": fingerprint, "time": round(time.time())})

    def status(self) -> dict[str, Any]:
        """What the process that trains here last showed; {} if there is nothing."""
        return self._read("status.json")

    def save_status(self, status: Mapping[str, Any]) -> None:
        """Raises OSError."""
        self._write("status.json", status, durable=False)

    def _read(self, name: str) -> dict[str, Any]:
        """{} where there is nothing, or nothing that can be read: none of it is missed for long."""
        try:
            found = read_json(self.path / name)
        except (OSError, DamagedFile):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, name: str, values: Mapping[str, Any], durable: bool = True) -> None:
        """Whole or not at all: the machine may go away at any moment."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / name, json.dumps(values), mode=0o600, durable=durable)


def _count(found: Any) -> int:
    """Raises ValueError for what is no count."""
    if type(found) is not int or not 0 <= found < MAX_COUNT:
        raise ValueError(f"{str(found)[:40]!r} is no count")
    return found


def _totals_of(saved: Any) -> Totals:
    """Raises ValueError, KeyError, TypeError."""
    seconds, rounds, waiting = saved["seconds"], saved.get("rounds", {}), saved.get("waiting", {})
    if not isinstance(seconds, int | float) or not 0 <= seconds < MAX_COUNT:
        raise ValueError("no seconds")
    if not isinstance(rounds, dict) or not isinstance(waiting, dict):
        raise ValueError("no rounds, or nothing that waits")
    waiting = {opening: (_count(samples), _count(steps)) for opening, (samples, steps) in waiting.items()}
    return Totals(_count(saved["samples"]), _count(saved["epochs"]), float(seconds), rounds, waiting)


# --- a worker's log ---


def open_log(path: Path) -> io.FileIO:
    """To append to. What has grown too long loses its beginning first; where nothing can be written it goes nowhere."""
    try:
        cut_log(path)
        return io.FileIO(path, "a")
    except OSError:
        return io.FileIO(os.devnull, "a")


def cut_log(path: Path) -> None:
    """Take the beginning off a log that has grown longer than MAX_LOG, also while it is appended to. Raises OSError.

    It is done within the file itself: a full disk has no room for another.
    """
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
