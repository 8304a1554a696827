"""Slots and contributions: what becomes of each slot that the training process fills."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from volunteer_kit.swarm.node.gradients import GRANTED, NO_LONGER, Gradients
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.talk import Delivered, Expired, Granted
from volunteer_kit.swarm.sync.contributions import Answer, Cause, Ledger, Share
from volunteer_kit.swarm.sync.entries import Member
from volunteer_kit.swarm.sync.log import Log, LogItem

CELLS, LARGEST, ELEMENTS = 4, 20, 8
ALL = (1 << CELLS) - 1


class Core:
    """A ledger, and the log of a run that stands at its beginning, for the gradients to look at."""

    def __init__(self, record=None):
        self.ledger = Ledger(CELLS, record, LARGEST)
        self.log = Log((LogItem.genesis([Member("a", "a", True)]),), 10)
        self.lineage = self.log.last.head.lineage


class Node:
    """A node's gradients, and the training process's side."""

    def __init__(self, folder, core=None, table=None, expired=None):
        self.core, self.told = core or Core(), []
        self.slots = Slots(folder / "gradients.bin", ELEMENTS)
        self.gradients = Gradients(self.slots, table or {}, self.told.append, CELLS, LARGEST, expired or {})
        self.gradients.note(self.core.ledger)
        self.gradients.grant()
        self.written = []  # the table at each write

    @property
    def granted(self):
        return [each.slot for each in self.told if isinstance(each, Granted)]

    @property
    def expired(self):
        return [each for each in self.told if isinstance(each, Expired)]

    def count(self, delivery):
        known = delivery.lineage == self.core.lineage
        self.core.ledger.add(delivery.samples, 0, None if known else Cause.LOST_BRANCH)
        self.gradients.place(self.core.ledger)
        self.written.append((dict(self.gradients.table), float(self.slots.view(0)[0])))

    async def deliver(self, slot, value, samples=4, names=(), lineage=None):
        self.slots.view(slot).fill_(value)
        message = Delivered(slot, samples, lineage or self.core.lineage, names)
        await self.gradients.take_delivery(message, self.core, self.count)
        self.gradients.note(self.core.ledger)

    def content(self, number):
        return float(self.slots.view(self.gradients.table[number])[0])

    def send(self, fingerprint=b"round"):
        return self.core.ledger.send("a", self.core.lineage, fingerprint)

    def settle(self, shares, lineage=b"entry", cells=ALL):
        answers = (Answer(cells, "a", b"", tuple(share._replace(cells=share.cells & cells) for share in shares)),)
        settled = self.core.ledger.commit(lineage, "a", answers)
        own = tuple((each.number, each.cells) for each in settled)
        told = self.gradients.settled(own, self.core.ledger)
        self.gradients.note(self.core.ledger)
        return told


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_slots_are_granted_and_a_delivery_is_answered_with_another(node):
    assert node.granted == [0, 1] and GRANTED == 2
    asyncio.run(node.deliver(0, 1.0))
    assert node.gradients.table == {0: 0} and node.granted == [0, 1, 2]
    assert not node.slots.view(2).any()


def test_a_delivery_is_added_to_an_open_contribution_in_a_third_slot(node):
    asyncio.run(node.deliver(0, 1.0))
    asyncio.run(node.deliver(1, 2.0))
    assert node.content(0) == 3.0
    assert node.gradients.table[0] not in (0, 1)
    # after a kill the contribution is one sum or the other
    assert node.written == [({0: 0}, 1.0), ({0: node.gradients.table[0]}, 1.0)]


def test_a_contribution_that_travels_or_is_large_is_not_added_to(node):
    asyncio.run(node.deliver(0, 1.0))
    node.send()
    asyncio.run(node.deliver(1, 2.0, samples=LARGEST))
    asyncio.run(node.deliver(node.granted[-1], 4.0))
    assert [node.content(number) for number in range(3)] == [1.0, 2.0, 4.0]


def test_a_round_that_begins_while_a_delivery_is_added_leaves_the_sum_aside(node):
    async def story():
        await node.deliver(0, 1.0)
        before = node.gradients.table[0]
        node.slots.view(1).fill_(2.0)
        message = Delivered(1, 4, node.core.lineage)
        adding = asyncio.ensure_future(node.gradients.take_delivery(message, node.core, node.count))
        await asyncio.sleep(0)  # the thread adds
        assert not adding.done()
        shares = node.send()
        await adding
        assert shares == (Share("a", 0, 0, 4, ALL),)
        assert node.gradients.table[0] == before and node.content(0) == 1.0 and node.content(1) == 2.0

    asyncio.run(story())


def test_a_delivery_on_parameters_of_nobody_gives_its_slot_back(node):
    asyncio.run(node.deliver(0, 1.0, names=("x",), lineage=b"unknown"))
    assert node.gradients.table == {}
    assert node.expired == [Expired(0.0, NO_LONGER, ("x",)), Expired(4.0, Cause.LOST_BRANCH.value)]
    assert node.granted == [0, 1, 0] and not node.slots.view(0).any()


def test_a_delivery_before_the_run_is_joined_is_not_counted(node):
    node.core.log = None
    asyncio.run(node.deliver(0, 1.0, names=("x",)))
    assert node.core.ledger.computed == 0
    assert node.expired == [Expired(0.0, NO_LONGER, ("x",))]


def test_names_are_told_when_all_cells_are_settled(node):
    asyncio.run(node.deliver(0, 1.0, names=("x", "y")))
    shares = node.send()
    assert node.settle(shares, b"one", cells=0b0011) == (2.0, ())
    assert node.settle(shares, b"two", cells=0b1100) == (2.0, ("x", "y"))
    assert node.gradients.table == {} and node.expired == []


def test_names_of_what_expires_are_told(node):
    asyncio.run(node.deliver(0, 1.0, names=("x",)))
    node.settle(node.send(), cells=0b0001)
    node.core.ledger.expire_born(1, None, Cause.STALE)
    node.gradients.note(node.core.ledger)
    assert node.expired == [Expired(0.0, NO_LONGER, ("x",)), Expired(3.0, Cause.STALE.value)]
    node.gradients.note(node.core.ledger)
    assert len(node.expired) == 2


def test_what_expired_in_earlier_lives_was_told_then(tmp_path):
    core = Core()
    core.ledger.add(4, 0, Cause.STALE)
    before = core.ledger.expired.copy()
    core.ledger.add(3, 0, Cause.UNKNOWN)  # when the node started
    assert Node(tmp_path, core, expired=before).expired == [Expired(3.0, Cause.UNKNOWN.value)]


def test_a_borrowed_slot_is_nobody_elses(node):
    asyncio.run(node.deliver(0, 7.0))
    shares = node.send()
    first, second = (node.gradients.borrow([0]) for _ in range(2))
    node.settle(shares)
    assert node.gradients.table == {}
    for round in range(6):
        asyncio.run(node.deliver(node.granted[-1], 1.0))
        node.settle(node.send(bytes([round])), bytes([round]))
    assert float(node.slots.view(first[0])[0]) == 7.0 and 0 not in node.granted[2:]
    node.gradients.give_back(first)
    asyncio.run(node.deliver(node.granted[-1], 1.0))
    assert 0 not in node.granted[2:]
    node.gradients.give_back(second)
    asyncio.run(node.deliver(node.granted[-1], 1.0))
    asyncio.run(node.deliver(node.granted[-1], 1.0))
    assert 0 in node.granted[2:]


def test_contributions_keep_their_slots_over_a_restart(tmp_path):
    node = Node(tmp_path)
    asyncio.run(node.deliver(0, 5.0))
    node.send()
    again = Node(tmp_path, Core(node.core.ledger.record()), dict(node.gradients.table))
    assert 0 not in again.granted and again.content(0) == 5.0
    asyncio.run(again.deliver(again.granted[0], 1.0))
    assert again.content(0) == 5.0 and again.content(1) == 1.0  # it may have travelled


def test_many_deliveries_and_rounds_lose_nothing(tmp_path):
    """In any order: the file stays small, and each sum is what was delivered."""
    node, random_, sums, borrowed = Node(tmp_path), random.Random(0), {}, []

    async def story():
        free = list(node.granted)
        for step in range(300):
            heard = len(node.told)
            deed = random_.choice(["deliver"] * 4 + ["send", "settle", "give back"])
            if deed == "deliver":
                before = {each.number: each.samples for each in node.core.ledger.live}
                await node.deliver(free.pop(0), float(step))
                (number,) = (each.number for each in node.core.ledger.live if each.samples != before.get(each.number))
                sums[number] = sums.get(number, 0.0) + step
            elif deed == "send":
                shares = node.send(step.to_bytes(2, "big"))
                borrowed.append((node.gradients.borrow(share.number for share in shares), shares))
            elif deed == "settle" and borrowed:
                node.settle(random_.choice(borrowed)[1], step.to_bytes(2, "big"), random_.randrange(1, ALL + 1))
            elif deed == "give back" and borrowed:
                slots, _ = borrowed.pop(0)
                for number, slot in slots.items():
                    assert float(node.slots.view(slot)[0]) == sums[number]
                node.gradients.give_back(slots)
            free += [each.slot for each in node.told[heard:] if isinstance(each, Granted)]
            for number in node.gradients.table:
                assert node.content(number) == sums[number]
            assert len(set(free)) == len(free) == GRANTED
            assert all(not node.slots.view(slot).any() for slot in free)

    asyncio.run(story())
    while borrowed:
        node.gradients.give_back(borrowed.pop()[0])
    assert torch.isfinite(node.slots.view(0)).all()


# --- ways of local steps ---


@pytest.fixture
def stepper(tmp_path):
    made = Node(tmp_path)
    made.gradients = Gradients(made.slots, {}, made.told.append, CELLS, LARGEST, {}, True)
    made.told.clear()
    made.gradients.grant()
    return made


def settled(node, shares, lineage, cells=ALL):
    answers = (Answer(cells, "a", b"", tuple(share._replace(cells=share.cells & cells) for share in shares)),)
    own = tuple((each.number, each.cells) for each in node.core.ledger.commit(lineage, "a", answers))
    done = node.gradients.done(own, lineage)
    node.core.ledger.return_all()
    node.gradients.note(node.core.ledger)
    return done


def test_a_settled_way_stays_in_its_slot_until_the_training_process_has_read_it(stepper):
    asyncio.run(stepper.deliver(0, 1.0))
    slot = stepper.gradients.table[0]
    assert settled(stepper, stepper.send(), b"one", cells=0b0011) == ((slot, 0b0011),)
    assert settled(stepper, stepper.send(b"again"), b"two") == ((slot, 0b1100),), "each cell once"
    for turn in range(6):
        asyncio.run(stepper.deliver(stepper.granted[-1], 2.0, samples=LARGEST))
        assert stepper.granted[-1] != slot, turn
    assert float(stepper.slots.view(slot)[0]) == 1.0
    stepper.gradients.reached(b"one")
    stepper.gradients.reached(b"another")
    assert slot not in stepper.granted[2:]
    stepper.gradients.reached(b"two")
    asyncio.run(stepper.deliver(stepper.granted[-1], 2.0, samples=LARGEST))
    assert stepper.granted[-1] == slot


def test_ways_that_expire_are_told_with_the_next_step(stepper):
    asyncio.run(stepper.deliver(0, 1.0))
    slot = stepper.gradients.table[0]
    stepper.core.ledger.expire_born(1, None, Cause.STALE)
    stepper.gradients.note(stepper.core.ledger)
    asyncio.run(stepper.deliver(1, 2.0, lineage=b"of long ago"))
    assert sorted(stepper.gradients.done((), b"one")) == [(slot, ALL), (1, ALL)]
    assert stepper.gradients.done((), b"two") == ()


def test_what_a_model_computes_that_began_anew_is_apart(stepper):
    async def deliver(slot, life):
        stepper.slots.view(slot).fill_(1.0)
        message = Delivered(slot, 4, stepper.core.lineage, (), life)

        def count(delivery):
            if stepper.gradients.is_apart(delivery):
                stepper.core.ledger.seal()
            stepper.count(delivery)

        await stepper.gradients.take_delivery(message, stepper.core, count)
        stepper.gradients.note(stepper.core.ledger)

    asyncio.run(deliver(0, 0))
    asyncio.run(deliver(1, 3))
    assert stepper.gradients.life == 3 and stepper.gradients.table.keys() == {0, 1}
    asyncio.run(deliver(stepper.granted[-1], 3))
    assert stepper.gradients.table.keys() == {0, 1} and stepper.content(1) == 2.0
    done = settled(stepper, stepper.send(), b"one")
    assert [float(stepper.slots.view(slot)[0]) for slot, _ in done] == [2.0], "the model is not ahead by the first one"
