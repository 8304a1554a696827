"""What the demo knows about its swarm, gathered from the volunteers' events. No processes and no clock in here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = dict[str, Any]
SOURCES = {"peers": "from the other volunteers", "checkpoint": "from its own checkpoint", "new": "untrained"}


class Mark(NamedTuple):
    """Something that happened to the swarm, for the loss curve."""

    epoch: int
    label: str


class CurvePoint(NamedTuple):
    """One epoch of the whole swarm; `loss` is weighted by the volunteers' samples."""

    epoch: int
    loss: float
    samples: int


@dataclass
class Volunteer:
    """One volunteer. A life is the time from one start of its worker to its end; a kill begins the next one."""

    name: str
    state: str = "waiting to start"
    training: bool = False
    device: str = ""
    samples_per_second: float = 0.0
    epoch: int = 0
    loss: float | None = None
    lives: int = 0
    samples: int = 0  # that entered applied epochs, of all lives
    samples_of_life: int = 0
    joined_late: bool = False
    killed_at: float | None = None  # s, as in events
    killed_in_life: int = 0
    back_after: float | None = None  # s from the kill to the first epoch with its work in it
    source: str = ""  # where its model came from: "peers", "checkpoint" or "new"
    finished_epoch: int | None = None
    checkpoint: str | None = None

    @property
    def returned(self) -> bool:
        """Killed, and its work has entered epochs since."""
        return self.back_after is not None


