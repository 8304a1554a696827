"""Is there room for what the processes of a peer share? Docker gives a container 64 MB."""

from __future__ import annotations

from pathlib import Path

from volunteer_kit.doctor.finding import Finding

SMALL = 256e6  # bytes; less is a container's default, and too little for most runs


def shared_memory(parameters: int | None, state_bytes: int | None, folder: Path = Path("/dev/shm")) -> Finding:
    """:param parameters: that the run's model learns; None: no run was given"""
    from volunteer_kit.swarm.shared_memory import MB, room_for_sharing, shared_bytes, ways_out

    room = room_for_sharing(folder)
    if room is None:
        return Finding("shared memory", "ok", "no limit of its own")
    needed = shared_bytes(parameters or 0, state_bytes or 0)
    text = f"{folder} has {room.free / MB:,.0f} of {room.total / MB:,.0f} MB free"
    if parameters is not None:
        text += f"; this run needs about {needed / MB:,.0f}"
    if room.free < needed:
        return Finding("shared memory", "problem", text, ways_out(needed, room, folder))
    if parameters is None and room.total < SMALL:
        return Finding("shared memory", "warning", f"{text}; most runs need more", ways_out(2**29, room, folder))
    return Finding("shared memory", "ok", text)
