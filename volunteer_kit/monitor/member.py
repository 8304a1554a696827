"""The monitor as a member of the swarm: a peer that trains nothing, goes into each round with weight 0, and so holds
the live state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hivemind.p2p import PeerID

from volunteer_kit.addressing import LISTEN
from volunteer_kit.auth.access_token import BanList, Signer, Trust
from volunteer_kit.auth.keys import KeyFolder
from volunteer_kit.checkpoint import CheckpointError, is_finite, load_checkpoint
from volunteer_kit.home import Home
from volunteer_kit.monitor.errors import MonitorError
from volunteer_kit.monitor.evidence import State
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.public_samples import public_samples
from volunteer_kit.robust.rules import rule
from volunteer_kit.run_optimizers import build_step_bound
from volunteer_kit.run_sizes import parameters_of, state_bytes
from volunteer_kit.runs import RunConfig, build_model, build_optimizer, build_param_groups
from volunteer_kit.session.options import swarm_options
from volunteer_kit.swarm.acceptance import StateTrust
from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.beside import BUFFERS, HeldBuffers
from volunteer_kit.swarm.credit_bounds import Bounds
from volunteer_kit.swarm.host_membership import HostMembership
from volunteer_kit.swarm.optimizer import SwarmOptimizer
from volunteer_kit.swarm.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.receipts import ReceiptBoard, ReceiptWriter
from volunteer_kit.swarm.records import PeerBoard
from volunteer_kit.swarm.shared_memory import require_shared_memory, shared_bytes
from volunteer_kit.swarm.state_round import ROUNDING
from volunteer_kit.swarm.transfer import StateRefused

MICROBATCH = 64  # samples that a volunteer does at once, for the receipts' bounds


@dataclass(frozen=True)
class Addresses:
    """As in PeerConfig."""

    initial_peers: Sequence[str] = ()
    host_maddrs: Sequence[str] = LISTEN
    announce_maddrs: Sequence[str] = ()
    startup_timeout: float = field(default=90.0)


class Member:
    """Built in the order in which things can go wrong cheaply. Must be built in the main thread.

    :param keys: folder of the run's keys; None: no authority, and nothing is signed
    :param on_refused: told (peer id, why) of donors that are not believed
    :param on_bans: told of each new list
    :param on_broken: called with the reason when one of this peer's processes has died, in a thread of its own; it
        should end the program
    Raises MonitorError, KeysError, SwarmError, MissingDependency.
    """

    def __init__(
        self,
        run: RunConfig,
        home: Home,
        keys: Path | None,
        addresses: Addresses,
        on_refused: Callable[[str, str], None],
        on_bans: Callable[[BanList], None],
        on_broken: Callable[[str], None],
    ):
        self.run, self.home = run, home
        self._keys = KeyFolder(keys) if keys is not None and run.authority is not None else None
        self.membership = self._membership(keys)
        self.admission = self.membership.admission if self.membership else Admission()
        self.public_loss = public_samples(run)
        self.step_bound = build_step_bound(run, ROUNDING if run.swarm.average_state_every else 0.0)
        model = build_model(run)
        self._buffers = HeldBuffers.of_run(model) if run.marks_unused else None
        self.names = [*parameter_names(model), *([BUFFERS] if self._buffers is not None and len(self._buffers) else [])]
        require_shared_memory(shared_bytes(parameters_of(run), state_bytes(run)))
        self.peer = self._start_peer(addresses)
        self.peer.processes.when_broken(on_broken)
        self._receipts: ReceiptWriter | None = None
        try:
            if self.membership:
                self.membership.keep(self.peer, on_bans=on_bans)
            self.optimizer = self._make_optimizer(build_param_groups(run, model), on_refused)
        except BaseException:
            self.peer.shutdown()
            raise
        self.board = PeerBoard(self.peer.dht, run.run_id)
        self.receipts = ReceiptBoard(self.peer.dht, self.run_key)
        bounds = Bounds(run.target_batch_size, self.optimizer.options.max_samples_per_second, MICROBATCH)
        account_of = None if self.admission.is_open else self.admission.account_of
        self._receipts = ReceiptWriter(self.receipts, bounds, self.board.fetch, account_of)
        self.optimizer.on_reduced = self._receipts

    def _membership(self, keys: Path | None) -> HostMembership | None:
        run = self.run
        if run.authority is None:
            return None
        if keys is None:
            raise MonitorError(
                f"The run {run.run_id!r} has an authority: its monitor needs the run's keys to be let in and to sign.\n"
                f"1. Name their folder: --keys {run.run_id}-host/keys"
            )
        return HostMembership(
            run.run_id, run.authority.url, run.authority.public_key, keys, self.home.identity, "monitor"
        )

    def _start_peer(self, addresses: Addresses) -> Peer:
        return start_peer(
            PeerConfig(
                initial_peers=list(addresses.initial_peers),
                host_maddrs=list(addresses.host_maddrs),
                announce_maddrs=list(addresses.announce_maddrs),
                identity_path=str(self.home.identity),
                startup_timeout=addresses.startup_timeout,
                check_identity=False,  # a lock keeps the folder to one monitor
            ),
            self.admission,
        )

    def _make_optimizer(self, groups: list[dict], on_refused: Callable[[str, str], None]) -> SwarmOptimizer:
        make, schedule = build_optimizer(self.run)
        optimizer = SwarmOptimizer(
            peer=self.peer,
            options=swarm_options(self.run),
            params=groups,
            optimizer=make,
            scheduler=schedule,
            reduce=rule(self.run.swarm.aggregation),
            buffers=self._buffers,
        )
        optimizer.weights_are_samples = self.run.draws  # those of a fine-tune weigh what their loss is a mean over
        if self.run.authority is not None:
            trust = Trust.of(self.run.run_id, self.run.authority.public_key)
            optimizer.trust_states(
                StateTrust(
                    trust,
                    self.run_key,
                    self.home.path / "states",
                    step_bound=self.step_bound,
                    public_loss=self.public_loss,
                    keep_own=False,  # it puts them down itself, with a checkpoint
                    on_refused=on_refused,
                )
            )
        return optimizer

    # --- what it is ---

    @property
    def run_key(self) -> str:
        return swarm_options(self.run).run_key

    @property
    def signs(self) -> bool:
        return self._keys is not None

    def signer(self) -> Signer:
        """Raises KeysError."""
        return self._keys.signer("monitor")

    def is_monitor(self, peer: PeerID) -> bool:
        return peer == self.peer.peer_id or (not self.admission.is_open and self.admission.role_of(peer) == "monitor")

    # --- the swarm's state ---

    def resume(self, checkpoint: Path) -> bool:
        """Go on from a checkpoint of ours, until somebody has a newer state. :returns: whether it could be used."""
        try:
            found = load_checkpoint(checkpoint, fingerprint=self.run.fingerprint)
            self.optimizer.load_named_state(self.names, found.tensors, found.meta)
        except (CheckpointError, StateRefused):
            return False
        return True

    def join(self) -> bool:
        """Take the swarm's state, if there is a swarm. :returns: whether one was taken."""
        return self.optimizer.join(patience=min(20.0, self.run.swarm.load_state_timeout))

    def attend(self) -> None:
        """Take part in what goes on; to be called several times a second. May take as long as a round."""
        if self.optimizer.obey_orders():
            return
        if self.optimizer.tracker.global_progress.num_peers > 1 or self.optimizer.cut_off is not None:
            self.optimizer.attend()
        else:  # alone there is nothing to step with; and a step without samples would be none
            time.sleep(0.1)

    @property
    def is_steady(self) -> bool:
        """The state is that of one moment: no step is under way, and nothing is still being downloaded."""
        averager = self.optimizer.state_averager
        return averager.is_between_steps and averager.complete

    @property
    def epoch(self) -> int:
        """Of the state."""
        return self.optimizer.state_averager.told[0]

    @property
    def order(self) -> int:
        """The last order that is in the state."""
        return self.optimizer.state_averager.obeyed

    @torch.no_grad()
    def look(self, swarm_loss: float | None) -> State:
        """A copy of the parameters, and whether the rest is numbers. Only while it is steady."""
        averager = self.optimizer.state_averager
        with averager.lock_averaged_tensors:
            tensors = averager.state_tensors()
            count = len(averager.main_parameters)
            parameters = [tensor.detach().cpu().clone() for tensor in tensors[:count]]
            finite = is_finite(tensors[count:])
        return State(self.epoch, self.order, parameters, finite, swarm_loss)

    def copy(self) -> tuple[dict, list[torch.Tensor]]:
        """The whole state. Raises StateRefused."""
        metadata, tensors, _ = self.optimizer.state_averager.get_current_state()
        return metadata, tensors

    @property
    def tensor_names(self) -> list[str]:
        return [*self.names, *self.optimizer.state_averager.statistic_keys(self.names)]

    def close(self) -> None:
        """Say goodbye, end averagers, DHT and p2pd; some seconds."""
        if self._receipts is not None:
            self._receipts.close(patience=1.0)
        self.optimizer.shutdown()
        if self.membership is not None:
            self.membership.close()
        self.peer.shutdown()
