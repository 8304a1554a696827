"""Whole runs of hand-made schedules: what the simulator's parts do together."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from tests.simulation.history import History
from tests.simulation.invariants import Violation
from tests.simulation.modes import MODES, make_schedule, mode_of
from tests.simulation.schedule import Fault, PeerPlan, Schedule
from tests.simulation.simulation import Simulation
from volunteer_kit.swarm.sync.certificates import MOST_OBSERVERS, VOTES_FROM
from volunteer_kit.swarm.sync.contributions import Ledger
from volunteer_kit.swarm.sync.core import SyncCore
from volunteer_kit.swarm.sync.entries import Entry, Member

SETTINGS = {"target_batch_size": 160, "cells": 8, "epoch_deadline": 30.0, "alone_after": 20.0}


def peers(count: int, clients: int = 0, **others: float) -> tuple[PeerPlan, ...]:
    """Peers of 10 samples per second."""
    plan = dict(founder=True, speed=10.0, microbatch=10, latency=0.02, uplink=20.0, ahead=0.0, rate=1.0) | others
    return tuple(
        PeerPlan(member=Member(f"p{place}", f"a{place}", place < count - clients), **plan) for place in range(count)
    )


def schedule(group: tuple[PeerPlan, ...], *faults: Fault, size: float = 0.5e6, quiet_from: float = 40.0) -> Schedule:
    return Schedule("broad", 0, group, tuple(sorted(faults)), SETTINGS, size, quiet_from, quiet_from + 200)


def entries(simulation: Simulation) -> list[Entry]:
    steps = [branch.step for branch in simulation.invariants.branches.values()]
    return [step for step in steps if isinstance(step, Entry)]


def test_without_faults_every_epoch_holds_everybody():
    simulation = Simulation(schedule(peers(4)))
    outcome = simulation.run()
    assert outcome.commits >= 9 and outcome.idle < 0.02
    assert outcome.samples > 0.85 * outcome.computed
    for entry in entries(simulation):
        assert entry.missing == 0 and {share.peer for share in entry.answers[0].shares} == {"p0", "p1", "p2", "p3"}


def test_a_late_part_is_not_lost():
    group = (*peers(3), peers(4, uplink=0.5)[3])
    late_line = schedule(group, quiet_from=120.0)
    simulation = Simulation(late_line._replace(settings={**SETTINGS, "exchange_ceiling": 8.0}))
    outcome = simulation.run()
    late = [entry for entry in entries(simulation) for answer in entry.answers if len(answer.shares) > 4]
    assert late, "what came too late travels with the next round"
    assert outcome.samples > 0.7 * outcome.computed


def test_a_reducer_that_dies_leaves_a_missing_slice():
    crashes = [Fault(at, "crash", ("p3",)) for at in (4.35, 9.0, 13.0, 17.0, 21.0)]
    simulation = Simulation(schedule(peers(4), *crashes, size=4e6))
    simulation.run()
    assert any(entry.missing for entry in entries(simulation))


def test_a_joiner_takes_a_snapshot_and_brings_samples():
    group = (*peers(3), peers(4)[3]._replace(founder=False))
    simulation = Simulation(schedule(group, Fault(10.0, "join", ("p3",))))
    simulation.run()
    assert any(share.peer == "p3" for entry in entries(simulation) for a in entry.answers for share in a.shares)


def test_a_damaged_peer_takes_a_snapshot():
    simulation = Simulation(schedule(peers(4), Fault(10.0, "damage", ("p2",))))
    simulation.run()
    assert simulation.processes["p2"].disk.damage == 0.0
    assert {topic.value for topic in simulation.told} >= {"drifted"}


def test_a_rollback_order_reaches_everybody():
    simulation = Simulation(schedule(peers(4), Fault(20.0, "order", (), amount=2)))
    simulation.run()
    assert {process.core.head.generation for process in simulation.processes.values()} == {1}


def test_survivors_open_a_branch():
    crashes = [Fault(10.0 + place / 10, "leave", (f"p{place}",)) for place in range(2)]
    simulation = Simulation(schedule(peers(4), *crashes, quiet_from=60.0))
    simulation.run()
    assert simulation.processes["p3"].core.head.lineage == simulation.processes["p2"].core.head.lineage


def test_clients_alone_wait():
    simulation = Simulation(schedule(peers(3, clients=2), Fault(15.0, "leave", ("p0",))))
    simulation.run()
    assert {process.core.phase.value for process in simulation.processes.values() if not process.left} == {"isolated"}


def monitor(name: str, founder: bool = False) -> PeerPlan:
    """It computes nothing."""
    return peers(1)[0]._replace(member=Member(name, name, True, observes=True), founder=founder, speed=0.0)


def views(simulation: Simulation) -> list[dict[str, Member]]:
    return [process.core.log.last.membership.view for process in simulation.processes.values() if process.up]


def test_a_monitor_that_was_away_votes_again():
    crash = [Fault(at, "crash", ("m",)) for at in (10.0, 10.5)]
    cut = Fault(10.0, "partition", ("m",), 60.0)
    simulation = Simulation(schedule((*peers(4), monitor("m", founder=True)), *crash, cut, quiet_from=100.0))
    simulation.run()
    missed = [entry for entry in entries(simulation) if "m" not in {member.peer for member in entry.group}]
    assert len(missed) > 2, "it was out of the view"
    for process in simulation.processes.values():
        membership = process.core.log.last.membership
        assert membership.entries["m"] == VOTES_FROM and "m" in membership.electorate


def test_a_flood_of_identities_that_compute_nothing_takes_two_places():
    crowd = [monitor(f"m{place}") for place in range(12)]
    joins = Fault(10.0, "join", tuple(plan.member.peer for plan in crowd))
    simulation = Simulation(schedule((*peers(3), *crowd), joins, quiet_from=60.0))
    simulation.run()
    for view in views(simulation):
        assert sum(member.observes for member in view.values()) == MOST_OBSERVERS
        assert {"p0", "p1", "p2"} <= view.keys()


def test_who_computes_nothing_and_does_not_say_so_has_no_place():
    idle = monitor("idle")._replace(member=Member("idle", "idle", True))
    simulation = Simulation(schedule((*peers(3), idle), Fault(10.0, "join", ("idle",)), quiet_from=40.0))
    simulation.run()
    assert all("idle" not in view for view in views(simulation))


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_seed_is_one_history(mode):
    texts = []
    for _ in range(2):
        history = History(everything=True)
        Simulation(make_schedule(mode, 7), history=history).run()
        texts.append("\n".join(history.lines))
    assert texts[0] == texts[1]


PRINT_HISTORIES = """
import hashlib
from tests.simulation.history import History
from tests.simulation.modes import make_schedule
from tests.simulation.simulation import Simulation
for mode in ("broad", "liar", "nasty"):
    history = History(everything=True)
    Simulation(make_schedule(mode, 11), history=history).run()
    print(hashlib.sha256("\\n".join(history.lines).encode()).hexdigest())
"""


def test_a_seed_is_one_history_in_every_process():
    found = set()
    for hash_seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", PRINT_HISTORIES], env=environment, capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        found.add(run.stdout)
    assert len(found) == 1


def test_the_mix_has_every_mode_and_stays_as_it_is():
    mix = [mode_of(seed) for seed in range(2000)]
    assert {mode: round(mix.count(mode) / 2000, 1) for mode in MODES} == {"nasty": 0.5, "broad": 0.3, "liar": 0.2}
    assert hashlib.sha256(" ".join(mix).encode()).hexdigest()[:8] == MIX


MIX = "90555e23"  # change it with `modes.MODES`, and failed_seeds.txt too


def test_a_core_that_raises_is_a_violation(monkeypatch):
    monkeypatch.setattr(SyncCore, "_count_votes", lambda core: 1 / 0)
    with pytest.raises(Violation, match="ZeroDivisionError at"):
        Simulation(schedule(peers(3))).run()


def test_a_ledger_that_forgets_is_a_violation(monkeypatch):
    monkeypatch.setattr(Ledger, "return_all", lambda ledger: ledger._live.clear())
    with pytest.raises(Violation, match="I4"):
        Simulation(schedule(peers(3))).run()
