"""One machine with the faults that it is given: a network namespace with a mount namespace and a memory limit."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.netlab import NoNetlab

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).with_name("shim.c")
LATIN1 = "en_US"  # its locale is ISO-8859-1
NOBODY = 12345  # a user's number that no list of users has


@dataclass(frozen=True)
class Faults:
    """:param shm_mb: size of /dev/shm; None: as it is
    :param memory: bytes that a control group leaves; None: no limit
    :param start_method: of multiprocessing, before any program begins
    :param no_record_locks: fcntl(2) locks nothing, as flock(2) does here in any case
    :param clock_off: s, from the start on
    :param user: the number of the user that all runs as, without a home folder; None: this one
    :param encoding: "latin1", or "" for this machine's own
    :param variables: of the environment, besides
    """

    shm_mb: int | None = None
    memory: int | None = None
    start_method: str = "fork"
    no_record_locks: bool = False
    clock_off: float = 0.0
    user: int | None = None
    encoding: str = ""
    umask: str = "022"
    variables: Mapping[str, str] = field(default_factory=dict)


class Machine:
    """Raises NoNetlab where this user may not make it."""

    def __init__(self, namespace: str, faults: Faults, folder: Path):
        self.namespace, self.faults, self.folder = namespace, faults, folder
        self.has_cgroup = False
        folder.mkdir()
        folder.chmod(0o777)
        self._clock = folder / "clock"
        self.set_clock(faults.clock_off)
        self._group: Path | None = None
        self._holder: subprocess.Popen | None = None

    def __enter__(self) -> Machine:
        steps = ["set -e"]
        if self.faults.shm_mb is not None:
            steps.append(f"mount -t tmpfs -o size={self.faults.shm_mb}m,mode=1777 tmpfs /dev/shm")
        if self.faults.memory is not None:
            steps.append(self._limit_memory(self.faults.memory))
        steps += ["echo ready", "exec sleep 3600"]
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "-m", "sh", "-c", "\n".join(steps)]
        self._holder = subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self._holder.stdout.readline() != "ready\n":
            raise NoNetlab(f"A machine cannot be made here: {self._holder.stderr.read().strip()}")
        _build(self.folder / "shim.so")
        (self.folder / "site").mkdir()
        lines = ["import multiprocessing", f"multiprocessing.set_start_method({self.faults.start_method!r})"]
        (self.folder / "site" / "sitecustomize.py").write_text("\n".join(lines) + "\n")
        if self.faults.encoding:
            made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(self.folder / LATIN1)]
            with contextlib.suppress(OSError):
                subprocess.run(made, capture_output=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
        if self._group is not None:
            _empty(self._group)
            with contextlib.suppress(OSError):
                self._group.rmdir()

    def start(self, *words: str, output: Path, home: Path) -> subprocess.Popen:
        """`volunteer-kit WORDS` there, as a job of this process: Ctrl-Z stops it.

        :param home: the user's home folder, if the user has one
        """
        user = []
        if self.faults.user is not None:
            may_read = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # Python may be root's
            user = ["setpriv", "--reuid", str(self.faults.user), "--clear-groups", *may_read, "--"]
        enters = f"echo $$ > {self._group}/cgroup.procs\n" if self._group is not None else ""
        begin = f'{enters}cd {self.folder}; umask {self.faults.umask}; exec "$@"'
        command = ["nsenter", "-t", str(self._holder.pid), "-m", "-n", "sh", "-c", begin, "sh", *user]
        with output.open("ab") as out:
            return subprocess.Popen(
                [*command, sys.executable, "-m", "volunteer_kit", *words], stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, env=self._environment(home), preexec_fn=os.setpgrp,
            )  # fmt: skip

    def set_clock(self, off: float) -> None:
        """:param off: s that its wall clock is ahead of the right one, from now on"""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(struct.pack("d", off))

    def _environment(self, home: Path) -> dict[str, str]:
        found = {
            "PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder / 'site'}",
            "LD_PRELOAD": str(self.folder / "shim.so"), "PREPARED_CLOCK": str(self._clock), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "TMPDIR": tempfile.gettempdir(),
        }  # fmt: skip
        found |= {name: value for name, value in os.environ.items() if name == "VOLUNTEER_KIT_STARTED_BY"}
        found |= {"HOME": str(home), "LANG": "C.UTF-8"} if self.faults.user is None else {"LANG": "C.UTF-8"}
        if self.faults.no_record_locks:
            found["PREPARED_NO_RECORD_LOCKS"] = "1"
        if self.faults.encoding:
            has_locale = (self.folder / LATIN1).is_dir()
            found |= {"LANG": LATIN1, "LOCPATH": str(self.folder)} if has_locale else {"PYTHONIOENCODING": "latin1"}
        return found | self.faults.variables

    def _limit_memory(self, limit: int) -> str:
        """A control group of our own; where none can be made, files that tell of one. :returns: lines of sh"""
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base = Path("/sys/fs/cgroup", controllers)
            group = base / path.lstrip("/") / f"prepared-{os.getpid()}"
            try:
                group.mkdir()
                if not (group / "cgroup.procs").exists():
                    raise OSError("no control groups are mounted there")
                (group / ("memory.limit_in_bytes" if controllers else "memory.max")).write_text(str(limit))
            except OSError:
                with contextlib.suppress(OSError):
                    group.rmdir()
                continue
            self._group, self.has_cgroup = group, True
            return ":"
        stated = "/sys/fs/cgroup"
        files = f"{stated}/memory/memory.limit_in_bytes {stated}/memory.max"
        return f"mount -t tmpfs tmpfs {stated}\nmkdir {stated}/memory\necho {limit} | tee {files} > /dev/null"


def _empty(group: Path) -> None:
    """End all that still runs in a control group, for else it stays."""
    deadline = time.monotonic() + 60.0
    while (pids := (group / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _build(target: Path) -> None:
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(target), str(SHIM)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoNetlab("There is no gcc here (Debian: apt-get install gcc).") from None
    if done.returncode:
        raise NoNetlab(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def program(namespace: str, words: Sequence[str], output: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """A Python program on another machine, until the end of the block."""
    enter = ["nsenter", f"--net=/run/netns/{namespace}", sys.executable, *words]
    path = os.pathsep.join(filter(None, [str(ROOT), variables.pop("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    with output.open("ab") as out, subprocess.Popen(
        enter, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
