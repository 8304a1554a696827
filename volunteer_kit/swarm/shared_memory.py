"""Memory that the processes of a peer share: what a run needs of it, and what this machine has.

torch keeps it in /dev/shm on Linux, whatever its sharing strategy. Docker gives a container 64 MB there, enough for a
model of 3 million parameters.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

from volunteer_kit.swarm.errors import SwarmError

FOLDER = Path("/dev/shm")
MB = 2**20  # bytes, as Docker and df count
HELD_PER_PARAMETER = 8  # bytes, measured: the averaged parameters and the averaged gradients, in fp32
FIXED = 4 * 2**20  # bytes, measured 0.1 MB: tables, counters and futures
# torch's words, and the system's, where a segment does not fit
SIGNS = ("unable to allocate shared memory", "unable to mmap", "No space left on device", "unable to resize file")


class Room(NamedTuple):
    """Bytes of shared memory."""

    free: int
    total: int


def shared_bytes(parameters: int, state_bytes: int) -> int:
    """What a peer needs at its peak: a state that it takes or gives crosses its processes as a whole.

    :param parameters: that are learnt
    :param state_bytes: of parameters and statistics
    """
    return HELD_PER_PARAMETER * parameters + state_bytes + FIXED


def room_for_sharing(folder: Path = FOLDER) -> Room | None:
    """What there is; None where the system keeps it elsewhere, or without a limit of its own."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    if not found.f_blocks:
        return None
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def require_shared_memory(needed: int, folder: Path = FOLDER) -> None:
    """Raises SwarmError (shared_memory) where `needed` bytes do not fit: says what is there, and how to get more."""
    room = room_for_sharing(folder)
    if room is None or room.free >= needed:
        return
    raise SwarmError(
        f"This run needs about {needed / MB:,.0f} MB of shared memory; {folder} has {room.free / MB:,.0f} MB free of "
        f"{room.total / MB:,.0f}.\n{ways_out(needed, room, folder)}",
        kind="shared_memory",
    )


def ways_out(needed: int, room: Room, folder: Path = FOLDER) -> str:
    """How a machine gets `needed` bytes of shared memory, as numbered lines."""
    size = f"{max(1, math.ceil(1.25 * (needed + room.total - room.free) / 2**30))}g"
    return (
        f"1. In Docker: docker run --shm-size={size} ... (compose.yaml: shm_size: {size})\n"
        f"2. On a machine of your own: sudo mount -o remount,size={size} {folder}\n"
        f"3. See what holds the rest: df -h {folder}; ls -lS {folder} | head"
    )


def explain_full(error: BaseException, folder: Path = FOLDER) -> SwarmError | None:
    """An error in the middle of a run -> what it means, if shared memory has run out; None: it is another error."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "shm" not in text or not any(sign in text for sign in SIGNS):
        return None
    room = room_for_sharing(folder) or Room(0, 0)
    return SwarmError(
        f"Shared memory has run out: {folder} has {room.free / MB:,.0f} MB free of {room.total / MB:,.0f}.\n"
        f"{ways_out(2 * room.total, room, folder)}",
        kind="shared_memory",
    )
