"""A Trainer's node, and what it asks of it.

A step of the Trainer gives its gradients to the node. In the synchronous mode it then waits until the step of all is
committed, unless more of this peer's batches are wanted for it; with `overlap` it goes on, and what is computed
meanwhile enters a later step.

The node counts samples in units, a power of two of which makes target_batch_size: then a step of one batch is divided
by a power of two, which changes no bit of it.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from hivemind.p2p import PeerID

from volunteer_kit.auth.access_token import Trust
from volunteer_kit.output import say
from volunteer_kit.swarm.codecs.wire import FLOAT32
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.connectivity import Reach
from volunteer_kit.swarm.net.identity import give_up_key, load_private_key
from volunteer_kit.swarm.net.peer import Peer
from volunteer_kit.swarm.node.beside import BESIDE, Judge, StepBeside, beside_of, buffers_in, judge_trained, vector_with
from volunteer_kit.swarm.node.credentials import peer_id_of, public_der
from volunteer_kit.swarm.node.discovery import Discovery
from volunteer_kit.swarm.node.link import Link, launch_node, start_node
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.node.process import layout_of
from volunteer_kit.swarm.node.slots import Slots, StoreError
from volunteer_kit.swarm.node.store import NodeStore
from volunteer_kit.swarm.node.talk import Admit, NodeSpec
from volunteer_kit.swarm.options import StepReport, SwarmOptions, SwarmProgress
from volunteer_kit.swarm.records.device_speeds import Limits
from volunteer_kit.swarm.rounds.beside import BesideGradients, SharedBuffers
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.reducer import decode_answer
from volunteer_kit.swarm.rounds.weighed import factor_of, most_weight_of, units_of, weighed_sync
from volunteer_kit.swarm.sync.timing import comes_too_late
from volunteer_kit.training.hf_optimizer import Clip, FirstRates, Schedule, moved, parameters_of
from volunteer_kit.training.turns import is_turn, share_of, takes_turns

EXACT: Final = 1024  # elements of a tensor that is not rounded: few bytes, and much influence
LEAST_PATIENCE, FIRST_PATIENCE = 2.0, 15.0  # s for what others are to bring of a step; before the first one
LATE_PATIENCE: Final = 30.0  # s for the step itself, when all its samples are here
JOIN_PATIENCE: Final = 60.0  # s for a sign of a model, or for this peer to begin the run
LOOK: Final = 0.2  # s
FIRST_SECONDS: Final = 10.0  # in which a peer may not know all that are here
GONE_AFTER: Final = 3  # calls in a row that nobody took
TOO_SLOW: Final = (
    "A batch takes this machine {seconds:.1f} s, and the swarm takes a step every {epoch:.1f} s. Gradients that are "
    "more than {most} steps late count nothing, so most of its work is lost.\n"
    "1. Take smaller batches: lower per_device_train_batch_size or gradient_accumulation_steps.\n"
    '2. Or raise "max_staleness" or "target_batch_size" in hivemind_config["opt"], for all peers.'
)
NEWS: Final = {  # topics of sync.messages.Topic that a person should hear of
    "round failed": "A round came to no step and is tried again ({about}). Nothing is lost by it.",
    "proposal refused": "A step was refused ({about}).",
    "branch opened": "More than half of the peers have been away for long. Those that are here go on without them "
    "({about}); when they are back, all take the model of the side that trained more.",
    "branch lost": "Others had trained more meanwhile, and this peer takes their model ({about}).",
    "rolled back": "The run's host has ordered everybody back to an earlier model ({about}).",
    "drifted": "This peer's model was no longer the others', and theirs takes its place ({about}). If it comes again, "
    "look at this machine's memory, its heat, and overclocking.",
    "warning": "{about}",
}


@dataclass(frozen=True)
class NodeSettings:
    """What a Trainer's node is to do.

    :param codec: of gradients, as NodeSpec has it; with `options.grad_rank` of their factors
    :param longest: words of a full sample
    """

    run_key: str
    options: SwarmOptions
    codec: tuple[str, str, int, float]
    max_staleness: int
    longest: int

    @property
    def overlap(self) -> bool:
        """Whether the device computes while a round runs."""
        return self.options.delay_optimizer_step or self.options.delay_grad_averaging

    @property
    def rank(self) -> int:
        """Return the rank of the factors that gradients travel as; 0: they travel as they are."""
        return self.options.grad_rank or 0

    @property
    def units(self) -> int:
        """Of target_batch_size; a power of two."""
        return units_of(self.options.target_batch_size)

    def sync(self) -> dict[str, Any]:
        """Fields of SyncConfig."""
        return weighed_sync(self.options, self.max_staleness)


@dataclass(frozen=True)
class NodeTerms:
    """The terms that a run's file and its authority set for a node; without them it believes everybody.

    :param rule: how the members' parts become one, a name of `robust.rules`
    :param account, trust: see NodeSpec
    :param admission, judge: see NodeOptimizer; `judge` knows the model's parameters only
    :param username_of, believe: see Discovery
    """

    rule: str = "mean"
    account: str = ""
    trust: Trust | None = None
    admission: Callable[[], Admit] = Admit
    judge: Judge | None = None
    username_of: Callable[[PeerID], str | None] = lambda peer: None
    believe: Callable[[], Limits] | None = None


class NodeSwarm:
    """What a Trainer calls its swarm: gradients go in, steps change the model. For the Trainer's thread.

    :param node: over the parameters and `beside`, in this order
    :param parameters: of the model, as the Trainer's optimizer has them
    :param beside: (M, 3), the node's last parameter
    """

    def __init__(
        self,
        node: NodeOptimizer,
        settings: NodeSettings,
        parameters: Sequence[torch.Tensor],
        beside: torch.nn.Parameter,
        buffers: SharedBuffers,
    ):
        self.node, self._settings, self._parameters = node, settings, parameters
        self._beside, self._buffers = beside, buffers
        self._target = settings.options.target_batch_size
        self._units_of_sample = settings.units / self._target
        self._given = BesideGradients(len(parameters), buffers)
        self._told = self._given.make_tensor()
        self._mean_buffers, self._mean_weight = torch.zeros(len(buffers), **FLOAT32), 0.0
        self._lineage: bytes | None = None
        self._own = self._own_units = 0  # samples that are in no step; units on the parameters of the model
        self._padding = 0  # units that no sample is of
        self._owed = 0.0  # part of a sample that no report has
        self._per_weight: float | None = None  # of this epoch, where this peer is alone
        self._speeds: tuple[float, Sequence[float]] = (0.0, ())  # samples/s: ours, the others'
        self._batch = 0  # samples of the last one
        self._committed = 0  # samples of ours in the steps that were reported in this epoch
        self._late = 0  # samples among `_own` that are in no step, though others took one since
        self._began = time.monotonic()
        self._seconds = deque[float](maxlen=5)  # of epochs
        self._more = 0  # samples of this epoch beyond the share
        self.reports: deque[StepReport] = deque(maxlen=1000)
        self.takes_turns = self.has_begun_the_run = False
        self._awaited, self._first_at = 1, 0.0

    # --- coming ---

    def join(self, patience: float) -> None:
        """Raises SwarmError (dead_peers, broken)."""
        self.has_begun_the_run = not self.node.join(patience)
        if not self.has_begun_the_run:
            self._buffers.shared.copy_(buffers_in(self._beside, len(self._parameters)))
            self._buffers.arrive()
        self._lineage, self._began = self.node.lineage, time.monotonic()

    def begins_with(self, peers: int) -> None:
        """So many begin together. At first not all of them know of each other."""
        self._awaited, self._first_at = peers, time.monotonic()

    @property
    def _expected(self) -> int:
        return self._awaited if time.monotonic() - self._first_at < FIRST_SECONDS else 1

    @property
    def is_alone(self) -> bool:
        return self.node.progress().num_peers <= 1

    # --- one batch ---

    def step(
        self,
        batch_size: int,
        *,
        names: Sequence[Hashable] = (),
        weight: float | None = None,
        ends_pass: bool = False,
    ) -> bool:
        """Give the gradients in .grad, the mean over `weight` of something in `batch_size` samples of these `names`.
        :returns: False if they are of no use: not finite, or of no weight.

        :param weight: in full samples; None: they are a mean over samples
        :param ends_pass: they are the last of a pass over our data: a peer that is alone steps with what it has
        """
        self._batch = batch_size
        weight = float(batch_size if weight is None else weight)
        before, is_taken = self.node.lineage, False
        if weight > 0:
            units = math.ceil(batch_size * self._units_of_sample)
            padding = max(0, self._settings.units - self._own_units - units) if ends_pass and self.is_alone else 0
            factor = self._factor(weight)
            self._fill_beside(factor)
            is_taken = self.node.step(units + padding, (units + padding) / factor, names)
            self._padding += padding if is_taken else 0
        self._own += batch_size if is_taken else 0
        if is_taken and self.node.lineage == before:
            self._own_units += units + padding
        self.take()
        return is_taken

    def _factor(self, weight: float) -> float:
        """What gradients of this weight are multiplied with. Of a peer that is alone the first of a step are multiplied
        with a power of two, which changes no bit of them, and the others of that step in proportion."""
        if self._per_weight is not None:
            return weight * self._per_weight
        if self._own_units or not self.is_alone:
            return weight * self._usual_factor
        factor = 2.0 ** round(math.log2(weight * self._usual_factor))
        self._per_weight = factor / weight
        return factor

    @property
    def _usual_factor(self) -> float:
        return self._units_of_sample * factor_of(self._settings.longest)

    def _fill_beside(self, factor: float) -> None:
        self._given.note([parameter.grad is not None for parameter in self._parameters])
        self._given.fill(self._told)
        self._given.forget()
        self._beside.grad = self._told
        if len(self._buffers):
            sent = self._told[len(self._parameters) :, 1]
            self._mean_weight += factor
            self._mean_buffers.lerp_(sent, factor / self._mean_weight)

    def take(self, patience: float = 0.0) -> bool:
        """Take the swarm's step, if there is one. :returns: whether there was.

        :param patience: s
        """
        self.node.await_step(patience)
        taken = self._read_reports()
        self._committed += taken
        if self.node.lineage == self._lineage:
            return False
        self._lineage = self.node.lineage
        if len(self._buffers):
            if self._mean_weight:
                self._buffers.gave(self._mean_buffers.clone())
            self._buffers.take(buffers_in(self._beside, len(self._parameters)))
            self._buffers.arrive()
            self._mean_buffers.zero_()
        now = time.monotonic()
        self._seconds.append(now - self._began)
        self._began, self._mean_weight, self._per_weight = now, 0.0, None
        # Samples that missed this step enter the next one. Those that were late before have expired, or soon will.
        late = min(max(0, self._own - self._committed), self._own - self._late)
        self._own = self._late = 0 if self.is_alone else late
        self._own_units = self._more = self._committed = 0
        return True

    def _read_reports(self) -> int:
        """:returns: samples of ours that are in a step now"""
        committed = 0
        while self.node.reports:
            report = self.node.reports.popleft()
            padding = min(self._padding, report.samples)
            self._padding -= padding
            self._owed += (report.samples - padding) / self._units_of_sample
            samples = int(self._owed + 1e-3)  # units are rounded up
            self._owed -= samples
            committed += samples
            total = round(report.all_samples / self._units_of_sample)
            self.reports.append(replace(report, samples=samples, all_samples=total))
        return committed

    # --- whose turn it is ---

    def await_turn(self, batch: int, last_epoch: int | None = None) -> None:
        """Return when another batch of ours is wanted; until then wait for the swarm's step.

        Each peer computes its share of a step, by the speeds of their devices, and beyond it what the others do not
        bring in time. With `overlap` nobody waits.

        :param batch: samples of our next one
        :param last_epoch: after which none is wanted; None: there is no last
        """
        if self._settings.overlap or batch <= 0:
            return
        waits_since = time.monotonic()
        while last_epoch is None or self.node.model_epoch < last_epoch:
            progress = self.node.progress()
            self.takes_turns |= takes_turns(progress.computing, batch, self._target)
            if self._is_wanted(progress, batch):
                return
            patience = self._patience
            if self.take(LOOK):
                waits_since = time.monotonic()
            elif self.node.is_leaving:
                return
            elif time.monotonic() - waits_since > patience:
                self._more = self._target  # the others do not bring it: this peer goes on until the step comes
                return

    def _is_wanted(self, progress: SwarmProgress, batch: int) -> bool:
        peers = max(progress.computing, self._expected)
        if not is_turn(progress.place, peers, batch, self._target, self.node.model_epoch):
            return self._own < min(self._more, self._target)
        share = share_of(*self._speeds, peers)
        return self._own < min(max(share * self._target * (1 - 1e-6), 1) + self._more, self._target)

    def saw(self, own: float, others: Sequence[float]) -> None:
        """Take the speeds of the devices: ours as measured, the others' as they say.

        :param own: samples/s, and so are `others`
        """
        self._speeds = (own, tuple(others))

    @property
    def why_too_slow(self) -> str:
        """Why batches of this device come too late to count, and what to do; "": they do not, as far as known."""
        speed, most = self._speeds[0], self._settings.max_staleness
        seconds, epoch = self._batch / speed if speed > 0 else 0.0, self.node.progress().epoch_seconds
        if not comes_too_late(seconds, epoch, most):
            return ""
        return TOO_SLOW.format(seconds=seconds, epoch=epoch, most=most)

    @property
    def _patience(self) -> float:
        """s"""
        if self._own >= self._target:
            return LATE_PATIENCE
        usual = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else FIRST_PATIENCE
        return max(LEAST_PATIENCE, usual)


class NodeSide:
    """A Member's steps by a node.

    :param shown: the Trainer's optimizer; its statistics are taken
    :param names: of its parameters
    :param first: the schedule at the swarm's first step
    :param epoch: the swarm's steps that are in the model already
    :param others: -> how many others are here, of the same run
    :param wants_out: -> does something wait for this peer to leave, so that no step should wait any more?
    :param launched: a node's process
    :param terms: of a run from a file
    Raises SwarmError (identity_taken) if another program uses the node's files.
    """

    turns = (
        "A step of target_batch_size = {target} is fewer batches than there are peers: they compute by turns, and wait "
        "in between.\n"
        "1. Set target_batch_size to as much as all peers' batches together or more, the same on all peers.\n"
        "2. Or lower per_device_train_batch_size or gradient_accumulation_steps on all."
    )

    def __init__(
        self,
        peer: Peer,
        settings: NodeSettings,
        shown: torch.optim.Optimizer,
        scheduler: Any,
        clip: Clip,
        names: Sequence[str],
        buffers: SharedBuffers,
        *,
        identity_path: str,
        initial_peers: Sequence[str],
        first: FirstRates | None,
        epoch: int,
        last_epoch: int,
        others: Callable[[], int],
        wants_out: Callable[[], bool],
        launched: Link,
        terms: NodeTerms,
    ):
        self._peer, self._settings, self._others, self._wants_out = peer, settings, others, wants_out
        self._launched: Link | None = launched
        parameters = parameters_of(shown)
        beside = beside_of(len(parameters), buffers)
        vector = vector_with(parameters, beside, settings.rank)
        spec = NodeSpec(
            daemon=peer.daemon_address(),
            identity_path=identity_path,
            client_mode=peer.client_mode,
            initial_peers=tuple(initial_peers),
            folder=node_folder(identity_path, str(peer.peer_id)),
            run_key=settings.run_key,
            sync=settings.sync(),
            shapes=vector.shapes,
            origins=vector.origins,
            most_weight=most_weight_of(settings.longest),
            codec=settings.codec,
            rule=terms.rule,
            account=terms.account,
            trust=terms.trust,
            max_mbps=settings.options.max_mbps,
            rank=settings.rank,
            ends=vector.ends,
        )
        self._keeper: StepBeside | None = None

        def optimizer(groups: list[dict[str, Any]]) -> Any:
            *own, last = groups
            gradients = [parameter.grad for group in own for parameter in group["params"]]
            behind = moved(shown, own, clip)
            for parameter, gradient in zip(parameters_of(behind), gradients, strict=True):
                parameter.grad = gradient  # which a first step has replaced
            self._keeper = StepBeside(behind, last["params"][0])
            return self._keeper

        def schedule(keeper: StepBeside) -> Schedule:
            if first is None:
                return Schedule(scheduler, keeper.behind, epoch)
            first.give(scheduler, keeper.behind)
            return Schedule(scheduler, keeper.behind, 0)

        layout = layout_of(spec)

        def decode(cells: int, data: bytes, at_step: Layout = layout) -> Mapping[int, torch.Tensor]:
            return vector.means(decode_answer(at_step, cells, data))

        reach = Reach(peer.dht, settings.options.alone_after)
        try:
            spec.folder.mkdir(parents=True, exist_ok=True)
            slots = Slots(spec.folder / "gradients.bin", vector.elements)
        except OSError as error:
            raise SwarmError(str(error), kind="disk") from error
        node = NodeOptimizer(
            spec=spec,
            start=self._start,
            params=[*({**group} for group in shown.param_groups), {"params": [beside]}],
            optimizer=optimizer,
            scheduler=schedule,
            names=[*names, BESIDE],
            slots=slots,
            layout=vector,
            decode=decode,
            reach=reach,
            discover=partial(
                Discovery,
                peer.dht,
                run_key=settings.run_key,
                public=not peer.client_mode,
                is_first=not initial_peers,
                username_of=terms.username_of,
                believe=terms.believe,
            ),
            admission=terms.admission,
            judge=terms.judge and judge_trained(terms.judge, len(parameters)),
            fill=vector.fill,
            last_epoch=last_epoch,
            codec=layout if layout.goes_by_steps else None,
            cause_of=peer.processes.cause_of,
            begins_alike=False,  # adapters are drawn at random, and heads
        )
        shown.state.clear()  # it is with the node's now
        node.on_told = tell
        if epoch:
            tensors, about = node.named_state(node.names)
            node.load_named_state(node.names, tensors, {**about, "epoch": epoch})
        self.swarm = NodeSwarm(node, settings, parameters, beside, buffers)
        self._node = node
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="leaving", daemon=True)

    def _start(self, spec: NodeSpec) -> Link:
        launched, self._launched = self._launched, None
        return start_node(spec, launched, self._peer.processes)

    def _watch(self) -> None:
        """Once this peer has to leave, no step waits any more."""
        while not self._closing.wait(0.5):
            if self._wants_out():
                self._node.stop_waiting()
                return

    @property
    def epoch(self) -> int:
        return self._node.model_epoch

    @property
    def behind(self) -> torch.optim.Optimizer:
        """The one that steps, on the CPU."""
        assert self._keeper is not None
        return self._keeper.behind

    @property
    def reach(self) -> Reach:
        return self._node.reach

    @property
    def cut_off(self) -> str | None:
        return self._node.cut_off

    @property
    def reports(self) -> deque[StepReport]:
        return self.swarm.reports

    @property
    def num_peers(self) -> int:
        return self._node.progress().num_peers

    @property
    def num_uncallable(self) -> int:
        return self._node.progress().uncallable

    @property
    def takes_turns(self) -> bool:
        return self.swarm.takes_turns

    def join(self, patience: float) -> None:
        """Take the run's parameters, or begin the run. Raises SwarmError (dead_peers, broken)."""
        self._watching.start()
        self.swarm.join(max(patience, JOIN_PATIENCE))
        if self._node.lineage is None:
            raise SwarmError("This peer had to leave before it had the run's model.", kind="dead_peers")

    def has_met(self, wanted: int) -> bool:
        """Are so many peers here with the run's model, this one among them? Who began the run is called by all; the
        others hear of each other in its first step."""
        in_touch = wanted if self.swarm.has_begun_the_run else min(wanted, 2)
        return self.num_peers >= in_touch and (wanted <= 1 or 1 + self._others() >= wanted)

    def finish_updates(self) -> None:
        """The steps that are here are in the model."""
        with suppress(SwarmError):  # the next step tells
            self.swarm.take()

    def up_to_date(self) -> AbstractContextManager[None]:
        return self._node.up_to_date()

    def settle(self, patience: float) -> None:
        self._node.settle(patience)
        self.finish_updates()

    def linger(self, seconds: float, behind: Callable[[], Collection[PeerID]], is_broken: Callable[[], bool]) -> None:
        """Others may still take the last steps from us. Of those that were killed records stay for a minute: nobody
        waits for whom nobody reaches."""
        deadline, in_vain = time.monotonic() + seconds, 0
        while time.monotonic() < deadline and not is_broken():
            late = set(behind())
            in_vain = 0 if self.reach.is_there(late) else in_vain + 1
            if not late or in_vain == GONE_AFTER:
                return
            time.sleep(0.5)

    def close(self, comes_back: bool) -> None:
        """End the node.

        :param comes_back: this peer is here again at once, and says no goodbye
        """
        self._closing.set()
        self._node.comes_back = comes_back
        self._node.shutdown()
        if self._launched is not None:
            self._launched.close()


