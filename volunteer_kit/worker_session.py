"""One worker's stay in a swarm: build what the run says, join, train, settle, leave."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from volunteer_kit.checkpoint import CheckpointError, latest_checkpoint
from volunteer_kit.device import Device, Workload, detect_device, plan_device
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.reading import Reading
from volunteer_kit.runs import (
    RunConfig,
    build_model,
    build_optimizer,
    build_param_groups,
    build_stream,
    load_run,
)
from volunteer_kit.swarm.codec import make_codec
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.optimizer import StepReport, SwarmOptimizer, SwarmOptions
from volunteer_kit.swarm.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.records import PeerBoard, PeerRecord
from volunteer_kit.swarm.state import StateRefused
from volunteer_kit.training.callbacks import Emit, KeepGoodState, SaveCheckpoints
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.training.trainer import Callback, Trainer

if TYPE_CHECKING:
    from volunteer_kit.worker import Orders

STEP_EVERY = 1.0  # s between "step" events
MICROBATCHES_AHEAD = 4  # read in the background
RECORD_EVERY = 15.0  # s between renewals of our record, a quarter of its lifetime
FINISH_PATIENCE = 60.0  # s to reach the last epoch once the others have, and then to hold what they hold


class Session:
    """Built in the order in which things can go wrong cheaply: run file, data, device, model, then the network.

    Raises RunError, DataError, SwarmError, MissingDependency, each with what to do.
    """

    def __init__(self, spec: WorkerSpec, emit: Emit):
        self.spec, self.emit = spec, emit
        self.total_samples = self.epochs_contributed = 0
        self.peer: Peer | None = None
        self.optimizer: SwarmOptimizer | None = None
        self.run: RunConfig = load_run(spec.run)
        device = detect_device()
        self.device = torch.device(device.kind if device.kind in ("cuda", "mps") else "cpu")
        self.stream = build_stream(self.run, peer_seed=spec.peer_seed, device=self.device)
        self.stream.probe()  # data that cannot be read must be told before others wait for us
        self.reading = Reading(self.stream, spec.stream_path, self.run.fingerprint, emit)
        self.model = build_model(self.run)
        self._plan_device(device)
        self.model.to(self.device)
        self.names = parameter_names(self.model)
        try:
            self._meet_the_swarm(build_param_groups(self.run, self.model))
        except BaseException:
            self.close()
            raise

    def _plan_device(self, device: Device) -> None:
        plan = plan_device(device, workload(self.run, self.model.num_parameters()))
        for problem in filter(None, (*device.problems, plan.warning)):
            self.emit("warning", kind="device", message=problem)
        self.batch_size = self.spec.batch_size or plan.batch_size
        self.threads = self.spec.threads or plan.threads
        self.precision, self.device_name = plan.precision, device.name
        self.model.checkpointing = plan.checkpointing
        torch.set_num_threads(max(1, self.threads))
        self.emit(
            "device",
            device=device.name,
            batch_size=self.batch_size,
            precision=self.precision,
            threads=self.threads,
            why=plan.why,
        )

    def _meet_the_swarm(self, groups: list[dict]) -> None:
        spec, run = self.spec, self.run
        self.peer = start_peer(
            PeerConfig(
                initial_peers=spec.initial_peers,
                host_maddrs=spec.host_maddrs,
                announce_maddrs=spec.announce_maddrs,
                identity_path=spec.identity_path,
                client_mode=spec.client_mode,
                startup_timeout=spec.startup_timeout,
            )
        )
        self.emit(
            "connected",
            peer_id=str(self.peer.peer_id),
            maddrs=self.peer.visible_maddrs(),
            client_mode=self.peer.client_mode,
        )
        self.board = PeerBoard(self.peer.dht, run.run_id)
        self._check_same_run()
        optimizer, scheduler = build_optimizer(run)
        self.optimizer = SwarmOptimizer(
            peer=self.peer, options=swarm_options(run), params=groups, optimizer=optimizer, scheduler=scheduler
        )
        resumed = self._resume()
        taken = self.optimizer.join(patience=run.swarm.load_state_timeout)
        source = "peers" if taken else "checkpoint" if resumed else "new"
        self.emit("state_loaded", epoch=self.optimizer.local_epoch, source=source)
        self.reading.share(self.peer.dht, swarm_options(self.run).run_key)
        self._publish()

    def _check_same_run(self) -> None:
        """Peers of the same name and other settings never meet in averaging; say so instead of training alone."""
        others = [record for peer_id, record in self.board.fetch().items() if peer_id != self.peer.peer_id]
        if others and not any(record.fingerprint == self.run.fingerprint for record in others):
            theirs = others[0].fingerprint
            raise SwarmError(
                f"The swarm trains the run {self.run.run_id!r} with other settings than yours "
                f"(fingerprint {theirs[:12]}, yours is {self.run.fingerprint[:12]}), so your gradients would not fit.\n"
                "1. Ask the host for the current run file and use it.\n"
                "2. If it is the same file, update the kit: pip install -U volunteer-kit",
                kind="wrong_run",
            )

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
        except (CheckpointError, StateRefused) as e:  # the swarm may hold the state; a bad file here must not stop us
            message = f"No checkpoint here can be used, the swarm's state is taken instead. {e}"
            self.emit("warning", kind="checkpoint", message=message)
            return False
        return True

    # --- training ---

    def train(self, orders: Orders) -> None:
        """Train until told to leave or to finish; then save."""
        tell = Tell(self, orders)
        callbacks: list[Callback] = [tell, KeepGoodState(self.emit)]
        saver = None
        if self.spec.checkpoint_dir:
            run = self.run.model_dump(mode="json")
            meta = {"run_id": self.run.run_id, "fingerprint": self.run.fingerprint, "run": run}
            saver = SaveCheckpoints(self.spec.checkpoint_dir, self.names, meta, self.emit)
            callbacks.append(saver)
        self.trainer = Trainer(
            self.model,
            self.optimizer,
            self.reading.next_batch,
            compute_loss,
            batch_size=self.batch_size,
            precision=self.precision,
            callbacks=callbacks,
        )
        self.stream.read_ahead(MICROBATCHES_AHEAD * self.batch_size)
        self.trainer.train(lambda: orders.leave.is_set() or self._has_finished(orders))
        if not orders.leave.is_set():
            self._reach(orders.finish_at)
        self.optimizer.settle(patience=0.0 if orders.leave.is_set() else FINISH_PATIENCE)
        path = saver.save(self.optimizer) if saver and self.optimizer.local_epoch > 0 else None
        if not orders.leave.is_set():
            epoch, samples = self.optimizer.local_epoch, self.total_samples
            self.emit("finished", epoch=epoch, path=str(path or ""), total_samples=samples)
            orders.leave.wait()  # others may still take our state

    def _has_finished(self, orders: Orders) -> bool:
        """At the last epoch ourselves, or left behind by those who are: then their state is what we need."""
        last = orders.finish_at
        return last is not None and max(self.optimizer.local_epoch, self.optimizer.tracker.global_epoch) >= last

    def _reach(self, last_epoch: int) -> None:
        deadline = time.monotonic() + FINISH_PATIENCE
        while self.optimizer.local_epoch < last_epoch and time.monotonic() < deadline:
            if not self.optimizer.load_state_from_peers():
                time.sleep(self.optimizer.options.refresh_period)

    def count(self, report: StepReport) -> int:
        """Samples of ours in this step, added to what this stay has earned."""
        earned = self.reading.applied(report)
        self.total_samples += earned
        self.epochs_contributed += earned > 0
        return earned

    def _publish(self, loss: float | None = None, speed: float = 0.0) -> None:
        self.board.publish(
            PeerRecord(
                peer_id=self.peer.peer_id.to_bytes(),
                fingerprint=self.run.fingerprint,
                name=self.spec.name[:64],
                device=self.device_name[:64],
                epoch=self.optimizer.local_epoch,
                total_samples=self.total_samples,
                samples_per_second=float(speed),
                loss=loss if loss is not None and math.isfinite(loss) else None,
                client_mode=self.peer.client_mode,
            )
        )

    def close(self) -> None:
        """Say goodbye, end the averagers, the DHT and p2pd."""
        self.reading.close()
        if self.optimizer is not None:
            self.board.publish(None)
            self.optimizer.shutdown()
            self.emit("left", total_samples=self.total_samples, epochs=self.epochs_contributed)
        if self.peer is not None:
            self.peer.shutdown()


class Tell(Callback):
    """Turns the loop's progress into events for the supervisor, and renews our record for the others."""

    def __init__(self, session: Session, orders: Orders):
        self.session, self.orders = session, orders
        self._last_step = self._last_record = 0.0
        self._skipped: dict[str, int] = {}

    def on_microbatch(self, trainer: Trainer, loss: float, samples: int) -> None:
        now = time.monotonic()
        if now - self._last_step >= STEP_EVERY:
            self._last_step = now
            self._tell_step(trainer, loss)
        if now - self._last_record >= RECORD_EVERY:
            self._last_record = now
            self.session._publish(loss, trainer.samples_per_second)
        self.session.reading.keep()

    def _tell_step(self, trainer: Trainer, loss: float) -> None:
        optimizer = trainer.optimizer
        progress = optimizer.tracker.global_progress
        self.session.emit(
            "step",
            epoch=optimizer.local_epoch,
            samples=optimizer.grad_averager.local_samples_accumulated,
            samples_per_second=round(trainer.samples_per_second, 3),
            loss=loss,
            num_peers=progress.num_peers,
            swarm_samples=progress.samples_accumulated,
            target_batch_size=optimizer.target_batch_size,
        )
        counts = self.session.reading.counts()
        if trainer.microbatches_lost:
            counts["microbatch_not_finite"] = trainer.microbatches_lost
        if counts != self._skipped:
            self._skipped = dict(counts)
            self.session.emit("skipped", counts=counts)

    def on_epoch(self, trainer: Trainer, report: StepReport, loss: float | None) -> None:
        self.session.emit(
            "epoch",
            epoch=report.epoch,
            samples=self.session.count(report),
            total_samples=self.session.total_samples,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            group_size=report.group_size,
            received=report.received,
            seconds=round(report.seconds, 3),
            sent_bytes=report.bytes_sent,
            received_bytes=report.bytes_received,
            failure=report.failure,
        )
        trouble = report.failure or report.apart
        if trouble:
            self.session.emit("warning", kind="round", message=f"Epoch {report.epoch}: {trouble}; catching up.")
        for peer, why in report.refused.items():
            message = f"Left out of epoch {report.epoch}: {peer}: {why}."
            self.session.emit("warning", kind="refused", message=message)


