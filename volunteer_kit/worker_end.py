"""How a worker process ended: in words, and whether another one may follow it."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.device.machine import memory_kills, memory_limit, usable_memory
from volunteer_kit.home import log_end
from volunteer_kit.training.protocol import BROKEN, OFFLINE, REFUSED, RENEW, WorkerSpec

GB = 1e9
HOPELESS = 0.4  # of what training needs, which is reckoned with some room: the demo takes 0.75 GB of its 1.5

NOT_NOW = ("startup", "port_taken")  # errors that tell about this moment, where all was well before


def memory_words(limit: float, is_limited: bool, needed: float | None) -> str:
    """A clause that names both numbers.

    :param limit: bytes of RAM that a process may have here
    :param is_limited: a control group leaves it less than the machine has
    :param needed: bytes that training takes about; None: it ended before that was known
    """
    whose = "its control group (a container, a service or a batch job) leaves it" if is_limited else "this machine has"
    need = f", and training needs about {needed / GB:.1f}" if needed is not None else ""
    return f"{whose} {limit / GB:.1f} GB of memory{need}"


def more_memory(needed: float | None) -> str:
    """How to get so many bytes, as numbered lines."""
    size = math.ceil((needed or 2 * GB) / GB * 1.2)
    return (
        f"1. Give it more: docker run --memory={size}g (systemd: MemoryMax={size}G; Slurm: --mem={size}G)\n"
        "2. Close other programs; see which take most: ps aux --sort=-rss | head\n"
        "3. Or join a run with a smaller model."
    )


def too_little_memory(needed: float, peers_on_machine: int = 1, root: Path = Path("/")) -> str | None:
    """What to tell where this machine has far too little for `needed` bytes; None: it can be tried."""
    total = usable_memory(root)[0] / max(1, peers_on_machine)
    if total >= HOPELESS * needed:
        return None
    told = memory_words(total, memory_limit(root) is not None, needed)
    return f"There is too little memory to train: {told}.\n{more_memory(needed)}"


class MemoryWatch:
    """Whether the kernel has killed a process here for a lack of memory since this was made.

    :param root: where /proc and /sys are
    """

    def __init__(self, root: Path = Path("/")):
        self._root, self._before = root, memory_kills(root)

    def lack(self, plan: Mapping[str, Any]) -> Lack | None:
        """:param plan: the worker's newest "device" or "plan" event, {} if there was none"""
        now = memory_kills(self._root)
        if self._before is None or now is None or now <= self._before:
            return None
        batch, needed = plan.get("batch_size"), plan.get("memory_bytes")
        limit = usable_memory(self._root)[0]
        return Lack(limit, memory_limit(self._root) is not None, needed, batch, bool(plan.get("checkpointing")))


class Lack(NamedTuple):
    """Memory ran out: what there was, and with which plan."""

    limit: int  # bytes
    is_limited: bool
    needed: float | None = None  # bytes
    batch_size: int | None = None  # of the plan; None: it ended before it had one
    checkpointing: bool = False

    def in_words(self) -> str:
        """A clause, without a full stop."""
        with_plan = f" with batches of {self.batch_size}" if self.batch_size is not None else ""
        told = memory_words(self.limit, self.is_limited, self.needed)
        return f"memory ran out{with_plan} and the kernel killed it: {told}"

    def smaller(self, spec: WorkerSpec) -> WorkerSpec | None:
        """What the next worker is to do; None: no smaller plan is left."""
        half = (self.batch_size or 1) // 2
        if half and (spec.most_samples is None or half < spec.most_samples):
            return spec.model_copy(update={"most_samples": half})
        if self.checkpointing or spec.recompute:
            return None
        return spec.model_copy(update={"most_samples": 1, "recompute": True})


@dataclass(frozen=True)
class WorkerEnd:
    """What is known of one worker that is gone.

    :param exit_code: negative: killed by that signal; None: it could not be started
    :param error: message and `error_kind` of its newest "error" or "broken" event; empty: it sent none
    :param lack: of memory, if the kernel killed one of its processes for that
    """

    exit_code: int | None
    error: str = ""
    error_kind: str = ""
    lack: Lack | None = None

    def may_be_followed(self, crashes: int, max_restarts: int, was_connected: bool) -> bool:
        """A line that was there once is waited for as long as it takes; what crashes again and again is not.

        :param crashes: in a row, this one included
        :param was_connected: some worker has met the swarm
        """
        if self.exit_code == OFFLINE:
            return was_connected
        if self.exit_code == REFUSED and not (was_connected and self.error_kind in NOT_NOW):
            return False
        return crashes <= max_restarts

    def in_words(self) -> str:
        """A clause, without a full stop."""
        code = self.exit_code
        if self.lack is not None and code in (-signal.SIGKILL, BROKEN):
            return self.lack.in_words()
        if code is None:
            return self.error or "it could not be started"
        if code in (REFUSED, BROKEN, OFFLINE) and self.error:
            return self.error.splitlines()[0].rstrip(".")
        if code == OFFLINE:
            return "nobody could be reached"
        if code == RENEW:
            return "it begins afresh"
        if code == -signal.SIGKILL:
            return "it was killed (SIGKILL), often the system's answer to a lack of memory"
        if code == -signal.SIGBUS:
            return "it was killed (SIGBUS), mostly because shared memory was full: df -h /dev/shm"
        return f"it ended with exit code {code}" if code >= 0 else f"it was killed by signal {-code}"

    def why_given_up(self, crashes: int, log_path: Path) -> str:
        """To be read where no worker follows: what happened, what to do, and the end of the log."""
        if self.exit_code in (REFUSED, OFFLINE):
            return self.error or f"The worker refused to go on. {log_path} ends with:\n{log_end(log_path)}"
        if self.lack is not None:
            return (
                f"The worker cannot go on: {self.in_words()}, with the smallest plan there is. Samples already counted "
                f"are safe.\n{more_memory(self.lack.needed)}"
            )
        often = f"{crashes} times in a row" if crashes > 1 else "once, and restarting is switched off"
        return (
            f"The worker crashed {often} ({self.in_words()}). Samples already counted are safe.\n"
            f"  1. Read the end of its log: tail -n 50 {log_path}\n"
            "  2. If it speaks of memory, close other programs; if of the disk, make room.\n"
            f"  3. Join again.\nThe log ends with:\n{log_end(log_path)}"
        )
