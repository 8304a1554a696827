"""A network of machines in one: namespaces on a bridge, with lines that can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """Make the calling thread, and all that it begets, live in the network namespace `name`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"could not enter the network namespace {name}")


class Network:
    """`machines` namespaces, 10.77.0.1 and so on, each with a line of its own to a switch in the middle."""

    def __init__(self, machines: int):
        self.tag = f"vk{os.getpid()}"
        self.machines = [f"{self.tag}-{number}" for number in range(1, machines + 1)]
        self.switch = f"{self.tag}-0"

    def __enter__(self) -> Network:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for number, machine in enumerate(self.machines, start=1):
            ip("netns", "add", machine)
            ip("-n", machine, "link", "add", "line", "type", "veth", "peer", "name", f"to{number}")
            ip("-n", machine, "link", "set", f"to{number}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"to{number}", "master", "switch", "up")
            ip("-n", machine, "addr", "add", f"{self.address(number)}/24", "dev", "line")
            ip("-n", machine, "link", "set", "lo", "up")
            ip("-n", machine, "link", "set", "line", "up")
        return self

    def __exit__(self, *_) -> None:
        for name in (*self.machines, self.switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number}"

    def settings(self, number: int) -> dict:
        """What a peer of tests/swarm_peer.py needs to live on machine `number`, from 1."""
        maddrs = [f"/ip4/{self.address(number)}/tcp/0"]
        return {"network": self.machines[number - 1], "host_maddrs": maddrs, "client_mode": False}

    def cut(self, number: int) -> None:
        """The line of machine `number` is dead: nothing is refused, nothing arrives."""
        ip("-n", self.switch, "link", "set", f"to{number}", "nomaster")

    def mend(self, number: int) -> None:
        ip("-n", self.switch, "link", "set", f"to{number}", "master", "switch")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(machines: int) -> Iterator[Network]:
    """A Network, removed at the end. Skips where this user may not make one."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command here (Debian: apt-get install iproute2)")
    made = Network(machines)
    try:
        try:
            made.__enter__()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"making network namespaces needs root: {e.stderr.strip()}")
        yield made
    finally:
        made.__exit__()
