"""The synchronization core by hand: epochs without faults, then one history for each fault that a review proved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.sync_peers import ALL_CELLS, CELLS, Swarm, among, everything, without
from volunteer_kit.swarm.sync import leading
from volunteer_kit.swarm.sync.ballots import Ballot, leader_order
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contacts import MOST_CONTACTS, Contacts
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Cause, Share
from volunteer_kit.swarm.sync.core import SyncCore
from volunteer_kit.swarm.sync.entries import Entry, Head, Member, Opening, RollbackOrder
from volunteer_kit.swarm.sync.log import LogItem, is_chain
from volunteer_kit.swarm.sync.messages import (
    Action,
    AnswerRefused,
    AnswersHeld,
    Ask,
    AskOpening,
    BallotRecord,
    Begin,
    Body,
    Durable,
    ExchangeWithout,
    FetchAnswers,
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
    SnapshotTaken,
    Started,
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


def persisted_before(actions: list[Action], kind: type, holds: Callable[[BallotRecord], bool]) -> bool:
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


def with_backlog(absent: int) -> tuple[Swarm, str, list[str]]:
    """Epochs have taken 16 s, everybody has an epoch's samples as the next one begins, and all but these have reported.

    :returns: the swarm, the leader, and the members whose reports are still on their way
    """
    swarm = Swarm(target=80)
    swarm.train(66)
    plan = opened_round(swarm, 16)
    swarm.compute(80)
    swarm.passes = without(Report)
    swarm.end_exchange(plan)
    swarm.deliver()
    leader = leader_order(swarm["a"].head.seed, swarm.genesis.membership.public)[0]
    late = [peer for peer in swarm.order if peer != leader][:absent]
    swarm.passes = everything
    swarm.deliver_late(each for each in swarm.take_stopped(Report, leader) if each[0] not in late)
    swarm.deliver()
    return swarm, leader, late


def members(plan: Round) -> set[str]:
    """The peers of a round."""
    return {member.peer for member in plan.group}


def test_a_round_that_could_begin_waits_for_reports_that_are_on_their_way():
    swarm, leader, late = with_backlog(absent=1)
    begun = len(swarm.rounds)
    swarm.deliver_late(each for each in swarm.take_stopped(Report, leader) if each[0] in late)
    swarm.deliver()
    assert len(swarm.rounds) == begun + 1 and members(swarm.last_round()) == set("abcde")


def seconds_without(swarm: Swarm, leader: str, late: list[str]) -> int:
    """How long the next round waits for members that are behind and go on saying so."""
    begun, old, seconds = len(swarm.rounds), swarm[leader].log.items[-2].head, 0
    swarm.passes = lambda sender, to, body: sender not in late
    while len(swarm.rounds) == begun:
        for peer in late:
            swarm.say(peer, leader, swarm.said(peer, Report)[-1], old)
        swarm.wait(1)
        seconds += 1
    assert members(swarm.last_round()) == set("abcde") - set(late)
    return seconds


def test_a_round_waits_a_quarter_of_an_epoch_for_one_member_that_is_behind():
    assert 3 <= seconds_without(*with_backlog(absent=1)) <= 4


def test_a_member_for_which_rounds_wait_in_vain_is_waited_for_more_and_more_seldom():
    contact = Contacts(5.0)["a"]
    waited = []
    for epoch in range(100):
        if contact.waited_again <= epoch:
            waited.append(epoch)
            contact.missed_round(epoch)
    assert waited == [0, 2, 6, 14, 30, 62, 94]


def test_a_round_waits_half_an_epoch_while_more_than_a_quarter_is_catching_up():
    assert 7 <= seconds_without(*with_backlog(absent=2)) <= 9


def test_a_round_does_not_wait_for_a_member_that_follows_another_leader():
    swarm = Swarm(target=EVERYBODY)
    plan = opened_round(swarm)
    leader, stray, *others = swarm.order
    swarm.say(stray, leader, Refuse(Ballot(1, stray), False))
    swarm.wait(1)
    for peer in (leader, *others):
        assert swarm.done(peer, ExchangeWithout)[-1].silent == (stray,)
    swarm.end_exchange(plan, peers=[leader, *others])
    swarm.wait(1)
    assert swarm[leader].head.epoch == 1


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


def test_an_answer_that_makes_no_sense_costs_its_slice_only():
    """A reducer says that it holds an answer; its bytes are none."""
    swarm = Swarm(target=EVERYBODY)
    swarm.serves_answers = False
    plan = opened_round(swarm)
    leader = swarm.order[0]
    liar, lost = next((reducer, cells) for reducer, cells in plan.slices if reducer != leader)
    good = tuple(each for each in swarm.answers(plan) if each.reducer != liar)
    bad = next(each for each in swarm.answers(plan) if each.reducer == liar)
    swarm.end_exchange(plan, (*good, bad), [liar])
    swarm.end_exchange(plan, good, [peer for peer in swarm.order if peer != liar])
    swarm.deliver()
    asked = swarm.done(leader, FetchAnswers)[-1]
    assert asked.digests == {bad.digest} and asked.sources == (liar,) and bad in asked.judged
    swarm.happen(leader, AnswerRefused(bad.slice))
    swarm.deliver()
    for peer in swarm.order:
        assert swarm.applied(peer)[0].step.missing == lost


def test_nobody_votes_for_answers_that_make_no_sense():
    swarm = Swarm(target=EVERYBODY)
    leader, voter, *_ = swarm.order
    entry = proposed(swarm)
    odd = replace(entry, answers=(entry.answers[0]._replace(digest=b"odd"), *entry.answers[1:]))
    swarm.serves_answers = False
    swarm.say(leader, voter, Propose(Ballot(0, leader), odd, ()))
    assert swarm.done(voter, FetchAnswers)[-1].judged == odd.answers
    swarm.happen(voter, AnswerRefused(odd.answers[0].slice))
    assert not swarm.said(voter, Vote) and len(swarm.told(voter, Topic.REFUSED)) == 1


def test_nobody_votes_for_bytes_under_other_cells_than_they_were_read_as():
    """Everybody holds the bytes, but nobody could take a step with them. The true answers still enter."""
    swarm = Swarm(target=EVERYBODY)
    leader, voter, *_ = swarm.order
    entry = proposed(swarm)
    first, second, *others = entry.answers
    odd = replace(entry, answers=(first._replace(digest=second.digest), second._replace(digest=first.digest), *others))
    swarm.serves_answers = False
    swarm.say(leader, voter, Propose(Ballot(0, leader), odd, ()))
    asked = swarm.done(voter, FetchAnswers)[-1]
    assert asked.digests == {first.digest, second.digest} and asked.judged == odd.answers
    here = swarm[voter].head.lineage
    swarm.happen(voter, AnswersHeld(asked.digests, frozenset(each.slice for each in entry.answers), here))
    assert not swarm.said(voter, Vote)
    swarm.happen(voter, AnswerRefused(odd.answers[0].slice))
    assert len(swarm.told(voter, Topic.REFUSED)) == 1
    swarm.serves_answers = True
    swarm.wait(60)
    assert swarm.applied(voter)[0].step.answers == entry.answers


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
    goodbyes = swarm.leave(leavers)
    assert all(each.accepted is None and each.promised.turn > 0 for each in goodbyes)
    swarm.deliver_late(vote + late)
    for goodbye in goodbyes:
        swarm.say(goodbye.peer, leader, goodbye)
        swarm.say(goodbye.peer, second, goodbye)
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
    goodbyes = swarm.leave(leavers)
    for peer in living:
        for goodbye in goodbyes:
            swarm.say(goodbye.peer, peer, goodbye)
    if proposal_arrives:
        swarm.deliver_late(each for each in swarm.take_stopped(Propose) if each[1] in living)
    swarm.passes, swarm.ends_exchanges = among(living), True
    swarm.train(120, peers=living)
    assert min(swarm[peer].head.epoch for peer in living) > 10
    assert len({swarm[peer].head.lineage for peer in living}) == 1


# --- leaders ---


@pytest.mark.parametrize("place", [None, -1], ids=["a stranger", "a member"])
@pytest.mark.parametrize("turn", [0, 10**6])
def test_an_invented_accepted_entry_binds_no_leader(place, turn):
    """The lie is the first promise that the new leader hears."""
    swarm = Swarm()
    dead, heir, *_ = swarm.order
    liar = "x" if place is None else swarm.order[place]
    at = Ballot(turn, liar if turn else dead)
    group = tuple(sorted({*swarm.members, Member(liar, liar, True)}))
    answers = (Answer(ALL_CELLS, liar, b"poison", (Share(liar, 0, 0, 40, ALL_CELLS),)),)
    fake = Entry(0, 0, 0, swarm.genesis.head.lineage, at, b"nothing", group, answers, 0)
    living = [peer for peer in swarm.order if peer != dead]

    def lie() -> None:
        for ballot in asks_at(swarm, heir):
            swarm.say(liar, heir, Promise(ballot, fake, at))

    swarm.passes = lambda sender, to, body: dead not in (sender, to) and not isinstance(body, Promise)
    while not asks_at(swarm, heir):
        swarm.train(1, peers=living)
    lie()
    swarm.passes = lambda sender, to, body: dead not in (sender, to) and (sender, type(body)) != (liar, Promise)
    swarm.train(30, peers=living, attack=lie)
    assert min(swarm[peer].head.epoch for peer in living) > 5
    assert b"poison" not in {answer.digest for item in swarm.applied(heir) for answer in item.step.answers}


def test_a_leader_cannot_add_members_that_bring_nothing():
    swarm = Swarm()
    leader, *voters = swarm.order
    entry = proposed(swarm)
    fakes = tuple(Member(f"z{number}", f"z{number}", False) for number in range(20))
    crowded = replace(entry, group=tuple(sorted(entry.group + fakes)))
    for voter in voters:
        swarm.say(leader, voter, Propose(Ballot(0, leader), crowded, ()))
        assert swarm[voter].ballot.accepted is None


def test_a_leader_that_one_member_alone_hears_is_replaced():
    swarm = Swarm()
    swarm.train(5)
    leader, only = swarm.order[0], swarm.order[1]
    swarm.passes = lambda sender, to, body: sender != leader or to == only
    before = swarm.epochs
    swarm.train(120)
    others = [peer for peer in swarm.order if peer != leader]
    assert min(swarm[peer].head.epoch for peer in others) > before + 20


def test_endless_rounds_at_one_ballot_cost_one_turn():
    swarm = Swarm()
    leader, *others = swarm.order
    numbers = iter(range(1, 1000))
    swarm.passes = among(others)

    def begin_again() -> None:
        group = [(member, 1000 if member.peer == leader else 0, 10.0) for member in swarm.members]
        for peer in others:
            plan = leading.make_round(
                swarm[peer].head.lineage, Ballot(0, leader), next(numbers), group, CELLS, 60.0, 20.0
            )
            swarm.say(leader, peer, Begin(plan))

    swarm.train(60, peers=others, attack=begin_again)
    assert min(swarm[peer].head.epoch for peer in others) > 10


def test_a_round_without_a_finite_bound_is_refused():
    swarm = Swarm()
    leader, *others = swarm.order
    group = [(member, 1000 if member.peer == leader else 0, 10.0) for member in swarm.members]
    for seconds in (float("nan"), float("inf"), -1.0):
        plan = leading.make_round(swarm.genesis.head.lineage, Ballot(0, leader), 7, group, CELLS, seconds, 2.0)
        for peer in others:
            swarm.say(leader, peer, Begin(plan))
            assert swarm[peer].phase is Phase.COLLECTING
    swarm.passes = among(others)
    swarm.train(40, peers=others)
    assert min(swarm[peer].head.epoch for peer in others) > 5


def test_a_reducer_with_wrong_shares_costs_its_slice_only():
    swarm = Swarm()
    swarm.ends_exchanges = False
    liar, seen = swarm.order[1], set()

    def spoil() -> None:
        for plan, sent in list(swarm.rounds.values()):
            if plan.fingerprint not in seen and sent:
                seen.add(plan.fingerprint)
                wrong = tuple(
                    answer._replace(digest=b"wrong", shares=(Share("z", 9, 0, 5, answer.cells),))
                    if answer.reducer == liar
                    else answer
                    for answer in swarm.answers(plan)
                )
                swarm.end_exchange(plan, wrong)

    swarm.train(100, attack=spoil)
    assert swarm.epochs > 30
    digests = [answer.digest for item in swarm.applied("a") for answer in item.step.answers]
    assert b"wrong" not in digests
    given = [liar in dict(plan.slices) for plan, _ in list(swarm.rounds.values())[-20:] if plan.ballot.leader != liar]
    assert given.count(True) < len(given) / 3  # each leader gives it no slices for a while


# --- strangers ---


def attacked(attack: Callable[[Swarm], None]) -> Swarm:
    """A swarm that trains for 50 s and is attacked from second 10 on."""
    swarm = Swarm()
    swarm.train(10)
    swarm.train(40, attack=lambda: attack(swarm))
    return swarm


LEAST = 23  # epochs of 25: what an attack from outside may cost


@pytest.mark.parametrize("quorum", [True, False])
def test_a_strangers_lead_with_a_huge_turn_moves_nobody(quorum):
    swarm = attacked(lambda swarm: swarm.everybody_hears("x", Lead(Ballot(10**9, "x"), quorum)))
    assert swarm.epochs >= LEAST
    assert {core.turn for core in swarm.cores.values()} == {0}


def test_a_strangers_round_throws_nobody_out_of_the_honest_one():
    swarm = Swarm()
    plan = opened_round(swarm)
    inside = [peer for peer, core in swarm.cores.items() if core.phase is Phase.EXCHANGING]
    ballot = Ballot(10**9, "x")
    genuine = leading.make_round(swarm.genesis.head.lineage, ballot, 1, [(STRANGER, 9, 9.0)], CELLS, 1.0, 1.0)
    for garbage in (genuine, genuine._replace(fingerprint=b"x"), genuine._replace(group=(), slices=())):
        swarm.everybody_hears("x", Begin(garbage))
    assert [peer for peer, core in swarm.cores.items() if core.phase is Phase.EXCHANGING] == inside
    swarm.end_exchange(plan)
    swarm.deliver()
    assert swarm.epochs == 1


def test_rounds_of_strangers_do_not_slow_the_swarm():
    def begin(swarm: Swarm) -> None:
        ballot = Ballot(10**9 + int(swarm.now), "x")
        for peer, core in swarm.cores.items():
            plan = leading.make_round(core.head.lineage, ballot, 1, [(STRANGER, 9, 9.0)], CELLS, 1.0, 1.0)
            swarm.say("x", peer, Begin(plan))

    assert attacked(begin).epochs >= LEAST


def test_a_strangers_refusal_stops_no_election():
    swarm = Swarm()
    dead, *living = swarm.order
    swarm.passes = among(living)
    ballots = (Ballot(0, dead), Ballot(10**9, "x"), Ballot(10**9, living[-1]))

    def refuse() -> None:
        for number, ballot in enumerate(ballots):
            swarm.everybody_hears(f"x{number}", Refuse(ballot, True))
            swarm.everybody_hears(f"y{number}", Refuse(ballot, False))

    swarm.train(60, peers=living, attack=refuse)
    assert min(swarm[peer].head.epoch for peer in living) > 10
    assert all(ballot.turn < 100 for peer in living for ballot in asks_at(swarm, peer))


def test_a_strangers_ask_at_the_beginning_of_a_slot_binds_nobody():
    seen: dict[str, bytes] = {}

    def ask(swarm: Swarm) -> None:
        for peer, core in swarm.cores.items():
            if seen.get(peer) != core.head.lineage:
                seen[peer] = core.head.lineage
                swarm.say("x", peer, Ask(Ballot(1000 + core.head.epoch, "x")))

    swarm = attacked(ask)
    assert swarm.epochs >= LEAST
    assert swarm.said("a", Promise) == []


def rising_ask(liar: str, core: SyncCore, turn: int) -> Body:
    return Ask(Ballot(turn, liar))


def rising_lead(liar: str, core: SyncCore, turn: int) -> Body:
    return Lead(Ballot(turn, liar), True)


def rising_begin(liar: str, core: SyncCore, turn: int) -> Body:
    group = [(each, 1000 if each.peer == liar else 0, 10.0) for each in core.log.last.membership.view.values()]
    return Begin(leading.make_round(core.head.lineage, Ballot(turn, liar), 1, group, CELLS, 60.0, 20.0))


def rising_refusal(liar: str, core: SyncCore, turn: int) -> Body:
    return Refuse(Ballot(core.turn + 6, liar), True)


@pytest.mark.parametrize("lie", [rising_ask, rising_lead, rising_begin, rising_refusal])
def test_a_member_that_names_higher_ballots_each_second_slows_the_swarm_a_little_only(lie):
    swarm = Swarm()
    swarm.train(10)
    liar, before = swarm.order[-1], swarm.epochs
    turns = iter(range(10, 10**6, 10))

    def attack() -> None:
        turn = next(turns)
        for peer in swarm.order[:-1]:
            swarm.say(liar, peer, lie(liar, swarm[peer], turn))

    swarm.train(100, attack=attack)
    assert swarm.epochs - before >= 45  # of 50


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({"bandwidth": float("nan")}, id="bandwidth nan"),
        pytest.param({"bandwidth": float("inf")}, id="bandwidth inf"),
        pytest.param({"bandwidth": -5.0}, id="bandwidth below 0"),
        pytest.param({"samples": -(10**9)}, id="samples below 0"),
        pytest.param({"round_seconds": float("nan")}, id="round nan"),
        pytest.param({"vote_seconds": -1.0}, id="vote below 0"),
        pytest.param({"alone_for": float("inf")}, id="alone for ever"),
        pytest.param({"member": Member("a", "a", True), "samples": 10**6}, id="another peer"),
    ],
)
def test_a_report_that_makes_no_sense_is_not_heard(lie):
    def report(swarm: Swarm) -> None:
        for peer, core in swarm.cores.items():
            told = {
                "member": STRANGER,
                "samples": 1,
                "bandwidth": 10.0,
                "round_seconds": None,
                "vote_seconds": None,
                "alone_for": 0.0,
            }
            swarm.say("x", peer, Report(Ballot(core.turn, swarm.order[0]), **{**told, **lie}))

    swarm = attacked(report)
    assert swarm.epochs >= LEAST
    assert all(member.peer != "x" for plan, _ in swarm.rounds.values() for member in plan.group)


def test_a_newcomer_that_reduces_nothing_costs_some_slices_only():
    """It says that its line is the fastest, and answers never."""
    swarm = Swarm()
    ended = set()

    def attack() -> None:
        for peer, core in swarm.cores.items():
            report = Report(Ballot(core.turn, swarm.order[0]), STRANGER, 1, 9e8, None, None, 0.0)
            swarm.say("x", peer, report)
        for plan, _ in list(swarm.rounds.values()):
            if plan.fingerprint not in ended and "x" not in dict(plan.slices):
                ended.add(plan.fingerprint)
                swarm.end_exchange(plan)

    def all_but_its_own(fingerprint: bytes) -> tuple[Answer, ...]:
        return tuple(answer for answer in swarm.answers(swarm.rounds[fingerprint][0]) if answer.reducer != "x")

    swarm.train(20)
    before, swarm.had, swarm.ends_exchanges = swarm.epochs, all_but_its_own, False
    swarm.train(120, attack=attack)
    assert swarm.epochs >= before + 15


def test_contacts_are_bounded_and_those_that_speak_are_kept():
    contacts = Contacts(5.0)
    contacts["a"].heard = 1.0
    for number in range(MOST_CONTACTS + 100):
        contacts[f"s{number}"].heard = 0.0
    assert len(list(contacts)) == MOST_CONTACTS
    assert "a" in dict(contacts)


# --- branches ---


@pytest.mark.parametrize("seconds", [16, 57])
def test_strangers_open_no_branch_for_an_isolated_peer(seconds):
    swarm = Swarm()
    swarm.train(10)
    swarm.passes = lambda sender, to, body: False
    swarm.wait(seconds)
    assert {core.phase for core in swarm.cores.values()} == {Phase.ISOLATED}
    for peer, core in swarm.cores.items():
        head = core.head
        opening = Opening(*head.order, head.epoch, head.lineage, 0, (STRANGER,))
        item = core.log.last.after_opening(opening, frozenset("x"))
        swarm.say("x", peer, Items(head.lineage, (item,)), item.head)
        assert core.head == head


@pytest.mark.parametrize("attempt", [None, 7, 1 << 20, 10**9])
def test_survivors_open_their_branch_whatever_a_stranger_asks_for(attempt):
    swarm = Swarm()
    pair, head = swarm.order[:2], swarm.genesis.head
    names = [f"x{number}" for number in range(100)]

    def ask() -> None:
        for peer in pair if attempt is not None else ():
            first = next(name for name in names if leader_order(head.lineage, (name, peer))[0] == name)
            members = tuple(sorted((Member(first, first, True), swarm[peer].me)))
            swarm.say(first, peer, AskOpening(Opening(*head.order, head.epoch, head.lineage, attempt, members)))

    swarm.passes = among(pair)
    swarm.train(150, peers=pair, attack=ask)
    for peer in pair:
        assert any(isinstance(item.step, Opening) for item in swarm.applied(peer))
        assert swarm[peer].head.epoch > 5


@pytest.mark.parametrize("attempt", [0, 1 << 20, 10**9])
def test_survivors_open_their_branch_whatever_a_stranger_signs(attempt):
    """The stranger's signature comes before each honest one."""
    swarm = Swarm()
    pair = swarm.order[:2]

    def sign_first(sender: str, to: str, body: Body) -> bool:
        if isinstance(body, AskOpening):
            swarm.say("x", sender, SignOpening(body.opening.lineage, body.opening.attempt))
            swarm.say("x", sender, SignOpening(b"another", attempt))
        return {sender, to} <= set(pair)

    swarm.passes = sign_first
    swarm.train(150, peers=pair)
    assert min(swarm[peer].head.epoch for peer in pair) > 5


