"""A member that computes nothing, as a monitor is: it votes, leads and follows, and no samples of its own enter.

It reports with its heartbeat alone, so epochs have to be longer than one.
"""

from __future__ import annotations

from tests.sync_peers import Swarm, among
from volunteer_kit.swarm.sync.entries import Entry, Member
from volunteer_kit.swarm.sync.messages import Ordered, Propose, Vote


def train(swarm: Swarm, seconds: int, peers: str) -> None:
    """These peers compute a sample each second; all are there."""
    for _ in range(seconds):
        swarm.compute(1, peers)
        swarm.wait(1)


def entries(swarm: Swarm, peer: str) -> list[Entry]:
    return [item.step for item in swarm.applied(peer) if isinstance(item.step, Entry)]


def test_a_founder_without_samples_leads_votes_and_reduces():
    swarm = Swarm("abc")
    train(swarm, 120, "bc")
    assert swarm.epochs > 20
    steps = entries(swarm, "a")
    assert {share.peer for step in steps for answer in step.answers for share in answer.shares} == {"b", "c"}
    assert "a" in swarm["b"].log.last.membership.electorate
    assert swarm.said("a", Vote) and swarm.said("a", Propose)
    assert "a" in {answer.reducer for step in steps for answer in step.answers}
    assert swarm["a"].ledger.computed == 0


def test_a_newcomer_without_samples_follows_and_is_no_member():
    """It is in each round's group, so that it gets the answers as they come; who votes has brought something."""
    swarm = Swarm("abc")
    swarm.train(20)
    swarm.add(Member("d", "d", True))
    swarm.discover()
    train(swarm, 60, "ab")
    swarm.wait(3)
    assert swarm["d"].head == swarm["a"].head
    assert any(member.peer == "d" for member in swarm.last_round().group)
    assert "d" not in swarm["a"].log.last.membership.view and not swarm.said("d", Vote)


def test_an_order_names_those_who_are_here():
    swarm = Swarm("abcd")
    train(swarm, 20, "bcd")
    swarm.passes = among("abc")
    train(swarm, 8, "bc")
    kept = swarm["a"].log.items[-3].head.lineage
    order = swarm["a"].order_back(kept, b"digest", 5)
    assert [member.peer for member in order.members] == ["a", "b", "c"]
    head = swarm["a"].head
    assert (order.generation, order.sequence, order.epoch) == (head.generation + 1, 5, head.epoch + 1)
    swarm.happen("a", Ordered(order))
    swarm.deliver()
    assert {swarm[peer].head.lineage for peer in "abc"} == {order.lineage}
    before = swarm["a"].head.epoch
    train(swarm, 20, "bc")
    assert swarm["a"].head.epoch > before and swarm["a"].head.lineage == swarm["b"].head.lineage
    swarm.happen("a", Ordered(order))
    assert swarm["a"].head.epoch > before, "once"


def test_a_founder_that_waits_for_the_first_samples_opens_no_branch():
    swarm = Swarm("a", epoch_deadline=20.0, alone_after=20.0)
    swarm.wait(200)
    assert swarm["a"].head.lineage == swarm.genesis.head.lineage and not swarm.applied("a")
    swarm.add(Member("b", "b", True))
    swarm.discover()
    swarm.wait(2)
    train(swarm, 30, "b")
    assert swarm.epochs > 1
