"""Verified averaging among real peers on loopback: cheats are caught, the honest are left in peace."""

from __future__ import annotations

import pytest

from tests.local_swarm import LocalPeer, LocalSwarm, local_swarm

ALWAYS = {"share": 1.0, "strikes": 3, "probation": 4}


def start(swarm: LocalSwarm, attacks: list[str | None], **settings) -> list[LocalPeer]:
    """One peer for each of `attacks` (None: honest), that begin together; all others know the first."""
    settings = {"verification": ALWAYS, "target_batch_size": 64 * len(attacks), "waits": True, **settings}
    peers = [swarm.add(module="tests.verified_peer", attack=attack, **settings) for attack in attacks]
    for peer in peers:
        peer.wait_event("joined")
    for peer in peers:
        peer.order("go")
    return peers


def of(peer: LocalPeer, kind: str) -> list[dict]:
    return [event for event in peer.events if event["event"] == kind]


def found(peer: LocalPeer, *kinds: str) -> list[list]:
    """What a peer's verdicts say: [kind, peer id, epoch, words]."""
    return [event for verdicts in of(peer, "verdicts") for event in verdicts["events"] if event[0] in kinds]


def loss_at(peer: LocalPeer, epoch: int) -> float:
    return next(event["loss"] for event in of(peer, "epoch") if event["epoch"] >= epoch)


def bans_of(peer: LocalPeer, ids: set[str], timeout: float = 240.0) -> dict[str, int]:
    """Peer id -> epoch of the round by which this peer knows it banned, once all of `ids` are."""
    banned: dict[str, int] = {}
    while set(banned) < ids:
        event = peer.wait_for(lambda e, known=frozenset(banned): new_bans(e) - known, timeout)
        banned |= dict.fromkeys(new_bans(event), event["epoch"])
    return banned


def cheated_rounds(peer: LocalPeer, until: int) -> list[int]:
    """Epochs up to `until` in whose round it cheated. On a busy machine one that was struck may download a state for
    many of a swift swarm's epochs, and a slow reducer may be given no part: then there is nothing to find."""
    found, before = [], 0
    for event in peer.said():
        if event["event"] == "epoch":
            if event["cheated"] > before and event["group_size"] > 1 and event["epoch"] <= until:
                found.append(event["epoch"])
            before = event["cheated"]
    return found


def new_bans(event: dict) -> set[str]:
    told = event["events"] if event["event"] == "verdicts" else ()
    return {who for kind, who, *_ in told if kind == "ban"}


@pytest.mark.parametrize(
    "delays",
    [
        pytest.param((False, False), marks=pytest.mark.slow),
        pytest.param((True, False), marks=pytest.mark.slow),
        (True, True),
    ],
)
def test_honest_peers_find_each_other_right(tmp_path, delays):
    step, averaging = delays
    with local_swarm(tmp_path) as swarm:
        peers = start(swarm, [None] * 3, delay_optimizer_step=step, delay_grad_averaging=averaging)
        for peer in peers:
            peer.wait_epoch(8, group_size=3)
        ends = swarm.finish(*peers)
        assert len({end["digest"] for end in ends}) == 1
        measured = [m for peer in peers for event in of(peer, "verdicts") for m in event["measured"]]
        assert len(measured) >= 9 and max(measured) < 0.1, measured
        assert not [event for peer in peers for event in found(peer, "strike", "ban", "mismatch")]


@pytest.mark.slow
def test_who_cannot_be_called_is_looked_at_and_looks_at_others(tmp_path):
    with local_swarm(tmp_path) as swarm:
        options = {"module": "tests.verified_peer", "verification": ALWAYS, "target_batch_size": 256, "waits": True}
        public = [swarm.add(**options), swarm.add(**options)]
        public[0].wait_event("joined")
        hidden = [swarm.add(client_mode=True, attack=attack, **options) for attack in (None, "flip")]
        for peer in [*public, *hidden]:
            peer.wait_event("joined")
        for peer in [*public, *hidden]:
            peer.order("go")
        hidden[1].order("cheat")
        cheat = hidden[1].wait_event("connected")["peer_id"]
        for peer in (*public, hidden[0]):
            assert set(bans_of(peer, {cheat})) == {cheat}
        assert [duty for event in of(hidden[0], "verdicts") for duty in event["duties"]]
        assert not [event for event in found(public[0], "strike", "mismatch") if event[1] != cheat]