def test_a_member_that_never_signs_does_not_stop_a_branch():
    """Two of seven survive; a liar says that it is alone as well."""
    swarm = Swarm("abcdefg")
    pair, liar = swarm.order[:2], swarm.order[-1]

    def seem_alone() -> None:
        for peer in pair:
            ballot = Ballot(swarm[peer].turn, liar)
            swarm.say(liar, peer, Report(ballot, swarm[liar].me, 1, 10.0, None, None, swarm.now))

    swarm.passes = among(pair)
    swarm.train(300, peers=pair, attack=seem_alone)
    assert min(swarm[peer].head.epoch for peer in pair) > 5


# --- rollback orders ---


def rollback(swarm: Swarm, peer: str = "a", place: int = 1) -> RollbackOrder:
    """The monitor's order to go back to an item of this peer's log."""
    return RollbackOrder(1, 1, swarm[peer].head.epoch, swarm[peer].log.items[place].head.lineage, swarm.members)


def test_answers_of_a_replay_are_fetched_once():
    """A peer that is behind hears the same entries with each heartbeat."""
    swarm = Swarm("abcd", target=4)
    swarm.passes = among("abc")
    swarm.train(10, 2, "abc")
    items = swarm["a"].log.items
    swarm.serves_answers = False
    for _ in range(3):
        swarm.say("a", "d", Items(swarm.genesis.head.lineage, items[1:2]), items[1].head)
    assert swarm["d"].phase is Phase.CATCHING_UP and len(swarm.done("d", FetchAnswers)) == 1
    swarm.say("a", "d", Items(swarm.genesis.head.lineage, items[1:3]), items[2].head)
    assert len(swarm.done("d", FetchAnswers)) == 2, "and those of more entries"


