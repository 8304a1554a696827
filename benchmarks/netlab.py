"""Homes in one machine: network namespaces on a bridge, each behind a line of its own, shaped both ways and counted.

    python benchmarks/netlab.py            are the lines as slow as they were asked to be?

    with Netlab([Line(down=20, up=10)] * 3) as lab:
        subprocess.Popen([*lab.inside(1), "python", "peer.py"])     # lives at lab.address(1)
        lab.traffic(1)                                              # what its line has carried
        lab.cut(1)

It takes root and iproute2. What it makes is removed at the end, however this process ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CLONE_NEWNET = 0x40000000
BURST = "64kb"  # what the shaper lets through at once: 50 ms of 10 Mbit/s
QUEUE = "200ms"  # the longest that a packet waits in it, as in a home router; then it is dropped
REMOVE = """
cat
for name in $0 $@; do ip netns pids $name | xargs -r kill -9; ip netns delete $name; done
"""  # end of input: who made them has come to its end


class NoNetlab(OSError):
    """No namespaces, or no shapers, can be had here; says why."""


@dataclass(frozen=True)
class Line:
    """One machine's line to the middle of the net.

    :param down: Mbit/s to it, headers of Ethernet, IP and TCP included; None: as fast as the kernel is
    :param up: Mbit/s from it
    :param rtt: ms from the machine to the middle and back. Where the kernel has no netem there is none, and
        `Netlab.delays` is False
    """

    down: float | None = None
    up: float | None = None
    rtt: float = 0.0


class Traffic(NamedTuple):
    """Bytes on a machine's line, headers included."""

    sent: int
    received: int


class Netlab:
    """One namespace for each of `lines`, numbered from 1, on a bridge in a namespace of its own.

    Raises NoNetlab on entering, where this user may not make one.
    """

    def __init__(self, lines: Sequence[Line]):
        self.lines, self.delays = lines, any(line.rtt for line in lines)
        self.tag = f"vk{os.getpid()}"
        self.machines = [f"{self.tag}-{number}" for number in range(1, len(lines) + 1)]
        self.switch = f"{self.tag}-0"
        self._remover: subprocess.Popen | None = None

    def __enter__(self) -> Netlab:
        if shutil.which("ip") is None:
            raise NoNetlab("There is no `ip` command here (Debian: apt-get install iproute2).")
        self._remover = subprocess.Popen(
            ["sh", "-c", REMOVE, *self.machines, self.switch],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
            ip("-n", self.switch, "link", "set", "switch", "up")
            for number, (machine, line) in enumerate(zip(self.machines, self.lines, strict=True), start=1):
                self._connect(number, machine, line)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self, number: int, machine: str, line: Line) -> None:
        far = f"to{number}"
        ip("netns", "add", machine)
        ip("-n", machine, "link", "add", "line", "type", "veth", "peer", "name", far)
        if line.down or line.up:  # packets as they are on a wire: neither counters nor shapers see 64 kB for one header
            for device in ("line", far):
                ip("-n", machine, "link", "set", device, "gso_max_segs", "1")
        ip("-n", machine, "link", "set", far, "netns", self.switch)
        ip("-n", self.switch, "link", "set", far, "master", "switch", "up")
        ip("-n", machine, "addr", "add", f"{self.address(number)}/24", "dev", "line")
        ip("-n", machine, "link", "set", "lo", "up")
        ip("-n", machine, "link", "set", "line", "up")
        self._shape(machine, "line", line.up, line.rtt / 2)
        self._shape(self.switch, far, line.down, line.rtt / 2)

    def _shape(self, machine: str, device: str, mbps: float | None, delay: float) -> None:
        """What leaves the machine by this device."""
        add, at = ["tc", "-n", machine, "qdisc", "add", "dev", device], ["root"]
        if delay and self.delays:
            netem = ["root", "handle", "1:", "netem", "delay", f"{delay:g}ms", "limit", "10000"]
            self.delays = subprocess.run([*add, *netem], capture_output=True).returncode == 0
            at = ["parent", "1:", "handle", "2:"] if self.delays else at
        if mbps:
            run(*add, *at, "tbf", "rate", f"{mbps:g}mbit", "burst", BURST, "latency", QUEUE)

    def __exit__(self, *_) -> None:
        """Ends what still lives in it, too."""
        self._remover.communicate()

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number}"

    def inside(self, number: int) -> list[str]:
        """What stands before a command that is to run on this machine."""
        return ["ip", "netns", "exec", self.machines[number - 1]]

    def traffic(self, number: int) -> Traffic:
        """Since it was made."""
        told = ip("-n", self.machines[number - 1], "-s", "-j", "link", "show", "dev", "line")
        counted = json.loads(told)[0]["stats64"]
        return Traffic(counted["tx"]["bytes"], counted["rx"]["bytes"])

    def cut(self, number: int) -> None:
        """The line of this machine is dead: nothing is refused, nothing arrives."""
        ip("-n", self.switch, "link", "set", f"to{number}", "nomaster")

    def mend(self, number: int) -> None:
        ip("-n", self.switch, "link", "set", f"to{number}", "master", "switch")


