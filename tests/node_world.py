"""Nodes of one swarm in one process: real engines, cores, disks and signatures, and a toy for each training process.

Each delivery marks a place of its own in every cell of the parameter vector. The optimizer is plain SGD, so each step
shows whose work it holds: what is counted twice, or comes from a slot that was used for something else meanwhile, is
seen at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.utils.crypto import RSAPrivateKey
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from tests.memory_network import Hub, Wire
from volunteer_kit.robust.standing import Settings
from volunteer_kit.swarm.codecs.registry import make_codec
from volunteer_kit.swarm.node.credentials import peer_id_of, public_der
from volunteer_kit.swarm.node.engine import Engine
from volunteer_kit.swarm.node.recomputing import Recomputing
from volunteer_kit.swarm.node.signatures import Envelope, Signatures
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.store import NodeStore
from volunteer_kit.swarm.node.talk import (
    Check,
    Checked,
    Compute,
    Delivered,
    Expired,
    Found,
    Founded,
    Granted,
    Leave,
    Load,
    NodeSpec,
    Recompute,
    Seen,
    StateWritten,
    Step,
    StepOf,
    Stepped,
    Told,
    WriteState,
)
from volunteer_kit.swarm.node.transfers import TransferFailed, Transfers
from volunteer_kit.swarm.node.verified_words import MARK
from volunteer_kit.swarm.rounds.exchange import Exchange
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.reducer import decode_answer
from volunteer_kit.swarm.sync.entries import Head
from volunteer_kit.swarm.sync.messages import Body
from volunteer_kit.swarm.wire import decode

CELLS, MARKS = 4, 3000  # cells of the vector, numbers of a cell: as many deliveries can be told apart
ELEMENTS = CELLS * MARKS
ALL = (1 << CELLS) - 1
RUN = "a run"
PATIENCE = 120.0  # s
TIMES = {
    "target_batch_size": 96, "max_staleness": 16, "cells": CELLS, "kept_entries": 30, "heartbeat": 0.05,
    "leader_timeout": 0.4, "suspect_after": 0.8, "isolated_after": 2.0, "alone_after": 60.0, "epoch_deadline": 0.4,
    "exchange_ceiling": 4.0, "exchange_floor": 0.6, "vote_ceiling": 4.0, "vote_floor": 0.6, "gather": 0.2,
    "catching_up_patience": 2.0, "fetch_patience": 1.0, "snapshot_patience": 10.0,
}  # fmt: skip


class Killed(BaseException):
    """The process of a peer ends here."""


@cache
def key(place: int) -> RSAPrivateKey:
    """Making one takes a second."""
    return RSAPrivateKey()


def layout() -> Layout:
    return Layout([torch.Size([ELEMENTS])], CELLS, make_codec("none", "none", 0))


class World:
    """All peers, and what every one of them has to agree on."""

    def __init__(self, folder: Path, verification: Settings | None = None, rule: str = "mean", **times: Any):
        self.folder, self.times = folder, {**TIMES, **times}
        self.verification, self.rule = verification, rule
        self.hub, self.peers = Hub(), {}
        self.changed = asyncio.Condition()
        self.deliveries: list[tuple[str, int]] = []  # peer and samples, by mark
        self.steps: dict[bytes, tuple[bytes, torch.Tensor]] = {}  # lineage -> parent, and the step's mean gradient
        self.states: dict[bytes, torch.Tensor] = {}  # lineage -> parameters
        self.faults: list[str] = []
        self._tasks: set[asyncio.Task] = set()

    def peer(self, name: str, **settings: Any) -> Peer:
        """A peer of this name, which runs from here on."""
        made = self.peers[name] = Peer(self, name, len(self.peers), **settings)
        made.start()
        return made

    def note(self) -> None:
        """Something happened."""

        async def tell() -> None:
            async with self.changed:
                self.changed.notify_all()

        task = asyncio.ensure_future(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, condition: Callable[[], object], patience: float = PATIENCE) -> None:
        """Wait for it; a fault of anybody ends the test."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while True:
            assert not self.faults and not self.hub.failures, (self.faults, self.hub.failures)
            if condition():
                return
            assert loop.time() < deadline, self.story()
            async with self.changed:
                try:
                    await asyncio.wait_for(self.changed.wait(), 0.05)
                except asyncio.TimeoutError:
                    pass

    async def all_at(self, epoch: int, *peers: Peer) -> None:
        """Wait until these peers, or all, have come to an epoch."""
        await self.until(lambda: all(peer.epoch >= epoch for peer in peers or self.alive))

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.runs]

    def hold_parts(self, of: Peer) -> tuple[list[Any], asyncio.Event]:
        """Hold back what this peer sends to reducers.

        :returns: the streams that are held so far, and the event that lets all of them go on
        """
        held: list[Any] = []
        let_go = asyncio.Event()

        async def hold(data: bytes) -> bytes:
            await let_go.wait()
            return data

        def tamper(stream: Any, data: bytes) -> Any:
            if stream.opened and stream.owner == of.id and len(held) < 20:
                held.append(stream)
                return hold(data)
            return data

        self.hub.tamper = tamper
        return held, let_go

    async def quiet(self, *peers: Peer) -> None:
        """Stop all devices; wait until all that can count is counted, and these or all are at one head."""
        for peer in self.alive:
            peer.trains = False
        peers = peers or tuple(self.alive)
        await self.until(lambda: all(not peer.on_its_way and not peer.ledger.live for peer in peers))
        await self.until(lambda: len({peer.lineage for peer in peers} | {peer.head.lineage for peer in peers}) == 1)

    def met(self) -> None:
        """Discovery: everybody hears of those that have parameters."""
        seen = [(peer.id, peer.account, peer.public, float("inf")) for peer in self.alive if peer.head is not None]
        for peer in self.alive:
            others = tuple(each for each in seen if each[0] != peer.id and not self.hub.is_cut(peer.id, each[0]))
            if others and others != peer.knows:
                peer.knows = others
                peer.say(Seen(others))

    def mark(self, peer: str, samples: int) -> int:
        """A place of its own for a delivery."""
        self.deliveries.append((peer, samples))
        assert len(self.deliveries) <= MARKS, "the test takes too long for this many marks"
        return len(self.deliveries) - 1

    def check_step(self, step: StepOf, gradient: torch.Tensor, parameters: torch.Tensor) -> None:
        """Equal lineages are equal steps and equal parameters."""
        known = self.steps.setdefault(step.lineage, (step.parent, gradient))
        if known[0] != step.parent or not torch.equal(known[1], gradient):
            self.faults.append(f"two steps have one lineage, at epoch {step.epoch}")
        self.check_state(step.lineage, parameters)

    def check_state(self, lineage: bytes, parameters: torch.Tensor) -> None:
        if not torch.equal(self.states.setdefault(lineage, parameters.clone()), parameters):
            self.faults.append("equal lineages, and other parameters")

    def branch(self, head: Head) -> list[torch.Tensor]:
        """The gradients of all steps that lead to this head."""
        found, lineage = [], head.lineage
        while lineage in self.steps:
            lineage, gradient = self.steps[lineage][0], self.steps[lineage][1]
            found.append(gradient)
        return found

    def entered(self, head: Head) -> torch.Tensor:
        """(cells, marks): how often each delivery entered on the way to this head."""
        counts = torch.zeros(CELLS, MARKS, dtype=torch.int)
        for gradient in self.branch(head):
            counts += (gradient != 0).view(CELLS, MARKS).int()
        return counts

    def check_books(self, *peers: Peer) -> None:
        """Nothing entered twice, and each ledger says what became of all that its peer computed. To be called when all
        is quiet."""
        peers = peers or tuple(self.alive)
        for peer in peers:
            counts = self.entered(peer.head)
            assert counts.max() <= 1, f"a delivery was counted {counts.max()} times"
            peer.check_ledger()
            marks = [place for place, (owner, _) in enumerate(self.deliveries) if owner == peer.name]
            entered = sum(int(counts[:, place].sum()) * self.deliveries[place][1] for place in marks)
            assert entered == peer.ledger.committed, f"{entered} entered of {peer.name}"
            assert peer.ledger.computed == CELLS * (peer.delivered - peer.lost), f"{peer.name} lost some"

    def story(self) -> str:
        told = []
        for peer in self.peers.values():
            core = peer.engine.core
            news = [each for each in peer.told if isinstance(each, Told)]
            told.append(
                f"{peer.name}: runs {peer.runs}, {core.phase.value}, epoch {peer.epoch}, {core.head}, "
                f"turn {core.turn}, live {core.ledger.live}, expired {core.ledger.expired}, free {peer.free}, "
                f"delivered {peer.delivered}, lost {peer.lost}, "
                f"computed {core.ledger.computed / CELLS:g}, news {news[-6:]}"
            )
        return "\n".join(told)

    async def close(self) -> None:
        for peer in self.peers.values():
            peer.kill()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


