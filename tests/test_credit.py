"""Credit: what signed receipts come to, whose rounds are the swarm's, and the ledger through kills and two monitors."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from functools import partial

import pytest
from hivemind.dht import DHT
from hivemind.p2p import PeerID

from tests.test_receipts import reduced
from tests.test_records import Somebody, store_as
from volunteer_kit.swarm.agreement import BEGINNING
from volunteer_kit.swarm.credit import Credit, Findings, credit_of_epoch, credit_of_step, line_of, steps_of
from volunteer_kit.swarm.credit_collector import CreditCollector
from volunteer_kit.swarm.credit_ledger import LONGEST, CreditLedger
from volunteer_kit.swarm.receipts import ENTRY, LIFETIME, Receipt, ReceiptBoard, digest_of, make_receipt, receipts_key

NOW = 1_800_000_000.0


def peer_of(name: str) -> PeerID:
    """ "a" and "a2" are machines of account "A"."""
    return PeerID(name.ljust(34, "-").encode())


NAMES = [*"abcdefghm", "a2", "b2"]
NAME_OF = {digest_of(peer_of(name)): name for name in NAMES}
PEER_NAME = {peer_of(name): name for name in NAMES}


def owner(digest: bytes) -> bytes | None:
    name = NAME_OF.get(digest)
    return name[0].upper().encode() if name else None


def account_of(peer: PeerID) -> bytes | None:
    return owner(digest_of(peer))


def is_monitor(peer: PeerID) -> bool:
    return peer == peer_of("m")


def signed(signer: str, epoch: int = 1, line: str = "x", *, since: str | None = None, at: float | None = None, **named):
    """A receipt of the round that made LINE at EPOCH of the LINE (or `since`) that was at the epoch before."""
    entries = sorted((digest_of(peer_of(name)), samples) for name, samples in named.items())
    before = BEGINNING if epoch == 1 else lineage(since or line, epoch - 1)
    return Receipt(
        peer_id=peer_of(signer).to_bytes(),
        epoch=epoch,
        round=lineage("R" + line, epoch),
        before=before,
        after=lineage(line, epoch),
        time=NOW + 10.0 * epoch if at is None else NOW + at,
        senders=b"".join(ENTRY.pack(*entry) for entry in entries),
    )


def lineage(line: str, epoch: int) -> bytes:
    return f"{line}{epoch}".ljust(8, "-").encode()


def by_name(credits) -> dict[str, tuple[int, bool]]:
    return {NAME_OF[digest]: tuple(credit) for digest, credit in credits.items()}


# --- one round ---

ALL = dict(a=10, b=20, c=30)


@pytest.mark.parametrize(
    "receipts, credited, why",
    [
        ([], {}, "nobody signed"),
        (
            [("a", ALL), ("b", ALL), ("c", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False)},
            "each by two others",
        ),
        (
            [("a", ALL), ("b", ALL)],
            {"a": (10, True), "b": (20, True), "c": (30, False)},
            "of two who reduce, one other",
        ),
        ([("a", ALL)], {"a": (10, True), "b": (20, True), "c": (30, True)}, "alone, its word is provisional"),
        (
            [("a", ALL), ("b", ALL), ("c", {**ALL, "a": 7})],
            {"a": (7, False), "b": (20, False), "c": (30, False)},
            "the lowest counts",
        ),
        (
            [("a", {**ALL, "a": 999}), ("b", ALL), ("c", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False)},
            "nobody's word about himself",
        ),
        (
            [("a", {**ALL, "d": 50}), ("b", ALL), ("c", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False)},
            "a friend whom most have not seen",
        ),
        (
            [("a", {**ALL, "d": 50}), ("b", {**ALL, "d": 50}), ("c", ALL), ("e", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False), "d": (50, True)},
            "two of four are not most, nor few",
        ),
        (
            [("a", dict(a=9, a2=90)), ("b", dict(a=9, a2=0)), ("c", dict(a=9)), ("a2", dict(a2=90))],
            {"a": (9, False)},
            "a second machine that only the first one saw",
        ),
        (
            [("a", ALL), ("a2", ALL), ("b", ALL)],
            {"a": (10, True), "b": (20, True), "c": (30, False)},
            "two machines of one account are one voice",
        ),
        (
            [("a", dict(a=10, a2=20)), ("a2", dict(a=10, a2=20))],
            {"a": (10, True), "a2": (20, True)},
            "one account alone in the swarm",
        ),
        (
            [("m", ALL), ("a", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False)},
            "a monitor is enough",
        ),
        (
            [("m", ALL), ("a", dict(b=12, c=14)), ("b", ALL), ("c", ALL)],
            {"a": (10, False), "b": (12, False), "c": (30, False)},
            "beside a monitor the lowest counts as far as half of its own",
        ),
        ([("m", dict(b=20)), ("a", ALL)], {"b": (20, False), "c": (30, True)}, "a monitor that did not see it"),
        ([("a", dict(b=0)), ("c", dict(b=0))], {}, "nothing is nothing"),
    ],
)
def test_credit_of_a_round(receipts, credited, why):
    written = [signed(signer, **samples) for signer, samples in receipts]
    assert by_name(credit_of_epoch(written, owner, is_monitor)) == credited, why
    assert by_name(credit_of_epoch(reversed(written), owner, is_monitor)) == credited, "their order does not matter"


def test_who_signs_less_for_others_than_they_did_is_named():
    receipts = [signed("a", **ALL), signed("b", **ALL), signed("c", **ALL), signed("d", a=1, b=1, c=1)]
    findings, [step] = Findings(), steps_of(receipts, owner)
    credits = credit_of_step(step, owner, findings)
    assert by_name(credits) == {"a": (1, False), "b": (1, False), "c": (1, False)}
    assert findings.understated == {peer_of("d")}
    [step] = steps_of([*receipts, signed("m", **ALL)], owner, is_monitor)
    credits = credit_of_step(step, owner, findings)
    assert by_name(credits) == {"a": (10, False), "b": (20, False), "c": (30, False)}, "and not believed"


def test_who_signs_two_things_of_one_round_or_what_cannot_be_is_not_heard():
    two = [signed("a", **ALL), signed("a", **{**ALL, "b": 21}), signed("b", **ALL), signed("c", **ALL)]
    findings = Findings()
    [step] = steps_of([*two, signed("d", a=10, b=513)], owner, findings=findings, max_samples=512)
    assert set(step.receipts) == {digest_of(peer_of("b")), digest_of(peer_of("c"))}
    assert findings.contradictions == {peer_of("a")} and findings.implausible == {peer_of("d")}
    assert len(steps_of([two[0], two[0]], owner)[0].receipts) == 1, "the same twice is no contradiction"


def test_a_signer_or_a_sender_whose_account_nobody_knows():
    stranger = signed("a", **ALL).copy(update={"peer_id": peer_of("z").to_bytes()})
    assert steps_of([stranger], owner) == []
    receipts, findings = [signed("a", z=5, **ALL), signed("b", z=5, **ALL)], Findings()
    [step] = steps_of(receipts, owner)
    assert "z" not in by_name(credit_of_step(step, owner, findings))
    assert findings.unknown == {digest_of(peer_of("z"))}


# --- the line ---


def made(epochs, line: str, signers: str, **more) -> list[Receipt]:
    return [signed(s, epoch, line, a=1, b=2, **more) for epoch in epochs for s in signers.split()]


def line_found(receipts) -> list[str]:
    """Of LINE and EPOCH, in order; the same whatever the order of receipts."""
    found = []
    for seed in range(4):
        random.Random(seed).shuffle(receipts)
        found.append([step.after.decode().strip("-") for step in line_of(steps_of(receipts, owner, is_monitor))])
    assert all(one == found[0] for one in found)
    return found[0]


X = partial(made, line="x", signers="a b c d")


def names(line: str, epochs) -> list[str]:
    return [f"{line}{epoch}" for epoch in epochs]


def test_a_swarm_that_nothing_happened_to():
    assert line_found(X(range(1, 9))) == names("x", range(1, 9))
    assert line_found([]) == []


def test_a_minority_that_went_its_own_way_for_a_while():
    fork = made([4], "y", "e f", since="x", at=41.0) + made([5, 6], "y", "e f")
    together = made(range(7, 9), "x", "a b c d e f")
    assert line_found(X(range(1, 7)) + fork + together) == names("x", range(1, 9))
    assert line_found(X(range(1, 7)) + fork) == names("x", range(1, 7)), "and while they are apart"


def test_a_majority_that_came_to_follow_the_few():
    """Not how many signed then, but what is gone on from."""
    fork = made([4], "y", "e f", since="x", at=41.0) + made([5, 6], "y", "e f")
    assert line_found(X(range(1, 7)) + fork + made([7], "y", "a b c d e f")) == [
        *names("x", [1, 2, 3]),
        *names("y", [4, 5, 6, 7]),
    ]


def test_an_epoch_without_receipts_loses_only_itself():
    assert line_found(X([1, 2, 3, 5, 6])) == names("x", [1, 2, 3, 5, 6])
    fork = made([3], "y", "e", since="x", at=31.0)
    assert line_found(X([1, 2, 3, 5, 6]) + fork) == names("x", [1, 2, 3, 5, 6])
    assert line_found(X([1, 2, 3]) + made([5, 6], "x", "a b c")) == names("x", [1, 2, 3, 5, 6]), "most went on"
    assert line_found(X([1, 2, 3]) + made([5, 6], "x", "a b")) == names("x", [1, 2, 3]), "half may be made up"


def test_after_a_restart_from_a_checkpoint_those_who_are_gone_do_not_hold_the_line():
    again = [r for e in range(3, 6) for r in made([e], "n", "a b", since="x" if e == 3 else None, at=900.0 + 10 * e)]
    assert line_found(X(range(1, 6)) + again) == names("x", range(1, 6)), "two of four: it may be made up"
    assert line_found(X(range(1, 6)) + again + made([6], "n", "a b", at=1000.0)) == [
        *names("x", [1, 2]),
        *names("n", [3, 4, 5, 6]),
    ]


def test_a_rollback_begins_a_lineage_anew_and_the_epoch_goes_on():
    again = [r.copy(update={"before": BEGINNING}) for r in made([5], "n", "a b c d")]
    assert line_found(X([1, 2, 3, 4]) + again + made([6, 7], "n", "a b c d")) == [
        *names("x", [1, 2, 3, 4]),
        *names("n", [5, 6, 7]),
    ]


def test_a_member_that_missed_a_slice_saw_the_round_all_the_same():
    receipts = X([1, 2]) + [signed("e", 2, a=1, b=2, e=3).copy(update={"after": b"elsewhere"[:8]})] + X([3])
    assert line_found(receipts) == names("x", [1, 2, 3])
    steps = steps_of(receipts, owner)
    assert max(len(step.receipts) for step in steps) == 5


@pytest.mark.parametrize("when", [35.0, 65.0, 9.0])
def test_two_who_make_up_a_round_are_not_on_the_line(when):
    """Beside the swarm's, claiming that the swarm went on from it; before all and after all it is credited as what it
    is: provisional."""
    made_up = [r.copy(update={"after": lineage("x", 3)}) for r in made([3], "z", "e f", at=when)]
    found = line_found(X(range(1, 7)) + made_up)
    assert [name for name in found if name != "x3"] == names("x", [1, 2, 4, 5, 6])
    keys = [step.key for step in line_of(steps_of(X(range(1, 7)) + made_up, owner))]
    assert (3, lineage("Rz", 3)) not in keys or when < 10 or when > 60


def test_whatever_few_sign_the_others_keep_their_credit_and_the_few_gain_nothing_final():
    """Random lies of two of six, in all fields that they choose."""
    rng = random.Random(7)
    honest = [signed(s, e, a=10, b=10, c=10, d=10, e=10) for e in range(1, 6) for s in "abcd"]
    for _ in range(200):
        lies = []
        for signer, epoch in itertools.product("ef", range(1, 6)):
            lie = signed(
                signer,
                epoch,
                rng.choice("xyz"),
                since=rng.choice("xyz"),
                **{n: rng.choice([10, 500]) for n in "abcdefgh"},
            )
            lies.append(lie.copy(update={"time": lie.time + rng.choice([-30.0, 0.0, 1.0, 30.0])}))
        line = line_of(steps_of([*honest, *lies], owner))
        credits = {step.epoch: by_name(credit_of_step(step, owner)) for step in line if step.after[:1] == b"x"}
        for epoch in range(1, 6):
            assert all(credits[epoch][name] == (10, False) for name in "abcde"), credits
        final = [c for step in line for n, c in by_name(credit_of_step(step, owner)).items() if n in "fgh" and not c[1]]
        assert not final


# --- the ledger ---


def step_of(epoch: int, line: str = "x", **more):
    [step] = steps_of(made([epoch], line, "a b c", **more), owner)
    return step


CREDITS = {"a": Credit(10, False), "a2": Credit(5, False), "b": Credit(20, True)}
DIGESTS = {digest_of(peer_of(name)): credit for name, credit in CREDITS.items()}
OWNERS = {digest: owner(digest) for digest in NAME_OF}


@pytest.fixture
def ledger(tmp_path):
    ledger = CreditLedger(tmp_path / "credit.sqlite")
    yield ledger
    ledger.close()


def test_totals_per_account_over_machines(ledger, tmp_path):
    ledger.learn(OWNERS, {b"A": "ann", b"B": "bob"})
    assert ledger.enter(step_of(1), DIGESTS, OWNERS)
    assert ledger.enter(step_of(2), DIGESTS, OWNERS)
    assert ledger.enter(step_of(3, at=9e6), {digest_of(peer_of("c")): Credit(1, False)}, OWNERS)
    board = {row["username"]: row for row in ledger.leaderboard()}
    ann = {"samples": 30, "provisional": 0, "seconds": 10.0, "machines": 2, "last_epoch": 2}
    assert board["ann"] == {"username": "ann", **ann}, "an epoch's time counts once, however many machines"
    assert (board["bob"]["samples"], board["bob"]["provisional"]) == (0, 40)
    assert board["43"]["seconds"] == LONGEST, "a night in which nothing happened is nobody's work"
    assert [row["username"] for row in ledger.leaderboard()] == ["ann", "43", "bob"]
    reader = CreditLedger(tmp_path / "credit.sqlite", read_only=True)
    assert reader.totals() == ledger.totals() and reader.sums() == (31, 40)
    with pytest.raises(sqlite3.OperationalError):
        reader.learn({}, {b"A": "eve"})
    reader.close()
    ledger.learn({digest_of(peer_of("a2")): b"B"}, {b"A": "anna"})
    assert ledger.machines()[digest_of(peer_of("a2"))] == b"B"
    assert ledger.totals()[0].username == "anna" and ledger.totals()[0].samples == 30, "what was earned stays"


def test_a_round_is_entered_once_and_beside_the_line_never(ledger):
    for epoch in (1, 2, 3, 5, 6):
        assert ledger.enter(step_of(epoch), DIGESTS, OWNERS)
        assert not ledger.enter(step_of(epoch), {d: Credit(99, False) for d in DIGESTS}, OWNERS)
    assert not ledger.enter(step_of(3, "y", since="x", at=31.0), DIGESTS, OWNERS), "another round of an epoch"
    assert not ledger.enter(step_of(4, "y", at=41.0), DIGESTS, OWNERS), "linked to nothing that is here"
    assert ledger.enter(step_of(4), DIGESTS, OWNERS), "late, and linked"
    assert ledger.sums() == (6 * 15, 6 * 20)
    assert ledger.enter(step_of(4, "r", at=100.0), DIGESTS, OWNERS), "all began again from a checkpoint"
    assert ledger.epochs_since(NOW + 50.0) == {4, 5, 6}


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "ledger"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        CreditLedger(path)
    with sqlite3.connect(tmp_path / "newer") as db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(sqlite3.DatabaseError, match="version 2"):
        CreditLedger(tmp_path / "newer")
    with pytest.raises(sqlite3.OperationalError):
        CreditLedger(tmp_path / "missing", read_only=True)


def enter_all(path, epochs, begun=None) -> None:
    ledger = CreditLedger(path)
    if begun is not None:
        begun.set()
    for epoch in epochs:
        ledger.enter(step_of(epoch), DIGESTS, OWNERS)
    ledger.close()


def test_a_monitor_killed_in_the_middle_and_two_at_once_change_nothing(tmp_path):
    path, context = tmp_path / "credit.sqlite", multiprocessing.get_context("fork")
    epochs = range(1, 121)
    for _ in range(6):
        begun = context.Event()
        process = context.Process(target=enter_all, args=(path, epochs, begun))
        process.start()
        assert begun.wait(20)
        time.sleep(random.uniform(0, 0.03))  # where it is hit does not matter
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
    both = [context.Process(target=enter_all, args=(path, epochs)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    ledger = CreditLedger(path)
    assert ledger.sums() == (120 * 15, 120 * 20)
    assert {t.account: (t.samples, t.provisional) for t in ledger.totals()} == {b"A": (1800, 0), b"B": (0, 2400)}
    ledger.close()


# --- the collector ---


class Shelf:
    """Receipts by epoch, as a board has them; `asked`: epochs."""

    lifetime = LIFETIME

    def __init__(self):
        self.receipts, self.asked = [], []

    def fetch(self, epochs):
        epochs = list(epochs)
        self.asked += epochs
        return {epoch: [r for r in self.receipts if r.epoch == epoch] for epoch in epochs}


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def collector(shelf, ledger, clock):
    clock.now = NOW
    username = lambda peer: PEER_NAME[peer][0] * 3  # noqa: E731
    peers = lambda: map(peer_of, NAMES)  # noqa: E731
    return CreditCollector(
        shelf, ledger, account_of, username, is_monitor, peers, max_samples=512, clock=clock, settle_after=15.0
    )


def test_a_round_is_entered_when_it_is_old_and_another_goes_on_from_it(collector, shelf, ledger, clock):
    shelf.receipts = X([1, 2])
    clock.now = NOW + 24.9
    assert collector.collect(2).steps == []
    clock.now = NOW + 25.0
    assert [step.epoch for step in collector.collect(2).steps] == [1]
    clock.now = NOW + 319.0
    assert collector.collect(2).steps == [], "nobody has gone on from the second"
    clock.now = NOW + 320.0
    collected = collector.collect(2)
    assert [step.epoch for step in collected.steps] == [2] and (collected.samples, collected.provisional) == (3, 0)
    assert collector.collect(2).steps == []
    assert {row["username"]: row["samples"] for row in ledger.leaderboard()} == {"aaa": 2, "bbb": 4}


def test_what_is_entered_is_not_asked_for_again(collector, shelf, clock):
    shelf.receipts = X(range(1, 41))
    clock.now = NOW + 440.0
    assert len(collector.collect(40).steps) == 39
    shelf.asked.clear()
    collector.collect(40)
    assert set(shelf.asked) == {37, 38, 39, 40, 41, 0}


def test_a_monitor_that_was_away_finds_what_it_missed(shelf, ledger, clock):
    shelf.receipts = X(range(1, 151))
    clock.now = NOW + 1600.0
    collector = CreditCollector(shelf, ledger, account_of, max_samples=512, clock=clock)
    assert [step.epoch for step in collector.collect(150).steps] == list(range(1, 150))
    shelf.asked.clear()
    again = CreditCollector(shelf, ledger, account_of, max_samples=512, clock=clock)
    assert again.collect(150).steps == [] and ledger.sums() == (149 * 3, 0)
    assert len(shelf.asked) < 10


def test_a_swarm_that_begins_again_at_an_earlier_epoch(collector, shelf, ledger, clock):
    shelf.receipts = X(range(1, 21))
    clock.now = NOW + 200 + 300
    assert len(collector.collect(20).steps) == 20
    for restart in range(1, 3):  # once while the monitor lives, once while it does not
        line = f"r{restart}"
        more = [
            signed(
                s, epoch, line, since="x" if epoch == 19 - restart else None, at=1000.0 * restart + epoch * 5, a=1, b=1
            )
            for epoch in range(19 - restart, 30)
            for s in "abc"
        ]
        shelf.receipts += more
        clock.now = NOW + 1000.0 * restart + 200.0
        entered = [step.epoch for step in collector.collect(29).steps]
        last_of_the_first = [29] if restart == 2 else []
        assert entered == last_of_the_first + list(range(19 - restart, 29)), restart
        collector = CreditCollector(shelf, ledger, account_of, max_samples=512, clock=clock, settle_after=15.0)


def test_receipts_of_the_future_and_of_long_ago_are_not_read(collector, shelf, clock):
    shelf.receipts = X([1], at=100.0) + X([2], at=-2000.0)
    clock.now = NOW
    collector.collect(1)
    assert collector._receipts == {}


def test_an_account_that_is_learned_later(shelf, ledger, clock):
    known = set("abc")
    shelf.receipts = [signed(s, e, a=1, g=7) for e in (1, 2) for s in "abc"]
    collector = CreditCollector(
        shelf, ledger, lambda p: account_of(p) if PEER_NAME[p] in known else None, lambda p: None, is_monitor,
        lambda: [peer_of("g")], max_samples=512, clock=clock, settle_after=15.0, give_up_after=100.0,
    )  # fmt: skip
    clock.now = NOW + 26.0
    collected = collector.collect(2)
    assert collected.findings.unknown == {digest_of(peer_of("g"))} and collected.samples == 1
    known.add("g")
    clock.now = NOW + 130.0
    assert collector.collect(2).samples == 8
    known.clear()
    again = CreditCollector(shelf, ledger, lambda p: None, max_samples=512, clock=clock)
    assert again._owners[digest_of(peer_of("g"))] == b"G", "and is known from then on"


def test_without_an_authority_every_peer_is_an_account(shelf, ledger, clock):
    shelf.receipts = [signed(s, e, a=1, a2=2, b=3) for e in (1, 2) for s in ("a", "a2", "b")]
    collector = CreditCollector(shelf, ledger, None, max_samples=512, clock=clock)
    clock.now = NOW + 60.0
    assert collector.collect(2).samples == 6
    assert sorted((t.samples, t.account) for t in ledger.totals()) == [
        (samples, digest_of(peer_of(name))) for samples, name in ((1, "a"), (2, "a2"), (3, "b"))
    ]


def test_through_a_real_dht(peer, tmp_path):
    """Three reducers, one liar, and a monitor that reads what the DHT holds."""
    people = [Somebody() for _ in range(3)]
    ids = [person.peer_id for person in people]
    board = ReceiptBoard(peer.dht, "collected")
    clock = [peer.dht.get_visible_maddrs() and time.time()]
    dht = DHT(initial_peers=peer.visible_maddrs(), client_mode=True, start=True, startup_timeout=60)
    try:
        before = BEGINNING
        for epoch in (1, 2):
            for number, person in enumerate(people):
                round_ = reduced(epoch=epoch, round_id=bytes([epoch]), round_name=bytes([epoch]), lineage_before=before)
                weights = {i: 500.0 if number == 2 and i == ids[2] else 40.0 for i in ids}
                receipt = make_receipt(person.peer_id, round_, weights, now=clock[0] + epoch)
                key = receipts_key("collected", epoch)
                assert store_as(person, dht, to=peer.peer_id, key=key, value=receipt.dict())
            before = receipt.after
    finally:
        dht.shutdown()
    ledger = CreditLedger(tmp_path / "credit.sqlite")
    monitor = CreditCollector(board, ledger, max_samples=512, clock=lambda: clock[0] + 50.0)
    assert monitor.collect(2).samples == 120
    assert ledger.of_machines() == {digest_of(i): (40, 0) for i in ids}
    ledger.close()
