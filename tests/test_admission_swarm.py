"""A running swarm at whose door strangers call every call there is; benchmarks/admission.py does it with five peers."""

from __future__ import annotations

import time

import pytest

from benchmarks.admission_parts.bans import ban_once
from benchmarks.admission_parts.cells import (
    ATTACKS,
    INCOMING,
    OUTGOING,
    Attackers,
    all_cells,
    attackers,
    id_of,
    try_incoming,
    try_outgoing,
    wait_for_verdict,
)
from benchmarks.admission_parts.swarm import run


def test_who_shows_nothing_is_refused_at_every_call_and_by_every_call(tmp_path):
    with run(tmp_path, 2) as swarm:
        those = Attackers({name: swarm.add_stranger(name) for name in ("stranger", "friend")})
        those.tokens = {"no token": b"", "good": swarm.join("friend")}
        kinds = [kind for kind in INCOMING if kind.rpc != "rpc_aggregate_part"]  # takes 5 s each; the slow test has it
        cells = [try_incoming(swarm, those, kind, attack) for kind in kinds for attack in ("no token", "good")]
        cells += [try_outgoing(swarm, those, kind, attack) for kind in OUTGOING for attack in ("no token", "good")]
        assert [cell for cell in cells if not cell.as_it_should] == []


@pytest.mark.slow
def test_every_attack_at_every_call(tmp_path):
    with run(tmp_path, 3) as swarm:
        cells = all_cells(swarm, attackers(swarm))
        assert [cell for cell in cells if not cell.as_it_should] == []
        assert len(cells) == (len(INCOMING) + len(OUTGOING) + 1) * (len(ATTACKS) + 1)


@pytest.mark.slow
def test_a_banned_peer_is_out_and_the_others_train_on(tmp_path):
    with run(tmp_path, 4) as swarm:
        banned = id_of(swarm.peers[3])
        since = swarm.ban("peer3")
        for peer in swarm.peers[:3]:
            wait_for_verdict(peer, banned, "banned")
        assert time.monotonic() - since < 180.0
        for peer in swarm.peers[:3]:
            last = max(event["epoch"] for event in peer.events if event["event"] == "epoch")
            # a round of a busy machine may do without one of the three; none may have the fourth
            peer.wait_for(lambda e, n=last: e["event"] == "epoch" and e["epoch"] > n + 3 and e["group_size"] == 3)
            rounds = [event for event in peer.events if event["event"] == "epoch" and event["epoch"] > last + 3]
            assert all(event["group_size"] <= 3 for event in rounds)
        assert ban_once(swarm, "guest").last < 180.0