def test_a_rollback_order_in_items_that_extend_a_replay_is_taken():
    swarm = Swarm("abcd", target=4)
    swarm.passes = among("abc")
    swarm.train(10, 2, "abc")
    items = swarm["a"].log.items
    order = rollback(swarm)
    ordered = items[2].after_order(order)
    answers = (Answer(ALL_CELLS, "a", b"new", (Share("a", 99, order.epoch, 4, ALL_CELLS),)),)
    entry = Entry(1, 1, order.epoch, order.lineage, Ballot(0, "a"), b"f", swarm.members, answers, 0)
    last = ordered.after_entry(entry, Certificate(entry.lineage, Ballot(0, "a"), frozenset("abcd")))
    swarm.serves_answers = False
    swarm.say("a", "d", Items(swarm.genesis.head.lineage, items[1:3]), items[2].head)
    assert swarm["d"].phase is Phase.CATCHING_UP
    swarm.say("a", "d", Items(items[2].head.lineage, (ordered, last)), last.head)
    steps = [item.step for item in (*items[1:3], last)]
    swarm.happen("d", AnswersHeld(frozenset(answer.digest for step in steps for answer in step.answers)))
    assert swarm["d"].head == last.head
    assert order.lineage in swarm["d"].log and is_chain(swarm["d"].log.items)
    assert len(swarm.told("d", Topic.ROLLED_BACK)) == 1


