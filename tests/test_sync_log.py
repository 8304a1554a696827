"""The log: lineages, who votes, what a certificate proves, which branch wins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from volunteer_kit.swarm.sync import leading
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.branches import checked_suffix, opener, opening_members
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.entries import Entry, Head, Member, Opening, RollbackOrder, Verdict
from volunteer_kit.swarm.sync.log import Log, LogItem, is_chain


def members(names: str, account: str | None = None, public: bool = True) -> tuple[Member, ...]:
    return tuple(Member(name, account or name, public) for name in names)


def entry_behind(item: LogItem, group: tuple[Member, ...], **more) -> Entry:
    head = item.head
    answers = (Answer(1, group[0].peer, b"digest", (Share(group[0].peer, head.epoch, head.epoch, 5, 1),)),)
    fields = {"gone": (), "verdicts": ()} | more
    return Entry(
        *head.order, head.epoch, head.lineage, Ballot(0, group[0].peer), b"round", group, answers, 0, **fields
    )


def behind(item: LogItem, group: tuple[Member, ...], voters: str | None = None, **more) -> LogItem:
    entry = entry_behind(item, group, **more)
    by = frozenset(voters) if voters is not None else frozenset(member.peer for member in group)
    return item.after_entry(entry, Certificate(entry.lineage, Ballot(0, "a"), by))


GENESIS = LogItem.genesis(members("abc"))


# --- lineage ---


def test_a_lineage_is_of_the_whole_content():
    entry = entry_behind(GENESIS, members("abc"))
    assert entry.lineage == entry_behind(GENESIS, members("abc")).lineage
    changes = ({"epoch": 1}, {"missing": 2}, {"gone": ("a",)}, {"answers": ()}, {"parent": b"x"}, {"group": ()})
    assert len({entry.lineage, *(replace(entry, **change).lineage for change in changes)}) == len(changes) + 1


def test_the_ballot_that_certifies_is_no_part_of_it():
    entry = entry_behind(GENESIS, members("abc"))
    one = GENESIS.after_entry(entry, Certificate(entry.lineage, Ballot(0, "a"), frozenset("ab")))
    other = GENESIS.after_entry(entry, Certificate(entry.lineage, Ballot(3, "c"), frozenset("bc")))
    assert one.head == other.head
    assert GENESIS.leads_to(one) and GENESIS.leads_to(other)


# --- who votes ---


def test_the_view_is_of_the_last_two_entries():
    one = behind(GENESIS, members("abd"))
    two = behind(one, members("ab"))
    three = behind(two, members("ab"))
    assert [sorted(each.membership.view) for each in (one, two, three)] == [list("abcd"), list("abd"), list("ab")]


def test_a_newcomer_votes_with_its_third_entry():
    item, votes = GENESIS, []
    for _ in range(4):
        votes.append("d" in item.membership.electorate)
        item = behind(item, members("abcd"))
    assert votes == [False, False, False, True]


def test_newcomers_fill_up_while_there_are_few_voters():
    alone = LogItem.genesis(members("m"))
    crowd = behind(alone, members("m") + members("uvwxyz"))
    assert sorted(crowd.membership.electorate) == ["m", "u", "v"]


def test_a_flood_of_identities_is_no_quorum():
    flood = members("uvwxyz", account="one")
    item = GENESIS
    for _ in range(5):
        item = behind(item, members("abc") + flood)
    assert sorted(item.membership.electorate) == ["a", "b", "c", "u"]


def test_members_that_said_goodbye_or_are_banned_are_out():
    gone = behind(GENESIS, members("abc"), gone=("c",))
    banned = behind(gone, members("ab"), verdicts=(Verdict("b", b"proof"),))
    assert sorted(gone.membership.electorate) == ["a", "b"]
    assert sorted(banned.membership.electorate) == ["a"]
    assert behind(banned, members("ab")).membership.banned == {"b"}


# --- certificates ---


@pytest.mark.parametrize(
    ("voters", "accepted", "certified"),
    [("ab", None, True), ("a", None, False), ("ax", None, False), ("a", "other", False), ("a", "this", True)],
)
def test_what_a_certificate_proves(voters, accepted, certified):
    """Of a, b and c; c may have left with an entry that it accepted."""
    entry = entry_behind(GENESIS, members("abc"))
    goodbyes = ()
    if accepted is not None:
        kept = entry if accepted == "this" else replace(entry, missing=2)
        goodbyes = (Goodbye("c", entry.parent, Ballot(0, "a"), kept, Ballot(0, "a")),)
    certificate = Certificate(entry.lineage, Ballot(0, "a"), frozenset(voters), goodbyes)
    assert GENESIS.membership.certifies(certificate, entry) is certified


def test_who_left_with_nothing_accepted_does_not_count():
    genesis = LogItem.genesis(members("abcd"))
    entry = entry_behind(genesis, members("ab"))
    votes = Certificate(entry.lineage, Ballot(0, "a"), frozenset("bc"))
    assert not genesis.membership.certifies(votes, entry)
    for promised, counts in ((Ballot(0, ""), True), (Ballot(0, "a"), True), (Ballot(1, "b"), False)):
        left = votes._replace(goodbyes=(Goodbye("d", entry.parent, promised),))
        assert genesis.membership.certifies(left, entry) is counts, "a promise above the ballot may have bound others"


def test_a_leaver_from_a_slot_shortly_before_does_not_count_and_one_from_elsewhere_does():
    genesis = LogItem.genesis(members("abcd"))
    one = behind(genesis, members("abcd"))
    entry = entry_behind(one, members("abc"))
    for slot, counts in ((genesis.head.lineage, True), (b"ahead, or of another branch", False)):
        goodbyes = (Goodbye("d", slot, Ballot(0, "")),)
        certificate = Certificate(entry.lineage, Ballot(0, "a"), frozenset("bc"), goodbyes)
        assert one.membership.certifies(certificate, entry) is counts


# --- branches ---


def test_an_opening_needs_every_signature_and_a_member_that_can_be_called():
    opening = Opening(0, 0, 0, GENESIS.head.lineage, 0, members("bc"))
    assert GENESIS.leads_to(GENESIS.after_opening(opening, frozenset("bc")))
    assert not GENESIS.leads_to(GENESIS.after_opening(opening, frozenset("b")))
    clients = LogItem.genesis(members("ab") + members("c", public=False))
    alone = Opening(0, 0, 0, clients.head.lineage, 0, members("c", public=False))
    assert not clients.leads_to(clients.after_opening(alone, frozenset("c")))
    assert opener(clients.head.lineage, alone.members) is None


def test_newcomers_open_a_branch_only_when_everybody_has_left():
    assert opening_members(GENESIS, members("bcx")) == members("bc")
    assert opening_members(GENESIS, members("xy")) == members("xy")
    mixed = Opening(0, 0, 0, GENESIS.head.lineage, 0, members("bx"))
    assert not GENESIS.leads_to(GENESIS.after_opening(mixed, frozenset("bx")))


def opened(item: LogItem, names: str, attempt: int = 0) -> LogItem:
    opening = Opening(*item.head.order, item.head.epoch, item.head.lineage, attempt, members(names))
    return item.after_opening(opening, frozenset(names))


@pytest.mark.parametrize(
    ("groups", "confirmed"),
    [
        (["c", "c", "c"], False),  # however long it is alone
        (["c", "ac"], True),  # two of three: whoever is missing was no quorum
        (["c", "cx"], True),  # x is new, and would have found the others
        (["c", "cx", "c"], True),  # and it stays confirmed
    ],
)
def test_a_branch_is_confirmed_by_a_quorum_of_those_before_or_by_somebody_new(groups, confirmed):
    item = opened(GENESIS, "c")
    opening = item.head.lineage
    assert item.membership.unconfirmed is not None
    for group in groups:
        item = behind(item, members(group))
    assert (item.membership.unconfirmed is None) is confirmed
    assert item.membership.openings == (opening,)


def test_members_of_a_branch_confirm_it_one_after_another():
    five = LogItem.genesis(members("abcde"))
    item = behind(behind(opened(five, "de"), members("d")), members("de"))
    assert item.membership.unconfirmed is not None
    assert behind(item, members("cd")).membership.unconfirmed is None, "c, d and e are three of five"


def test_an_opening_behind_one_that_is_not_confirmed_leaves_that_the_first():
    five = LogItem.genesis(members("abcde"))
    first = behind(opened(five, "de"), members("de"))
    second = opened(first, "e")
    assert second.membership.unconfirmed.electorate == five.membership.electorate
    assert second.membership.openings == (*first.membership.openings, second.head.lineage)
    assert behind(second, members("ce")).membership.unconfirmed is None, "d was there before the second opening"


def test_when_everybody_has_left_a_branch_of_newcomers_is_confirmed_at_once():
    assert opened(GENESIS, "xy").membership.unconfirmed is None


def test_the_survivors_of_a_tie_need_no_confirmation_of_the_missing_half():
    """The smaller id of two decides alone, so the branch of the other waits for it."""
    two = LogItem.genesis(members("ab"))
    assert behind(two, members("a"), voters="a").membership.unconfirmed is None
    assert opened(two, "b").membership.unconfirmed is not None
    assert behind(opened(two, "b"), members("ab")).membership.unconfirmed is None


@pytest.mark.parametrize(
    ("mine", "other", "wins"),
    [
        (Head(0, 0, 9, b"a", 90), Head(0, 0, 5, b"b", 80), True),
        (Head(0, 0, 5, b"a", 90), Head(0, 0, 9, b"b", 90), True),  # a tie: the smaller lineage
        (Head(0, 0, 5, b"b", 90), Head(0, 0, 9, b"a", 90), False),
        (Head(1, 0, 0, b"b", 0), Head(0, 5, 9, b"a", 90), True),  # a rollback wins against any branch
        (Head(1, 1, 0, b"b", 0), Head(1, 0, 9, b"a", 90), True),
    ],
)
def test_which_branch_wins(mine, other, wins):
    assert mine.beats(other) is wins
    assert other.beats(mine) is not wins


def test_a_chain_is_proven_step_by_step():
    one = behind(GENESIS, members("abc"))
    two = behind(one, members("abc"))
    order = two.after_order(RollbackOrder(1, 0, 7, one.head.lineage, members("ab")))
    assert is_chain((GENESIS, one, two, order))
    assert not is_chain((GENESIS, two))
    assert not is_chain((GENESIS, behind(GENESIS, members("abc"), voters="a")))
    richer = replace(one, head=one.head._replace(sample_cells=10**9))
    assert not is_chain((GENESIS, richer)), "a head that its entry does not lead to"


def test_a_suffix_has_to_follow_what_we_have():
    one = behind(GENESIS, members("abc"))
    two = behind(one, members("abc"))
    log = Log((GENESIS, one), kept=8)
    suffix = checked_suffix(log, one.head.lineage, (two,))
    assert suffix is not None and suffix.head == two.head
    assert checked_suffix(log, two.head.lineage, (two,)) is None
    assert checked_suffix(log, GENESIS.head.lineage, (two,)) is None


def test_a_log_forgets_its_oldest_items():
    items = [GENESIS]
    log = Log(items, kept=3)
    for _ in range(4):
        items.append(behind(items[-1], members("abc")))
        log = log.extended(items[-1])
    assert [item.head.epoch for item in log.items] == [2, 3, 4]
    assert GENESIS.head.lineage not in log
    assert log.last_common([b"x", items[3].head.lineage, items[2].head.lineage]) == items[3].head.lineage
    assert [item.head.epoch for item in log.behind(items[3].head.lineage)] == [4]


# --- rounds ---


@pytest.mark.parametrize("bandwidths", [[10.0], [10, 10, 10], [1, 100], [0, 5], [0, 0], [0.3, 7, 7, 9, 2.2]])
def test_slices_cover_every_cell_once(bandwidths):
    reducers = [(f"p{number}", float(mbit)) for number, mbit in enumerate(bandwidths)]
    slices = leading.share_out(16, reducers, "p0")
    masks = [mask for _, mask in slices]
    assert sum(masks) == (1 << 16) - 1
    assert sum(mask.bit_count() for mask in masks) == 16


def test_a_fingerprint_is_of_all_that_the_leader_said():
    group = [(member, 5, 10.0) for member in members("abc")]
    plan = leading.make_round(b"slot", Ballot(0, "a"), 1, group, 16, 5.0, 3.0)
    assert leading.is_genuine(plan, 16)
    for changed in ({"samples": (5, 5, 6)}, {"exchange_seconds": 50.0}, {"slices": (("x", 0xFFFF),)}, {"attempt": 2}):
        assert not leading.is_genuine(plan._replace(**changed), 16)
