"""Lending this machine to a run: start a worker, tell its story in plain lines, leave in good order."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import RunConfig, load_run, require_ready, with_data
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec

Event = dict[str, Any]
STEP_LINE_EVERY = 10.0  # s between two lines about the epoch that is being collected
EPOCH_LINE_EVERY = 2.0  # s between two lines about applied epochs; tiny runs have several a second


@dataclass(frozen=True)
class JoinResult:
    """What one stay in a swarm came to."""

    total_samples: int  # of this peer, that entered applied steps
    epochs: int  # applied steps that held samples of this peer
    restarts: int  # of the worker after crashes
    error: str | None  # in plain words, if the worker could not go on


def join_run(
    run: str | Path | RunConfig,
    *,
    initial_peers: Sequence[str] = (),
    data: str | Sequence[str] | None = None,
    name: str | None = None,
    client_mode: bool | None = None,
    checkpoint_dir: str | Path | None = None,
    host_maddrs: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    announce_maddrs: Sequence[str] = (),
    identity_path: str | Path | None = None,
    minutes: float | None = None,
    new_swarm: bool = False,
    batch_size: int | None = None,
    say: Callable[[str], None] = print,
) -> JoinResult:
    """Train with the swarm until Ctrl-C, SIGTERM or `minutes` have passed, and leave in good order.

    A second Ctrl-C ends everything at once. `client_mode=True` is for machines that nobody can connect to
    (None: found out). `identity_path` keeps the peer id over restarts, `checkpoint_dir` the training state.
    `new_swarm=True` starts without other peers. `say` gets each line. Raises RunError or DataError before anything
    starts.
    """
    config = with_data(run if isinstance(run, RunConfig) else load_run(run), data)
    require_ready(config)
    peers = [*initial_peers] or [*config.initial_peers]
    if not peers and not new_swarm:
        raise RunError(
            f"No peer of the run {config.run_id!r} is known, so there is nobody to join.\n"
            "1. Ask the run's host for its address, then: --initial-peers /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID\n"
            f"2. Or be the host yourself: volunteer-kit host {config.run_id}\n"
            "3. Or see a whole swarm on this machine: volunteer-kit demo"
        )
    _check_addresses("--initial-peers", peers, "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID")
    _check_addresses("--host-maddrs", host_maddrs, "/ip4/0.0.0.0/tcp/PORT")
    _check_addresses("--announce-maddrs", announce_maddrs, "/ip4/PUBLIC.IP/tcp/PORT")
    home = Path(checkpoint_dir or tempfile.mkdtemp(prefix="volunteer_kit_"))
    spec = WorkerSpec(
        run=config.model_dump(mode="json"),
        name=name or f"volunteer-{secrets.token_hex(2)}",
        initial_peers=peers,
        host_maddrs=[*host_maddrs],
        announce_maddrs=[*announce_maddrs],
        identity_path=str(identity_path or home / "identity.key"),  # a worker that is restarted is the same peer
        client_mode=client_mode,
        checkpoint_dir=str(checkpoint_dir) if checkpoint_dir else None,
        stream_path=str(home / "stream.json"),
        batch_size=batch_size,
        peer_seed=secrets.randbits(31),
    )
    log_path = home / "worker.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    say(f"Run {config.run_id} (fingerprint {config.fingerprint[:8]}), as {spec.name!r}. The worker's log: {log_path}")
    say("Ctrl-C leaves in good order; a second Ctrl-C ends at once.")
    worker = _Worker(spec, log_path=log_path)
    worker.say = say
    return _stay(worker, minutes)


class _Worker(Supervisor):
    """A supervisor that says when it is leaving, since saying goodbye takes a while."""

    say: Callable[[str], None] = print

    def begin_leave(self, timeout: float = 30.0) -> None:
        if self.running and not self._stopping:
            self.say("Leaving: the last work is being handed over. A second Ctrl-C ends at once.")
        super().begin_leave(timeout)


def _stay(worker: _Worker, minutes: float | None) -> JoinResult:
    story = Story()

    def tell(event: Event) -> None:
        if line := story.line(event):
            worker.say(line)

    alarm = threading.Timer(60 * (minutes or 0), worker.begin_leave)
    alarm.daemon = True
    if minutes is not None:
        alarm.start()
    try:
        worker.run_until_done(tell)
    finally:
        alarm.cancel()
    result = JoinResult(worker.total_samples, story.epochs, worker.restarts, story.error)
    if result.total_samples or not result.error:
        worker.say(f"Done: {result.total_samples} of your samples entered {result.epochs} epochs. Thank you!")
    return result


def _check_addresses(option: str, addresses: Sequence[str], form: str) -> None:
    """Tell the usual mistakes, HOST:PORT and a missing id, in an instant; the worker's peer checks the rest."""
    for address in addresses:
        if not address.startswith("/") or ("/p2p/" in form and "/p2p/" not in address):
            raise RunError(f"{option}: {address!r} is no address.\n1. Write it like {form}")


