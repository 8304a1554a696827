"""Liars: processes that run a real core and change what goes out. They cannot sign under another name.

A `Witness` sits beside each honest core and finds the proof that two contradicting statements are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.exchange import make_answer
from tests.simulation.invariants import decides
from tests.simulation.signatures import (
    Statement,
    answers_in,
    certificate_statements,
    contradicts,
    statements_in,
    verdict_on,
)
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Share
from volunteer_kit.swarm.sync.entries import Entry, Opening, Verdict
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    Action,
    Begin,
    Held,
    Items,
    Message,
    Promise,
    Propose,
    Round,
    Send,
    Snapshot,
    Vote,
)

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.simulation import Simulation

HUGE = 1_000_000_000  # samples


class Liar:
    """Changes nothing: the base of those that do, and what an identity of a flood is."""

    settings: dict[str, Any] = {}  # of its core, if they differ from the run's

    def __init__(self, sim: Simulation):
        self.sim = sim

    def change(self, process: Process, actions: Iterable[Action]) -> list[Action]:
        """What it does instead of what its core says."""
        return [changed for action in actions for changed in self.instead_of(process, action)]

    def instead_of(self, process: Process, action: Action) -> list[Action]:
        """The same for one action."""
        return [action]

    def hear(self, process: Process, sender: str, message: Message) -> None:
        """It hears a message before its core does."""

    def answers(
        self, sim: Simulation, round: Round, answers: tuple[Answer, ...]
    ) -> tuple[tuple[Answer, ...], tuple[Answer, ...] | None]:
        """What it answers as a reducer, and what it answers to every second member, if that differs."""
        return answers, None

    def samples(self, samples: int) -> int:
        """How many it says that a microbatch had."""
        return samples

    def say(self, process: Process, to: str, message: Message) -> None:
        """Send something of its own."""
        self.sim.invariants.said(process, self.sim.signatures.sign(process.name, message))
        self.sim.network.send(process.name, to, message)

    def others(self, process: Process) -> list[str]:
        """Everybody else."""
        return [peer for peer in self.sim.processes if peer != process.name]


def other_entry(entry: Entry) -> Entry:
    """A second entry for the same slot that is as valid as the first one."""
    if entry.answers:
        last = entry.answers[-1]
        return replace(entry, answers=entry.answers[:-1], missing=entry.missing | last.cells)
    return replace(entry, birth=Ballot(entry.birth.turn + 1, entry.birth.leader))


class DoubleProposer(Liar):
    """Proposes two entries at one ballot, votes for both, and spreads both certificates.

    In some slots each member gets one of them, in others everybody gets both.
    """

    def __init__(self, sim: Simulation):
        super().__init__(sim)
        self._second: dict[bytes, tuple[Ballot, Entry]] = {}
        self._votes: dict[bytes, set[str]] = {}

    def instead_of(self, process: Process, action: Action) -> list[Action]:
        """Every second member gets the second entry."""
        if isinstance(action, Send) and isinstance(action.message.body, Propose):
            body = action.message.body
            peers = sorted(process.core.log.last.membership.view)
            if action.to in peers and (peers.index(action.to) % 2 or body.entry.parent[0] % 2):
                second = other_entry(body.entry)
                self._second[second.lineage] = (body.ballot, second)
                changed = Send(action.to, Message(action.message.head, replace(body, entry=second)))
                return [changed, action] if body.entry.parent[0] % 2 else [changed]
        return [action]

    def hear(self, process: Process, sender: str, message: Message) -> None:
        """Count votes for the second entry."""
        body = message.body
        if not isinstance(body, Vote) or body.entry not in self._second:
            return
        ballot, entry = self._second[body.entry]
        votes = self._votes.setdefault(body.entry, {process.name})
        votes.add(sender)
        if body.ballot != ballot or entry.parent not in process.core.log:
            return
        base = process.core.log.item(entry.parent)
        if decides(base.membership.electorate, votes, ()):
            certificate = Certificate(entry.lineage, ballot, frozenset(votes))
            item = base.after_entry(entry, certificate)
            for voter in sorted(votes - {process.name}):
                self.say(process, voter, Message(process.core.head, Items(entry.parent, (item,))))


class EarlyLeader(Liar):
    """Begins rounds long before the batch is full."""

    settings = {"target_batch_size": 2}


class FalseSums(Liar):
    """Says in `Begin` that members reported other samples, and to each member something else."""

    def instead_of(self, process: Process, action: Action) -> list[Action]:
        """Change the sums."""
        if isinstance(action, Send) and isinstance(action.message.body, Begin):
            begun = action.message.body.round
            factor = 2 + sorted(self.sim.plans).index(action.to)
            told = begun._replace(samples=tuple(factor * each for each in begun.samples))
            return [Send(action.to, Message(action.message.head, Begin(told)))]
        return [action]


class Staller(Liar):
    """Leads, and never begins a round."""

    def instead_of(self, process: Process, action: Action) -> list[Action]:
        """Leave out every beginning."""
        if isinstance(action, Send) and isinstance(action.message.body, Begin):
            return []
        return [action]


class Ignorer(Liar):
    """Proposes at a higher ballot what it likes, whatever was accepted before."""

    def instead_of(self, process: Process, action: Action) -> list[Action]:
        """Leave out promises with an accepted proposal, as many as can be spared, and propose something else."""
        if not (isinstance(action, Send) and isinstance(action.message.body, Propose)):
            return [action]
        body = action.message.body
        if not any(promise.accepted is not None for _, promise in body.promises):
            return [action]
        promises = tuple(each for each in body.promises if each[1].accepted is None)
        electorate = process.core.log.last.membership.electorate
        if not decides(electorate, [peer for peer, _ in promises], ()):
            promises = body.promises
        changed = replace(body, entry=other_entry(body.entry), promises=promises)
        return [Send(action.to, Message(action.message.head, changed))]


class Voter(Liar):
    """Votes for every proposal, at every ballot, twice."""

    def hear(self, process: Process, sender: str, message: Message) -> None:
        """Vote."""
        body = message.body
        if isinstance(body, Propose) and process.core.head is not None:
            for _ in range(2):
                self.say(process, sender, Message(message.head, Vote(body.ballot, body.entry.lineage, None)))


class Hider(Liar):
    """Promises, and hides the proposal that it accepted; it also promises to everybody that asks."""

    def instead_of(self, process: Process, action: Action) -> list[Action]:
        """Hide it."""
        if isinstance(action, Send) and isinstance(action.message.body, Promise):
            promise = Promise(action.message.body.ballot, None, None)
            return [Send(action.to, Message(action.message.head, promise))]
        return [action]


class TwoAnswers(Liar):
    """Reduces, and gives every second member another answer."""

    def answers(
        self, sim: Simulation, round: Round, answers: tuple[Answer, ...]
    ) -> tuple[tuple[Answer, ...], tuple[Answer, ...] | None]:
        """Two answers with the same shares and other bytes."""
        others = tuple(
            make_answer(round.fingerprint, each.cells, each.reducer, each.shares, variant=1) for each in answers
        )
        sim.signatures.sign_answers(others)
        return answers, others


class WrongShares(Liar):
    """Reduces, and says that contributions of its own weigh a thousand times as much; it leaves out another one."""

    def answers(
        self, sim: Simulation, round: Round, answers: tuple[Answer, ...]
    ) -> tuple[tuple[Answer, ...], tuple[Answer, ...] | None]:
        """Change the shares."""
        changed = []
        for each in answers:
            shares = [
                share._replace(samples=share.samples * 1000) if share.peer == each.reducer else share
                for share in each.shares
            ]
            if len(shares) > 1 and shares[-1].peer != each.reducer:
                shares.pop()
            changed.append(make_answer(round.fingerprint, each.cells, each.reducer, shares))
        sim.signatures.sign_answers(changed)
        return tuple(changed), None


class Inflator(Liar):
    """Says that each microbatch had ten thousand times its samples."""

    def samples(self, samples: int) -> int:
        """Too many."""
        return 10_000 * samples


class FalseBranch(Liar):
    """Opens a branch alone, and commits a billion samples there."""

    def __init__(self, sim: Simulation):
        super().__init__(sim)
        self._items: tuple[LogItem, ...] = ()
        self._accounts = Accounts()
        self._heard = 0

    def hear(self, process: Process, sender: str, message: Message) -> None:
        """Tell the sender of the branch, now and then."""
        self._heard += 1
        head = process.core.head
        if head is None or head.epoch < 2 or self._heard % 10:
            return
        if not self._items or self._items[-1].head.epoch < head.epoch:
            self._make(process)
        if not self._items:
            return
        behind = self._items[0].step
        assert behind is not None
        self.say(process, sender, Message(self._items[-1].head, Items(behind.parent, self._items)))

    def _make(self, process: Process) -> None:
        item = process.core.log.last
        me = process.plan.member
        if me.peer not in item.membership.view:
            return
        opening = Opening(item.head.generation, item.head.sequence, item.head.epoch, item.head.lineage, 0, (me,))
        item = item.after_opening(opening, frozenset({me.peer}))
        self.sim.signatures.sign_statement(("opening", me.peer, opening.lineage))
        items = [item]
        everything = (1 << self.sim.cells) - 1
        accounts = process.core.accounts
        for _ in range(3):
            head = item.head
            fingerprint = head.lineage[:16]
            share = Share(me.peer, 1_000_000 + head.epoch, head.epoch, HUGE, everything)
            answer = make_answer(fingerprint, everything, me.peer, (share,))
            self.sim.signatures.sign_answers((answer,))
            process.held.add(answer.digest)
            ballot = Ballot(0, me.peer)
            entry = Entry(
                head.generation, head.sequence, head.epoch, head.lineage, ballot, fingerprint, (me,), (answer,), 0
            )
            certificate = Certificate(entry.lineage, ballot, frozenset({me.peer}))
            for statement in certificate_statements(entry.parent, certificate):
                self.sim.signatures.sign_statement(statement)
            accounts = accounts.after(entry.answers, head.epoch + 1, self.sim.schedule.settings["max_staleness"])
            item = item.after_entry(entry, certificate)
            items.append(item)
        self.sim.invariants.equivocators.add(me.peer)  # its core may vote for another entry there
        self._items, self._accounts = tuple(items), accounts

    def snapshot(self) -> Snapshot | None:
        """It serves its branch."""
        return Snapshot(self._items, self._accounts) if self._items else None


KINDS: dict[str, type[Liar]] = {
    "double proposer": DoubleProposer,
    "early leader": EarlyLeader,
    "false sums": FalseSums,
    "staller": Staller,
    "ignorer": Ignorer,
    "voter": Voter,
    "hider": Hider,
    "two answers": TwoAnswers,
    "wrong shares": WrongShares,
    "inflator": Inflator,
    "false branch": FalseBranch,
    "flood": Liar,
}


def make_liar(kind: str, sim: Simulation) -> Liar:
    """By the name that a schedule has."""
    return KINDS[kind](sim)


class Witness:
    """Remembers what an honest peer saw signed, and finds contradictions."""

    def __init__(self, sim: Simulation):
        self._sim = sim
        self._seen: dict[tuple[object, object, object], list[Statement]] = {}  # by kind, signer, slot
        self._answers: dict[tuple[str, bytes], list[Answer]] = {}
        self._proven: set[str] = set()

    def see(self, sender: str, message: Message) -> list[Verdict]:
        """What a message proves together with those before it."""
        found = []
        for statement in statements_in(sender, message):
            if len(statement) == 5 and self._contradicted(statement):
                found.append(self._prove(statement[1]))
        body = message.body
        if isinstance(body, Held):
            found += self.see_answers(body.fingerprint, body.answers)
        elif isinstance(body, Propose):
            found += self.see_answers(body.entry.fingerprint, answers_in(message))
        return [each for each in found if each is not None]

    def see_answers(self, fingerprint: bytes, answers: Iterable[Answer]) -> list[Verdict]:
        """Two answers of one reducer for one cell of one round are proof."""
        found = []
        for answer in answers:
            known = self._answers.setdefault((answer.reducer, fingerprint), [])
            if answer in known:
                continue
            if any(answer.cells & other.cells for other in known):
                verdict = self._prove(answer.reducer)
                if verdict is not None:
                    found.append(verdict)
            known.append(answer)
        return found

    def _contradicted(self, statement: Statement) -> bool:
        kind, signer, slot, ballot, what = statement
        known = self._seen.setdefault((kind, signer, slot), [])
        if statement in known:
            return False
        known.append(statement)
        if any(contradicts(statement, other) for other in known[:-1]):
            return True
        votes = self._seen.get(("vote", signer, slot), ())
        promises = self._seen.get(("promise", signer, slot), ())
        if kind == "vote":
            return any(_hides(promise, statement) for promise in promises)
        if kind == "promise":
            return any(_hides(statement, vote) for vote in votes)
        return False

    def _prove(self, peer: object) -> Verdict | None:
        assert isinstance(peer, str)
        if peer in self._proven:
            return None
        self._proven.add(peer)
        verdict = verdict_on(peer)
        self._sim.prove(verdict)
        return verdict


def _hides(promise: Statement, vote: Statement) -> bool:
    """Whether the promise hides a vote below its ballot, or the vote breaks the promise: one of the two is a lie."""
    ballot, told, voted = promise[3], promise[4], vote[3]
    assert isinstance(ballot, Ballot) and isinstance(told, tuple) and isinstance(voted, Ballot)
    accepted_at = told[1]
    return voted < ballot and (accepted_at is None or accepted_at < voted)