@dataclass
class DemoState:
    """All volunteers, the swarm's curve, and what happened in words, in order."""

    volunteers: dict[str, Volunteer] = field(default_factory=dict)
    losses: dict[int, list[tuple[float | None, int]]] = field(default_factory=dict)  # epoch -> (loss, samples) a peer
    news: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    first_epoch_at: float | None = None  # s, as in events
    seconds_an_epoch: float = 0.0  # moving average
    error: str | None = None
    warnings: Counter = field(default_factory=Counter)  # by kind
    skipped: Counter = field(default_factory=Counter)  # records left out by cause, as told by who has read most
    lost_parts: int = 0  # rounds in which a volunteer received less than everything
    progress: tuple[int, int] = (0, 0)  # samples of the next epoch that the swarm has, and needs
    peer_names: dict[str, str] = field(default_factory=dict)  # peer id -> volunteer's name
    _last_epoch_at: float | None = None

    def add(self, name: str, *, late: bool = False) -> Volunteer:
        """A volunteer is about to start."""
        self.volunteers[name] = Volunteer(name, joined_late=late)
        return self.volunteers[name]

    def killed(self, name: str, now: float) -> None:
        """`name` was ended by SIGKILL at `now` (s since the Unix epoch)."""
        volunteer = self.volunteers[name]
        volunteer.killed_at, volunteer.killed_in_life = now, volunteer.lives
        self._rest(volunteer, "killed")
        self.marks.append(Mark(self.epoch, f"{name} killed"))
        self.news.append(f"{name} is killed with SIGKILL, in the middle of its work.")

    def apply(self, name: str, event: Event) -> None:
        """Take in one event of a worker, or a notice of its supervisor."""
        handle = getattr(self, "_on_" + str(event.get("event")), None)
        if handle is not None:
            handle(self.volunteers[name], event)

    @property
    def epoch(self) -> int:
        """The newest epoch that anybody has applied."""
        return max(self.losses, default=0)

    @property
    def samples(self) -> int:
        """Samples that entered applied epochs."""
        return sum(v.samples for v in self.volunteers.values())

    @property
    def samples_per_second(self) -> float:
        return sum(v.samples_per_second for v in self.volunteers.values() if v.training)

    @property
    def curve(self) -> list[CurvePoint]:
        """Mean loss of the swarm by epoch; epochs whose loss nobody knows are left out."""
        points = []
        for epoch in sorted(self.losses):
            known = [(loss, samples) for loss, samples in self.losses[epoch] if loss is not None and samples > 0]
            total = sum(samples for _, samples in known)
            if total:
                points.append(CurvePoint(epoch, sum(loss * samples for loss, samples in known) / total, total))
        return points

    @property
    def all_finished(self) -> bool:
        return bool(self.volunteers) and all(v.finished_epoch is not None for v in self.volunteers.values())

    def share(self, volunteer: Volunteer) -> float:
        """This volunteer's part of all samples so far, 0 to 1."""
        return volunteer.samples / self.samples if self.samples else 0.0

    def _rest(self, volunteer: Volunteer, state: str) -> None:
        volunteer.state, volunteer.training, volunteer.samples_per_second = state, False, 0.0

    def _on_starting(self, volunteer: Volunteer, event: Event) -> None:
        volunteer.lives += 1
        volunteer.samples_of_life = 0
        volunteer.finished_epoch = volunteer.checkpoint = None
        self._rest(volunteer, "starting" if volunteer.lives == 1 else "starting again")

    def _on_device(self, volunteer: Volunteer, event: Event) -> None:
        threads, device = event.get("threads"), str(event["device"])
        shown = f", {threads} thread{'s' if threads != 1 else ''}" if threads and "cpu" in device.lower() else ""
        volunteer.device = device + shown
        volunteer.state = "looking for the swarm"

    def _on_connected(self, volunteer: Volunteer, event: Event) -> None:
        self.peer_names[str(event["peer_id"])] = volunteer.name
        volunteer.state = "connected, fetching the model"

    def _on_state_loaded(self, volunteer: Volunteer, event: Event) -> None:
        volunteer.state, volunteer.training = "training", True
        volunteer.epoch, volunteer.source = event["epoch"], event["source"]
        if volunteer.lives > 1 or volunteer.joined_late:
            source = SOURCES.get(event["source"], event["source"])
            self.news.append(f"{volunteer.name} has the model of epoch {event['epoch']}, {source}.")

    def _on_step(self, volunteer: Volunteer, event: Event) -> None:
        volunteer.state, volunteer.training = "training", True
        volunteer.samples_per_second = event["samples_per_second"] or 0.0
        volunteer.epoch = event["epoch"]
        if event["loss"] is not None and volunteer.loss is None:
            volunteer.loss = event["loss"]
        self.progress = (event["swarm_samples"] or 0, event["target_batch_size"] or 0)

    def _on_epoch(self, volunteer: Volunteer, event: Event) -> None:
        epoch, samples, now = event["epoch"], event["samples"], event["time"]
        volunteer.epoch = epoch
        if event["loss"] is not None:
            volunteer.loss = event["loss"]
        if event["received"] is not None and event["received"] < 1:
            self.lost_parts += 1
        is_new = epoch > self.epoch or not self.losses
        self.losses.setdefault(epoch, []).append((event["loss"], samples))
        if is_new:
            self._time_epoch(now)
        if samples > 0:
            first_of_life = volunteer.samples_of_life == 0
            volunteer.samples += samples
            volunteer.samples_of_life += samples
            if first_of_life:
                self._tell_first_work(volunteer, epoch, now)

    def _time_epoch(self, now: float) -> None:
        if self.first_epoch_at is None:
            self.first_epoch_at = now
            self.news.append("The first epoch is applied: everybody's gradients were averaged, and all took one step.")
        elif self._last_epoch_at is not None:
            took = max(0.0, now - self._last_epoch_at)
            self.seconds_an_epoch = took if not self.seconds_an_epoch else 0.8 * self.seconds_an_epoch + 0.2 * took
        self._last_epoch_at = now

    def _tell_first_work(self, volunteer: Volunteer, epoch: int, now: float) -> None:
        name = volunteer.name
        was_killed = volunteer.killed_at is not None and volunteer.lives > volunteer.killed_in_life
        if was_killed and not volunteer.returned:
            volunteer.back_after = now - volunteer.killed_at
            self.marks.append(Mark(epoch, f"{name} back"))
            self.news.append(
                f"{name} is back: {volunteer.back_after:.0f} s after it was killed, its samples count in epoch {epoch}."
            )
        elif volunteer.joined_late and volunteer.lives == 1:
            self.marks.append(Mark(epoch, f"{name} joined"))
            self.news.append(f"{name} pulls its weight: its samples count from epoch {epoch} on.")

    def _on_skipped(self, volunteer: Volunteer, event: Event) -> None:
        counts = Counter({str(cause): int(n) for cause, n in event["counts"].items()})
        if counts.total() > self.skipped.total():
            self.skipped = counts

    def _on_warning(self, volunteer: Volunteer, event: Event) -> None:
        self.warnings[event["kind"]] += 1
        if self.warnings[event["kind"]] == 1:
            self.news.append(f"{volunteer.name} warns: {self._with_names(event['message'])}")

    def _with_names(self, message: str) -> str:
        for peer_id, name in self.peer_names.items():
            message = message.replace(peer_id, name)
        return message

    def _on_error(self, volunteer: Volunteer, event: Event) -> None:
        self._rest(volunteer, "stopped with an error")
        self.error = self.error or f"{volunteer.name} cannot go on: {event['message']}"

    def _on_checkpoint(self, volunteer: Volunteer, event: Event) -> None:
        volunteer.checkpoint = event["path"]

    def _on_finished(self, volunteer: Volunteer, event: Event) -> None:
        self._rest(volunteer, "finished")
        volunteer.finished_epoch, volunteer.checkpoint = event["epoch"], event["path"]

    def _on_left(self, volunteer: Volunteer, event: Event) -> None:
        self._rest(volunteer, "left")

    def _on_restarting(self, volunteer: Volunteer, event: Event) -> None:
        if volunteer.killed_at is None or volunteer.killed_in_life != volunteer.lives:
            self.news.append(f"{volunteer.name}: {event.get('message', 'the worker crashed and is started again')}")
        self._rest(volunteer, "killed, starts again" if volunteer.killed_at is not None else "crashed, starts again")

    def _on_gave_up(self, volunteer: Volunteer, event: Event) -> None:
        self._rest(volunteer, "given up")
        reason = event.get("message") or event.get("reason") or "it crashed again and again"
        self.error = self.error or f"{volunteer.name} cannot go on: {reason}"


def mean_loss(points: list[CurvePoint]) -> float | None:
    """Mean over some epochs, weighted by samples; None without any."""
    total = sum(point.samples for point in points)
    return sum(point.loss * point.samples for point in points) / total if total else None


def first_and_last_loss(curve: list[CurvePoint]) -> tuple[float | None, float | None]:
    """The mean of the first and of the last few epochs: a tenth of the curve, 1 to 5 epochs."""
    few = max(1, min(5, len(curve) // 10))
    return mean_loss(curve[:few]), mean_loss(curve[-few:])