def test_a_rollback_that_a_snapshot_brings_is_a_rollback():
    by_order, by_snapshot = (Swarm("abcd") for _ in range(2))
    for swarm in (by_order, by_snapshot):
        swarm.train(10, 2)
        swarm.compute(1)
        order = rollback(swarm)
        told = "abcd" if swarm is by_order else "acd"
        for peer in told:
            swarm.happen(peer, Received("monitor", Message(None, Order(order))))
        swarm.passes = among("acd")
        swarm.train(3, 2, "acd")
    by_snapshot.snapshot_seconds = 0.0
    head = by_snapshot["a"].head
    swarm = by_snapshot
    swarm.say("a", "b", Items(None, ()), head)
    swarm.wait(1, "b")
    assert swarm["b"].head.order == (1, 1)
    assert Cause.LOST_BRANCH not in swarm["b"].ledger.expired
    assert swarm["b"].ledger.expired[Cause.ROLLBACK] == by_order["b"].ledger.expired[Cause.ROLLBACK]
    assert swarm["b"].ledger.committed == by_order["b"].ledger.committed


# --- snapshots and damage ---


def test_a_claimed_huge_head_costs_few_snapshots():
    swarm = Swarm("abc", target=4)
    swarm.train(10, 2)
    useless = Snapshot(swarm["b"].log.items[:3], Accounts())
    huge = Head(0, 0, 10**6, b"zzz", 10**18)
    swarm.snapshot_seconds = None
    before = len(swarm.done("b", FetchSnapshot))

    def claim() -> None:
        swarm.say("x", "b", Items(None, ()), huge)
        while len(swarm.done("b", FetchSnapshot)) > before + len(answered):
            answered.append(useless)
            swarm.happen("b", SnapshotTaken(useless))

    answered: list[Snapshot] = []
    swarm.train(60, attack=claim)
    assert 1 <= len(answered) <= 4
    assert swarm.epochs > 20


