"""A round's parts and answers, answers that are fetched, and snapshots, over home lines.

A reducer answers when every member's part of its slice is here, or after 0.7 of the exchange's time with what came.
An answer that is on its way when a core ends the exchange still arrives, and is not fetched a second time. Fetches are
spread over those that hold the answers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.protocol_parts.lines import Lines, Transfer
from tests.simulation.exchange import KEPT, REDUCERS_WAIT, TRIES, make_answer
from tests.simulation.process import Process
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.messages import ExchangeEnded, Round, StartExchange

if TYPE_CHECKING:
    from benchmarks.protocol_parts.swarm import Swarm


class Exchange:
    """One round's traffic."""

    def __init__(self, round: Round):
        self.round = round
        self.members = [member.peer for member in round.group]
        self.slices = dict(round.slices)
        self.lives: dict[str, int] = {}  # member -> its process's life when it started
        self.actions: dict[str, StartExchange] = {}
        self.parts: dict[str, set[str]] = {reducer: set() for reducer in self.slices}  # whose part came to it
        self.reduced: set[str] = set()
        self.answers: dict[str, list[Answer]] = {member: [] for member in self.members}  # that came to a member
        self.sending: dict[str, list[Transfer]] = {}  # a member's parts
        self.ended: set[str] = set()
        self.silent: dict[str, frozenset[str]] = {}  # member -> those for whom it does not wait

    def has_parts(self, reducer: str) -> bool:
        """Whether a reducer has all parts for which it waits."""
        waits_for = set(self.members) - self.silent.get(reducer, frozenset())
        return reducer in self.lives and waits_for <= self.parts[reducer]

    def has_answers(self, member: str) -> bool:
        """Whether a member has all answers for which it waits."""
        waits_for = self.slices.keys() - self.silent.get(member, frozenset())
        return waits_for <= {answer.reducer for answer in self.answers[member]}


class Exchanges:
    """All rounds of a swarm.

    :param size: bytes of one member's gradients as they travel
    """

    def __init__(self, swarm: Swarm, lines: Lines, size: float):
        self._swarm = swarm
        self._lines = lines
        self._size = size
        self._all: dict[bytes, Exchange] = {}
        self.coming: dict[tuple[str, int, bytes], Transfer] = {}  # (peer, life, digest of an answer) -> what brings it

    def died(self, peer: str) -> None:
        """A process ended."""
        self._lines.end_of(peer)
        for exchange in self._all.values():
            exchange.ended.add(peer)

    def start(self, process: Process, action: StartExchange) -> None:
        """A member sends its parts, and reduces if a slice is its own."""
        name, round, swarm = process.name, action.round, self._swarm
        exchange = self._all.get(round.fingerprint)
        if exchange is None:
            exchange = self._all[round.fingerprint] = Exchange(round)
            if len(self._all) > KEPT * 4:
                del self._all[next(iter(self._all))]
        exchange.lives[name], exchange.actions[name] = process.life, action
        if name in exchange.slices:
            exchange.parts[name].add(name)
            wait = REDUCERS_WAIT * round.exchange_seconds
            swarm.clock.after(wait, self._reduce, exchange, process, process.life)
        sending = exchange.sending[name] = []
        place = exchange.members.index(name)
        for reducer in (*exchange.members[place + 1 :], *exchange.members[:place]):  # not all to the first one at once
            if reducer in exchange.slices:
                swarm.network.connect(name, reducer)
                size = self._slice_size(exchange, reducer)
                if swarm.network.can_call(name, reducer):
                    came = partial(self._part_came, exchange, name, reducer)
                    sending.append(self._lines.send(name, reducer, size, came))
        if name in exchange.slices:
            self._reduce_if_all(exchange, name)

    def _slice_size(self, exchange: Exchange, reducer: str) -> float:
        return self._size * exchange.slices[reducer].bit_count() / self._swarm.cells

    def _part_came(self, exchange: Exchange, member: str, reducer: str) -> None:
        exchange.parts[reducer].add(member)
        self._reduce_if_all(exchange, reducer)

    def _reduce_if_all(self, exchange: Exchange, reducer: str) -> None:
        if exchange.has_parts(reducer):
            self._reduce(exchange, self._swarm.processes[reducer], exchange.lives[reducer])

    def _reduce(self, exchange: Exchange, process: Process, life: int) -> None:
        name, swarm = process.name, self._swarm
        if name in exchange.reduced or not process.up or process.life != life:
            return
        if process.paused:
            swarm.clock.after(0.5, self._reduce, exchange, process, life)
            return
        exchange.reduced.add(name)
        answer = self._answer(exchange, name)
        swarm.signatures.sign_answers((answer,))
        swarm.cells_of[answer.digest] = answer.cells.bit_count()
        process.held.add(answer.digest)
        size = self._slice_size(exchange, name)
        for member in exchange.members:
            if member == name:
                self._answer_came(exchange, member, answer)
            elif swarm.network.can_call(name, member):
                came = partial(self._answer_came, exchange, member, answer)
                transfer = self._lines.send(name, member, size, came)
                self.coming[member, swarm.processes[member].life, answer.digest] = transfer

    def _answer(self, exchange: Exchange, reducer: str) -> Answer:
        """A slice's average: of each member all shares, or none if they are not believed or spent already."""
        action, cells = exchange.actions[reducer], exchange.slices[reducer]
        limits = dict(action.limits)
        taken: list[Share] = []
        for member in sorted(exchange.parts[reducer]):
            shares = [each._replace(cells=each.cells & cells) for each in exchange.actions[member].shares]
            shares = [each for each in shares if each.cells]
            believed = sum(each.samples for each in shares) <= limits[member]
            if not believed:
                self._swarm.disbelieved += 1
            elif not any(action.spent.committed(member, each.number) & each.cells for each in shares):
                taken += shares
        return make_answer(exchange.round.fingerprint, cells, reducer, taken)

    def _answer_came(self, exchange: Exchange, member: str, answer: Answer) -> None:
        process = self._swarm.processes[member]
        exchange.answers[member].append(answer)
        if member not in exchange.ended:
            self._end_if_all(exchange, process)
        elif exchange.lives.get(member) == process.life and process.up:
            process.fetched(process.life, frozenset((answer.digest,)))

    def _end_if_all(self, exchange: Exchange, process: Process) -> None:
        if exchange.has_answers(process.name) and exchange.lives.get(process.name) == process.life:
            self._end(exchange, process)

    def without(self, process: Process, fingerprint: bytes, silent: tuple[str, ...]) -> None:
        """A core does not wait for these members any more."""
        exchange, name = self._all.get(fingerprint), process.name
        if exchange is None or exchange.lives.get(name) != process.life:
            return
        exchange.silent[name] = exchange.silent.get(name, frozenset()) | frozenset(silent)
        if name in exchange.slices:
            self._reduce_if_all(exchange, name)
        self._end_if_all(exchange, process)

    def end(self, process: Process, fingerprint: bytes) -> None:
        """A core ends its exchange with what is here."""
        exchange = self._all.get(fingerprint)
        if exchange is not None and exchange.lives.get(process.name) == process.life:
            self._end(exchange, process)
        else:
            process.handle(ExchangeEnded(fingerprint, ()))

    def _end(self, exchange: Exchange, process: Process) -> None:
        name = process.name
        if name in exchange.ended or not process.up:
            return
        exchange.ended.add(name)
        for transfer in exchange.sending[name]:
            transfer.over = True  # reducers that lack a part by now have answered without it
        here = sorted(exchange.answers[name], key=lambda answer: (answer.cells & -answer.cells).bit_length())
        process.held.update(answer.digest for answer in here)
        process.handle(ExchangeEnded(exchange.round.fingerprint, tuple(here)))