@dataclass
class Story:
    """Turns a worker's events into lines for a person, and keeps what the last line needs."""

    epochs: int = 0
    error: str | None = None
    step_line_at: float = float("-inf")  # monotonic s
    epoch_line_at: float = float("-inf")
    skipped: dict[str, int] = field(default_factory=dict)

    def line(self, event: Event) -> str | None:
        """One line for this event, or None when there is nothing new to say."""
        tell = getattr(self, "_" + str(event.get("event")), None)
        return tell(event) if tell else None

    def _starting(self, event: Event) -> str:
        return f"A worker process starts (pid {event['pid']})."

    def _device(self, event: Event) -> str:
        return (
            f"Device: {event['device']}; batches of {event['batch_size']}, {event['precision']}, "
            f"{event['threads']} threads. {event['why']}"
        )

    def _connected(self, event: Event) -> str:
        reach = "others cannot call this machine, so it calls them" if event["client_mode"] else "reachable"
        return f"Connected as {event['peer_id']} ({reach})."

    def _state_loaded(self, event: Event) -> str:
        sources = {"peers": "from other peers", "checkpoint": "from the checkpoint here", "new": "untrained"}
        return f"The model is here: epoch {event['epoch']}, {sources.get(event['source'], event['source'])}."

    def _step(self, event: Event) -> str | None:
        now = time.monotonic()
        if now - self.step_line_at < STEP_LINE_EVERY:
            return None
        self.step_line_at = now
        return (
            f"epoch {event['epoch']}: {event['swarm_samples']} of {event['target_batch_size']} samples, "
            f"{_peers(event['num_peers'])}; yours {event['samples_per_second']:.1f} samples/s, "
            f"loss {_number(event['loss'])}"
        )

    def _epoch(self, event: Event) -> str | None:
        self.epochs += 1 if event["samples"] else 0
        received = event["received"]
        lost = "" if received is None or received >= 1 else f", only {received:.0%} received"
        now = time.monotonic()
        if now - self.epoch_line_at < EPOCH_LINE_EVERY and not lost:
            return None
        self.epoch_line_at = now
        group = event["group_size"]
        average = f"{group} peers averaged in {event['seconds']:.1f} s" if group > 1 else "nobody to average with"
        return (
            f"epoch {event['epoch']} applied: loss {_number(event['loss'])}, {event['samples']} of your samples, "
            f"{average}{lost}"
        )

    def _skipped(self, event: Event) -> str | None:
        if event["counts"] == self.skipped:
            return None
        self.skipped = dict(event["counts"])
        return "Records left out so far: " + ", ".join(f"{n} {cause}" for cause, n in self.skipped.items())

    def _warning(self, event: Event) -> str:
        return f"Warning: {event['message']}"

    def _error(self, event: Event) -> str:
        self.error = str(event["message"])
        return f"The worker cannot go on: {self.error}"

    def _checkpoint(self, event: Event) -> str:
        return f"Checkpoint of epoch {event['epoch']}: {event['path']}"

    def _finished(self, event: Event) -> str:
        return f"Finished at epoch {event['epoch']}: {event['path']}"

    def _left(self, event: Event) -> str:
        return "The worker said goodbye to its peers."

    def _restarting(self, event: Event) -> str:
        return str(event["message"])

    def _gave_up(self, event: Event) -> str:
        if event["message"] == self.error:
            return "It is not started again: it would meet the same."
        self.error = str(event["message"])
        return self.error


def _peers(count: int) -> str:
    return f"{count} peer{'s' * (count != 1)}"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3f}"