def with_sketches(swarm: Swarm, seconds: int) -> None:
    """Train while each process sketches its parameters."""
    swarm.train(seconds, attack=swarm.sketch)


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_a_damaged_peer_is_repaired_though_snapshots_are_slower_than_epochs(client, seconds):
    swarm = Swarm(clients="e" if client else "", snapshot_patience=120.0)
    swarm.snapshot_seconds = seconds
    with_sketches(swarm, 10)
    swarm.damaged = {"e"}
    with_sketches(swarm, 60)
    assert swarm.told("e", Topic.DRIFTED) != []
    assert swarm.done("e", Repair) != []
    assert swarm.damaged == set()
    assert swarm["e"].head == swarm["a"].head
    assert swarm["e"].computes


@pytest.mark.parametrize("served", [True, False])
def test_a_damaged_peer_gets_the_answers_that_an_older_state_needs(served):
    swarm = Swarm()
    with_sketches(swarm, 20)
    old = swarm.snapshot("a")
    with_sketches(swarm, 10)
    swarm.add(STRANGER)
    swarm.discover()
    with_sketches(swarm, 10)
    assert swarm["x"].head == swarm["a"].head != old.head
    swarm.snapshot_seconds, swarm.serves_answers, swarm.damaged = None, served, {"x"}

    def serve_old() -> None:
        swarm.sketch()
        asked = swarm.done("x", FetchSnapshot)
        if len(asked) > len(given):
            given.append(asked[-1])
            if asked[-1].source in swarm.cores:
                swarm.happen("x", SnapshotTaken(old))

    given = swarm.done("x", FetchSnapshot)
    swarm.train(30, attack=serve_old)
    assert swarm.told("x", Topic.DRIFTED) != []
    assert bool(swarm.done("x", Repair)) is served
    assert swarm["x"].computes is served
    sources = {each.source for each in given}
    assert len(sources) > 1 or served


