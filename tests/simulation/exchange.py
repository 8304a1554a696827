"""Exchanges of parts and answers, and transfers of answers and snapshots, with as few events as possible.

A member's parts start when it hears of the round. A reducer answers when all parts of its slice are here, or after 0.7
of the exchange's time with what came. Each member's exchange ends when all answers are here, or when its core says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.messages import ExchangeEnded, Round, StartExchange

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.simulation import Simulation

REDUCERS_WAIT = 0.7  # of the exchange's time
KEPT = 3  # exchanges that are remembered
TRIES = 2.0  # s between two attempts to find a source


def make_answer(fingerprint: bytes, cells: int, reducer: str, shares: Iterable[Share], variant: int = 0) -> Answer:
    """An answer whose bytes follow from its content."""
    in_order = tuple(sorted(shares))
    text = repr((fingerprint, cells, in_order, variant)).encode()
    return Answer(cells, reducer, hashlib.blake2b(text, digest_size=12).digest(), in_order)


class Exchange:
    """One round's traffic."""

    __slots__ = ("round", "members", "lives", "actions", "parts", "reduced", "arrivals", "ended", "silent")

    def __init__(self, round: Round):
        self.round = round
        self.members = [member.peer for member in round.group]
        self.lives: dict[str, int] = {}  # member -> its process's life when it started
        self.actions: dict[str, StartExchange] = {}
        self.parts: dict[tuple[str, str], float] = {}  # (sender, reducer) -> s of arrival
        self.reduced: set[str] = set()
        self.arrivals: dict[str, dict[str, tuple[float, tuple[Answer, ...]]]] = {}  # member -> reducer -> answers
        self.ended: set[str] = set()
        self.silent: dict[str, frozenset[str]] = {}  # member -> those for whom it does not wait

    def is_whole(self, member: str) -> bool:
        """Whether all the answers are on their way to a member for which it waits."""
        silent = self.silent.get(member, frozenset())
        return all(reducer in self.arrivals.get(member, ()) or reducer in silent for reducer, _ in self.round.slices)


class Exchanges:
    """All exchanges of a simulation.

    :param size: bytes of all parameters
    """

    def __init__(self, sim: Simulation, size: float):
        self._sim = sim
        self._size = size
        self._all: dict[bytes, Exchange] = {}

    def died(self, peer: str) -> None:
        """A process ended: what it had not sent yet never comes."""
        now = self._sim.clock.now
        for exchange in self._all.values():
            exchange.ended.add(peer)
            for (sender, reducer), arrives in list(exchange.parts.items()):
                if arrives > now and peer in (sender, reducer):
                    del exchange.parts[sender, reducer]
            for arrivals in exchange.arrivals.values():
                if peer in arrivals and arrivals[peer][0] > now:
                    del arrivals[peer]

    def start(self, process: Process, action: StartExchange) -> None:
        """A member sends its parts, and reduces if a slice is its own."""
        sim, name, round = self._sim, process.name, action.round
        exchange = self._all.get(round.fingerprint)
        if exchange is None:
            exchange = self._all[round.fingerprint] = Exchange(round)
            if len(self._all) > KEPT * 4:
                del self._all[next(iter(self._all))]
        now, network = sim.clock.now, sim.network
        exchange.ended.discard(name)
        if name in exchange.actions:  # it has started again since
            action = replace(action, shares=exchange.actions[name].shares)
        exchange.lives[name], exchange.actions[name] = process.life, action
        sent = 0.0
        for reducer, cells in round.slices:
            if reducer == name:
                exchange.parts[name, name] = now
                continue
            sent += self._size * cells.bit_count() / sim.cells
            network.connect(name, reducer)
            if network.reaches(name, reducer):
                exchange.parts[name, reducer] = now + network.seconds(name, sent) + network.latency(name, reducer)
        mine = 0
        for reducer, cells in round.slices:
            if reducer == name:
                mine |= cells
        if mine:
            sim.clock.at(now + REDUCERS_WAIT * round.exchange_seconds, self._reduce, exchange, process, process.life)
        if exchange.is_whole(name):
            self._last(exchange, name)
        for reducer, _ in round.slices:
            if reducer in exchange.lives and reducer not in exchange.reduced:
                self._maybe_early(exchange, reducer)

    def _maybe_early(self, exchange: Exchange, reducer: str) -> None:
        """If all parts for this reducer are on their way, it is done when the last of them arrives."""
        silent = exchange.silent.get(reducer, frozenset())
        arrivals = [exchange.parts.get((member, reducer)) for member in exchange.members if member not in silent]
        if None not in arrivals:
            process = self._sim.processes[reducer]
            last = max(each for each in arrivals if each is not None)
            self._sim.clock.at(last, self._reduce, exchange, process, exchange.lives[reducer])

    def _reduce(self, exchange: Exchange, process: Process, life: int) -> None:
        name, sim = process.name, self._sim
        if name in exchange.reduced or not process.up or process.life != life:
            return
        if process.paused:
            sim.clock.after(0.5, self._reduce, exchange, process, life)
            return
        exchange.reduced.add(name)
        now, network = sim.clock.now, sim.network
        here = [
            member for member in exchange.members if exchange.parts.get((member, name), now + 1) <= now + 1e-9
        ]
        answers: tuple[Answer, ...] = (self._answer(exchange, name, here),)
        sim.signatures.sign_answers(answers)
        others: tuple[Answer, ...] | None = None
        if process.liar is not None:
            answers, others = process.liar.answers(sim, exchange.round, answers)
        process.held.update(answer.digest for answer in answers)
        size = self._size * sum(answer.cells.bit_count() for answer in answers) / sim.cells
        sent = 0.0
        for place, member in enumerate(exchange.members):
            given = others if others is not None and place % 2 else answers
            if member == name:
                arrives = now
            elif not network.reaches(name, member):
                continue
            else:
                sent += network.seconds(name, size)
                arrives = now + sent + network.latency(name, member)
            exchange.arrivals.setdefault(member, {})[name] = (arrives, given)
            if exchange.is_whole(member) and member in exchange.lives:
                self._last(exchange, member)

    def _last(self, exchange: Exchange, member: str) -> None:
        arrivals = exchange.arrivals.get(member, {}).values()
        last = max((arrives for arrives, _ in arrivals), default=self._sim.clock.now)
        last = max(last, self._sim.clock.now)
        self._sim.clock.at(last, self._all_here, exchange, self._sim.processes[member], exchange.lives[member])

    def _answer(self, exchange: Exchange, reducer: str, here: list[str]) -> Answer:
        """A slice's average: of each member all shares, or none if they are not believed or spent already."""
        action = exchange.actions[reducer]
        cells = dict(exchange.round.slices)[reducer]
        limits = dict(action.limits)
        taken: list[Share] = []
        for member in here:
            shares = [each._replace(cells=each.cells & cells) for each in exchange.actions[member].shares]
            shares = [each for each in shares if each.cells]
            believed = sum(each.samples for each in shares) <= limits[member]
            if believed and not any(action.spent.committed(member, each.number) & each.cells for each in shares):
                taken += shares
        return make_answer(exchange.round.fingerprint, cells, reducer, taken)

    def _all_here(self, exchange: Exchange, process: Process, life: int) -> None:
        if process.life == life and exchange.is_whole(process.name):
            self._end(exchange, process)

    def without(self, process: Process, fingerprint: bytes, silent: tuple[str, ...]) -> None:
        """A core does not wait for these members."""
        exchange, name = self._all.get(fingerprint), process.name
        if exchange is None or exchange.lives.get(name) != process.life:
            return
        before = exchange.silent.get(name, frozenset())
        exchange.silent[name] = before | frozenset(silent)
        if exchange.silent[name] == before:
            return
        if name in dict(exchange.round.slices) and name not in exchange.reduced:
            self._maybe_early(exchange, name)
        if exchange.is_whole(name):
            self._last(exchange, name)

    def end(self, process: Process, fingerprint: bytes) -> None:
        """A core ends its exchange with what is here."""
        exchange = self._all.get(fingerprint)
        if exchange is not None and exchange.lives.get(process.name) == process.life:
            self._end(exchange, process)
        else:
            process.handle(ExchangeEnded(fingerprint, ()))

    def _end(self, exchange: Exchange, process: Process) -> None:
        name, now = process.name, self._sim.clock.now
        if name in exchange.ended or not process.up:
            return
        exchange.ended.add(name)
        here = [
            answer
            for arrives, answers in exchange.arrivals.get(name, {}).values()
            if arrives <= now + 1e-9
            for answer in answers
        ]
        here.sort(key=lambda answer: (answer.cells & -answer.cells).bit_length())
        process.held.update(answer.digest for answer in here)
        if process.witness is not None:
            for verdict in process.witness.see_answers(exchange.round.fingerprint, here):
                process.prove(verdict)
        process.handle(ExchangeEnded(exchange.round.fingerprint, tuple(here)))