def elements_of(parameters: Sequence[torch.Tensor], buffers: SharedBuffers) -> int:
    """Return the number of elements of a node's vector."""
    return vector_with(parameters, beside_of(len(parameters), buffers)).elements


def launch(verbose: bool) -> Link:
    """A node's process, which loads what it needs meanwhile."""
    return launch_node("INFO" if verbose else "ERROR")


def node_folder(identity_path: str, peer_id: str) -> Path:
    """Where a node keeps its files: votes belong to an identity."""
    return Path(f"{identity_path}.{peer_id[-12:]}.node")


def renew_if_left(identity_path: str, elements: int) -> str | None:
    """Give up a key that has promised never to vote again, or whose votes are lost.

    To be called before the peer starts.

    :param elements: of a node's vector
    :returns: that, in words; None: the key stays
    """
    path = Path(identity_path)
    if not path.exists():
        return None
    folder = node_folder(identity_path, peer_id_of(public_der(load_private_key(path.read_bytes()))))
    if not folder.exists():
        return None
    try:
        store = NodeStore(folder, elements)
    except StoreError:
        return None  # another program uses it: whether that is one under our key is found out later
    try:
        has_left, trouble = store.goodbye is not None, store.trouble
    finally:
        store.close()
    if not (has_left or trouble):
        return None
    give_up_key(identity_path)
    shutil.rmtree(folder, ignore_errors=True)
    why = trouble or "it has said goodbye under it"
    return f"This peer takes a new key, for its votes under the old one are over: {why}."


def tell(topic: str, about: str) -> None:
    """News of the node; what is no trouble is not told."""
    if topic in NEWS:
        say(NEWS[topic].format(about=about))