@pytest.mark.slow
def test_a_reducer_that_answers_one_member_otherwise_drives_nobody_apart(tmp_path):
    """On another model than the others' its gradients would be false to all, and it would be struck for them."""
    with local_swarm(tmp_path) as swarm:
        peers = start(swarm, [None, None, None, "two averages"])
        cheat = peers[3]
        own_id = cheat.wait_event("connected")["peer_id"]
        for peer in peers:
            peer.wait_epoch(2, group_size=4)
        cheat.order("cheat")
        for peer in peers[:3]:
            peer.wait_for(
                lambda e: e["event"] == "verdicts"
                and any(x[:2] == ["suspended", own_id] and "what was sent" in x[3] for x in e["events"])
            )
        met = max(event["epoch"] for peer in peers for event in of(peer, "epoch"))
        for peer in peers[:3]:
            peer.wait_epoch(met + 4, group_size=3)
        ends = swarm.finish(*peers[:3])
        assert len({end["digest"] for end in ends}) == 1
        honest = {peer.wait_event("connected")["peer_id"] for peer in peers[:3]}
        assert not [event for peer in peers[:3] for event in found(peer, "strike", "ban") if event[1] in honest]
        assert [event for peer in peers[:3] for event in of(peer, "epoch") if event["received"] < 1]


@pytest.mark.slow
def test_a_cheating_sender_and_a_cheating_reducer_are_banned_within_five_epochs(tmp_path):
    share, epochs = ALWAYS["share"], 5
    missed = (1 - share) ** epochs
    print(f"share {share}: a cheat that is never looked at in {epochs} epochs has a chance of {missed:.2%}")
    assert missed < 0.01
    losses = {}
    for attacks in ([None] * 6, [None, "flip", "reducer", None, None, None]):
        folder = tmp_path / str(attacks.count(None))
        folder.mkdir()
        with local_swarm(folder) as swarm:
            peers = start(swarm, attacks, verification={**ALWAYS, "strikes": 2})
            honest = [peer for peer, attack in zip(peers, attacks, strict=True) if attack is None]
            cheats = {p.wait_event("connected")["peer_id"]: p for p in peers if p not in honest}
            met = max(peer.wait_epoch(1, group_size=6)["epoch"] for peer in peers)
            for peer in peers:
                peer.wait_epoch(met + 1, group_size=6)
            for peer in peers:
                peer.order("cheat")
            for peer in honest:
                banned = bans_of(peer, set(cheats))
                cheated = {who: cheated_rounds(cheats[who], at) for who, at in banned.items()}
                print("banned in", banned, "rounds in which they cheated", cheated)
                assert all(0 < len(rounds) <= epochs for rounds in cheated.values()), (banned, cheated)
                peer.wait_epoch(40)
            ends = swarm.finish(*honest)
            assert len({end["digest"] for end in ends}) == 1
            strikes = {event[1] for peer in honest for event in found(peer, "strike")}
            assert strikes == set(cheats)
            losses[attacks.count(None)] = loss_at(honest[0], 40)
    print("loss after 40 epochs: honest", losses[6], "attacked", losses[4])
    assert losses[4] < 1.03 * losses[6]


@pytest.mark.slow
def test_a_broken_but_honest_peer_is_told_so_and_is_not_banned_for_it(tmp_path):
    """Bits flip in one of 50 microbatches."""
    with local_swarm(tmp_path) as swarm:
        peers = start(swarm, [None, "bits", None, None], one_in=50)
        broken = peers[1]
        own_id = broken.wait_event("connected")["peer_id"]
        broken.wait_for(lambda e: e["event"] == "broke")
        words = broken.wait_for(
            lambda e: e["event"] == "verdicts" and any(x[0] == "strike" and x[1] == own_id for x in e["events"])
        )
        text = next(x[3] for x in words["events"] if x[0] == "strike" and x[1] == own_id)
        assert "what it sent is not what its samples give" in text and "have confirmed it" in text
        back = broken.wait_for(
            lambda e: e["event"] == "verdicts" and any(x[0] == "trusted" and x[1] == own_id for x in e["events"])
        )
        for peer in peers:
            peer.wait_epoch(back["epoch"] + 3)
        ends = swarm.finish(*peers)
        assert len({end["digest"] for end in ends}) == 1
        strikes = len({tuple(event) for event in found(peers[0], "strike")})
        assert bool(found(peers[0], "ban")) == (strikes >= 3)
        first, last = of(peers[0], "epoch")[0]["loss"], of(peers[0], "epoch")[-1]["loss"]
        assert last < first
