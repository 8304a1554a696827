"""Does a container, a service or a batch job leave training enough memory, and has the kernel killed anything here?"""

from __future__ import annotations

from pathlib import Path

from volunteer_kit.device.machine import memory_kills, memory_limit
from volunteer_kit.device.plan import least_memory
from volunteer_kit.doctor.finding import Finding

GB = 1e9


def limit_of_memory(parameters: int | None, root: Path = Path("/")) -> Finding:
    """:param parameters: that the run's model learns; None: no run was given
    :param root: where /proc and /sys are"""
    from volunteer_kit.worker_end import more_memory

    limit, kills, needed = memory_limit(root), memory_kills(root), least_memory(parameters or 0)
    text = f"a control group leaves {limit / GB:.1f} GB" if limit is not None else "no control group sets one"
    if limit is not None:
        text += f"; training needs about {needed / GB:.1f}"
    if kills:
        text += f"; the kernel has killed {kills} process{'es' if kills > 1 else ''} here for a lack of memory"
    if limit is not None and limit < needed:
        return Finding("memory limit", "problem", text, more_memory(needed))
    return Finding("memory limit", "warning" if kills else "ok", text, more_memory(needed) if kills else "")
