"""Private folders for the unix sockets of peers, and the removal of those that killed peers left.

A peer locks its folder for as long as one of its processes lives. The lock tells the folders of dead peers from those
in use, also across containers that share the folder for temporary files; systemd-tmpfiles (253 and later) leaves a
locked folder alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from volunteer_kit.storage.locks import LockFile, is_locked, try_flock

PREFIX = "volunteer-kit-sockets-"  # of folders that are locked
NEW_PREFIX = "volunteer-kit-starting-"  # of those that may not be locked yet
MAX_BASE = 40  # characters; the system allows 107 (103 on macOS), and PREFIX and hivemind's names take 60
LOCK = ".lock"  # a file in the folder, where folders cannot be locked
YOUNG = 60.0  # s in which a new folder may not be locked yet

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_in_use: set[SocketFolder] = set()  # by peers of this process


class SocketFolder:
    """A locked folder with mode 0700 for the sockets of one peer. Raises OSError where none can be made."""

    def __init__(self) -> None:
        base = base_folder()
        remove_stale_folders()
        new = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=base))
        self._lock: int | None = os.open(new, _FOLDER)
        self._lock_file = None if try_flock(self._lock, shared=True) else LockFile(new / LOCK)
        if self._lock_file is not None:
            self._lock_file.acquire()
        self.path = new.rename(base / new.name.replace(NEW_PREFIX, PREFIX))
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
            if self._lock_file is not None:
                self._lock_file.release()
            _in_use.discard(self)


def base_folder() -> Path:
    """The folder for temporary files, or /tmp where its path is too long for a socket's."""
    folder = None
    with suppress(OSError):  # on a full disk Python finds none
        folder = tempfile.gettempdir()
    return Path(folder if folder is not None and len(folder) <= MAX_BASE else "/tmp")


def remove_own_folders() -> None:
    """Remove those of this process's peers, before it ends by force."""
    for folder in list(_in_use):
        folder.remove()


def remove_stale_folders() -> None:
    """Remove what killed peers of this user left."""
    base = base_folder()
    for folder in (*base.glob(PREFIX + "*"), *base.glob(NEW_PREFIX + "*")):
        with suppress(OSError):
            about = folder.lstat()
            starting = folder.name.startswith(NEW_PREFIX) and time.time() - about.st_mtime <= YOUNG
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not starting:
                _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    """Raises OSError."""
    descriptor = os.open(folder, _FOLDER)
    try:
        is_stale = try_flock(descriptor)
        if (folder / LOCK).exists():
            is_stale = is_stale is not False and not is_locked(folder / LOCK)
        if is_stale:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> int:
    """Lock `folder` as one of several -> a descriptor that holds the lock until it is closed.

    Raises OSError if another process holds it alone, and where folders cannot be locked.
    """
    descriptor = os.open(folder, _FOLDER)
    if not try_flock(descriptor, shared=True):
        os.close(descriptor)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(folder))
    return descriptor
