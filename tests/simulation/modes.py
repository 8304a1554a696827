"""From a seed to a schedule: which peers there are, and what goes wrong when."""

from __future__ import annotations

import random
from typing import Any

from tests.simulation.schedule import Fault, PeerPlan, Schedule
from volunteer_kit.swarm.sync.entries import Member

CELLS = 8
QUIET_SECONDS = 240.0  # at most, after the last fault; a seed ends as soon as everybody agrees
MODES = {"nasty": 0.55, "broad": 0.3, "liar": 0.15}  # share of the seeds of a mix
LIES = (
    "double proposer", "early leader", "false sums", "staller", "ignorer", "voter", "hider", "two answers",
    "wrong shares", "inflator", "false branch",
)  # fmt: skip


def mode_of(seed: int) -> str:
    """Which mode a seed of a mix has."""
    drawn = random.Random(f"mode-{seed}").random()
    for mode, share in MODES.items():
        drawn -= share
        if drawn < 0:
            return mode
    return "nasty"


def make_schedule(mode: str, seed: int) -> Schedule:
    """The schedule of a seed: equal in every process and on every machine."""
    return {"broad": broad, "nasty": nasty, "liar": liar}[mode](seed)


def _peers(rng: random.Random, count: int, public: int, founders: int, epoch: float) -> tuple[list[PeerPlan], int]:
    """Peers of very different speed; sometimes one that only votes, or two of one account.

    :param epoch: s that an epoch should take
    :returns: the peers, and the target batch size
    """
    peers = []
    for place in range(count):
        speed = 4.0 * 2 ** rng.uniform(0, 4)
        peers.append(
            PeerPlan(
                member=Member(f"p{place}", f"a{place}", place < public),
                founder=place < founders,
                speed=speed,
                microbatch=max(1, round(speed * rng.uniform(0.8, 2.0))),
                latency=rng.uniform(0.005, 0.08),
                uplink=rng.choice((5.0, 10.0, 20.0, 100.0)),
                ahead=rng.choice((0.0, 0.0, rng.uniform(-30, 30), rng.uniform(-1e6, 1e6))),
                rate=rng.choice((1.0, 1.0, rng.uniform(0.98, 1.02), rng.uniform(0.9, 1.1))),
            )
        )
    if founders > 2 and rng.random() < 0.1:
        place = rng.randrange(founders)
        peers[place] = peers[place]._replace(speed=0.0)
    if count > 3 and rng.random() < 0.15:
        one, other = rng.sample(range(count), 2)
        peers[one] = peers[one]._replace(member=peers[one].member._replace(account=peers[other].member.account))
    target = max(4, round(epoch * sum(peer.speed for peer in peers[:founders])))
    return peers, target


def _settings(rng: random.Random, target: int) -> dict[str, Any]:
    """Deadlines that fit epochs of a few seconds, so that a schedule sees many of them."""
    return {
        "target_batch_size": target,
        "max_staleness": rng.choice((4, 4, 4, 2, 1)),
        "cells": CELLS,
        "overlap": rng.random() < 0.9,
        "isolated_after": 8.0,
        "alone_after": rng.choice((15.0, 25.0)),
        "epoch_deadline": rng.choice((15.0, 30.0)),
        "exchange_ceiling": 10.0,
        "vote_ceiling": 6.0,
        "catching_up_patience": 12.0,
        "fetch_patience": 4.0,
        "snapshot_patience": 20.0,
        "kept_entries": rng.choice((6, 12, 48)),
    }


