"""Test how voters judge members' commitments, in a run that verifies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Cause, Ledger, Share
from volunteer_kit.swarm.sync.entries import Entry, Member
from volunteer_kit.swarm.sync.judging import Judge
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import CommitmentsHeard

A, B = Member("a", "a", True), Member("b", "b", True)
GENESIS = LogItem.genesis([A, B])
WHOLE = Share("a", 1, 0, 8, 0b1111)
ANSWER = Answer(0b0011, "b", b"digest", (WHOLE._replace(cells=0b0011),))
ENTRY = Entry(
    0, 0, 0, GENESIS.head.lineage, Ballot(0, "a"), b"round", (A, B), (ANSWER,), 0b1100, commitments=b"the list"
)
HEARD = CommitmentsHeard(b"round", b"the list", (WHOLE,))
CONFIG = SyncConfig(target_batch_size=32, cells=4)


def judge(heard: CommitmentsHeard | None = HEARD, refused: frozenset[bytes] = frozenset()) -> Judge:
    return Judge(CONFIG, GENESIS, A, Accounts(), (), 8, (), 0.0, heard, refused)


def test_an_entry_of_what_was_committed_to_is_accepted():
    assert judge().why_not_committed(ENTRY) is None
    assert judge(None).why_not_committed(ENTRY) is None, "a member that was not in the exchange has heard no list"
    assert judge(replace(HEARD, fingerprint=b"another round")).why_not_committed(ENTRY) is None


@pytest.mark.parametrize(
    "share",
    [
        ANSWER.shares[0]._replace(samples=9),
        ANSWER.shares[0]._replace(birth=-1),
        ANSWER.shares[0]._replace(number=2),
        ANSWER.shares[0]._replace(peer="b"),
        ANSWER.shares[0]._replace(cells=0b0001),
    ],
)
def test_a_share_that_nobody_has_committed_to_is_refused(share):
    assert judge().why_not_committed(replace(ENTRY, answers=(ANSWER._replace(shares=(share,)),)))


def test_another_list_is_refused():
    assert judge().why_not_committed(replace(ENTRY, commitments=b"another list"))
    assert judge().why_not_committed(replace(ENTRY, commitments=b""))


def test_an_answer_that_is_too_long_is_refused():
    assert judge(refused=frozenset(answer.slice for answer in ENTRY.answers)).why_not_committed(ENTRY)


def test_what_has_to_be_checked_first_counts_for_the_size_of_a_step():
    assert judge().why_early(ENTRY, 1.0), "it has 8 samples of 32, in half of the cells"
    assert judge(replace(HEARD, disregarded=4 * 32)).why_early(ENTRY, 1.0) is None
    assert judge(None).why_early(ENTRY, 1.0) is None, "those who have heard the list know"
    assert judge(None).why_early(replace(ENTRY, commitments=b""), 1.0)


def test_the_list_is_of_the_lineage_and_a_run_that_does_not_verify_keeps_its_own():
    assert ENTRY.lineage != replace(ENTRY, commitments=b"").lineage != replace(ENTRY, commitments=b"other").lineage


def test_contributions_that_were_taken_for_checking_alone_expire():
    ledger = Ledger(4)
    for birth in (0, 1):
        ledger.add(8, birth)
    ledger.send("a", b"slot", b"round")
    ledger.expire((0, 7), Cause.PROBATION)
    assert [each.number for each in ledger.live] == [1] and ledger.expired == {Cause.PROBATION: 32}
    assert ledger.computed == 64
