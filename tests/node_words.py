"""Define one word of each kind that a node says, for tests of how words travel."""

from __future__ import annotations

from typing import Any

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contributions import (
    Accounts,
    Answer,
    Cause,
    Contribution,
    LedgerRecord,
    Settled,
    Share,
)
from volunteer_kit.swarm.sync.entries import Entry, Member, Opening, RollbackOrder, Verdict
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    Accuse,
    Ask,
    AskItems,
    AskOpening,
    BallotRecord,
    Begin,
    Body,
    HeadRecord,
    Held,
    Items,
    Lead,
    OpeningRecord,
    Order,
    Promise,
    Propose,
    Record,
    Refuse,
    Report,
    Round,
    SignOpening,
    Sketches,
    Snapshot,
    Vote,
    Without,
)

HASH = bytes(range(32))
MEMBERS = tuple(Member(name, f"account of {name}", name != "c") for name in "abc")
BALLOT = Ballot(3, "a")
GENESIS = LogItem.genesis(MEMBERS)
WIDE = (1 << 200) | 5  # cells


def entry_behind(item: LogItem, **more: Any) -> Entry:
    shares = tuple(Share(name, 7, item.head.epoch, 64, WIDE) for name in "abc")
    answers = (Answer(WIDE, "a", HASH, shares), Answer(8, "b", HASH[::-1], ()))
    head = item.head
    return Entry(*head.order, head.epoch, head.lineage, BALLOT, HASH, MEMBERS, answers, 2, **more)


def behind(item: LogItem, *goodbyes: Goodbye, **more: Any) -> LogItem:
    entry = entry_behind(item, **more)
    return item.after_entry(entry, Certificate(entry.lineage, BALLOT, frozenset("abc"), goodbyes))


ENTRY = entry_behind(GENESIS, gone=("c",), verdicts=(Verdict("c", b"proof"),))
GOODBYE = Goodbye("c", HASH, BALLOT, ENTRY, Ballot(2, "b"))
ONE = behind(GENESIS)
TWO = behind(ONE, GOODBYE)
OPENING = Opening(0, 0, 2, TWO.head.lineage, 1, MEMBERS[:2])
OPENED = TWO.after_opening(OPENING, frozenset("ab"))
ORDER = RollbackOrder(1, 4, 2, GENESIS.head.lineage, MEMBERS, ("c",))
ORDERED = OPENED.after_order(ORDER)
LOG = (GENESIS, ONE, TWO, OPENED, ORDERED, behind(ORDERED))
PROMISE = Promise(BALLOT, ENTRY, Ballot(0, "b"))
ROUND = Round(HASH, BALLOT, 0, MEMBERS, (1, 2, 3), (("a", 3), ("b", WIDE)), 2.5, 1.0, HASH)
VOTE = Vote(BALLOT, HASH, 0.25)
BODIES: tuple[Body, ...] = (
    Report(BALLOT, MEMBERS[0], 12, 50.5, 3.0, None, 0),
    Lead(BALLOT, True),
    Ask(BALLOT),
    PROMISE,
    Promise(BALLOT, None, None),
    Refuse(BALLOT, False),
    Begin(ROUND),
    Without(HASH, ("b", "c")),
    Held(HASH, ENTRY.answers),
    Propose(BALLOT, ENTRY, (("a", PROMISE), ("b", Promise(BALLOT, None, None))), (GOODBYE,)),
    VOTE,
    Vote(BALLOT, HASH, None),
    Sketches(HASH, (("a", VOTE), ("b", VOTE))),
    AskItems((HASH, b"")),
    Items(GENESIS.head.lineage, LOG[1:]),
    Items(None, ()),
    GOODBYE,
    AskOpening(OPENING),
    SignOpening(HASH, 2),
    Order(ORDER),
    Accuse(Verdict("c", b"proof" * 100)),
)
ACCOUNTS = Accounts().after(ENTRY.answers, 1, 4).after(behind(ONE).step.answers, 16, 4)  # type: ignore[union-attr]
LEDGER = LedgerRecord(
    (Contribution(1, 2, 3, WIDE, 0, True),),
    2,
    30,
    20,
    ((Cause.STALE, 5),),
    ((Cause.LOST_BRANCH, Settled(0, 1, 2)),),
    ((HASH, (Settled(1, 2, WIDE),)),),
    HASH,
    (HASH, b"other"),
)
RECORDS: tuple[Record, ...] = (
    BallotRecord(HASH, BALLOT),
    BallotRecord(HASH, BALLOT, ENTRY, BALLOT, BALLOT),
    OpeningRecord(OPENING),
    HeadRecord(Snapshot(LOG, ACCOUNTS)),
    LEDGER,
    GOODBYE,
)