def enter(name: str) -> None:
    """Make the calling thread, and all that it begets, live in the network namespace `name`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"could not enter the network namespace {name}")


def ip(*words: str) -> str:
    return run("ip", *words)


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NoNetlab(f"{' '.join(words)}: {done.stderr.strip()}\nNetwork namespaces and shaped lines take root.")
    return done.stdout


# --- are the lines what they were asked to be? ---

ASKED = (Line(down=20, up=10, rtt=40), Line(down=50, up=25), Line(down=5, up=1), Line())
SECONDS, PORT = 6.0, 4000


def pour(address: str) -> None:
    """Send for as long as this process lives."""
    with socket.create_connection((address, PORT)) as pipe:
        while True:
            pipe.sendall(bytes(2**16))


def drain() -> None:
    """Take what one comes to send."""
    with socket.create_server(("", PORT)) as door:
        print("open", flush=True)
        pipe, _ = door.accept()
        while pipe.recv(2**20):
            pass


def measure(lab: Netlab, sender: int, receiver: int) -> float:
    """Mbit/s on the sender's line, once its buffers are full."""
    script = [sys.executable, __file__]
    taker = subprocess.Popen([*lab.inside(receiver), *script, "--drain"], stdout=subprocess.PIPE)
    giver = None
    try:
        taker.stdout.readline()
        giver = subprocess.Popen([*lab.inside(sender), *script, "--pour", lab.address(receiver)])
        time.sleep(1.0)
        began, before = time.monotonic(), lab.traffic(receiver).received
        time.sleep(SECONDS)
        return 8e-6 * (lab.traffic(receiver).received - before) / (time.monotonic() - began)
    finally:
        for process in filter(None, (giver, taker)):
            process.kill()
            process.wait()


def main() -> int:
    far = len(ASKED)  # its own line is as fast as the kernel
    off = []
    with Netlab(ASKED) as lab:
        print(f"{'line':>6}{'':>6}{'asked':>8}{'measured':>10}   Mbit/s")
        for number, line in enumerate(ASKED[:-1], start=1):
            for name, asked, ends in (("down", line.down, (far, number)), ("up", line.up, (number, far))):
                found = measure(lab, *ends)
                off.append(abs(found / asked - 1))
                print(f"{number:>6}{name:>6}{asked:>8g}{found:>10.2f}", flush=True)
        if not lab.delays:
            print("This kernel has no netem: no line has a delay of its own.")
    print(json.dumps({"largest_error": round(max(off), 4), "delays": lab.delays}))
    return 0 if max(off) <= 0.05 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pour"]:
        pour(sys.argv[2])
    elif sys.argv[1:] == ["--drain"]:
        drain()
    else:
        try:
            sys.exit(main())
        except NoNetlab as e:
            sys.exit(str(e))
