"""The unix sockets at which the processes of one peer meet: a folder of their own, and a look whether they are there.

Programs that clean the folder for temporary files (systemd-tmpfiles, tmpreaper, cron jobs) remove sockets that are in
use. Connections that stand go on, and every new one fails: the peer looks alive and answers nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_sharer, util
from pathlib import Path

from volunteer_kit.swarm.errors import SwarmError

PREFIX = "volunteer-kit-sockets-"
MAX_BASE = 40  # characters; the system allows 107 (103 on macOS), and PREFIX and hivemind's names take 60
YOUNG = 60.0  # s in which a folder may have been made and not locked yet


_in_use: set[SocketFolder] = set()  # by peers of this process


class SocketFolder:
    """A folder with mode 0700 for the sockets of one peer, locked for as long as a process of the peer lives.

    The lock tells the folders of dead peers from those in use, across containers that share the folder for temporary
    files too; systemd-tmpfiles (253 and later) leaves a locked folder alone. Raises SwarmError (startup).
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        base = base if len(base) <= MAX_BASE else "/tmp"
        try:
            remove_stale_folders(Path(base))
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            self._lock: int | None = _lock(self.path)
        except OSError as e:
            raise SwarmError(
                f"This peer cannot keep its sockets in {base}: {e.strerror or e}.\n"
                f"1. Is there room, and may this user write there? df -h {base}\n"
                "2. Name another folder for temporary files, with a short path: export TMPDIR=/var/tmp",
                kind="startup",
            ) from e
        _in_use.add(self)

    @property
    def prefix(self) -> str:
        """hivemind's way to name it: the beginning of a multiaddr."""
        return f"/unix{self.path}/"

    def remove(self) -> None:
        """May be called again and again."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
            _in_use.discard(self)


def remove_own_folders() -> None:
    """Those of this process's peers, before it ends by force."""
    for folder in list(_in_use):
        folder.remove()


def remove_stale_folders(base: Path) -> None:
    """Remove the folders of peers that were killed."""
    for folder in base.glob(PREFIX + "*"):
        with suppress(OSError):
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and time.time() - about.st_mtime > YOUNG:
                lock = _lock(folder, fcntl.LOCK_EX)
                try:
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _lock(folder: Path, kind: int = fcntl.LOCK_SH) -> int:
    """Raises OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SocketGuard:
    """Remembers the sockets that were there, and finds one that was removed or replaced."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}  # device and inode

    def find_lost(self, paths: Iterable[str], may_come: Iterable[str] = ()) -> str | None:
        """:param paths: of sockets that should be there
        :param may_come: of those that are not missed before they were seen"""
        may_come = [*may_come]
        for path in (*paths, *may_come):
            try:
                about = os.stat(path)
                found = (about.st_dev, about.st_ino) if stat.S_ISSOCK(about.st_mode) else None
            except OSError:
                found = None
            if found is None and path not in self._known and path in may_come:
                continue
            if found is None or self._known.setdefault(path, found) != found:
                return path
        return None


def sockets_of_multiprocessing() -> list[str]:
    """Where other processes fetch what this one sends them through pipes (multiprocessing.resource_sharer): an order to
    hivemind's DHT carries a pipe for its answer, and is dropped in silence when that cannot be fetched."""
    address = getattr(resource_sharer._resource_sharer, "_address", None)
    return [address] if isinstance(address, str) else []


def lock_folder_of_multiprocessing() -> None:
    """Keep systemd-tmpfiles away from that folder. It lives as long as the process, and so does the lock."""
    with suppress(OSError):
        _lock(Path(util.get_temp_dir()))
