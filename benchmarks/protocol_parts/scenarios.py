"""What happens to a swarm: faults in turn, churn, and ends."""

from __future__ import annotations

import random
from typing import NamedTuple

from benchmarks.protocol_parts.account import Shares
from benchmarks.protocol_parts.swarm import STATE, Home, Swarm, founders, peer
from tests.simulation.history import History
from tests.simulation.schedule import Fault, PeerPlan

EVERY, LASTING = 20.0, 8.0  # s between faults, and until one is lifted; chaos.py's
KINDS = ("kill", "stop", "cut", "partition")
APART = 3  # peers on the smaller side of a partition
WARM_UP = 60.0  # s; then faults begin
FROM = 35.0  # s; the first commit behind it begins the measurement
LAST_COMMIT = 240.0  # s; a measurement ends at the first commit behind its end, or so much later
MEAN_LIFE = 1800.0  # s
STRIKE = 120.0  # s; when many leave or die
WATCHED = 900.0  # s behind that
AWAY = 180.0  # s; until a dead public peer comes back, or another one joins


class Result(NamedTuple):
    """What the devices of one run did."""

    shares: Shares
    commits: int
    longest_gap: float  # s between two commits
    told: dict[str, int]  # news, by topic
    events: int
    megabytes: float  # of gradients, answers and states


class Silence(NamedTuple):
    """How long a swarm made no step."""

    seconds: float  # from the last fault of the scenario to the next commit; inf: none came
    needed: float  # s of these that the survivors' devices need for an epoch, or a newcomer's state for its way
    longest_gap: float  # s between two commits, from the first fault on

    @property
    def waiting(self) -> float:
        """s that the protocol took."""
        return self.seconds - self.needed


def chaos_faults(names: list[str], begin: float, end: float, rng: random.Random, kinds: tuple[str, ...]) -> list[Fault]:
    """One every 20 s, kinds in turn, on peers that are drawn."""
    faults: list[Fault] = []
    at = begin
    while kinds and at + EVERY <= end:
        kind = kinds[len(faults) % len(kinds)]
        struck = tuple(rng.sample(names, APART if kind == "partition" else 1))
        faults.append(Fault(at, "partition" if kind == "cut" else kind, struck, LASTING))
        at += EVERY
    return faults


def chaos(
    home: Home, seed: int, minutes: float, kinds: tuple[str, ...] = KINDS, history: History | None = None
) -> Result:
    """The schedule of benchmarks/chaos.py. No kinds: no faults."""
    rng = random.Random(f"goodput-{seed}")
    peers = founders(home, rng)
    end = WARM_UP + 60 * minutes
    faults = chaos_faults([each.member.peer for each in peers], WARM_UP, end, rng, kinds)
    return _measured(Swarm(home, "goodput", seed, peers, faults, end + LAST_COMMIT), end, history)


def crowd(home: Home, seed: int, minutes: float, history: History | None = None) -> Result:
    """Peers with lives of `MEAN_LIFE` on average. Half of them leave, half die for good, and a newcomer as fast takes
    each one's place at once."""
    rng = random.Random(f"crowd-{seed}")
    peers = founders(home, rng)
    end = WARM_UP + 60 * minutes
    faults: list[Fault] = []
    lives: list[tuple[PeerPlan, float]] = [(each, 0.0) for each in peers]
    for plan, begin in lives:  # it grows
        over = begin + rng.expovariate(1 / MEAN_LIFE)
        if over < end:
            faults.append(Fault(over, rng.choice(("leave", "die")), (plan.member.peer,)))
            newcomer = peer(home, f"n{len(lives):03d}", plan.speed, plan.member.public, False, rng)
            peers.append(newcomer)
            faults.append(Fault(over, "join", (newcomer.member.peer,)))
            lives.append((newcomer, over))
    return _measured(Swarm(home, "crowd", seed, peers, faults, end + LAST_COMMIT), end, history)


def _measured(swarm: Swarm, end: float, history: History | None) -> Result:
    swarm.history = history
    swarm.measure(FROM, end)
    swarm.run()
    told = {topic.value: count for topic, count in sorted(swarm.told.items(), key=lambda each: each[0].value)}
    told["parts not believed"] = swarm.disbelieved
    commits = sum(FROM < at <= end for at in swarm.commits.at)
    longest = swarm.commits.longest_gap(FROM, end)
    events = swarm.all_events + swarm.events
    return Result(swarm.shares(), commits, longest, told, events, swarm.lines.sent / 1e6)


def six_leave(home: Home, seed: int, history: History | None = None) -> Silence:
    """Six of eight leave within a second."""
    return _struck(home, seed, "leave", 1.0, history)


def six_die(home: Home, seed: int, history: History | None = None) -> Silence:
    """Six of eight die for good within a minute."""
    return _struck(home, seed, "die", 60.0, history)


def _struck(home: Home, seed: int, kind: str, within: float, history: History | None) -> Silence:
    rng = random.Random(f"{kind}-{seed}")
    peers = founders(home, rng)
    begin = STRIKE + rng.uniform(0, home.epoch)
    struck = rng.sample([each.member.peer for each in peers], 6)
    faults = [Fault(begin + rng.uniform(0, within), kind, (name,)) for name in struck]
    swarm = Swarm(home, kind, seed, peers, faults, STRIKE + WATCHED)
    return _watched(swarm, min(fault.at for fault in faults), max(fault.at for fault in faults), history)


def public_dies(home: Home, seed: int, returns: bool, history: History | None = None) -> Silence:
    """The only public peer of four dies. After `AWAY` it comes back, or another public one joins; `seconds` count from
    then."""
    rng = random.Random(f"public-{seed}")
    peers = founders(home._replace(peers=4, public=1), rng)
    public = peers[0]
    begin = STRIKE + rng.uniform(0, home.epoch)
    if returns:
        faults = [Fault(begin, "away", (public.member.peer,), AWAY)]
    else:
        peers.append(peer(home, "n00", public.speed, True, False, rng))
        faults = [Fault(begin, "die", (public.member.peer,)), Fault(begin + AWAY, "join", ("n00",))]
    swarm = Swarm(home, "public", seed, peers, faults, STRIKE + AWAY + WATCHED)
    return _watched(
        swarm, begin, begin + AWAY, history, 0.0 if returns else swarm.lines.seconds(public.member.peer, STATE)
    )


def _watched(swarm: Swarm, begin: float, last: float, history: History | None, transfer: float = 0.0) -> Silence:
    swarm.history = history
    needed = [transfer]
    swarm.clock.at(last + 1e-3, lambda: needed.append(swarm.seconds_to_epoch()))
    swarm.run()
    seconds = swarm.commits.after(last)
    longest = swarm.commits.longest_gap(begin, swarm.clock.now)
    return Silence(float("inf") if seconds is None else seconds, max(needed), longest)