class Transfers:
    """Answers and snapshots that a peer gets from another one.

    :param answer_size: bytes of the answers of one cell
    :param snapshot_size: bytes
    """

    def __init__(self, swarm: Swarm, lines: Lines, answer_size: float, snapshot_size: float):
        self._swarm = swarm
        self._lines = lines
        self._answer_size = answer_size
        self._snapshot_size = snapshot_size
        self._coming = swarm.exchanges.coming

    def _reach(self, process: Process, source: str) -> Process | None:
        other, network = self._swarm.processes.get(source), self._swarm.network
        if other is None or not other.active or other is process:
            return None
        if network.is_cut(process.name, source) or network.is_cut(source, process.name):
            return None
        return other if network.can_call(process.name, source) else None

    def answers(self, process: Process, digests: frozenset[bytes], sources: tuple[str, ...]) -> None:
        """Fetch these answers from whoever has them; what is on its way is not asked for again."""
        here = digests & process.held
        if here:
            process.has(here)
        found: dict[str, list[bytes]] = {}
        for digest in sorted(digests - here):
            coming = self._coming.get((process.name, process.life, digest))
            if coming is not None and not coming.over and self._reach(process, coming.sender) is not None:
                continue
            place = digest[0] % max(1, len(sources))
            for source in (*sources[place:], *sources[:place]):
                other = self._reach(process, source)
                if other is not None and digest in other.held:
                    found.setdefault(source, []).append(digest)
                    break
        for source, some in found.items():
            arrived = partial(process.fetched, process.life, frozenset(some))
            size = self._answer_size * self._cells_of(some)
            transfer = self._lines.send(source, process.name, size, arrived)
            for digest in some:
                self._coming[process.name, process.life, digest] = transfer

    def _cells_of(self, digests: list[bytes]) -> int:
        return sum(self._swarm.cells_of[digest] for digest in digests)

    def snapshot(self, process: Process, source: str, fork: bytes) -> None:
        """Fetch a snapshot, behind the fork if that is given; one that cannot be reached fails."""
        other, life = self._reach(process, source), process.life
        if other is None:
            self._swarm.clock.after(TRIES, process.snapshot_came, life, source, None)
            return
        came = partial(self._snapshot_ends, process, life, other, fork)
        transfer = self._lines.send(source, process.name, self._snapshot_size, came)
        self._watch(process, life, transfer)

    def _watch(self, process: Process, life: int, transfer: Transfer) -> None:
        """A source that dies is noticed."""
        if process.life != life or not process.up:
            return
        source = self._swarm.processes[transfer.sender]
        if transfer.over and not source.up:
            process.snapshot_came(life, source.name, None)
        elif not transfer.over:
            self._swarm.clock.after(TRIES, self._watch, process, life, transfer)

    @staticmethod
    def _snapshot_ends(process: Process, life: int, other: Process, fork: bytes) -> None:
        process.snapshot_came(life, other.name, other.snapshot(fork) if other.up else None)
