"""The monitor as a member of the run: it trains nothing, and its node takes part in rounds with no samples. So it holds
the live state, and learns whose samples each step has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from hivemind.p2p import PeerID

from volunteer_kit.auth.access_token import BanList, account_digest
from volunteer_kit.checkpoint import CheckpointError, is_finite, load_checkpoint
from volunteer_kit.home import Home
from volunteer_kit.monitor.evidence import State
from volunteer_kit.monitor.kept import KeptStates
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.own_peer import Addresses, OwnPeer
from volunteer_kit.monitor.signing import LastOrder, Signing
from volunteer_kit.public_samples import public_samples
from volunteer_kit.run_optimizers import build_step_bound
from volunteer_kit.runs import RunConfig
from volunteer_kit.session.node import NEWS, make_node, node_spec, renew_key_if_left
from volunteer_kit.session.node_parts import node_parts, units_per_sample
from volunteer_kit.session.trust import judge_by
from volunteer_kit.swarm.credit.accounting import EntryCollector, StepFeed
from volunteer_kit.swarm.credit.ledger import CreditLedger
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.identity import peer_digest
from volunteer_kit.swarm.node.link import launch_node
from volunteer_kit.swarm.node.member import order_number
from volunteer_kit.swarm.node.talk import StepOf
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.swarm.state.manifest import Sequences, Statements
from volunteer_kit.swarm.sync.entries import RollbackOrder

JOIN_WITHIN: Final = 20.0  # s until the monitor is up all the same; it goes on looking for the run's model
LOOK_AGAIN: Final = 0.5  # s of one such look
MOST_NEWS: Final = 64  # that wait to be told
MOST_EPOCHS: Final = 4096  # lineages whose epoch is remembered


class Member:
    """Built in the order in which things can go wrong cheaply, in the main thread.

    :param on_bans, on_broken: as of OwnPeer.start
    Raises MonitorError, KeysError, SwarmError, MissingDependency, StoreError.
    """

    def __init__(
        self,
        run: RunConfig,
        home: Home,
        keys: Path | None,
        addresses: Addresses,
        on_bans: Callable[[BanList], None],
        on_broken: Callable[[str], None],
    ):
        self.run, self.home = run, home
        self._launched = launch_node()  # it loads what it needs meanwhile
        try:
            self._build(keys, addresses, on_bans, on_broken)
        except BaseException:
            self._launched.close()
            raise

    def _build(
        self,
        keys: Path | None,
        addresses: Addresses,
        on_bans: Callable[[BanList], None],
        on_broken: Callable[[str], None],
    ) -> None:
        run, home = self.run, self.home
        self._parts = parts = node_parts(run)
        self._units = units_per_sample(run)
        folder = home.path / "node"
        self.news: deque[str] = deque(maxlen=MOST_NEWS)
        renew_key_if_left(folder, home.identity, parts.elements, self.news.append)
        self.own = OwnPeer(run, home, keys)
        self.membership, self.admission = self.own.membership, self.own.admission
        self.public_loss = public_samples(run)
        self.step_bound = build_step_bound(run)
        self.own.start(addresses, on_bans, on_broken)
        self.peer, self.board = self.own.peer, self.own.board
        self._on_broken = on_broken
        self._feed = StepFeed()
        self._epochs: dict[bytes, int] = {}  # of lineages, the newest last
        self._last_order: LastOrder | None = None
        try:
            spec = node_spec(
                run,
                self.peer,
                parts,
                identity_path=str(home.identity),
                folder=folder,
                initial_peers=addresses.initial_peers,
                observes=True,
            )
            judge = None if self.admission.is_open else judge_by(self.step_bound, self.public_loss)
            self.optimizer = make_node(run, self.peer, self.board, parts, spec, self._launched, judge)
        except BaseException:
            self.own.close()
            raise
        if self.membership is not None:
            self.membership.on_news = self.optimizer.tell_admission
        self.optimizer.on_told = self._take_news
        self.optimizer.on_steps = self._take_steps
        self.optimizer.on_verdicts = lambda verdicts: self._feed.credit(verdicts.credits)

    def _take_news(self, topic: str, about: str) -> None:
        if topic in NEWS:
            self.news.append(NEWS[topic].format(about=about))

    def _take_steps(self, steps: tuple[StepOf, ...]) -> None:
        """In another thread."""
        self._feed(self._in_samples(step) for step in steps)
        for step in steps:
            self._epochs.pop(step.lineage, None)
            self._epochs[step.lineage] = step.epoch
            number = order_number(step.generation, step.sequence)
            if number > (self._last_order.number if self._last_order is not None else 0) and not step.is_step:
                self._last_order = LastOrder(number, step.parent)
        for lineage in [*self._epochs][: max(0, len(self._epochs) - MOST_EPOCHS)]:
            del self._epochs[lineage]

    def _in_samples(self, step: StepOf) -> StepOf:
        """A step as its members count, where the nodes count in units."""
        shares = tuple(each._replace(samples=each.samples / self._units) for each in step.shares)
        return replace(step, samples=round(step.samples / self._units), shares=shares)

    # --- what it is ---

    @property
    def run_key(self) -> str:
        return self.own.run_key

    @property
    def reports(self) -> deque[StepReport]:
        """The reports of steps; a reader takes them out."""
        return self.optimizer.reports

    def make_collector(
        self,
        ledger: CreditLedger,
        name_of: Callable[[PeerID], str | None],
        warn: Callable[[str], None],
    ) -> EntryCollector:
        """See EntryCollector: it counts what the node tells from now on, and what waits since the start."""
        return EntryCollector(self._feed, ledger, partial(_account, self.run.run_id), name_of, warn)

    def make_signing(self, kept: KeptStates, notes: Notes) -> Signing:
        """Sign for this monitor, which must hold the run's keys."""
        trust = self.admission.trust
        assert trust is not None
        sequences = Sequences(self.home.path / "states" / "sequences.json")
        statements = Statements(self.peer.dht, self.run_key, trust, sequences)
        return Signing(self, statements, kept, notes)

    # --- the swarm's state ---

    def resume(self, checkpoint: Path) -> bool:
        """Begin the run with a checkpoint of ours, where nobody has a state. :returns: whether it could be used."""
        try:
            found = load_checkpoint(checkpoint, fingerprint=self.run.fingerprint)
            names, tensors = self._parts.names, self._parts.from_checkpoint(found.tensors)
            self.optimizer.load_named_state(names, tensors, found.meta)
        except CheckpointError:
            return False
        return True

    def join(self, patience: float = JOIN_WITHIN) -> bool:
        """Take the swarm's state, or begin the run. :returns: whether one was taken. Raises SwarmError (broken)."""
        try:
            return self.optimizer.join(patience)
        except SwarmError as error:
            if error.kind != "dead_peers":
                raise
            return False  # attend() goes on

    def attend(self) -> None:
        """The node does by itself what has to be done; to be called several times a second.

        Raises SwarmError (broken).
        """
        if not self.is_steady:
            self.join(LOOK_AGAIN)
        why = self.optimizer.why_broken
        if why:
            self._on_broken(why)

    @property
    def is_steady(self) -> bool:
        """There is a state; it is of one moment at any time."""
        return self.optimizer.lineage is not None

    @property
    def epoch(self) -> int:
        """The epoch of the state."""
        return self.optimizer.local_epoch

    @property
    def samples_of_epoch(self) -> float:
        """Return about how many samples all peers together have for the epoch under way."""
        return self.optimizer.progress().swarm_samples / self._units

    @property
    def order(self) -> int:
        """The last order that is in the state."""
        return self.optimizer.order

    @property
    def last_order(self) -> LastOrder | None:
        """The last order that is in the state, as far as this monitor has seen it given."""
        return self._last_order

    def epoch_of(self, lineage: bytes) -> int | None:
        """Return it for a recent step; None: the monitor does not know the step."""
        return self._epochs.get(lineage)

    def order_back(
        self, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any], sign: Callable[[bytes], bytes]
    ) -> RollbackOrder | None:
        """Call NodeOptimizer.order_back for a checkpoint of what `copy` returned."""
        return self.optimizer.order_back(self._parts.from_checkpoint(tensors), about, sign)

    def look(self, swarm_loss: float | None) -> State:
        """A copy of the parameters, and whether the rest is numbers. Only while it is steady."""
        about, values = self.copy()
        count = self._parts.num_trained
        return State(about["epoch"], about["order"], values[:count], is_finite(values[count:]), swarm_loss)

    def copy(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The whole state, in the order of `tensor_names`."""
        tensors, about = self.optimizer.named_state(self._parts.names)
        return about, list(self._parts.for_checkpoint(tensors).values())

    @property
    def tensor_names(self) -> Sequence[str]:
        """Parameters first, then the buffers if there are some, then statistics."""
        return list(self._parts.for_checkpoint(self.optimizer.named_state(self._parts.names)[0]))

    def close(self) -> None:
        """Say goodbye, end node, DHT and p2pd; some seconds."""
        self.optimizer.shutdown()
        self._launched.close()
        self.own.close()


def _account(run_id: str, account: str, peer: str) -> bytes:
    """An account of an entry, as the ledger names it; without an authority each peer is one."""
    return peer_digest(PeerID.from_base58(peer)) if account == peer else account_digest(run_id, account)
