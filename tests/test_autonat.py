"""Whether other peers can call this machine: AutoNAT's messages, and a real peer that is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hivemind.utils.multiaddr import Multiaddr

from benchmarks.netlab import NoNetlab
from benchmarks.reachability_parts.cells import CELLS
from benchmarks.reachability_parts.dialling import look
from tests.local_swarm import ROOT
from tests.network import Network, network
from volunteer_kit.process_group import kill_all
from volunteer_kit.swarm.net import autonat


def response(status: int, address: str | None = None) -> bytes:
    inner = b"\x08" + autonat._varint(status)
    if address:
        inner += autonat._field(3, Multiaddr(address).to_bytes())
    return b"\x08\x01" + autonat._field(3, inner)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (response(0, "/ip4/45.77.0.2/tcp/4002"), ("reached", "/ip4/45.77.0.2/tcp/4002")),
        (response(100), ("not reached", "")),
        (response(101), (autonat.WHY_NOT[101], "")),
        (response(300), ("the peer answered with status 300", "")),
    ],
)
def test_answers_of_autonat(message, answer):
    assert autonat.read_answer(message) == answer


@pytest.mark.parametrize("message", [b"\x1a\x05\x08", b"\x1a", b"\xff" * 30, b"\x0d\x00\x00\x00\x00"])
def test_what_a_stranger_sends_instead_is_refused(message):
    with pytest.raises(ValueError):
        autonat.read_answer(message)


class PublicNetwork(Network):
    """With addresses that AutoNAT takes for public ones."""

    @staticmethod
    def address(number: int) -> str:
        return f"45.77.0.{number}"


SERVE = """
import asyncio
from hivemind.p2p import P2P

async def main():
    p2p = await P2P.create(host_maddrs=["/ip4/45.77.0.1/tcp/4001"], startup_timeout=60)
    print((await p2p.get_visible_maddrs())[0], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
CLOSED = """
import asyncio, sys
from hivemind.p2p import P2P, PeerID
from volunteer_kit.swarm.net.autonat import call_back

async def main():  # it listens where nobody can call
    p2p = await P2P.create(initial_peers=sys.argv[1:], host_maddrs=["/ip4/127.0.0.1/tcp/4002"], startup_timeout=60)
    peer = PeerID.from_base58(sys.argv[1].rpartition("/")[2])
    print((await call_back(p2p, peer, ["/ip4/45.77.0.2/tcp/4002"])).status)
    await p2p.shutdown()

asyncio.run(main())
"""


@pytest.mark.slow
def test_another_peer_says_whether_it_can_call_this_machine(monkeypatch):
    monkeypatch.setattr("tests.network.Network", PublicNetwork)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with network(2) as net:
        server = subprocess.Popen(
            ["ip", "netns", "exec", net.machines[0], sys.executable, "-c", SERVE],
            stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            address = server.stdout.readline().strip()

            def ask(*command: str) -> str:
                done = subprocess.run(
                    ["ip", "netns", "exec", net.machines[1], sys.executable, *command, address],
                    capture_output=True, text=True, env=environment, timeout=120, check=True,
                )  # fmt: skip
                return done.stdout.splitlines()[-1]

            found = json.loads(ask("-m", "volunteer_kit.doctor.probe", "peer", "0", "may_ask"))
            assert found["results"] == {address: ""} and not found["client_mode"]
            assert found["answers"] == {"IPv4": "reached"}
            assert found["situation"] == "a machine with a public IPv4 address"
            assert ask("-c", CLOSED) == "not reached"
        finally:
            kill_all(server.pid)
            server.wait()


@pytest.mark.slow
def test_machines_on_all_kinds_of_lines_find_out_and_meet():
    """A dual-stack home, two homes and a host, local names, IPv6 only, a carrier-grade NAT, a firewall."""
    with ThreadPoolExecutor(len(CELLS)) as pool:
        try:
            looks = list(pool.map(look, CELLS))
        except NoNetlab as e:
            pytest.skip(str(e))
    for cell, found in zip(CELLS, looks, strict=True):
        assert found.client_modes == tuple(house.client_mode for house in cell.houses), (cell.name, found)
        assert found.meets, (cell.name, found)