def test_a_leader_that_counts_higher_is_followed_at_once():
    """It alone is public, so each turn is its own; its clients have heard it in the lower one just now."""
    swarm = Swarm(names="abc", clients="bc", target=3)
    swarm.train(5)
    plan = opened_round(swarm, 1)
    swarm.end_exchange(plan, ())
    swarm.say("b", "a", Refuse(Ballot(5, "a"), False))
    swarm.say("b", "a", Refuse(Ballot(9, "a"), True))
    swarm.wait(2)
    assert swarm.said("a", Ask)[-1].ballot.turn > 9
    before = swarm.epochs
    swarm.ends_exchanges = True
    swarm.train(6)
    assert swarm.epochs > before
    assert not [each for peer in "bc" for each in swarm.said(peer, Refuse)]


@pytest.mark.parametrize("refusals", [1, 5])
def test_a_member_that_refused_and_comes_is_counted_on(refusals):
    """It refused an earlier ballot. The leader has no quorum without it."""
    swarm = Swarm(names="abc", target=3)
    swarm.train(5)
    before = swarm.epochs
    for other in swarm.cores:
        for _ in range(refusals):
            for peer in swarm.cores.keys() - {other}:
                swarm.say(peer, other, Refuse(Ballot(0, "z"), False))
    swarm.train(2)
    assert swarm.epochs > before


