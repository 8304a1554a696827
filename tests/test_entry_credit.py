"""Credit by what entries say: each step once, exactly, over restarts, and what nobody can tell is counted."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from volunteer_kit.swarm.credit.accounting import WAITING, EntryCollector, StepFeed
from volunteer_kit.swarm.credit.ledger import CreditLedger
from volunteer_kit.swarm.net.identity import peer_digest
from volunteer_kit.swarm.node.engine import brought_to
from volunteer_kit.swarm.node.talk import Brought, StepOf
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.entries import Entry, Member

ADA, BOB = (str(PeerID(b"\x12\x20" + bytes([i]) * 32)) for i in (1, 2))
CELLS = 16


def account_of(account: str, peer: str) -> bytes:
    return peer_digest(PeerID.from_base58(peer)) if account == peer else account.encode()


def name_of_step(epoch: int, branch: str = "") -> bytes:
    return f"{epoch}{branch}".encode()


def step(epoch: int, samples: dict[str, float] | None = None, *, branch: str = "", parent: bytes | None = None):
    shares = tuple(Brought(peer, peer, amount) for peer, amount in (samples or {}).items())
    parent = name_of_step(epoch - 1, branch) if parent is None else parent
    return StepOf(name_of_step(epoch, branch), parent, 0, epoch, shares=shares)


GENESIS = StepOf(name_of_step(0), b"", 0, 0, is_step=False)


class Scene:
    """A monitor's ledger, through its restarts."""

    def __init__(self, folder: Path):
        self.path, self.names, self.warnings = folder / "credit.sqlite", {}, []
        self.now = 1000.0
        self.start()

    def start(self) -> None:
        self.feed = StepFeed(lambda: self.now)
        names = lambda peer: self.names.get(str(peer))  # noqa: E731
        self.collector = EntryCollector(
            self.feed, CreditLedger(self.path), account_of, names, self.warnings.append
        )

    def restart(self) -> None:
        self.collector.close()
        self.start()

    def tell(self, *steps: StepOf) -> int:
        self.now += 10.0
        self.feed(steps)
        return self.collector.collect(0)

    @property
    def credit(self) -> dict[str, int]:
        names = {peer_digest(PeerID.from_base58(peer)): peer for peer in (ADA, BOB)}
        return {names[digest]: samples for digest, (samples, _) in self.collector.ledger.of_machines().items()}


@pytest.fixture
def scene(tmp_path):
    scene = Scene(tmp_path)
    scene.tell(GENESIS)
    yield scene
    scene.collector.close()


def test_each_step_is_counted_once(scene):
    assert scene.tell(step(1, {ADA: 8, BOB: 4}), step(2, {ADA: 8})) == 2
    assert scene.tell(step(1, {ADA: 8, BOB: 4}), step(2, {ADA: 8}), step(3, {BOB: 5})) == 1
    assert scene.credit == {ADA: 16, BOB: 9}
    scene.restart()
    assert scene.tell(GENESIS, step(1, {ADA: 8, BOB: 4}), step(2, {ADA: 8}), step(3, {BOB: 5}), step(4, {BOB: 1})) == 1
    assert scene.credit == {ADA: 16, BOB: 10}
    assert scene.collector.ledger.sums() == (26, 0) and not scene.warnings


def test_parts_of_samples_add_up_to_whole_ones(scene):
    scene.tell(*(step(epoch, {ADA: 5 / CELLS}) for epoch in range(1, 33)))
    scene.restart()
    assert scene.credit == {ADA: 10}
    scene.tell(step(33, {ADA: 15 / CELLS}))
    assert scene.credit == {ADA: 10}
    scene.tell(step(34, {ADA: 1 / CELLS}))
    assert scene.credit == {ADA: 11}
    [total] = scene.collector.ledger.totals()
    assert (total.samples, type(total.samples), total.last_epoch) == (11, int, 34)


def test_what_the_logs_tail_no_longer_has_is_counted_and_told(scene):
    scene.tell(step(1, {ADA: 8}))
    scene.tell(*(step(epoch, {ADA: 1}) for epoch in range(11, 15)))
    assert scene.collector.ledger.missed() == 9 and scene.credit == {ADA: 12}
    [text] = scene.warnings
    assert "9 steps before step 11" in text
    scene.restart()
    scene.tell(*(step(epoch, {ADA: 1}) for epoch in range(11, 16)))
    assert scene.collector.ledger.missed() == 9 and len(scene.warnings) == 1


def test_a_monitor_that_comes_late_for_the_first_time(tmp_path):
    scene = Scene(tmp_path)
    scene.tell(*(step(epoch, {BOB: 2}) for epoch in range(41, 45)))
    assert scene.collector.ledger.missed() == 40 and scene.credit == {BOB: 8}
    scene.collector.close()


def test_a_run_that_begins_anew_from_a_checkpoint_has_missed_nothing(scene):
    scene.tell(step(1, {ADA: 8}))
    scene.tell(StepOf(b"genesis", b"", 0, 10, is_step=False), step(11, {ADA: 8}, parent=b"genesis"))
    assert scene.collector.ledger.missed() == 0 and scene.credit == {ADA: 16}


def test_openings_orders_and_branches(scene):
    scene.tell(step(1, {ADA: 8}), step(2, {ADA: 8}))
    opening = StepOf(name_of_step(2, "b"), name_of_step(2), 0, 2, is_step=False)
    scene.tell(opening, step(3, {BOB: 4}, branch="b"))
    order = StepOf(name_of_step(7, "c"), name_of_step(1), 1, 7, is_step=False, sequence=5)
    scene.tell(order, step(8, {BOB: 4}, branch="c"))
    assert scene.credit == {ADA: 16, BOB: 8}, "what an order or another branch undoes was computed all the same"
    assert not scene.warnings


