"""Whole verified rounds of honest members in one process: each has its node's `Verification`, with keys of its own.

Stand-ins: messages go from member to member through the deflate streams of their links, without libp2p; parts go to the
reducers, and answers back, without streams. All else of a round is the kit's: commitments, the list, reducers, reveals,
statements, and what validators compute and report.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from hivemind.utils.crypto import RSAPrivateKey

from volunteer_kit.robust.standing import Settings
from volunteer_kit.swarm.node.credentials import peer_id_of, public_der
from volunteer_kit.swarm.node.deflate import Deflater, Inflater
from volunteer_kit.swarm.node.recomputing import Recomputing
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.talk import Recompute, Recomputed, Verdicts
from volunteer_kit.swarm.node.verification import Named, Verification
from volunteer_kit.swarm.node.verified_words import MARK, MOST_MESSAGE
from volunteer_kit.swarm.rounds.commitments import Commitments
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.reducer import SliceReducer, decode_answer
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Share
from volunteer_kit.swarm.sync.entries import Entry, Member
from volunteer_kit.swarm.sync.messages import Round, StartExchange

FRAME_HEAD = 5  # bytes before a message of a control stream
PATIENCE = 600.0  # s: nobody waits for anything in vain here
RULE = "centered_clip"
TRUTH = 4.0  # of the small task, beside its noise


class Task(Protocol):
    """The gradients that members compute."""

    layout: Layout
    samples: int  # of a member in a round

    def named(self, round_number: int, member: int) -> tuple[str, ...]:
        """The samples of a member in a round."""

    def gradient(self, names: Sequence[str], epoch: int, member: int) -> torch.Tensor:
        """Their summed gradient on the model of an epoch, (elements,), as this member computes it."""

    def step(self, average: torch.Tensor) -> None:
        """The model of the next epoch."""


class Small:
    """A vector of so few values that nearly all of a round's time is that of its words; the words are of full size."""

    def __init__(self, cells: int, samples: int, codec: Any):
        self.layout, self.samples = Layout([torch.Size([64 * cells])], cells, codec), samples
        noise = torch.randn(4096, self.layout.elements, generator=torch.Generator().manual_seed(0))
        self._gradients = TRUTH + noise

    def named(self, round_number: int, member: int) -> tuple[str, ...]:
        return tuple(f"{round_number}/{100 + member}/{1000 + index}" for index in range(self.samples))

    def gradient(self, names: Sequence[str], epoch: int, member: int) -> torch.Tensor:
        return self._gradients[[int(hashlib.md5(name.encode()).hexdigest()[:3], 16) for name in names]].sum(0)

    def step(self, average: torch.Tensor) -> None:
        """The model of the next epoch has the same gradients."""


class Found(NamedTuple):
    """The cost of honest rounds, for one member in one round."""

    word_bytes: float  # sent and heard
    seconds: float  # of the processor, for `Verification`
    forced: float  # contributions that it computes again because they have to be looked at
    judged: float  # and because it is a juror
    mismatch: float  # the largest that validators found, as a share of a contribution's length


class Node:
    """One member."""

    def __init__(self, group: Group, place: int):
        key = RSAPrivateKey()
        self._group, self._place = group, place
        self.peer = peer_id_of(public_der(key))
        self.held: dict[str, dict[int, bytes]] = {}  # what was brought for its slice
        self.sent = 0  # bytes
        self.judged = 0
        self.mismatches: list[float] = []
        self._named: dict[int, tuple[str, ...]] = {}
        self._out: dict[str, Deflater] = {}
        self._in: dict[str, Inflater] = {}
        self._duties: list[Recompute] = []
        self._answered: list[Recomputed] = []
        self._recomputing = Recomputing(1, SyncConfig.max_staleness, group.settings.sums, self._answered.append)
        self._recomputing.recompute = lambda names, model: iter([[
            group.task.gradient(names, int(model[0]), place)
        ]])  # fmt: skip
        self.verification = Verification(
            self.peer,
            group.settings,
            clips=True,
            transport=self,
            signatures=Signatures(key, self.peer, "run"),
            layout=group.task.layout,
            max_staleness=SyncConfig.max_staleness,
            named=lambda number: Named(self._named[number], 1),
            answer=group.answers.__getitem__,
            parts=lambda fingerprint: self.held,
            lineage=lambda epoch: b"%d" % epoch,
            tell=self._tell,
        )
        self.verification.verifier.random_bytes = random.Random(place).randbytes  # the same draws in each run

    # --- its transport ---

    def answer(self, name: str, handler: Callable[[str, bytes, Any], Any]) -> None:
        """Ignore questions for proofs: no member accuses another one here."""

    async def ask(self, peer: str, name: str, head: bytes, timeout: float) -> Any:
        raise ConnectionError("nobody is accused here")

    def send(self, peer: str, data: bytes) -> None:
        deflated = self._out.setdefault(peer, Deflater()).deflate(data)
        self.sent += FRAME_HEAD + len(deflated)
        asyncio.get_running_loop().call_soon(self._group.by_peer[peer].hear, self.peer, deflated)

    def hear(self, peer: str, deflated: bytes) -> None:
        data = self._in.setdefault(peer, Inflater(MOST_MESSAGE)).inflate(deflated)
        self.verification.on_message(peer, data.removeprefix(MARK))

    # --- its training process ---

    def _tell(self, message: Any) -> None:
        if isinstance(message, Recompute):
            self._duties.append(message)
            self.judged += message.duty.kind == "judge"
        elif isinstance(message, Verdicts):
            self.mismatches += message.measured

    def keep_model(self, epoch: int) -> None:
        self._recomputing.keep(b"%d" % epoch, [torch.tensor(float(epoch))])  # the task has the model itself

    def compute_again(self) -> list[Recomputed]:
        """:returns: what it was asked for"""
        for message in self._duties:
            self._recomputing.ask(message)
        while self._recomputing.work_off(0.0):
            pass
        found = [*self._answered]
        self._duties.clear()
        self._answered.clear()
        return found

    # --- a round ---

    async def commit(self, plan: Round, epoch: int) -> Commitments:
        task = self._group.task
        self._named[epoch] = task.named(epoch, self._place)
        share = Share(self.peer, epoch, epoch, task.samples, self._group.all_cells)
        start = StartExchange(plan, (share,), (), Accounts())
        gradient = self._group.gradients[self._place]
        commitments = await self.verification.commit(start, epoch, lambda number: gradient)
        assert commitments is not None and commitments.own
        return commitments