def test_a_damaged_leader_steps_down_and_the_others_go_on():
    """It gets no snapshot, so it stays damaged."""
    swarm = Swarm()
    swarm.snapshot_seconds = None
    leader = swarm.order[0]
    swarm.damaged = {leader}
    with_sketches(swarm, 90)
    assert swarm.told(leader, Topic.DRIFTED) != []
    assert swarm.epochs > 10
    assert not swarm[leader].computes
    late = [item for item in swarm.applied("a") if item.head.epoch > 10]
    assert all(leader not in item.certificate.voters for item in late)


@pytest.mark.parametrize("sketch", [float("nan"), float("inf"), 7.0], ids=str)
def test_a_sketch_that_is_no_number_shows_damage(sketch):
    swarm = Swarm()
    with_sketches(swarm, 10)
    item = swarm["b"].log.items[-1]
    parent = item.step.parent
    votes = [(peer, Vote(Ballot(0, "a"), item.head.lineage, sketch if peer == "b" else 1.0)) for peer in "abcde"]
    swarm.say("a", "b", Sketches(parent, tuple(votes)))
    assert len(swarm.told("b", Topic.DRIFTED)) == 1


def test_votes_for_other_entries_show_no_damage():
    swarm = Swarm()
    with_sketches(swarm, 10)
    *_, before, item = swarm["b"].log.items
    old = Vote(Ballot(0, "a"), before.head.lineage, 7.0)
    fresh = Vote(Ballot(0, "a"), item.head.lineage, 1.0)
    votes = tuple((peer, old if peer == "b" else fresh) for peer in "abcde")
    swarm.say("c", "b", Sketches(item.step.parent, votes))
    strangers = tuple((peer, replace(fresh, sketch=7.0)) for peer in "uvwxyz")
    swarm.say("c", "b", Sketches(item.step.parent, (("b", fresh), *strangers)))
    assert swarm.told("b", Topic.DRIFTED) == []


def test_late_votes_of_strangers_show_no_damage():
    swarm = Swarm()
    with_sketches(swarm, 10)
    for leader in swarm.cores:
        for item in swarm[leader].log.items[1:]:
            for stranger in "uvwxyz":
                swarm.say(stranger, leader, Vote(Ballot(0, leader), item.head.lineage, 55.0), swarm.genesis.head)
    swarm.deliver()
    assert all(swarm.told(peer, Topic.DRIFTED) == [] for peer in swarm.cores)


def test_a_peer_that_joins_anew_in_the_slot_of_its_vote_remembers_it():
    """It lost its parameters, and kept what it had written."""
    swarm = Swarm()
    swarm.train(10)
    leader, voter = swarm.order[0], swarm.order[1]
    head = swarm[voter].log.last
    record = BallotRecord(head.head.lineage, Ballot(3, leader))
    again = SyncCore(swarm[voter].config, swarm[voter].me, Durable(ballot=record), None, 0.0)
    again.handle(Started(), 0.0)
    again.handle(SnapshotTaken(Snapshot(swarm[voter].log.items, swarm[voter].accounts)), 1.0)
    assert again.head == head.head
    assert again.ballot == record
