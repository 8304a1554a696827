"""The synchronization core by hand: epochs without faults, then one history for each fault that a review proved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sync_peers import ALL_CELLS, CELLS, Swarm, among, everything, without
from volunteer_kit.swarm.sync import leading
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contacts import MOST_CONTACTS, Contacts
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Cause, Share
from volunteer_kit.swarm.sync.log import (
    Certificate,
    Entry,
    Goodbye,
    Head,
    LogItem,
    Member,
    Opening,
    RollbackOrder,
    is_chain,
)
from volunteer_kit.swarm.sync.messages import (
    Action,
    AnswersHeld,
    Ask,
    AskOpening,
    BallotRecord,
    Begin,
    EndExchange,
    FetchSnapshot,
    Held,
    Items,
    Lead,
    LeaveRequested,
    Message,
    Order,
    Persist,
    Promise,
    Propose,
    Received,
    Refuse,
    Repair,
    Report,
    Round,
    Send,
    SignOpening,
    Sketches,
    Snapshot,
    Topic,
    Vote,
)
from volunteer_kit.swarm.sync.phases import Phase

STRANGER = Member("x", "x", True)
EVERYBODY = 15  # samples: a round begins when five have brought three


def opened_round(swarm: Swarm, samples: int = 3, peers: str | None = None) -> Round:
    """Devices have computed enough and a round has begun; its exchange goes on."""
    swarm.ends_exchanges = False
    swarm.compute(samples, peers)
    begun = len(swarm.rounds)
    for _ in range(60):
        swarm.wait(1, peers)
        if len(swarm.rounds) > begun:
            return swarm.last_round()
    raise AssertionError("no round began")


def proposed(swarm: Swarm, samples: int = 3, reaches: str = "") -> Entry:
    """The leader of turn 0 has proposed an entry. The proposal reaches these peers only, and no vote comes back."""
    plan = opened_round(swarm, samples)
    swarm.end_exchange(plan)
    swarm.deliver(lambda sender, to, body: to in reaches if isinstance(body, Propose) else not isinstance(body, Vote))
    entry = swarm[swarm.order[0]].ballot.accepted
    assert entry is not None
    return entry


def asks_at(swarm: Swarm, peer: str) -> list[Ballot]:
    """Ballots at which this peer asked for promises."""
    return [body.ballot for body in swarm.said(peer, Ask)]


def persisted_before(actions: list[Action], kind: type, holds) -> bool:
    """Whether a ballot record for which `holds` is true was written before the first message of this kind."""
    written = False
    for action in actions:
        if isinstance(action, Persist):
            written |= any(isinstance(record, BallotRecord) and holds(record) for record in action.records)
        elif isinstance(action, Send) and isinstance(action.message.body, kind):
            return written
    raise AssertionError(f"no {kind.__name__} was sent")


# --- without faults ---


def test_an_epoch_goes_from_reports_to_the_commit():
    swarm = Swarm(target=EVERYBODY)
    plan = opened_round(swarm)
    leader = swarm.order[0]
    assert plan.ballot == Ballot(0, leader)
    assert {core.phase for core in swarm.cores.values()} == {Phase.EXCHANGING}
    swarm.end_exchange(plan)
    assert {core.phase for core in swarm.cores.values()} == {Phase.VOTING}
    swarm.deliver()
    assert {core.head.lineage for core in swarm.cores.values()} == {swarm[leader].head.lineage}
    for core in swarm.cores.values():
        assert (core.head.epoch, core.phase, core.ledger.live) == (1, Phase.COLLECTING, ())
        assert core.ledger.committed == core.ledger.computed == 3 * CELLS
        assert core.accounts.committed("a", 0) == ALL_CELLS


def test_devices_compute_while_a_round_runs():
    swarm = Swarm(target=EVERYBODY)
    plan = opened_round(swarm)
    swarm.compute(2)
    swarm.end_exchange(plan)
    swarm.deliver()
    assert all(core.computes and core.ledger.pending_samples == 2 for core in swarm.cores.values())


def test_the_next_leader_proposes_the_entry_of_a_leader_that_died():
    swarm = Swarm(target=EVERYBODY)
    dead, heir, *_ = swarm.order
    entry = proposed(swarm, reaches=swarm.order[2] + swarm.order[3])
    living = [peer for peer in swarm.order if peer != dead]
    swarm.passes = among(living)
    swarm.wait(30, living)
    for peer in living:
        first = swarm.applied(peer)[0]
        assert first.step == entry
        assert first.certificate.ballot.turn > 0
        assert dead not in first.certificate.voters


def test_a_late_contribution_enters_one_epoch_later():
    swarm = Swarm(target=EVERYBODY)
    late = swarm.order[-1]
    swarm.passes = lambda sender, to, body: not (isinstance(body, Begin) and to == late)
    plan = opened_round(swarm)
    swarm.end_exchange(plan)
    swarm.deliver()
    assert swarm[late].head.epoch == 1
    assert (swarm[late].ledger.pending_samples, swarm[late].ledger.committed) == (3, 0)
    swarm.passes, swarm.ends_exchanges = everything, True
    swarm.train(3, samples=2)
    share = next(
        share for answer in swarm.applied(late)[1].step.answers for share in answer.shares if share.peer == late
    )
    assert (share.birth, share.samples) == (0, 3)
    assert swarm[late].ledger.expired == {}


def test_a_slice_whose_reducer_died_is_missing_and_its_senders_keep_their_part():
    swarm = Swarm(target=EVERYBODY)
    plan = opened_round(swarm)
    dead, lost = next((reducer, cells) for reducer, cells in plan.slices if reducer != swarm.order[0])
    living = [peer for peer in swarm.order if peer != dead]
    swarm.passes = among(living)
    swarm.end_exchange(plan, tuple(each for each in swarm.answers(plan) if each.reducer != dead), living)
    swarm.deliver()
    swarm.wait(3, living)
    for peer in living:
        assert swarm.applied(peer)[0].step.missing == lost
        assert [each.pending for each in swarm[peer].ledger.live] == [lost]
        assert swarm[peer].ledger.committed == 3 * (CELLS - lost.bit_count())


def test_a_promise_is_written_before_it_is_said():
    swarm = Swarm()
    _, candidate, voter, *_ = swarm.order
    swarm.passes = lambda sender, to, body: False
    swarm.wait(4, voter)
    ballot = Ballot(1, candidate)
    actions = swarm.happen(voter, Received(candidate, Message(swarm.genesis.head, Ask(ballot))))
    assert persisted_before(actions, Promise, lambda record: record.promised == ballot)


def test_a_vote_is_written_before_it_is_said():
    swarm = Swarm(target=EVERYBODY)
    leader, voter, *_ = swarm.order
    entry = proposed(swarm)
    propose = Propose(Ballot(0, leader), entry, ())
    actions = swarm.happen(voter, Received(leader, Message(swarm.genesis.head, propose)))
    assert persisted_before(actions, Vote, lambda record: record.accepted == entry)


def test_a_proposal_is_written_before_it_is_said():
    swarm = Swarm(target=EVERYBODY)
    leader = swarm.order[0]
    proposed(swarm)
    actions = [action for peer, action in swarm.actions if peer == leader]
    assert persisted_before(actions, Propose, lambda record: record.proposed_at == Ballot(0, leader))


def test_a_leaver_brings_its_round_to_an_end_and_the_others_go_on():
    swarm = Swarm(target=EVERYBODY)
    plan = opened_round(swarm)
    leaver = swarm.order[0]
    swarm.happen(leaver, LeaveRequested())
    assert swarm[leaver].phase is Phase.EXCHANGING
    swarm.end_exchange(plan)
    swarm.deliver()
    assert swarm[leaver].phase is Phase.LEAVING
    assert swarm[leaver].ledger.committed == 3 * CELLS
    swarm.ends_exchanges = True
    living = [peer for peer in swarm.order if peer != leaver]
    swarm.train(20, peers=living)
    for peer in living:
        assert swarm[peer].head.epoch > 4
        assert leaver not in swarm[peer].log.last.membership.view


def test_a_newcomer_joins_by_a_snapshot_and_brings_samples():
    swarm = Swarm()
    swarm.train(10)
    newcomer = Member("n", "n", True)
    assert swarm.add(newcomer).phase is Phase.JOINING
    swarm.discover()
    swarm.train(20)
    assert swarm["n"].phase is not Phase.JOINING
    assert swarm["n"].head == swarm["a"].head
    assert swarm["n"].ledger.committed > 0
    assert newcomer in swarm["a"].log.last.membership.view.values()


# --- leavers and promises ---


def test_a_leaver_does_not_shrink_the_quorum_below_its_promise():
    """Two leavers that accepted nothing have promised a higher ballot; they stay in the denominator below it."""
    swarm = Swarm(target=4)
    leader, second, voter, *leavers = swarm.order
    proposed(swarm, reaches=voter)
    vote = swarm.take_stopped(Vote)
    group = (second, *leavers)
    swarm.passes = lambda sender, to, body: {sender, to} <= set(group) and not isinstance(body, Propose)
    swarm.compute(4, group)
    while swarm.last_round().ballot.leader != second:
        swarm.wait(1, group)
    swarm.end_exchange(swarm.last_round())
    swarm.deliver()
    late = [each for each in swarm.take_stopped(Propose, voter) if each[0] == second]
    for leaver in leavers:
        swarm.happen(leaver, LeaveRequested())
    swarm.passes = lambda sender, to, body: False
    swarm.wait(60, leavers)
    goodbyes = {peer: swarm.said(peer, Goodbye)[0] for peer in leavers}
    assert all(each.accepted is None and each.promised.turn > 0 for each in goodbyes.values())
    for peer, to, message in vote:
        swarm.happen(to, Received(peer, message))
    for peer, to, message in late:
        swarm.happen(to, Received(peer, message))
    for peer, goodbye in goodbyes.items():
        swarm.say(peer, leader, goodbye)
        swarm.say(peer, second, goodbye)
    swarm.deliver(among({second, voter}))
    assert swarm.applied(leader) == []
    assert [item.certificate.ballot.leader for item in swarm.applied(second)] == [second]


def test_a_goodbye_does_not_vote_below_its_promise():
    swarm = Swarm()
    leader, voter, second, _, leaver = swarm.order
    entry = proposed(swarm, reaches=leaver)
    swarm.passes = lambda sender, to, body: False
    swarm.wait(30, leaver)
    higher = max(Ballot(2, second), swarm[leaver].ballot.promised)
    swarm.say(second, leaver, Ask(higher))
    assert swarm[leaver].ballot.promised == higher
    swarm.happen(leaver, LeaveRequested())
    goodbye = swarm.said(leaver, Goodbye)[0]
    assert (goodbye.promised, goodbye.accepted) == (higher, entry)
    swarm.say(leaver, leader, goodbye)
    swarm.say(voter, leader, Vote(Ballot(0, leader), entry.lineage, None))
    assert swarm.applied(leader) == []
    membership = swarm.genesis.membership
    votes = Certificate(entry.lineage, Ballot(0, leader), frozenset({leader, voter}), (goodbye,))
    assert not membership.certifies(votes, entry)
    assert membership.certifies(votes._replace(ballot=higher), entry)


def test_a_goodbye_from_a_slot_ahead_is_in_no_certificate():
    """Both leavers voted for the entry and left behind it; another entry needs them still."""
    genesis = LogItem.genesis(Member(name, name, True) for name in "abc")
    group = tuple(sorted(genesis.membership.view.values()))
    slot = genesis.head.lineage
    first = Entry(0, 0, 0, slot, Ballot(0, "b"), b"one", group, (), ALL_CELLS)
    other = Entry(0, 0, 0, slot, Ballot(0, "a"), b"two", group[:1], (), ALL_CELLS)
    assert genesis.leads_to(
        genesis.after_entry(first, Certificate(first.lineage, Ballot(0, "b"), frozenset("bc")))
    )
    goodbyes = tuple(Goodbye(peer, first.lineage, Ballot(0, "")) for peer in "bc")
    alone = Certificate(other.lineage, Ballot(0, "a"), frozenset("a"), goodbyes)
    assert not genesis.leads_to(genesis.after_entry(other, alone))


def test_a_core_counts_no_goodbye_from_a_slot_ahead():
    swarm = Swarm("abc")
    leader, *others = swarm.order
    entry = proposed(swarm)
    for peer in others:
        swarm.say(peer, leader, Goodbye(peer, entry.lineage, Ballot(0, "")))
    swarm.wait(10, leader)
    assert swarm.applied(leader) == []


@pytest.mark.parametrize("proposal_arrives", [False, True])
def test_leavers_of_the_group_do_not_stop_the_slot(proposal_arrives):
    """The leader accepted an entry; two of its group of three leave before anybody else has it."""
    swarm = Swarm(target=4)
    leader, *leavers = swarm.order[:3]
    group, living = {leader, *leavers}, [leader, *swarm.order[3:]]
    swarm.passes = among(group)
    plan = opened_round(swarm, peers="".join(group))
    swarm.end_exchange(plan)
    swarm.deliver(lambda sender, to, body: sender in group and isinstance(body, Held))
    for peer in leavers:
        swarm.happen(peer, LeaveRequested())
    swarm.passes = lambda sender, to, body: False
    swarm.wait(60, leavers)
    goodbyes = [swarm.said(peer, Goodbye)[0] for peer in leavers]
    for peer in living:
        for goodbye in goodbyes:
            swarm.say(goodbye.peer, peer, goodbye)
    if proposal_arrives:
        for _, to, message in [each for each in swarm.take_stopped(Propose) if each[1] in living]:
            swarm.happen(to, Received(leader, message))
    swarm.passes, swarm.ends_exchanges = among(living), True
    swarm.train(120, peers=living)
    assert min(swarm[peer].head.epoch for peer in living) > 10
    assert len({swarm[peer].head.lineage for peer in living}) == 1
