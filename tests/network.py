"""A network of machines in one: namespaces on a bridge, with lines that can be cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks.netlab import Line, Netlab, NoNetlab


class Network(Netlab):
    """`machines` of them, 10.77.0.1 and so on, with lines as fast as the kernel."""

    def __init__(self, machines: int):
        super().__init__([Line()] * machines)

    def settings(self, number: int) -> dict:
        """What a peer of tests/swarm_peer.py needs to live on machine `number`, from 1."""
        maddrs = [f"/ip4/{self.address(number)}/tcp/0"]
        return {"network": self.machines[number - 1], "host_maddrs": maddrs, "client_mode": False}


@contextlib.contextmanager
def or_skip(lab):
    """Enter a Netlab; the test is skipped where there can be none."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(lab)
        except NoNetlab as e:
            pytest.skip(str(e))
        yield made


@contextlib.contextmanager
def network(machines: int) -> Iterator[Network]:
    """A Network, removed at the end. Skips where this user may not make one."""
    with or_skip(Network(machines)) as made:
        yield made