def test_accounts_have_machines_and_names(scene):
    shares = (Brought(ADA, "ada", 3.0), Brought(BOB, "ada", 4.0))
    scene.tell(StepOf(b"x", GENESIS.lineage, 0, 1, shares=shares))
    [total] = scene.collector.ledger.totals()
    assert (total.account, total.username, total.samples, total.machines) == (b"ada", "ada", 7, 2)
    scene.names[ADA] = "Ada"
    scene.tell(StepOf(b"y", b"x", 0, 2, shares=shares))
    assert [row["username"] for row in scene.collector.ledger.leaderboard()] == ["Ada"]


def test_a_name_that_is_found_later_is_shown(scene):
    scene.tell(step(1, {ADA: 8}))
    assert scene.collector.ledger.totals()[0].username is None
    scene.names[ADA] = "Ada"
    scene.collector.collect(0)
    assert scene.collector.ledger.totals()[0].username == "Ada"


def test_a_disk_that_fails_loses_nothing(scene, monkeypatch):
    whole = CreditLedger.enter_committed

    def fail(*args, **kwargs):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(CreditLedger, "enter_committed", fail)
    with pytest.raises(sqlite3.OperationalError):
        scene.tell(step(1, {ADA: 8}))
    monkeypatch.setattr(CreditLedger, "enter_committed", whole)
    assert scene.tell(step(2, {ADA: 8})) == 2
    assert scene.credit == {ADA: 16} and not scene.warnings


def test_what_waits_too_long_is_missed_and_told(scene):
    steps = [step(epoch, {ADA: 1}) for epoch in range(1, WAITING + 11)]
    scene.tell(*steps)
    assert scene.collector.ledger.missed() == 10 and scene.credit == {ADA: WAITING}


def test_old_ledgers_are_read_on(tmp_path):
    ledger = CreditLedger(tmp_path / "credit.sqlite")
    ledger.close()
    with sqlite3.connect(tmp_path / "credit.sqlite") as db:
        db.execute("DROP TABLE missed")
    ledger = CreditLedger(tmp_path / "credit.sqlite")
    assert ledger.missed() == 0
    ledger.close()


def test_an_entry_says_whose_samples_it_holds():
    """A late contribution counts in full, and a slice that was lost counts for none of its cells."""
    low, high = (1 << 8) - 1, (1 << 16) - (1 << 8)
    share = lambda peer, number, samples, cells: Share(peer, number, 3, samples, cells)  # noqa: E731
    answers = (
        Answer(low, ADA, b"1", (share(ADA, 0, 10, low), share(ADA, 1, 2, low), share(BOB, 4, 6, low))),
        Answer(high & ~(1 << 15), BOB, b"2", (share(ADA, 0, 10, high & ~(1 << 15)),)),
    )
    group = (Member(ADA, "ada", True), Member(BOB, "bob", True))
    entry = Entry(0, 0, 4, b"p", Ballot(0, ADA), b"f", group, answers, 1 << 15)
    assert brought_to(entry, CELLS) == (Brought(ADA, "ada", 10 * 15 / 16 + 1), Brought(BOB, "bob", 3.0))


def test_the_steps_of_a_branch_that_lost_are_in_nobodys_credit(scene):
    scene.tell(step(1, {ADA: 8, BOB: 4}), step(2, {ADA: 8}), step(3, {ADA: 7}), step(4, {ADA: 6}))
    tail = (step(1, {ADA: 8, BOB: 4}), step(2, {ADA: 8}), step(3, {BOB: 9}, branch="b", parent=name_of_step(2)))
    assert scene.tell(GENESIS, *tail, step(4, {BOB: 9}, branch="b")) == 2
    assert scene.credit == {ADA: 16, BOB: 22}
    assert scene.collector.ledger.sums() == (38, 0) and scene.collector.ledger.lost() == 13
    [text] = scene.warnings
    assert "2 steps are lost" in text and "13 samples" in text
    scene.tell(*tail)
    assert scene.credit == {ADA: 16, BOB: 22} and len(scene.warnings) == 1


def test_a_branch_loses_while_the_monitor_is_away(scene):
    scene.tell(step(1, {ADA: 8}), step(2, {ADA: 7}), step(3, {ADA: 6}))
    scene.restart()
    opening = StepOf(b"opening", name_of_step(1), 0, 1, is_step=False)
    scene.tell(step(1, {ADA: 8}), opening, step(2, {BOB: 3}, branch="b", parent=b"opening"))
    assert scene.credit == {ADA: 8, BOB: 3} and scene.collector.ledger.lost() == 13


def test_a_branch_that_wins_back_counts_again(scene):
    ours = (step(1, {ADA: 8}), step(2, {ADA: 7}))
    theirs = (step(1, {ADA: 8}), step(2, {BOB: 3}, branch="b", parent=name_of_step(1)))
    scene.tell(*ours)
    scene.tell(*theirs)
    scene.tell(*ours, step(3, {ADA: 1}))
    assert scene.credit == {ADA: 16, BOB: 0} and scene.collector.ledger.lost() == 3


def test_what_a_rollback_order_undoes_stays_counted(scene):
    scene.tell(step(1, {ADA: 8}), step(2, {ADA: 7}))
    order = StepOf(b"order", name_of_step(1), 1, 3, is_step=False, sequence=5)
    scene.tell(order, replace(step(4, {BOB: 3}, branch="c", parent=b"order"), generation=1, sequence=5))
    assert scene.credit == {ADA: 15, BOB: 3} and scene.collector.ledger.lost() == 0
