"""Does a volunteer or a host of this machine stand stopped (Ctrl-Z)? It holds its folder, and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from volunteer_kit.doctor.finding import Finding
from volunteer_kit.storage.locks import is_locked, who_holds

if TYPE_CHECKING:
    from volunteer_kit.storage.holders import Holder


def look(name: str, folders: Sequence[Path]) -> Finding:
    """:param name: of the finding
    :param folders: of a run's volunteer or host on this machine"""
    from volunteer_kit.storage.holders import holders, what_is_stopped  # psutil may be missing

    found = [(folder, holders(folder)) for folder in folders]
    stopped = [words for folder, there in found if (words := what_is_stopped(folder, there)) is not None]
    if stopped:
        ways = "\n".join(way for one in stopped for way in one.ways_out)
        return Finding(name, "problem", "; ".join(one.text for one in stopped), ways)
    running = [one for one in (_running(folder, there) for folder, there in found) if one]
    return Finding(name, "ok", "; ".join(running) or "none runs on this machine")


def is_at_work(folder: Path) -> bool:
    """Does a worker hold this folder, and does not stand stopped?"""
    from volunteer_kit.storage.holders import holders

    there = [one for one in holders(folder) if one.lock == "worker"]
    if there:
        return any(not one.is_stopped for one in there)
    try:
        return is_locked(folder / "worker.lock")
    except OSError:
        return True  # another user's


def _running(folder: Path, there: Sequence[Holder]) -> str:
    """In words; "" where nothing runs."""
    if there:
        return f"process {there[0].pid} runs, and holds {folder}"
    from volunteer_kit.storage.holders import LOCKS

    for name in LOCKS:
        lock = folder / f"{name}.lock"
        try:
            if is_locked(lock):
                return who_holds(lock) or f"{folder} is held by a process that this user cannot see"
        except OSError:
            return f"{folder} is another user's"
    return ""
