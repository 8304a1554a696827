"""What of this machine a process may use: cores and memory, a container's limits considered."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """CPU cores this process may use: its affinity, and a container's quota, which os.cpu_count() does not know."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # macOS
        cores = float(os.cpu_count() or 1)
    for folder in _cgroups(root, "cpu"):
        old = _numbers(folder / "cpu.cfs_quota_us", 1) + _numbers(folder / "cpu.cfs_period_us", 1)
        limit = _numbers(folder / "cpu.max", 2) or old
        if len(limit) == 2 and limit[0] > 0 and limit[1] > 0:  # -1: no quota
            cores = min(cores, limit[0] / limit[1])
    return max(1, int(cores + 0.01))


def usable_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(bytes of RAM this process may have, bytes of it free now), a container's limit considered."""
    info = dict(re.findall(r"(\w+):\s+(\d+) kB", _text(root / "proc/meminfo")))
    if "MemTotal" in info:
        total = int(info["MemTotal"]) * 1024
        free = int(info.get("MemAvailable", info["MemTotal"])) * 1024
    else:  # macOS tells only the total
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    for folder in _cgroups(root, "memory"):
        limit = _numbers(folder / "memory.max", 1) or _numbers(folder / "memory.limit_in_bytes", 1)
        used = _numbers(folder / "memory.current", 1) or _numbers(folder / "memory.usage_in_bytes", 1)
        if limit and used and limit[0] < total:
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            taken = used[0] - (int(cache[1]) if cache else 0)  # the kernel gives unused file cache back
            total = int(limit[0])
            free = min(free, max(0, int(limit[0] - taken)))
    return total, free


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that a control group (a container, a service, a batch job) leaves this process; None: no less than the
    machine has."""
    limits = [
        limit
        for folder in _cgroups(root, "memory")
        for limit in (_numbers(folder / "memory.max", 1) or _numbers(folder / "memory.limit_in_bytes", 1))
    ]
    physical = re.search(r"MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"))
    most = 1024 * int(physical[1]) if physical else math.inf
    least = min(limits, default=math.inf)
    return int(least) if least < most else None


def memory_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for a lack of memory, of this process's control group where that counts
    them, else of the whole machine; None: nobody counts them."""
    files = [folder / name for folder in _cgroups(root, "memory") for name in ("memory.events", "memory.oom_control")]
    for file in (*files, root / "proc/vmstat"):
        if counted := re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE):
            return int(counted[1])
    return None


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control groups, its own and all above it; version 2 and 1."""
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            inner = base / path.lstrip("/")
            folders += [inner, *(parent for parent in inner.parents if base in (parent, *parent.parents))]
    return [folder for folder in folders if folder.is_dir()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _numbers(path: Path, count: int) -> tuple[float, ...]:
    """The first numbers of a file, "max" being infinite; () if there are fewer."""
    words = _text(path).split()[:count]
    numbers = tuple(math.inf if word == "max" else float(word) for word in words if re.fullmatch(r"max|-?\d+", word))
    return numbers if len(numbers) == count else ()
