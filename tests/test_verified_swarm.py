"""Verified averaging among real peers on loopback."""

from __future__ import annotations

from tests.local_swarm import local_swarm

ALWAYS = {"share": 1.0, "strikes": 3, "probation": 4}


def start(swarm, count: int, attacks=(), **settings):
    kinds = [*attacks, *[None] * (count - len(attacks))]
    settings = {"verification": ALWAYS, "target_batch_size": 64 * count, **settings}
    first = swarm.add(module="tests.verified_peer", **settings)
    return [first, *(swarm.add(module="tests.verified_peer", attack=kind, **settings) for kind in kinds[: count - 1])]


def test_honest_peers_find_each_other_right(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = start(swarm, 3)
        for peer in peers:
            peer.wait_epoch(6, group_size=3)
        ends = swarm.finish(*peers)
        assert len({end["digest"] for end in ends}) == 1
        verdicts = [e for peer in peers for e in peer.events if e["event"] == "verdicts"]
        assert sum(len(e["measured"]) for e in verdicts) >= 9
        assert max(m for e in verdicts for m in e["measured"]) < 0.15
        assert not [e for e in verdicts for event in e["events"] if event[0] in ("strike", "ban", "mismatch")]


def test_a_cheating_sender_and_a_cheating_reducer_are_banned_by_all(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = start(swarm, 6, attacks=("flip", "reducer"))
        cheats, honest = peers[1:3], [peers[0], *peers[3:]]
        ids = {cheat.wait_event("connected")["peer_id"] for cheat in cheats}
        banned = {}
        for peer in honest:
            banned[peer] = {}
            while set(banned[peer]) < ids:
                event = peer.wait_for(
                    lambda e, known=banned[peer]: e["event"] == "verdicts" and set(e["bans"]) - set(known), timeout=180
                )
                banned[peer] |= dict.fromkeys(event["bans"], event["epoch"])
            print("banned", banned[peer])
        ends = swarm.finish(*honest)
        print([e for e in honest[0].events if e["event"] == "verdicts"])
        print([e["loss"] for e in honest[0].events if e["event"] == "epoch"])
        assert all(set(found) == ids for found in banned.values())
        assert len({end["digest"] for end in ends}) == 1
