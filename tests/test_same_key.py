"""One key on two machines is noticed, and the one that came later takes another."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from volunteer_kit.doctor.same_key import same_key
from volunteer_kit.swarm.net.identity import ensure_identity, give_up_key
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
from volunteer_kit.swarm.net.same_key import ID_SIZE, SKEW, Instance, KeyWatch, Sharing, judge, read_instance
from volunteer_kit.swarm.records.peer_record import PeerBoard

OURS, THEIRS = b"o" * ID_SIZE, b"t" * ID_SIZE
BEGAN, NOW = 1000.0, 1100.0
OWN = Instance(OURS, BEGAN, NOW)


@pytest.mark.parametrize(
    ("found", "sharing"),
    [
        (None, Sharing.ALONE),
        (Instance(OURS, BEGAN, NOW - 15), Sharing.ALONE),  # our own record
        (Instance(OURS, BEGAN, NOW - 7), Sharing.CLONED),  # a machine that was cloned while it ran
        (Instance(THEIRS, BEGAN - 500, BEGAN - 1), Sharing.ALONE),  # the program before us on this machine
        (Instance(THEIRS, BEGAN - 500, BEGAN + SKEW), Sharing.ALONE),  # the same, by a clock that differs
        (Instance(THEIRS, BEGAN - 500, BEGAN + SKEW + 1), Sharing.LATER),  # it was here before, and still is
        (Instance(THEIRS, BEGAN + 50, NOW - 3), Sharing.FIRST),
        (Instance(THEIRS, BEGAN, NOW - 3), Sharing.FIRST),  # at the same moment: one of the two goes
        (Instance(b"a" * ID_SIZE, BEGAN, NOW - 3), Sharing.LATER),
    ],
)
def test_what_stands_under_the_key(found, sharing):
    assert judge(OWN, found, {NOW - 30, NOW - 15}) is sharing


@pytest.mark.parametrize("said", [None, 3, [], [OURS, 1.0], [b"o", 1.0, 2.0], [OURS, 1, 2.0], [OURS, 1.0, "now"]])
def test_what_is_no_record_is_none(said):
    assert read_instance(said) is None


def test_a_record_is_read_as_it_was_written():
    assert read_instance([*OWN]) == OWN


def test_a_key_that_is_given_up_is_kept_and_a_new_one_is_made(tmp_path):
    path = tmp_path / "identity.key"
    keys = set()
    for number in range(3):
        keys.add(ensure_identity(path).private_numbers())
        assert give_up_key(path).name == "identity.key.shared" + (f"-{number + 1}" if number else "")
    assert len(keys) == 3 and len([*tmp_path.iterdir()]) == 3
    assert give_up_key(path) is None


@pytest.mark.slow
def test_two_programs_under_one_key_find_each_other(peer, tmp_path):
    """Over the records of the others: they never meet."""
    key = tmp_path / "identity.key"
    config = PeerConfig(
        peer.visible_maddrs(), ["/ip4/127.0.0.1/tcp/0"], identity_path=str(key), check_identity=False,
        startup_timeout=120,
    )  # fmt: skip
    PeerBoard(peer.dht, "shared")
    peers, watches = [], []
    try:
        for client_mode in (False, True):
            peers.append(start_peer(replace(config, client_mode=client_mode)))
            PeerBoard(peers[-1].dht, "shared")
            watches.append(KeyWatch(peers[-1].dht, "shared", peers[-1].peer_id, skew=0.0))
            assert watches[-1].look() is Sharing.ALONE or len(watches) == 2
        found, deadline = [Sharing.ALONE, Sharing.ALONE], time.monotonic() + 60
        while Sharing.ALONE in found and time.monotonic() < deadline:
            looks = zip(found, watches, strict=True)
            found = [before if before is not Sharing.ALONE else watch.look() for before, watch in looks]
        assert found == [Sharing.FIRST, Sharing.LATER]
        doctors = same_key(key, peer.visible_maddrs(), trains_here=False, within=120)
        assert doctors.level == "warning" and f"mv {key}" in doctors.way_out
        other = tmp_path / "other.key"
        ensure_identity(other)
        assert same_key(other, peer.visible_maddrs(), trains_here=False, within=120).level == "ok"
    finally:
        for one in peers:
            one.shutdown()