def broad(seed: int) -> Schedule:
    """Everything that can go wrong, to 3-12 peers."""
    rng = random.Random(f"broad-{seed}")
    founders = rng.choices((3, 4, 5, 6, 7, 8, 10, 12), (5, 6, 5, 4, 3, 2, 1, 1))[0]
    newcomers = rng.choice((0, 0, 1, 1, 2))
    count = founders + newcomers
    public = max(1, founders - rng.choice((0, 0, 1, 2, founders - 1)))
    peers, target = _peers(rng, count, public, founders, rng.uniform(2, 5))
    peers = [
        peer._replace(member=peer.member._replace(public=rng.random() < 0.6)) if not peer.founder else peer
        for peer in peers
    ]
    size = rng.choice((0.1e6, 0.5e6, 1e6, 2e6))
    if rng.random() < 0.1:  # everybody behind a home line
        peers = [peer._replace(uplink=1.0) for peer in peers]
        size /= 4
    names = [peer.member.peer for peer in peers]
    quiet_from = rng.uniform(60, 150)
    faults = [Fault(rng.uniform(3, quiet_from / 2), "join", (peer.member.peer,)) for peer in peers if not peer.founder]
    weights = [weight * rng.choice((0, 1, 1, 4)) for _, weight in FAULTS]  # each seed has its own illness
    for _ in range(rng.randint(4, 30)):
        faults.append(_one_fault(rng, names, weights, rng.uniform(2, quiet_from - 1), quiet_from))
    if rng.random() < 0.2:
        at = rng.uniform(10, quiet_from - 8)
        kind = rng.choice(("crash", "crash", "leave"))
        within = rng.choice((0.1, 2.0, 6.0))
        faults += [Fault(at + rng.uniform(0, within), kind, (name,)) for name in names]
    faults.sort()
    return Schedule(
        "broad", seed, tuple(peers), tuple(faults), _settings(rng, target), size, quiet_from, quiet_from + QUIET_SECONDS
    )


FAULTS = (  # with how often each comes
    ("crash", 8), ("crash upon", 4), ("pause", 4), ("cut", 3), ("one way", 5), ("partition", 4), ("slow", 2),
    ("leave", 2), ("damage", 1), ("order", 1), ("loss", 2), ("duplicates", 1), ("deciding", 1),
)  # fmt: skip


def _one_fault(rng: random.Random, names: list[str], weights: list[int], at: float, quiet_from: float) -> Fault:
    seconds = min(rng.choice((rng.uniform(1, 6), rng.uniform(1, 20))), quiet_from - at)
    kind = rng.choices([kind for kind, _ in FAULTS], weights)[0] if any(weights) else "crash"
    one = rng.choice(names)
    if kind == "crash":
        return Fault(at, "crash", (one,), amount=rng.choice((0, 0, 1, 2, 3, 5, 8)))
    if kind == "crash upon":
        return Fault(at, "upon", (one,), what=_upon(rng))
    if kind in ("cut", "one way"):
        other = rng.choice([name for name in names if name != one])
        return Fault(at, "cut", (one, other), seconds, what="one way" if kind == "one way" else "")
    if kind == "partition":
        inside = rng.sample(names, rng.randint(1, len(names) - 1))
        return Fault(at, "partition", tuple(sorted(inside)), min(seconds * 2, quiet_from - at))
    if kind == "slow":
        return Fault(at, "slow", (one,), seconds, amount=rng.choice((5, 10, 30)))
    if kind == "order":
        return Fault(at, "order", (), amount=rng.randint(0, 4), what=rng.choice(("", "two")))
    if kind in ("loss", "duplicates", "deciding"):
        return Fault(at, "trouble", (), seconds, amount=rng.uniform(0.05, 0.3), what=kind)
    return Fault(at, kind, (one,), seconds if kind == "pause" else 0.0)


def _upon(rng: random.Random) -> str:
    deed = rng.choice(("crash", "crash before", "crash", "crash before", "leave"))
    return f"{deed} {rng.choice(('vote', 'promise', 'propose'))}"


NASTY = (("upon", 5), ("actions", 3), ("pause", 1), ("pause upon", 3), ("duel", 3), ("cut", 2), ("leave", 1))


