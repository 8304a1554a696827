"""What lies between a home and the middle of the net, where the kernel has no netem: delay, and packets that are lost.

    relay.py WIRES

Two TAP devices a wire, one in the machine's namespace and one in the switch's, and this process between them: a frame
that comes out of one goes into the other half a round trip later, or never. Order is kept. WIRES is JSON, a list of
dicts with the fields of Wire.

It says "ready" when the devices are there, and ends, and they with it, at the end of its input. While frames are on
their way it looks once a millisecond, for all lines together, and not at each frame.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.netlab_parts.kernel import enter

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LONGEST = 2**16  # bytes of a frame
AT_ONCE = 64  # frames taken from one device before the others have their turn
TICK = 0.001  # s between two looks
HELD = 10_000  # frames on one way: 1 s at 120 Mbit/s; the next ones are lost


@dataclass(frozen=True)
class Wire:
    """:param machine, near: namespace and name of the device at home
    :param switch, far: those of the one in the middle
    :param delay: s each way
    :param loss: share of the frames that are lost, each way
    """

    machine: str
    near: str
    switch: str
    far: str
    delay: float
    loss: float


@dataclass
class Way:
    """One direction of a wire."""

    source: int
    target: int
    delay: float
    loss: float
    held: deque[tuple[float, bytes]] = field(default_factory=deque)  # (when it is due, frame)

    def take(self) -> None:
        """What has come to the source."""
        due = time.monotonic() + self.delay - TICK  # it has waited half a tick, and will wait another half
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self.source, LONGEST)
            except OSError:  # none is left, or the device is down
                return
            if len(self.held) < HELD and not (self.loss and random.random() < self.loss):
                self.held.append((due, frame))

    def give(self, now: float) -> None:
        """What is due, to the target."""
        while self.held and self.held[0][0] <= now:
            with contextlib.suppress(OSError):  # its queue is full, or it is down: lost
                os.write(self.target, self.held[0][1])
            self.held.popleft()


def make_device(namespace: str, name: str) -> int:
    """A TAP device; it lives as long as the file."""
    enter(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def make_ways(wires: list[Wire]) -> list[Way]:
    ways = []
    for wire in wires:
        near, far = make_device(wire.machine, wire.near), make_device(wire.switch, wire.far)
        ways += [Way(near, far, wire.delay, wire.loss), Way(far, near, wire.delay, wire.loss)]
    return ways


def relay(ways: list[Way]) -> None:
    """Until the input ends."""
    by_source = {way.source: way for way in ways}
    while True:
        is_busy = any(way.held for way in ways)
        if is_busy:
            time.sleep(TICK)
        ready, _, _ = select.select([0, *by_source], [], [], 0 if is_busy else None)
        if 0 in ready:
            if not os.read(0, LONGEST):
                return
            ready.remove(0)
        for source in ready:
            by_source[source].take()
        now = time.monotonic()
        for way in ways:
            way.give(now)


if __name__ == "__main__":
    try:
        os.nice(-15)
        ways = make_ways([Wire(**wire) for wire in json.loads(sys.argv[1])])
    except OSError as e:
        sys.exit(f"no TAP devices can be had here: {e}")
    print("ready", flush=True)
    relay(ways)