class Group:
    """All members; cells of the vector are dealt out to them in turn."""

    def __init__(self, task: Task, members: int, settings: Settings):
        self.task, self.settings = task, settings
        self.all_cells = (1 << task.layout.num_cells) - 1
        self.answers: dict[bytes, bytes] = {}
        self.gradients: list[torch.Tensor] = []
        self.nodes = [Node(self, place) for place in range(members)]
        self.by_peer = {node.peer: node for node in self.nodes}
        self._forced = 0
        self._seconds: list[float] = []  # of each round, of all members

    def play(self, rounds: int) -> Found:
        """Play one round to get to know each other, and then so many that are measured."""
        return asyncio.run(self._play(rounds))

    async def _play(self, rounds: int) -> Found:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await self._round(0)
        self._forced, self._seconds = 0, []
        for node in self.nodes:
            node.sent = node.judged = 0
        for epoch in range(1, rounds + 1):
            await self._round(epoch)
        for node in self.nodes:
            node.verification.close()
        each = rounds * len(self.nodes)
        mismatches = [found for node in self.nodes for found in node.mismatches]
        return Found(
            2 * sum(node.sent for node in self.nodes) / each,
            median(self._seconds) / len(self.nodes),
            self._forced / each,
            sum(node.judged for node in self.nodes) / each,
            max(mismatches, default=0.0),
        )

    async def _round(self, epoch: int) -> None:
        peers, layout = [node.peer for node in self.nodes], self.task.layout
        self.gradients = [
            self.task.gradient(self.task.named(epoch, place), epoch, place) for place in range(len(peers))
        ]
        for node in self.nodes:
            node.keep_model(epoch)
        slices = tuple(
            (peer, sum(1 << cell for cell in range(place, layout.num_cells, len(peers))))
            for place, peer in enumerate(peers)
        )
        members = tuple(Member(peer, peer, True) for peer in peers)
        fingerprint = hashlib.sha256(b"round %d" % epoch).digest()
        leader = Ballot(0, peers[epoch % len(peers)])
        samples = (self.task.samples,) * len(peers)
        plan = Round(b"%d" % epoch, leader, 0, members, samples, slices, PATIENCE, PATIENCE, fingerprint)
        begun = time.process_time()
        promised = await asyncio.gather(*(node.commit(plan, epoch) for node in self.nodes))
        seconds = time.process_time() - begun
        answers = self._exchange(plan, epoch, dict(zip(peers, promised, strict=True)))
        entry = Entry(
            0, epoch, epoch, b"", leader, fingerprint, members, answers, 0, commitments=promised[0].digest
        )
        begun = time.process_time()
        for node in self.nodes:
            node.verification.committed(entry)
        while not all(self._is_verified(node, fingerprint) for node in self.nodes):
            await asyncio.sleep(0.005)
        seconds += time.process_time() - begun
        last = self.nodes[0].verification.verifier.last_seen_through
        assert last is not None and not last.void
        self._forced += len(last.targets - last.by_chance)
        found = {node: node.compute_again() for node in self.nodes}
        begun = time.process_time()
        for node, each in found.items():
            for recomputed in each:
                await node.verification.report(recomputed)
        self._seconds.append(seconds + time.process_time() - begun)
        cells = [decode_answer(layout, answer.cells, self.answers[answer.digest]) for answer in answers]
        averages = {cell: average for each in cells for cell, average in each.items()}
        self.task.step(torch.cat([averages[cell] for cell in range(layout.num_cells)]))

    @staticmethod
    def _is_verified(node: Node, fingerprint: bytes) -> bool:
        last = node.verification.verifier.last_seen_through
        return last is not None and last.round_id == fingerprint

    def _exchange(self, plan: Round, epoch: int, promised: dict[str, Commitments]) -> tuple[Answer, ...]:
        """Bring all parts to their reducers, which refuse what was not promised to them."""
        answers = []
        for reducer, mask in plan.slices:
            limits = dict.fromkeys(promised, float(self.task.samples))
            own = SliceReducer(
                self.task.layout, mask, reducer, epoch=epoch, max_staleness=SyncConfig.max_staleness, limits=limits,
                spent=Accounts(), rule=RULE, keeps=True,
            )  # fmt: skip
            for peer, sender in promised.items():
                part = own.begin(peer, promised[reducer].shares_of(peer, mask))
                for cell in part.weights:
                    assert promised[reducer].is_committed(peer, cell, sender.own[cell])
                    own.read(part, cell, sender.own[cell])
                own.take(part)
            own.close()
            found = own.reduce()
            assert found is not None
            answer, data = found
            self.answers[answer.digest] = data
            self.by_peer[reducer].held = own.kept
            answers.append(answer)
        return tuple(answers)
