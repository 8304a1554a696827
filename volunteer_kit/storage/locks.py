"""One lock for every file system.

flock(2) is the lock of choice: processes that were forked from the holder hold it too, and the system releases it when
the last of them dies. Lustre, some NFS and some FUSE mounts know no flock. There a record lock of the open file takes
its place, with the same properties on Linux. Where neither works, a file beside the lock names its holder: machine,
process id and start time. Only "would block" means that another process holds a lock; any other error means that this
kind of lock does not work here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["flock", "record", "file"]

MAX_HOLDER = 4096  # bytes of a file that names a holder
HALF_WRITTEN = 10.0  # s; a holder's file that stays unreadable for longer was left by a killed process
PROC = Path("/proc")
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN)


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Lock an open file or folder until its descriptors are closed, without waiting.

    :param shared: others may hold it shared at the same time
    :returns: whether this descriptor has the lock now; None where the file system knows no locks of open files
    """
    return _try_kinds(descriptor, shared)[0]


def try_flock(descriptor: int, *, shared: bool = False) -> bool | None:
    """The same by flock(2) alone, the only kind that works for folders, and that other programs look for."""
    try:
        _flock(descriptor, shared)
    except OSError as error:
        return False if error.errno in _BUSY else None
    return True


def _try_kinds(descriptor: int, shared: bool) -> tuple[bool | None, Kind]:
    if (is_ours := try_flock(descriptor, shared=shared)) is not None:
        return is_ours, "flock"
    is_ours = _try_record_lock(descriptor, shared)
    return is_ours, "file" if is_ours is None else "record"


def _try_record_lock(descriptor: int, shared: bool = False) -> bool | None:
    try:
        _record_lock(descriptor, shared)
    except OSError as error:
        return False if error.errno in (*_BUSY, errno.EACCES) else None
    return True


def _flock(descriptor: int, shared: bool) -> None:
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def _record_lock(descriptor: int, shared: bool) -> None:
    """Lock the whole file. A plain POSIX lock, all that macOS has, is the process's own: its forked children do not
    hold it, and it is gone once the process closes any descriptor of the file."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        fcntl.lockf(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0))


def knows_record_locks(folder: Path) -> bool:
    """Whether POSIX record locks, which SQLite needs, work in a folder; True where no file can be made to try."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
    except OSError:
        pass
    return True


class Holder(NamedTuple):
    """A process that holds a lock by a file beside it."""

    machine: str  # its name, for a person
    where: str  # what tells its processes from those of other machines, boots and containers
    pid: int
    start: str  # when it started, as the system counts; "": not known
    token: str  # of this one lock

    @classmethod
    def current(cls) -> Holder:
        pid = os.getpid()
        return cls(socket.gethostname()[:64], _where(), pid, _start_of(pid) or "", secrets.token_hex(8))

    @property
    def is_here(self) -> bool:
        """Whether this machine can say if it lives."""
        return self.where == _where()

    @property
    def is_dead(self) -> bool:
        """False where nobody here can know."""
        if not self.is_here:
            return False
        if PROC.is_dir():
            start = _start_of(self.pid)
            return start is None or bool(self.start) and start != self.start
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


class LockFile:
    """An exclusive lock by the name of a file, which is made if it is not there.

    :param mode: of a file that is made, less the umask
    """

    def __init__(self, path: str | Path, mode: int = 0o600):
        self.path, self._mode = Path(path), mode
        self.kind: Kind | None = None  # of the lock that is held, or that another process was found to hold
        self._descriptor: int | None = None
        self._holder: Holder | None = None

    @property
    def descriptor(self) -> int:
        """The locked file's. Raises RuntimeError if it is not locked."""
        if self._descriptor is None:
            raise RuntimeError(f"{self.path} is not locked")
        return self._descriptor

    def acquire(self) -> bool:
        """Lock it, without waiting. False: another holds it. Raises OSError where the file cannot be made."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
        try:
            is_ours, self.kind = _try_kinds(descriptor, shared=False)
            if is_ours is None:
                self._holder = _claim(_holder_file(self.path), self._mode)
                is_ours = self._holder is not None
            with suppress(FileNotFoundError):  # else the one who held it has removed the file meanwhile
                if is_ours and os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    self._descriptor, descriptor = descriptor, -1
                    return True
            self._disclaim()
            return False
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def release(self) -> None:
        """May be called again and again."""
        if self._descriptor is not None:
            self._disclaim()
            os.close(self._descriptor)
            self._descriptor = None

    def _disclaim(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None and holder.pid == os.getpid():  # a forked child's copy ends nothing
            path = _holder_file(self.path)
            with suppress(OSError):
                if _read_holder(path) == holder:
                    path.unlink()


def is_locked(path: str | Path) -> bool:
    """Whether some process holds the lock of this file now, of whatever kind: it may see the file system by another
    mount. No file is made. Raises OSError other than FileNotFoundError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = [try_flock(descriptor)]
        if found == [True]:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # on NFS it is a record lock, too, and would be in the other's way
        found.append(_try_record_lock(descriptor))
    finally:
        os.close(descriptor)
    holder = _holder_file(Path(path))
    return False in found or (holder.exists() and not _is_left(holder))


def who_holds(path: str | Path) -> str:
    """A line for a person where only a file says who holds the lock, and no process here can know whether that one
    lives; "" else."""
    file = _holder_file(Path(path))
    holder = _read_holder(file)
    if holder is None or holder.is_here:
        return ""
    return (
        f"By {file} it is process {holder.pid} of the machine {holder.machine}. "
        f"If that one is gone, remove the file: rm {file}"
    )


# --- a file that names the holder ---


def _holder_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.holder")


def _claim(path: Path, mode: int) -> Holder | None:
    """Be the holder; None: another one is. Raises OSError."""
    if path.exists() and not _take_away(path):
        return None
    holder = Holder.current()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        return None
    try:
        with open(descriptor, "wb") as file:
            file.write(json.dumps(holder).encode())
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return holder


def _take_away(path: Path) -> bool:
    """Remove the file of a dead holder. It is moved first: of two who find it dead, the slower one must not remove the
    file that the quicker one has made since."""
    if not _is_left(path):
        return False
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return True
    if not _is_left(aside):
        with suppress(FileExistsError):
            os.link(aside, path)
        aside.unlink()
        return False
    aside.unlink()
    return True


def _is_left(path: Path) -> bool:
    """Whether no living process holds the lock by this file, as far as this machine can know."""
    holder = _read_holder(path)
    if holder is not None:
        return holder.is_dead
    try:
        return time.time() - path.stat().st_mtime > HALF_WRITTEN
    except FileNotFoundError:
        return True


def _read_holder(path: Path) -> Holder | None:
    """None: there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            machine, where, pid, start, token = json.loads(file.read(MAX_HOLDER))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    if type(pid) is not int or pid < 1 or not all(isinstance(one, str) for one in (machine, where, start, token)):
        return None
    return Holder("".join(one for one in machine if one.isprintable()), where, pid, start, token)


def _where() -> str:
    """A process id means the same within one boot and one namespace of process ids."""
    found = [socket.gethostname()]
    with suppress(OSError):
        found.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        found.append(os.readlink(PROC / "self/ns/pid"))
    return " ".join(found)


def _start_of(pid: int) -> str | None:
    """When a process started, in clock ticks since the boot; None: there is none, or it has ended."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None
