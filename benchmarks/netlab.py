"""Homes in one machine: network namespaces on a bridge, each behind a line of its own, shaped both ways and counted.

    python benchmarks/netlab.py            are the lines what they were asked to be?

    with Netlab([Line(down=20, up=10, rtt=40, nat=True), *[Line(down=20, up=10)] * 2]) as lab:
        subprocess.Popen([*lab.inside(1), "python", "peer.py"])     # lives at lab.address(1)
        lab.traffic(1)                                              # what its line has carried
        lab.cut(1)
        lab.partition([1, 2])                                       # from now on these two see only each other
        lab.mend()

It takes root and iproute2, and /dev/net/tun for delay and loss. What it makes is removed at the end, however this
process ends.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.netlab_parts.descendants import without_mark
from benchmarks.netlab_parts.kernel import NoNetlab, enter, ip, run, works
from benchmarks.netlab_parts.relay import Wire

__all__ = ["Line", "Netlab", "NoNetlab", "Traffic", "enter"]

_LABS = itertools.count()  # of this process
RELAY = Path(__file__).with_name("netlab_parts") / "relay.py"
BURST = 64.0  # kB that the shaper lets through at once: 50 ms of 10 Mbit/s
QUEUE = "200ms"  # the longest that a packet waits in it, as in a home router; then it is dropped
# Removes from /dev/shm what killed processes leave there, and then ends. Killed with them it left 13 GB in a day.
JANITOR = "torch_shm_manager"
REMOVE = f"""
cat
for name in $0 $@; do
  for pid in $(ip netns pids $name); do grep -q {JANITOR[:15]} /proc/$pid/comm || kill -9 $pid; done
  ip netns delete $name
done
"""  # end of input: who made them has come to its end
# A classic BPF program on what arrives: IPv4's UDP, and TCP's SYN without ACK, are dropped (2), all else goes on (-1).
# It keeps no state, and neither nftables nor a drop action of tc need be there.
NOTHING_NEW = (
    "11,40 0 0 12,21 0 8 2048,48 0 0 23,21 5 0 17,21 0 5 6,177 0 0 14,80 0 0 27,84 0 0 18,21 0 1 2,6 0 0 2,"
    "6 0 0 4294967295"
)


def is_janitor(pid: int) -> bool:
    try:
        return psutil.Process(pid).name() == JANITOR
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Line:
    """One machine's line to the middle of the net.

    :param down: Mbit/s to it, headers of Ethernet, IP and TCP included; None: as fast as the kernel is
    :param up: Mbit/s from it
    :param rtt: ms from the machine to the middle and back; between two machines it is the sum of both
    :param loss: share of the packets that are lost on the way, each way, one independent of the other
    :param nat: nobody can connect to it; it can connect to others. All of UDP stays outside
    :param burst: kB that the shaper lets through at once. Raise it for lines over 200 Mbit/s that stay below their rate
    """

    down: float | None = None
    up: float | None = None
    rtt: float = 0.0
    loss: float = 0.0
    nat: bool = False
    burst: float = BURST

    @property
    def is_ideal(self) -> bool:
        """Neither delay nor loss."""
        return not self.rtt and not self.loss


class Traffic(NamedTuple):
    """Bytes on a machine's line, headers included, and packets."""

    sent: int
    received: int
    packets_sent: int
    packets_received: int