def compute_loss(model: torch.nn.Module, batch) -> torch.Tensor:
    """The model's loss on a microbatch, moved to the model's device."""
    device = next(model.parameters()).device
    return model(batch.text.to(device, non_blocking=True), batch.codes.to(device, non_blocking=True)).loss


def workload(run: RunConfig, parameters: int) -> Workload:
    """What one sample of this run costs a device."""
    model = run.model
    logits = model.text_seq_len * (model.num_text_tokens + model.text_seq_len)
    return Workload(
        parameters=parameters,
        tokens=model.text_seq_len + model.image_seq_len,
        dim=model.dim,
        depth=model.depth,
        logits=logits + model.image_seq_len * model.num_image_tokens,
        reversible=model.reversible,
    )


def swarm_options(run: RunConfig) -> SwarmOptions:
    """The run file's section `swarm`, as the optimizer takes it."""
    swarm = run.swarm
    return SwarmOptions(
        run_key=f"{run.run_id}-{run.fingerprint[:16]}".replace(".", "-"),  # hivemind's keys may hold no dots
        target_batch_size=run.target_batch_size,
        matchmaking_time=swarm.matchmaking_time,
        averaging_timeout=swarm.averaging_timeout,
        allreduce_timeout=swarm.allreduce_timeout,
        next_chunk_timeout=swarm.allreduce_timeout / 3,  # for a reducer twice as long, and still within the whole
        load_state_timeout=swarm.load_state_timeout,
        average_state_every=swarm.average_state_every,
        delay_optimizer_step=swarm.delay_optimizer_step,
        delay_grad_averaging=swarm.delay_grad_averaging,
        grad_codec=make_codec(swarm.small_compression, swarm.grad_compression, swarm.compress_above),
        state_codec=make_codec(swarm.small_compression, swarm.state_compression, swarm.compress_above),
        refresh_period=min(0.5, swarm.matchmaking_time / 5),
        metadata_expiration=swarm.progress_expiration,
    )