def nasty(seed: int) -> Schedule:
    """Votes, promises and proposals of 2-5 peers are late by 0.2-12 s, lost, or crashed upon."""
    rng = random.Random(f"nasty-{seed}")
    founders = rng.choice((2, 3, 3, 3, 4, 4, 5))
    newcomers = rng.choice((0, 0, 1, 2))
    public = max(1, founders - rng.choice((0, 0, 0, 1, 2)))
    peers, target = _peers(rng, founders + newcomers, public, founders, rng.uniform(1, 4))
    names = [peer.member.peer for peer in peers]
    quiet_from = rng.uniform(60, 200)
    faults = [Fault(rng.uniform(1, 60), "join", (peer.member.peer,)) for peer in peers if not peer.founder]
    faults.append(Fault(1.0, "trouble", (), quiet_from - 1.0, amount=rng.uniform(0.03, 0.4), what="deciding"))
    for _ in range(rng.randint(0, 20)):
        at = rng.uniform(2, quiet_from - 1)
        one = rng.choice(names)
        kind = rng.choices([kind for kind, _ in NASTY], [weight for _, weight in NASTY])[0]
        seconds = min(rng.uniform(1, 10), quiet_from - at)
        if kind == "upon":
            faults.append(Fault(at, "upon", (one,), what=_upon(rng)))
        elif kind == "pause upon":
            said = rng.choice(("propose", "promise", "vote"))
            faults.append(Fault(at, "upon", (one,), seconds, what=f"pause {said}"))
        elif kind == "duel":  # the leader stands still while another one is promised; its word comes late
            seconds = min(rng.uniform(3, 8), quiet_from - at)
            faults.append(Fault(at, "upon", tuple(names), seconds, what="pause propose"))
            faults.append(Fault(at, "upon", tuple(names), what=rng.choice(("crash promise", "crash vote"))))
        elif kind == "actions":
            faults.append(Fault(at, "crash", (one,), amount=rng.randint(1, 12)))
        elif kind == "cut":
            other = rng.choice([name for name in names if name != one])
            faults.append(Fault(at, "cut", (one, other), seconds, what=rng.choice(("", "one way"))))
        else:
            faults.append(Fault(at, kind, (one,), seconds if kind == "pause" else 0.0))
    faults.sort()
    settings = _settings(rng, target)
    return Schedule(
        "nasty", seed, tuple(peers), tuple(faults), settings, 0.1e6, quiet_from, quiet_from + QUIET_SECONDS
    )


def liar(seed: int) -> Schedule:
    """One or two liars, fewer than a third of the voters, or a flood of identities of one account; some faults too."""
    rng = random.Random(f"liar-{seed}")
    founders = rng.choice((4, 5, 5, 6, 7))
    liars = 2 if founders == 7 and rng.random() < 0.5 else 1
    flood = rng.random() < 0.1
    public = max(2, founders - rng.choice((0, 0, 1, 2)))
    peers, target = _peers(rng, founders, public, founders, rng.uniform(1.5, 4))
    lying = [peer.member.peer for peer in rng.sample(peers[:public], liars)]
    if rng.random() < 0.15:
        lying = [rng.choice(peers).member.peer]
    faults: list[Fault] = []
    quiet_from = rng.uniform(40, 110)
    if rng.random() < 0.4:  # higher ballots, where a liar can ignore or hide what was accepted
        faults.append(
            Fault(2.0, "trouble", (), quiet_from - 2.0, amount=rng.uniform(0.02, 0.2), what="deciding")
        )
    if flood:
        lying = []
        for place in range(rng.randint(4, 12)):
            name = f"f{place}"
            identity = peers[0]._replace(
                member=Member(name, "flood", rng.random() < 0.5), founder=False, liar="flood", speed=4.0, microbatch=6
            )
            peers.append(identity)
            faults.append(Fault(rng.uniform(1, 10), "join", (name,)))
    peers = [peer._replace(liar=rng.choice(LIES)) if peer.member.peer in lying else peer for peer in peers]
    names = [peer.member.peer for peer in peers if not peer.liar]
    for _ in range(rng.choice((0, 0, 1, 2, 3, 6))):
        at = rng.uniform(5, quiet_from - 1)
        seconds = min(rng.uniform(1, 8), quiet_from - at)
        one = rng.choice(names)
        if rng.random() < 0.5:
            faults.append(Fault(at, "crash", (one,), amount=rng.choice((0, 1, 3))))
        else:
            other = rng.choice([peer.member.peer for peer in peers if peer.member.peer != one and peer.founder])
            faults.append(Fault(at, "cut", (one, other), seconds, what=rng.choice(("", "one way"))))
    faults.sort()
    return Schedule(
        "liar", seed, tuple(peers), tuple(faults), _settings(rng, target), 0.2e6, quiet_from, quiet_from + QUIET_SECONDS
    )