class Disk(NodeStore):
    """A store whose process may die at a write."""

    dies: Callable[[str, Any], None] = staticmethod(lambda when, what: None)

    def write(self, records: Any = (), **more: Any) -> None:
        records = tuple(records)
        for record in records:
            self.dies("before write", record)
        super().write(records, **more)
        for record in records:
            self.dies("written", record)


class Line(Wire):
    """A transport whose process may die when it says something."""

    dies: Callable[[str, Any], None] = staticmethod(lambda when, what: None)

    def send(self, peer: str, data: bytes, names: Iterable[str] = ()) -> None:
        if data[:1] == MARK:
            super().send(peer, data)
            return
        body: Body = decode(Envelope, data, 2**22).message.body
        self.dies("before saying", body)
        super().send(peer, data)
        self.dies("said", body)


class Peer:
    """One node and its training process, through all their lives."""

    def __init__(
        self, world: World, name: str, place: int, *, founds: bool = False, public: bool = True, samples: int = 8,
        pause: float = 0.01, trains: bool = True, sends: float = 1.0,
    ):  # fmt: skip
        self.sends = sends  # what its gradients are multiplied with, on their way into a slot
        self.world, self.name, self.public, self.founds = world, name, public, founds
        self.key, self.samples, self.pause, self.trains = key(place), samples, pause, trains
        self.id = self.account = peer_id_of(public_der(self.key))
        self.folder = world.folder / name
        self.spec = NodeSpec(
            daemon="", identity_path="", client_mode=not public, initial_peers=(), folder=self.folder, run_key=RUN,
            sync=world.times, shapes=((ELEMENTS,),), codec=("none", "none", 0, 1.0), founds=founds,
            verification=world.verification, rule=world.rule,
        )  # fmt: skip
        self.runs = False
        self.lives = 0
        self.upon: list[tuple[str, Callable[[Any], object]]] = []  # when it dies
        self.lost = 0  # samples that were delivered when it died, and not counted yet

    # --- life ---

    def start(self) -> None:
        """Its process starts, with what its folder has."""
        self.lives, self.runs = self.lives + 1, True
        self.knows: tuple = ()
        self.told: list[Any] = []
        self.free: list[int] = []
        self.granted: list[int] = []
        self.computes, self.leaves = True, False
        self.parameters = torch.zeros(ELEMENTS)
        self.lineage: bytes | None = None
        self.epoch = -1
        self.expired: dict[str, float] = {}
        self.loads: list[Load] = []
        self.sketch = 0.0  # of its parameters; those of the others are 0
        self.store = Disk(self.folder, ELEMENTS)
        self.store.dies = self.dies
        assert self.store.belongs_to(self.id)
        self.slots = Slots(self.store.slots_path, ELEMENTS)
        self.line = Line(self.world.hub, self.id)
        self.line.dies = self.dies
        self.layout = layout()
        self.signatures = Signatures(self.key, self.id, RUN)
        self.exchange = Exchange(
            self.id, self.line, self.layout, max_staleness=self.world.times["max_staleness"],
            sign_answer=self.signatures.sign_answer,
            check_answer=self.signatures.check_answer, credential=self.signatures.credential,
            knows=self.signatures.knows, retry_after=0.05,
            rule=self.world.rule,
        )  # fmt: skip
        self.recomputing: Recomputing | None = None
        if self.world.verification is not None:
            staleness = self.world.times["max_staleness"]
            self.recomputing = Recomputing(4 * ELEMENTS, staleness, self.world.verification.sums, self.say)
            self.recomputing.recompute = recompute
        self.inbox: list[Any] = []  # of the training process: it may hear before this is done
        self.engine = Engine(
            self.spec, self.line, self.store, self.slots, self.layout, self.signatures, self.exchange, self.hear
        )
        self.engine.start()
        self.task = asyncio.ensure_future(self.train())
        if self.founds:
            self.say(Found())
        self.world.met()

    def kill(self) -> None:
        """End the process: it runs and says nothing any more. Its threads still write what they hold to the disk."""
        if self.runs:
            self.runs = False
            self.world.hub.kill(self.id)
            self.engine.stop()
            self.exchange.close()
            self.task.cancel()
            record = self.store.durable().ledger
            self.lost = self.delivered - (record.computed // CELLS if record is not None else 0)
            self.store.close()
            self.world.note()

    async def restart(self) -> None:
        """Once its last threads are done."""
        assert not self.runs
        await asyncio.get_running_loop().run_in_executor(None, int)
        self.start()

    def dies(self, when: str, what: Any) -> None:
        """At what was planned, its process ends."""
        if not self.runs:
            raise Killed
        for plan in self.upon:
            if plan[0] == when and plan[1](what):
                self.upon.remove(plan)
                self.kill()
                raise Killed

    async def dies_when(self, when: str, found: Callable[[Any], object]) -> None:
        """Plan its end, and wait for it."""
        self.upon.append((when, found))
        await self.world.until(lambda: not self.runs)

    upon_hearing: Callable[[Any], None] = staticmethod(lambda message: None)  # before its node goes on

    # --- how things stand ---

    @property
    def head(self) -> Head | None:
        return self.engine.core.head

    @property
    def ledger(self) -> Any:
        return self.engine.core.ledger

    @property
    def on_its_way(self) -> bool:
        """Whether a delivery is not counted yet."""
        return self.ledger.computed != CELLS * (self.delivered - self.lost)

    @property
    def delivered(self) -> int:
        """Samples, in all its lives."""
        return sum(samples for peer, samples in self.world.deliveries if peer == self.name)

    def check_ledger(self) -> None:
        ledger = self.ledger
        pending = sum(each.samples * (each.pending | each.in_flight).bit_count() for each in ledger.live)
        assert ledger.computed == ledger.committed + pending + sum(ledger.expired.values())

    # --- the training process ---

    def say(self, message: Any) -> None:
        """To the node; a pipe brings it later."""
        life = self.lives
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: self.engine.on_trainer(message) if self.runs and life == self.lives else None)

    def hear(self, message: Any) -> None:
        """From the node."""
        life = self.lives
        self.told.append(message)
        self.upon_hearing(message)
        asyncio.get_running_loop().call_soon(lambda: self.take(message) if self.runs and life == self.lives else None)

    def take(self, message: Any) -> None:
        if isinstance(message, Granted):
            self.granted.append(message.slot)
            if self.slots.view(message.slot).any() or message.slot in self.free:
                self.world.faults.append(f"{self.name} was granted a slot that is in use")
            self.free.append(message.slot)
        elif isinstance(message, Compute):
            self.computes = message.on
        elif isinstance(message, Founded):
            self.at(message.lineage, message.epoch)
        elif isinstance(message, Step):
            self.step(message.step)
            self.say(Stepped(self.lineage, self.sketch))
        elif isinstance(message, Load):
            self.load(message)
        elif isinstance(message, Check):
            found = read_state(message.path)
            said = Checked(message.path, "", bytes.fromhex(found[0]), found[1]) if found else None
            self.say(said or Checked(message.path, "no state"))
        elif isinstance(message, WriteState):
            message.path.write_bytes(written_state(self.lineage, self.epoch, self.parameters))
            self.say(StateWritten(self.lineage, message.path, hashlib.sha256(message.path.read_bytes()).digest()))
        elif isinstance(message, Recompute):
            assert self.recomputing is not None
            self.recomputing.ask(message)
        elif isinstance(message, Expired):
            if message.samples:
                self.expired[message.cause] = self.expired.get(message.cause, 0.0) + message.samples
        self.world.note()

    def at(self, lineage: bytes, epoch: int) -> None:
        self.lineage, self.epoch = lineage, epoch
        self.world.check_state(lineage, self.parameters)
        self.keep_model()
        self.say(Stepped(lineage, self.sketch))
        self.world.met()

    def load(self, message: Load) -> None:
        self.loads.append(message)
        self.sketch = 0.0
        found = read_state(message.path)
        if found is None or found[:2] != (message.lineage.hex(), message.epoch):
            self.world.faults.append(f"{self.name} was told to load what is not there")
            return
        self.parameters = found[2]
        self.lineage, self.epoch = message.lineage, message.epoch
        for step in message.steps:
            self.step(step)
        self.at(self.lineage, self.epoch)

    def step(self, step: StepOf) -> None:
        if step.parent != self.lineage:
            self.world.faults.append(f"{self.name}: step {step.epoch} does not follow epoch {self.epoch}")
        gradient = torch.zeros(ELEMENTS)
        for cells, path in step.answers:
            data = path.read_bytes()
            for cell, values in decode_answer(self.layout, cells, data).items():
                gradient[self.layout.cell(cell)] = values
        self.parameters = self.parameters - gradient
        self.lineage, self.epoch = step.lineage, step.epoch
        self.world.check_step(step, gradient, self.parameters)
        self.keep_model()

    def keep_model(self) -> None:
        if self.recomputing is not None:
            self.recomputing.keep(self.lineage, [self.parameters])

    async def train(self) -> None:
        """Microbatches without an end, fewer the longer the story goes on: it may take long on a slow machine."""
        while True:
            await asyncio.sleep(self.pause * 2 ** (len(self.world.deliveries) * 6 // MARKS))
            if self.recomputing is not None:
                self.recomputing.work_off(0.0)
            if self.trains and self.computes and self.lineage is not None and self.free:
                try:
                    self.deliver()
                except Exception as error:
                    self.world.faults.append(f"{self.name} stopped to train: {error!r}")
                    return

    def deliver(self, samples: int | None = None) -> int:
        """One delivery of one microbatch; its mark."""
        samples = samples or self.samples
        slot, mark = self.free.pop(0), self.world.mark(self.name, samples)
        scale = 1.0 if self.recomputing is None else self.sends * scale_of(self.parameters)
        for cell in range(CELLS):
            self.slots.view(slot)[cell * MARKS + mark] += samples * scale
        names = (str(mark),) if self.recomputing is None else tuple(f"{mark}/{i}" for i in range(samples))
        self.say(Delivered(slot, samples, self.lineage, names))
        return mark

    async def leave(self) -> None:
        """Say goodbye, and end."""
        self.trains = False
        self.say(Leave())
        await self.world.until(lambda: self.engine.left.is_set())
        await asyncio.sleep(0)  # its last words leave
        await asyncio.sleep(0)
        self.kill()


def scale_of(parameters: torch.Tensor) -> float:
    """In a world that verifies, what gradients are multiplied with: they are others on each model."""
    return 1.0 + zlib.crc32(parameters.numpy().tobytes()) % 100 / 100


def recompute(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the gradient of samples that Peer.deliver has named."""
    gradient = torch.zeros(CELLS, MARKS)
    for name in names:
        gradient[:, int(name.split("/")[0])] += scale_of(parameters[0])
    yield [gradient.view(-1)]


def written_state(lineage: bytes, epoch: int, parameters: torch.Tensor) -> bytes:
    return save({"parameters": parameters}, {"about": json.dumps([lineage.hex(), epoch])})


def read_state(path: Path) -> tuple[str, int, torch.Tensor] | None:
    """Lineage in hex, epoch and parameters; None: it is none."""
    try:
        with safe_open(path, framework="pt") as opened:
            lineage, epoch = json.loads(opened.metadata()["about"])
            parameters = opened.get_tensor("parameters")
        return (lineage, epoch, parameters) if len(parameters) == ELEMENTS else None
    except (OSError, ValueError, TypeError, KeyError, SafetensorError):
        return None


class _Errors(logging.Handler):
    """Take each error that the node logs for a fault."""

    def __init__(self, world: World):
        super().__init__(logging.ERROR)
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        self.world.faults.append(self.format(record))


@contextmanager
def watched(world: World) -> Iterator[None]:
    """Errors that no code waits for are faults too."""
    loop, errors, log = asyncio.get_running_loop(), _Errors(world), logging.getLogger("volunteer_kit.swarm")

    def failed(loop: Any, context: dict) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed):
            world.faults.append(f"{context['message']}: {error!r}")

    loop.set_exception_handler(failed)
    log.addHandler(errors)
    try:
        yield
    finally:
        log.removeHandler(errors)


def play(folder: Path, story: Callable[[World], Any], **times: Any) -> None:
    """Run a story of a world."""

    async def whole() -> None:
        executor = ThreadPoolExecutor(1)  # first in, first out: `restart` waits for what is in hand
        asyncio.get_running_loop().set_default_executor(executor)
        world = World(folder, **times)
        with watched(world):
            try:
                await story(world)
                assert not world.faults and not world.hub.failures, (world.faults, world.hub.failures)
            finally:
                await world.close()

    asyncio.run(whole())


def refuse_checkpoints(monkeypatch: pytest.MonkeyPatch, to: Peer) -> list[bool]:
    """Let no checkpoint reach this peer until something is in the returned list."""
    fetch, may_fetch = Transfers.fetch_checkpoint, []

    async def refuse(self, *args, **kwargs):
        if self is to.engine._transfers and not may_fetch:
            raise TransferFailed("not now")
        await fetch(self, *args, **kwargs)

    monkeypatch.setattr(Transfers, "fetch_checkpoint", refuse)
    return may_fetch