class Netlab:
    """One namespace for each of `lines`, numbered from 1, on a bridge in a namespace of its own.

    Raises NoNetlab on entering, where this user may not make one. `relayed`: delay and loss are a user-space relay's,
    netem is missing.
    """

    def __init__(self, lines: Sequence[Line]):
        self.lines, self.relayed = lines, False
        self.tag = f"vk{os.getpid()}.{next(_LABS)}"
        self.machines = [f"{self.tag}-{number}" for number in range(1, len(lines) + 1)]
        self.switch = f"{self.tag}-0"
        self._remover: subprocess.Popen | None = None
        self._relay: subprocess.Popen | None = None

    def __enter__(self) -> Netlab:
        for command in ("ip", "tc"):
            if shutil.which(command) is None:
                raise NoNetlab(f"There is no `{command}` command here (Debian: apt-get install iproute2).")
        self._remover = subprocess.Popen(
            ["sh", "-c", REMOVE, *self.machines, self.switch],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=without_mark(),  # it cleans up when we have ended
        )  # fmt: skip
        try:
            for namespace in (self.switch, *self.machines):
                ip("netns", "add", namespace)
            for bridge in ("switch", "apart"):
                ip("-n", self.switch, "link", "add", bridge, "type", "bridge")
                ip("-n", self.switch, "link", "set", bridge, "up")
            self.relayed = not all(line.is_ideal for line in self.lines) and not self._has_netem()
            if self.relayed:
                self._start_relay()
            for number, line in enumerate(self.lines, start=1):
                self._connect(number, line)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _has_netem(self) -> bool:
        netem = ["qdisc", "replace", "dev", "apart", "root", "netem", "delay", "1ms"]
        return works("tc", "-n", self.switch, *netem)

    def _start_relay(self) -> None:
        """One for all lines that are not ideal; it makes their devices."""
        wires = [
            asdict(Wire(machine, "line", self.switch, f"to{number}", line.rtt / 2000, line.loss))
            for number, (machine, line) in enumerate(zip(self.machines, self.lines, strict=True), start=1)
            if not line.is_ideal
        ]
        self._relay = subprocess.Popen(
            [sys.executable, str(RELAY), json.dumps(wires)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        if self._relay.stdout.readline() != "ready\n":
            raise NoNetlab("Lines with delay or loss: " + self._relay.stderr.read().strip()[-500:])

    def _connect(self, number: int, line: Line) -> None:
        machine, far = self.machines[number - 1], f"to{number}"
        if not (self.relayed and not line.is_ideal):
            ip("-n", machine, "link", "add", "line", "type", "veth", "peer", "name", far)
            if line.down or line.up:  # packets as on a wire: neither counters nor shapers see 64 kB for one header
                for device in ("line", far):
                    ip("-n", machine, "link", "set", device, "gso_max_segs", "1")
            ip("-n", machine, "link", "set", far, "netns", self.switch)
        ip("-n", self.switch, "link", "set", far, "master", "switch", "up")
        ip("-n", machine, "addr", "add", f"{self.address(number)}/24", "dev", "line")
        ip("-n", machine, "link", "set", "lo", "up")
        ip("-n", machine, "link", "set", "line", "up")
        self._shape(machine, "line", line.up, line)
        self._shape(self.switch, far, line.down, line)
        if line.nat:
            run("tc", "-n", machine, "qdisc", "add", "dev", "line", "clsact")
            only = ["bpf", "direct-action", "bytecode", NOTHING_NEW]
            run("tc", "-n", machine, "filter", "add", "dev", "line", "ingress", *only)

    def _shape(self, machine: str, device: str, mbps: float | None, line: Line) -> None:
        """What leaves the machine by this device."""
        add, at = ["tc", "-n", machine, "qdisc", "replace", "dev", device], ["root"]
        if not line.is_ideal and not self.relayed:
            netem = ["netem", "delay", f"{line.rtt / 2:g}ms", "loss", f"{100 * line.loss:g}%", "limit", "10000"]
            run(*add, "root", "handle", "1:", *netem)
            at = ["parent", "1:", "handle", "2:"]
        if mbps:
            run(*add, *at, "tbf", "rate", f"{mbps:g}mbit", "burst", f"{1000 * line.burst:.0f}b", "latency", QUEUE)

    def reshape(self, number: int, line: Line) -> None:
        """Another speed for this machine's line, which has one; nothing else of it changes."""
        self._shape(self.machines[number - 1], "line", line.up, line)
        self._shape(self.switch, f"to{number}", line.down, line)

    def __exit__(self, *_) -> None:
        """Ends what still lives in it, too."""
        self._remover.communicate()
        if self._relay is not None:
            self._relay.communicate()

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number}"

    def inside(self, number: int) -> list[str]:
        """What stands before a command that is to run on this machine."""
        return ["ip", "netns", "exec", self.machines[number - 1]]

    def processes(self, number: int) -> list[int]:
        """Ids of all that live on this machine, whatever session or group they have gone into, but for the janitor."""
        return [int(pid) for pid in ip("netns", "pids", self.machines[number - 1]).split() if not is_janitor(int(pid))]

    def traffic(self, number: int) -> Traffic:
        """Since it was made."""
        told = ip("-n", self.machines[number - 1], "-s", "-j", "link", "show", "dev", "line")
        sent, received = (json.loads(told)[0]["stats64"][way] for way in ("tx", "rx"))
        return Traffic(sent["bytes"], received["bytes"], sent["packets"], received["packets"])

    def cut(self, number: int) -> None:
        """The line of this machine is dead: nothing is refused, nothing arrives."""
        ip("-n", self.switch, "link", "set", f"to{number}", "nomaster")

    def partition(self, numbers: Iterable[int]) -> None:
        """These machines see only each other from now on, and the others only each other."""
        for number in numbers:
            ip("-n", self.switch, "link", "set", f"to{number}", "master", "apart")

    def mend(self, number: int | None = None) -> None:
        """After cut or partition; None: all machines."""
        for each in range(1, len(self.lines) + 1) if number is None else [number]:
            ip("-n", self.switch, "link", "set", f"to{each}", "master", "switch")


if __name__ == "__main__":
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    from benchmarks.netlab_parts.check import main

    try:
        sys.exit(main())
    except NoNetlab as e:
        sys.exit(str(e))
