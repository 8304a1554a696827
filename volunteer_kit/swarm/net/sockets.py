"""Make a folder for the unix sockets of a peer's processes, and check that the sockets are still there.

Programs that clean the folder for temporary files (systemd-tmpfiles, tmpreaper, cron jobs) remove sockets that are in
use. Connections that stand go on, and every new one fails: the peer looks alive and answers nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_sharer, util
from pathlib import Path

from volunteer_kit.storage.socket_folders import SocketFolder, base_folder, lock_folder
from volunteer_kit.swarm.errors import SwarmError


def make_socket_folder() -> SocketFolder:
    """Raises SwarmError (startup) where none can be made."""
    try:
        return SocketFolder()
    except OSError as e:
        base = base_folder()
        raise SwarmError(
            f"This peer cannot keep its sockets in {base}: {e.strerror or e}.\n"
            f"1. Is there room, and may this user write there? df -h {base}\n"
            "2. Name another folder for temporary files, with a short path: export TMPDIR=/var/tmp",
            kind="startup",
        ) from e


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
        lock_folder(Path(util.get_temp_dir()))
