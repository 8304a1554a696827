"""State between peers: who gives it, who holds the same, and that what is taken equals the donor's to the last bit."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import DownloadRequest
from hivemind.utils import ValueWithExpiration

from tests.one_averager import make_averager, seen_donors
from volunteer_kit.swarm.agreement import BEGINNING, sketch
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.state import digest, read_donors

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))


@pytest.fixture
def averager(peer):
    return make_averager(peer)


def test_a_donor_holds_few_copies_at_once(averager, monkeypatch):
    """Each download holds a copy of the whole state until it is sent, and strangers may read slowly."""

    async def ask() -> list[int]:
        downloads = [averager.rpc_download_state(DownloadRequest(), Mock(remote_id=A)) for _ in range(4)]
        begun = [await anext(download, None) for download in downloads]
        await downloads[0].aclose()  # it hangs up
        begun.append(await anext(averager.rpc_download_state(DownloadRequest(), Mock(remote_id=A)), None))
        return [part is not None for part in begun]

    metadata, tensors, infos = averager.get_current_state()
    given = AsyncMock(return_value=(averager.serializer.dumps(metadata), tensors, infos))
    monkeypatch.setattr(averager, "_get_current_state_from_host_process", given)
    assert asyncio.run(ask()) == [True, True, True, False, True]


def test_what_strangers_declare_is_read_with_care():
    declared = {peer.to_bytes(): ValueWithExpiration([5, b"x"], 1e10) for peer in (A, D)}
    records = {
        **declared,
        "words": ValueWithExpiration(9, 1e10),
        B.to_bytes(): ValueWithExpiration(None, 1e10),  # it has left
        C.to_bytes(): 9,
        b"": ValueWithExpiration(9, 1e10),
        b"\xff" * 300: ValueWithExpiration(9, 1e10),
    }
    assert read_donors(records, D) == {A: [5, b"x"]}, "neither ourselves nor what is no donor"
    for nothing in (None, "words", [1], {}):
        assert read_donors(nothing, D) == {}


X, Y = (sketch([torch.full((99,), value)], 5) for value in (1.0, 2.0))


@pytest.mark.parametrize(
    "told, agreed",
    [
        ([[5, X, BEGINNING], [5, X, BEGINNING]], True),
        ([[5, X, BEGINNING], [5, Y, BEGINNING]], False),
        ([[5, X, BEGINNING], [5, X, BEGINNING], [5, Y, BEGINNING]], False),
        ([[5, X, BEGINNING], [4, X, BEGINNING]], False),
        ([[5, X, BEGINNING], None], False),
        ([[5, X, BEGINNING], [5]], False),
        ([[5, X, BEGINNING], [5, {"x": 1}, BEGINNING]], False),
        ([[5, None, BEGINNING], [5, None, BEGINNING]], False),
    ],
)
def test_members_agree_when_all_hold_the_same(averager, told, agreed):
    assert averager.is_in_agreement(dict(zip((A, B, C), told, strict=False))) is agreed


# --- through the network ---


def test_a_donor_is_seen_all_the_time(peer):
    """hivemind's declaration expires before the next one is stored: who doubts its state then finds nobody better."""
    donor = make_averager(peer, start=True, period=3.0, prefix="seen")
    try:
        deadline = time.monotonic() + 120
        while peer.peer_id not in seen_donors(peer, "seen"):
            assert time.monotonic() < deadline
        until = time.monotonic() + 6.5  # two more declarations
        while time.monotonic() < until:
            assert peer.peer_id in seen_donors(peer, "seen")
    finally:
        donor.shutdown()


def test_a_newcomer_equals_its_donor_to_the_last_bit(peer):
    """Download over libp2p; a donor with a broken state is refused and the next one asked."""
    others = [
        start_peer(PeerConfig(initial_peers=peer.visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
        for _ in range(2)
    ]
    averagers = []
    try:
        donor, broken = make_averager(peer, start=True, seed=1), make_averager(others[0], start=True, seed=2)
        averagers += [donor, broken]
        for averager, epoch in [(donor, 3), (broken, 9)]:
            for _ in range(epoch):
                averager.step(increment_epoch=True, optimizer_step=True)
        broken.state_tensors()[1][2] = float("nan")
        newcomer = make_averager(others[1], start=True)
        averagers.append(newcomer)
        deadline = time.monotonic() + 120
        while not seen_donors(others[1]).items() >= {peer.peer_id: 3, others[0].peer_id: 9}.items():
            assert time.monotonic() < deadline, seen_donors(others[1])
            time.sleep(0.05)

        assert newcomer.load_state_from_peers(timeout=120.0) is True
        assert newcomer.last_donor == str(peer.peer_id), "the broken one was asked first, and refused"
        assert digest(newcomer.state_tensors()) == digest(donor.state_tensors())
        assert newcomer.local_epoch == 3
        assert newcomer.optimizer.state[newcomer.optimizer.param_groups[0]["params"][0]]["steps"] == 3

        assert newcomer.told == donor.told and newcomer.told[0] == 3, "and says so"

        newcomer.local_epoch = 4  # nobody that fits is as far as we are
        assert newcomer.load_state_from_peers(timeout=120.0) is False
        assert newcomer.local_epoch == 4
        newcomer.local_epoch = 3
        assert newcomer.load_state_from_peers(timeout=120.0, at_least=4) is False, "nor as far as was asked for"
        assert newcomer.load_state_from_peers(timeout=120.0, donors=[others[0].peer_id]) is False, "only who was named"
        assert newcomer.load_state_from_peers(timeout=120.0, donors=[peer.peer_id]) is True
    finally:
        for averager in averagers:
            averager.shutdown()
        for other in others:
            other.shutdown()