class Transfers:
    """Answers and snapshots that a peer gets from another one.

    :param answer_size: bytes of the answers of one cell
    :param snapshot_size: bytes
    """

    def __init__(self, sim: Simulation, answer_size: float, snapshot_size: float):
        self._sim = sim
        self._answer_size = answer_size
        self._snapshot_size = snapshot_size

    def _reach(self, process: Process, source: str) -> Process | None:
        other = self._sim.processes.get(source)
        network = self._sim.network
        if other is None or not other.active or other is process:
            return None
        if network.is_cut(process.name, source) or network.is_cut(source, process.name):
            return None
        return other if network.can_call(process.name, source) else None

    def answers(self, process: Process, digests: frozenset[bytes], sources: tuple[str, ...]) -> None:
        """Fetch these answers from whoever has them."""
        here = digests & process.held
        wanted = sorted(digests - here)
        if not wanted:
            process.has(digests)
            return
        found: dict[str, list[bytes]] = {}
        for digest in wanted:
            for source in sources:
                other = self._reach(process, source)
                if other is not None and digest in other.held:
                    found.setdefault(source, []).append(digest)
                    break
        last = 0.0
        network = self._sim.network
        got: set[bytes] = set(here)
        for source, some in found.items():
            got.update(some)
            seconds = 2 * network.latency(process.name, source) + network.seconds(source, self._answer_size * len(some))
            last = max(last, seconds)
        if got:
            self._sim.clock.after(last, process.fetched, process.life, frozenset(got))

    def snapshot(self, process: Process, source: str, fork: bytes) -> None:
        """Fetch a snapshot, behind the fork if that is given; the transfer takes as long as the source's line needs."""
        network, sim = self._sim.network, self._sim
        other = self._reach(process, source)
        if other is None:
            sim.clock.after(TRIES, process.snapshot_came, process.life, source, None)
            return
        seconds = 2 * network.latency(process.name, source) + network.seconds(source, self._snapshot_size)
        sim.clock.after(seconds, self._snapshot_ends, process, process.life, other, other.life, fork)

    def _snapshot_ends(self, process: Process, life: int, other: Process, other_life: int, fork: bytes) -> None:
        found = None
        if other.active and other.life == other_life and self._reach(process, other.name) is other:
            found = other.snapshot(fork)
        process.snapshot_came(life, other.name, found)
