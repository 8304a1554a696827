"""Where the kit's files go, also for a user without a home folder (a container's user id that no list names), and who
may write there."""

from __future__ import annotations

import getpass
import os
import stat
from contextlib import suppress
from pathlib import Path

_umask_before: int | None = None


class NoHome(OSError):
    """This user has no home folder, and no other folder is named. The message says how to name one."""


def kit_folder() -> Path:
    """The folder for all that the kit keeps: $VOLUNTEER_KIT_HOME or ~/.cache/volunteer_kit. Raises NoHome."""
    named = os.environ.get("VOLUNTEER_KIT_HOME")
    return Path(named) if named else _home() / ".cache" / "volunteer_kit"


def expanded(path: str | Path) -> Path:
    """A path whose ~ is replaced by the home folder. Raises NoHome."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise _no_home(f" {path!s} begins with it.") from None


def has_home() -> bool:
    """Whether this user has a home folder in which files can be kept."""
    try:
        home = _home()
    except NoHome:
        return False
    return any(folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) for folder in (home, home / ".cache"))


def adopt_home(folder: str | Path | None) -> bool:
    """Where the user has no home folder, let `folder` be it, or else $VOLUNTEER_KIT_HOME, for this process and those
    that it starts: libraries keep caches there, and some end with an error where they cannot name the user.

    :returns: whether that was done
    """
    folder = folder or os.environ.get("VOLUNTEER_KIT_HOME")
    if not folder or has_home():
        return False
    os.environ["HOME"] = str(Path(folder).absolute())
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        os.environ["LOGNAME"] = user_name()
    return True


def user_name() -> str:
    """The user's name, or the number of one without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # OSError since Python 3.13
        return str(os.getuid())


def keep_others_out() -> None:
    """Where the umask lets everybody write what this process makes, as in many containers, take 022."""
    global _umask_before
    before = umask()
    if not before & stat.S_IWOTH:
        _umask_before = before
        os.umask(before | 0o022)


def umask(as_found: bool = False) -> int:
    """:param as_found: the one before keep_others_out() took another"""
    now = os.umask(0o022)
    os.umask(now)
    return _umask_before if as_found and _umask_before is not None else now


def make_folder(path: Path) -> None:
    """Make a folder, with those above it, in which nobody but its owner writes, whatever the umask. One of this user
    that is there and open to everybody is shut. Raises OSError."""
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        folder.mkdir(mode=0o755, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises where it is a file
    about = path.stat()
    if is_open(about.st_mode) and about.st_uid == os.geteuid():
        with suppress(OSError):  # a file system without such rights
            path.chmod(stat.S_IMODE(about.st_mode) & ~0o022)


def is_open(mode: int) -> bool:
    """Whether everybody may remove and replace what lies in a folder of this mode."""
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise _no_home("") from None


def _no_home(why: str) -> NoHome:
    return NoHome(
        f"This user (id {os.getuid()}) has no home folder.{why}\n"
        "1. Name a folder: --home FOLDER, or join_swarm(..., home=FOLDER)\n"
        "2. Or for all of the kit: export VOLUNTEER_KIT_HOME=FOLDER\n"
        "3. Or for all programs: export HOME=FOLDER"
    )
