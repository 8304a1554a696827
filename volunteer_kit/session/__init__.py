"""One worker's stay in a swarm: build what the run says, join, train, settle, leave."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from volunteer_kit.checkpoint import CheckpointError, latest_checkpoint
from volunteer_kit.home import Home
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.reading import Reading
from volunteer_kit.runs import (
    PROTOCOL_VERSION,
    RunConfig,
    build_model,
    build_param_groups,
    build_stream,
    load_run,
    run_key_of,
)
from volunteer_kit.session.compute import choose
from volunteer_kit.session.lookout import Lookout
from volunteer_kit.session.membership import Membership
from volunteer_kit.session.node import build_node, renew_if_left
from volunteer_kit.session.options import compute_loss
from volunteer_kit.session.pictures import DrawPictures
from volunteer_kit.session.same_run import check_same_run
from volunteer_kit.session.tally import Tally
from volunteer_kit.session.tell import Tell
from volunteer_kit.session.verification import Verification
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.identity import ensure_identity, give_up_key
from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.node.link import Link, launch_node
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.records.peer_record import PeerBoard, PeerRecord
from volunteer_kit.training.callbacks import Emit, SaveCheckpoints
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.training.trainer import Callback, Trainer

if TYPE_CHECKING:
    from volunteer_kit.worker import Orders

SOMEBODY = "a volunteer"  # who hides the own name
MICROBATCHES_AHEAD = 4  # read in the background
FINISH_PATIENCE = 60.0  # s at the last epoch, to hold what the others hold


class Renew(Exception):
    """The process has grown and should begin afresh; all that it did is counted."""


class SentAway(PermissionError):
    """The authority will have us no longer; the reason in words."""

    kind = "refused"


class Left(Exception):
    """The volunteer has left before there was anything to train."""


class Session:
    """Built in the order in which things can go wrong cheaply: run file, data, device, model, then the network.

    :param on_broken: called with the reason when one of this peer's processes has died, in a thread of its own while
        the loop may wait for an answer that never comes; it should end the program
    :param leave: set when the volunteer leaves, who may be waiting for an authority that is away
    :param launched: a node's process that waits for its spec; the session ends it

    Raises Left, RunError, DataError, SwarmError, MissingDependency, each with what to do.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        emit: Emit,
        on_broken: Callable[[str], None],
        leave: threading.Event | None = None,
        launched: Link | None = None,
    ):
        self.spec, self.emit, self._on_broken = spec, emit, on_broken
        self._leave = leave or threading.Event()
        self.home = Home(spec.home) if spec.home else None
        self.trainer: Trainer | None = None
        self.lookout: Lookout | None = None
        self.peer: Peer | None = None
        self.membership: Membership | None = None
        self.verification: Verification | None = None
        self.optimizer: NodeOptimizer | None = None
        self.run: RunConfig = load_run(spec.run)
        # its node's process loads what it needs meanwhile
        self.launched: Link = launched or launch_node()
        self.model = build_model(self.run)
        self.compute = choose(self.run, spec, self.model.num_parameters(), emit)
        self.stream = build_stream(self.run, peer_seed=spec.peer_seed, device=self.compute.device)
        self.stream.probe()  # data that cannot be read must be told before others wait for us
        stream_path = self.home.stream if self.home else None
        self.reading = Reading(self.stream, stream_path, self.run.fingerprint, emit)
        self.tally = Tally(self.reading, self.home, emit)
        self.model.checkpointing = self.compute.plan.checkpointing
        self.model.to(self.compute.device)
        self.names = parameter_names(self.model)
        try:
            self._meet_the_swarm(build_param_groups(self.run, self.model))
        except BaseException:
            self.close()
            raise

    def _meet_the_swarm(self, groups: list[dict]) -> None:
        spec, run = self.spec, self.run
        known = self.home.known_peers() if self.home and spec.initial_peers else []  # the first peers may be gone
        identity_path = spec.identity_path or (str(self.home.identity) if self.home else None)
        if identity_path:
            renew_if_left(self, groups, identity_path)
        if identity_path:
            ensure_identity(identity_path, lambda text: self.emit("warning", kind="identity", message=text))
        self.membership = Membership(run, identity_path, spec.hf_token, self._tell_trouble)
        self.membership.ask(self._leave, self._tell_waiting)
        if self._leave.is_set():
            raise Left
        self.peer = start_peer(
            PeerConfig(
                initial_peers=list(dict.fromkeys([*spec.initial_peers, *known])),
                host_maddrs=spec.host_maddrs,
                announce_maddrs=spec.announce_maddrs,
                identity_path=self.membership.identity_path,
                client_mode=spec.client_mode,
                startup_timeout=spec.startup_timeout,
                check_identity=spec.identity_path is not None,  # that of the home is locked
            ),
            self.membership.admission,
        )
        self.peer.processes.when_broken(self._on_broken)
        self.membership.keep(self.peer)
        self.emit(
            "connected",
            peer_id=str(self.peer.peer_id),
            maddrs=self.peer.visible_maddrs(),
            client_mode=self.peer.client_mode,
        )
        self.board = PeerBoard(self.peer.dht, run.run_id)
        self._check_same_run()
        self.optimizer = build_node(self)
        if run.verification is not None:
            self.verification = Verification(self, groups)
        self.optimizer.reach.ask_cause = self.membership.why_no_token
        self.optimizer.on_round = lambda num_peers: self.emit("averaging", num_peers=num_peers)

    def _tell_waiting(self, reason: str, seconds: float) -> None:
        self.emit("waiting", reason=reason, seconds=round(seconds))

    def _tell_trouble(self, text: str) -> None:
        self.emit("warning", kind="authority", message=text)

    def _check_same_run(self) -> None:
        others = [record for peer, record in self.board.fetch().items() if peer != self.peer.peer_id]
        was_here = self.home is not None and self.home.was_here(self.run.fingerprint)
        warning = check_same_run(self.run, others, was_here=was_here)
        if warning:
            self.emit("warning", kind="wrong_run", message=warning)

    def _join(self, leave: threading.Event) -> None:
        """Take the swarm's state, watched from the first byte on: a volunteer may have set a limit. Raises Left."""

        def on_download(done: int, total: int) -> None:
            if leave.is_set():
                raise Left
            self._tell_download(done, total)

        self.lookout = Lookout(self)
        resumed = self._resume()
        self.optimizer.on_download = on_download
        taken = self.optimizer.join(patience=self.run.swarm.load_state_timeout)
        if leave.is_set():
            raise Left
        self.optimizer.on_download = self._tell_download
        source = "peers" if taken else "checkpoint" if resumed else "new"
        self.emit("state_loaded", epoch=self.optimizer.local_epoch, source=source)
        self.reading.share(self.peer.dht, run_key_of(self.run))
        self.publish()

    def _tell_download(self, done: int, total: int) -> None:
        self.emit("downloading", done=done, total=total)

    def _resume(self) -> bool:
        """Go on from the newest good checkpoint, if there is one and it is of this run."""
        if not (self.spec.resume and self.spec.checkpoint_dir):
            return False
        try:
            found = latest_checkpoint(self.spec.checkpoint_dir, fingerprint=self.run.fingerprint)
            if found is None:
                return False
            for skipped in found.skipped:
                self.emit("warning", kind="checkpoint", message=skipped)
            self.optimizer.load_named_state(self.names, found.tensors, found.meta)
        except CheckpointError as e:  # the swarm may hold the state; a bad file here must not stop us
            message = f"No checkpoint here can be used, the swarm's state is taken instead. {e}"
            self.emit("warning", kind="checkpoint", message=message)
            return False
        return True

    # --- training ---

    def train(self, orders: Orders) -> None:
        """Join; train until told to leave or to finish; then save. Raises Left, Renew, SentAway, SwarmError,
        DataError."""
        threading.Thread(target=self._stop_waiting, args=(orders.leave,), name="leaving", daemon=True).start()
        self._join(orders.leave)
        tell, pictures = Tell(self), DrawPictures(self.run, self.home, self.emit)
        callbacks: list[Callback] = [tell, pictures]
        saver = None
        if self.spec.checkpoint_dir:
            run = self.run.model_dump(mode="json")
            meta = {"run_id": self.run.run_id, "fingerprint": self.run.fingerprint, "run": run}
            saver = SaveCheckpoints(self.spec.checkpoint_dir, self.names, meta, self.emit)
            callbacks.append(saver)
        folder = self.home.tuned if self.home else None
        tuned = self.spec.batch_size is None
        self.trainer = Trainer(
            self.model,
            self.optimizer,
            self.reading.next_batch,
            compute_loss,
            batch_size=self.compute.batch_size,
            precision=self.compute.plan.precision,
            callbacks=callbacks,
            compute_gradients=self.compute.gradients(self.home.path / "programs" if self.home else None),
            tuning=self.compute.tuning(self.run, self.model.num_parameters(), folder, self.emit) if tuned else None,
        )
        self.stream.read_ahead(MICROBATCHES_AHEAD * max(self.compute.batch_size, self.compute.likely_batch))
        orders.finish_at = orders.finish_at or self.spec.finish_at
        try:
            self.trainer.train(lambda: self._should_stop(orders, tell))
            if self.membership.refused.is_set():
                raise SentAway(self.membership.why)
            if why := self._why_too_slow:
                raise SentAway(why)
            if self.lookout.must_dial_anew and not orders.leave.is_set():
                raise SwarmError(self.lookout.why_anew or "The line was dead.", kind="dead_peers")
            renews = tell.wants_renewal or self.lookout.waits_in_vain_with_key
            stops_early = orders.leave.is_set() or renews
            self.optimizer.settle(patience=0.0 if stops_early else FINISH_PATIENCE)
            self.trainer.tell_steps()
        finally:
            self.tally.end()
        path = saver.save(self.optimizer) if saver and self.optimizer.local_epoch > 0 else None
        if self.lookout.must_change_key and give_up_key(self.membership.identity_path) is None:
            raise SentAway(
                "Another machine takes part under the key of this one, and the key's file cannot be moved: "
                f"{self.membership.identity_path}\n1. Name another file: --identity-path ./other.key"
            )
        if renews and not orders.leave.is_set():
            self.emit("renewing", message=self.lookout.why_renew)
            raise Renew
        if not orders.leave.is_set():
            pictures.draw(self.model, self.optimizer.local_epoch)
            epoch, samples = self.optimizer.local_epoch, self.tally.samples
            self.emit("finished", epoch=epoch, path=str(path or ""), total_samples=samples)
            orders.leave.wait()  # others may still take our state

    def _stop_waiting(self, leave: threading.Event) -> None:
        leave.wait()
        self.optimizer.stop_waiting()

    def _should_stop(self, orders: Orders, tell: Tell) -> bool:
        sent_away = self.membership.refused.is_set()
        ends_here = orders.leave.is_set() or self._has_finished(orders)
        return ends_here or sent_away or tell.wants_renewal or self._must_begin_anew() or bool(self._why_too_slow)

    @property
    def _why_too_slow(self) -> str:
        return self.optimizer.why_too_slow if self.optimizer is not None else ""

    def _must_begin_anew(self) -> bool:
        return self.lookout.must_dial_anew or self.lookout.waits_in_vain_with_key

    def _has_finished(self, orders: Orders) -> bool:
        """At the last epoch; those who are left behind by others take their state."""
        return orders.finish_at is not None and self.optimizer.come_to(orders.finish_at)

    @property
    def speed(self) -> float:
        """Samples per second of this device, averaging not counted."""
        return self.trainer.samples_per_second if self.trainer else 0.0

    def publish(self, loss: float | None = None, speed: float = 0.0) -> None:
        if self.optimizer.reach.waits_for_itself:
            return  # a record that a wrong clock dates would stand as long as it is ahead
        self.board.publish(
            PeerRecord(
                peer_id=self.peer.peer_id.to_bytes(),
                fingerprint=self.run.fingerprint,
                name=SOMEBODY if self.spec.hide_name else self.spec.name[:64],
                hidden=self.spec.hide_name,
                device=self.compute.found.name[:64],
                epoch=self.optimizer.local_epoch,
                total_samples=self.tally.totals.samples,
                samples_per_second=float(speed),
                protocol=PROTOCOL_VERSION,
                loss=loss if loss is not None and math.isfinite(loss) else None,
                client_mode=self.peer.client_mode,
                rounds=self.tally.rounds.as_dict(),
            )
        )

    def close(self) -> None:
        """Say goodbye, end the node, the DHT and p2pd."""
        self.reading.close()
        if self.lookout is not None:
            self.lookout.close()
        if self.verification is not None:
            self.verification.close()
        if self.optimizer is not None:
            self.board.publish(None)
            must_change_key = self.lookout is not None and self.lookout.must_change_key
            is_sent_away = (self.membership is not None and self.membership.refused.is_set()) or self._why_too_slow
            self.optimizer.comes_back = not (self._leave.is_set() or must_change_key or bool(is_sent_away))
            self.optimizer.shutdown()
            if self.trainer is not None:
                self.trainer.tell_steps()  # a round may have been under way when this peer said goodbye
            self.emit("left", total_samples=self.tally.samples, epochs=self.tally.epochs)
        if self.membership is not None:
            self.membership.close()
        self.launched.close()
        if self.peer is not None:
            self.peer.shutdown()
