"""Writing a file or a folder that is there whole or not at all, also after a power cut.

It is written beside its place as `.NAME.RANDOM.part`, flushed to the disk, and renamed. Its writer holds a lock on the
part for as long as it lives, and the system releases the lock when the writer dies. So the next writer of the same name
can tell what a killed one left behind, and deletes it. A process id could not tell: ids are used again, and mean
nothing in another container or on another machine that shares the folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from volunteer_kit.storage.locks import try_lock

LEFT_FOR = 3600.0  # s without a change; where locks do not work, a part this old has no writer


def write_whole(path: str | Path, content: bytes | str, mode: int = 0o666, *, durable: bool = True) -> None:
    """Write a file in one step; what was there before stays until then. Text is written as UTF-8.

    :param mode: of the file, less the umask
    :param durable: it is on the disk when this returns; False: a power cut may leave it empty or as it was before, for
        what is written every second and missed by nobody
    Raises OSError; nothing is changed then.
    """
    with _part_file(Path(path), content, mode, durable) as part:
        os.replace(part, path)
        if durable:
            flush(Path(path).parent)


def write_once(path: str | Path, content: bytes | str, mode: int = 0o666) -> bool:
    """The same, and what is there already stays. :returns: whether it was written: of several processes that begin
    together, one does. Raises OSError."""
    with _part_file(Path(path), content, mode) as part:
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            if os.path.lexists(path):
                return False
            os.rename(part, path)  # a file system without hard links
        flush(Path(path).parent)
        return True


@contextmanager
def part_folder(path: str | Path) -> Iterator[Path]:
    """A new folder to write into: it, or one file in it, is to be put_in_place() as `path`. What is left of it in the
    end is deleted. What killed writers of the same name left is deleted first. Raises OSError."""
    path = Path(path)
    clear_leftovers(path)

    def make(part: Path) -> int:
        part.mkdir()
        return os.open(part, os.O_RDONLY)

    part, descriptor = _new_part(path, make)
    try:
        yield part
    finally:
        try:
            shutil.rmtree(part, ignore_errors=True)
        finally:
            os.close(descriptor)


def put_in_place(written: Path, path: Path) -> None:
    """Flush what was written, and give it its name. Raises OSError."""
    flush(written)
    os.replace(written, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """fsync of a file, or of a folder: names that were given stay given. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # some network file systems know no fsync of folders
    finally:
        os.close(descriptor)


# --- what killed writers left ---


# one pattern for all names: a process that compiles one for each file that it writes keeps hundreds of them
_OURS = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part")
_OLDER = re.compile(r"\.(.+)\.(\d{1,7})(?:\.tmp|\.part)?")  # of versions that named it after their process


def clear_leftovers(path: Path) -> None:
    """Delete what killed writers of `path` left beside it. What a living one writes stays."""
    with suppress(OSError):
        for found in list(path.parent.iterdir()):
            match = _OURS.fullmatch(found.name)
            if match and match[1] == path.name:
                clear_if_left(found)
                continue
            match = _OLDER.fullmatch(found.name)
            if match and match[1] in (path.name, path.stem):
                _clear_if_dead(found, int(match[2]))


def clear_if_left(part: Path) -> bool:
    """Delete a part, a file or a folder, whose writer is dead. :returns: whether it was."""
    with suppress(OSError):
        is_folder = part.is_dir() and not part.is_symlink()
        descriptor = os.open(part, os.O_RDONLY if is_folder else os.O_RDWR | os.O_NOFOLLOW)
        try:
            held = try_lock(descriptor)
            is_left = held if held is not None else time.time() - _changed_at(part) > LEFT_FOR
            if is_left:
                _delete(part)
            return is_left
        finally:
            os.close(descriptor)
    return False


def _clear_if_dead(part: Path, pid: int) -> None:
    with suppress(OSError):
        if pid == os.getpid() or not _is_alive(pid) or time.time() - _changed_at(part) > LEFT_FOR:
            _delete(part)


def _changed_at(part: Path) -> float:
    """s since 1970"""
    return max(one.stat().st_mtime for one in (part, *(part.iterdir() if part.is_dir() else ())))


def _delete(part: Path) -> None:
    shutil.rmtree(part) if part.is_dir() else part.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# --- parts ---


@contextmanager
def _part_file(path: Path, content: bytes | str, mode: int, durable: bool = True) -> Iterator[Path]:
    """Written, and flushed if it is to be durable."""
    clear_leftovers(path)
    part, descriptor = _new_part(path, lambda part: os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode))
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        if durable:
            os.fsync(descriptor)
        yield part
    finally:
        try:
            with suppress(OSError):  # it would hide the reason
                part.unlink()
        finally:
            os.close(descriptor)


def _new_part(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """A part, and the descriptor that holds its lock. Another process may take it for left before it is locked."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        descriptor = make(part)
        try:
            if try_lock(descriptor) is not False and os.path.samestat(os.fstat(descriptor), os.stat(part)):
                return part, descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
