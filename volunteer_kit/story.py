"""A worker's events, one after another, become the Progress that a volunteer is shown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from volunteer_kit.training.protocol import OFFLINE
from volunteer_kit.widgets.progress import PICTURES, POINTS, WARNINGS, Picture, Progress

Event = dict[str, Any]
MAX_PICTURE = 1 << 20  # bytes
QUIET = 2.0  # s; the word "averaging" for shorter rounds would only flicker


class Story:
    """Folds events into `progress`, which only this object changes."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self._said: dict[str, float] = {}  # warnings, and when
        self._sent = self._received = 0  # bytes of workers that have ended
        self._round_seconds = QUIET  # of the last round
        self._steps: list[tuple[float, int]] = []  # (time, samples of the epoch under way) lately

    def take(self, event: Event) -> None:
        """One event of the supervisor's. Of those without a word here, some are of a later version."""
        tell = getattr(self, "_" + str(event.get("event")), None)
        if tell is not None:
            tell(event)
        self.progress.updated = float(event.get("time") or time.time())

    def be(self, state: str, detail: str = "") -> None:
        self.progress.state, self.progress.detail = state, detail

    def warn(self, text: str) -> None:
        """Keep a warning; the same one again only renews its time."""
        kept = [(when, known) for when, known in self.progress.warnings if known != text]
        self.progress.warnings = [*kept, (time.time(), text)][-WARNINGS:]

    # --- beginnings ---

    def _starting(self, event: Event) -> None:
        self._sent, self._received = self.progress.bytes_sent, self.progress.bytes_received
        self.progress.name = str(event["name"])
        self.be("starting", "preparing the model and the data")

    def _device(self, event: Event) -> None:
        p = self.progress
        p.device, p.why = str(event["device"]), str(event["why"])
        p.plan = plan_in_words(event["batch_size"], event["precision"], event.get("checkpointing", False))
        self._precision = event["precision"]
        self.be("connecting")

    def _plan(self, event: Event) -> None:
        p = self.progress
        p.plan = plan_in_words(event["batch_size"], getattr(self, "_precision", "fp32"), event["checkpointing"])
        p.why = str(event["why"])

    def _waiting(self, event: Event) -> None:
        p = self.progress
        first = str(event["reason"]).partition("\n")[0]
        state = "reconnecting" if p.restarts else "connecting"
        self.be(state, f"{first.rstrip('.')}. Asked again in {event['seconds']:.0f} s")

    def _connected(self, event: Event) -> None:
        self.progress.message = ""
        how = "it calls others, they cannot call it" if event["client_mode"] else "others can call this machine"
        self.be("connecting", how)

    def _downloading(self, event: Event) -> None:
        p, now = self.progress, time.monotonic()
        done, total = event["done"], max(1, event["total"])
        began = getattr(self, "_download", None)
        if began is None or done < began[1]:
            self._download = began = (now, done)
        p.downloaded = min(1.0, done / total)
        rate = (done - began[1]) / (now - began[0]) if now - began[0] > 1 else 0
        p.seconds_left = (total - done) / rate if rate else None
        self.be("downloading")
        if done >= total:
            p.downloaded = p.seconds_left = self._download = None

    def _state_loaded(self, event: Event) -> None:
        p = self.progress
        p.epoch, p.downloaded, p.seconds_left, self._download = event["epoch"], None, None, None
        p.swarm_samples = 0
        self.be("training")

    # --- training ---

    def _step(self, event: Event) -> None:
        p = self.progress
        p.epoch, p.samples_per_second = event["epoch"], event["samples_per_second"]
        p.swarm_samples, p.target_batch_size = event["swarm_samples"], event["target_batch_size"]
        if p.rank is None:  # the place is told with the number of those it is among
            p.volunteers = max(event["num_peers"], 1)
        p.downloaded = p.seconds_left = None
        self._estimate(event)
        if p.state != "reconnecting":
            self.be("training")

    def _estimate(self, event: Event) -> None:
        """How long until the next global step, by how fast the samples came lately."""
        p, now = self.progress, float(event.get("time") or time.time())
        if self._steps and event["swarm_samples"] < self._steps[-1][1]:
            self._steps = []
        self._steps = [*self._steps, (now, event["swarm_samples"])][-20:]
        (first, had), (last, has) = self._steps[0], self._steps[-1]
        rate = (has - had) / (last - first) if last > first else p.swarm_samples_per_second or 0
        left = max(0, p.target_batch_size - p.swarm_samples)
        p.seconds_to_step = left / rate if rate else None

    def _averaging(self, event: Event) -> None:
        others = event["num_peers"] - 1
        if self._round_seconds >= QUIET:
            self.be("averaging", f"with {others} other{'s' * (others != 1)}" if others > 0 else "")

    def _epoch(self, event: Event) -> None:
        p = self.progress
        p.epoch, p.swarm_samples, self._steps, self._round_seconds = event["epoch"], 0, [], event["seconds"]
        if event["loss"] is not None:
            p.loss = thinned([*p.loss, (event["epoch"], event["loss"])])
        if p.state != "reconnecting":
            self.be("training")

    def _totals(self, event: Event) -> None:
        p = self.progress
        p.my_samples, p.my_epochs = event["samples"], event["epochs"]
        p.my_waiting = event.get("waiting", 0)

    def _swarm(self, event: Event) -> None:
        p = self.progress
        p.volunteers, p.rank, p.share = event["num_peers"], event["rank"], event["share"]
        p.swarm_samples_per_second = event["samples_per_second"]

    def _traffic(self, event: Event) -> None:
        self.progress.bytes_sent = self._sent + event["sent"]
        self.progress.bytes_received = self._received + event["received"]

    def _pictures(self, event: Event) -> None:
        found = []
        for one in event["pictures"][:PICTURES]:
            try:
                with Path(one["path"]).open("rb") as file:
                    found.append(Picture(str(one["caption"]), file.read(MAX_PICTURE), event["epoch"]))
            except OSError:
                continue
        self.progress.pictures = found or self.progress.pictures

    def _checkpoint(self, event: Event) -> None:
        self.progress.checkpoint = str(event["path"])

    # --- trouble ---

    def _warning(self, event: Event) -> None:
        if event["kind"] != "refused":  # whom a round was without is in the log; to a volunteer it is noise
            self.warn(str(event["message"]))

    def _cut_off(self, event: Event) -> None:
        if self.progress.state != "finished":
            self.be("reconnecting", str(event["reason"]))

    def _back(self, event: Event) -> None:
        if self.progress.state != "finished":
            self.be("training")

    def _restarting(self, event: Event) -> None:
        self.progress.restarts = event["restarts"]
        self.be("reconnecting" if event.get("exit_code") == OFFLINE else "restarting", f"in {event['delay']:.0f} s")
        self.warn(str(event["message"]))

    def _renewing(self, event: Event) -> None:
        self.be("starting", "afresh")
        self.warn(str(event["message"]))

    def _error(self, event: Event) -> None:
        self.progress.message = str(event["message"])

    def _gave_up(self, event: Event) -> None:
        self.progress.message = str(event["message"])
        self.be("failed")

    # --- ends ---

    def _finished(self, event: Event) -> None:
        self.progress.epoch = event["epoch"]
        self.be("finished")

    def _left(self, event: Event) -> None:
        if self.progress.state == "leaving":
            self.be("leaving", "goodbye was said")


def plan_in_words(batch_size: int, precision: str, checkpointing: bool) -> str:
    """How this machine trains, in a few words."""
    again = ", recomputing activations to save memory" if checkpointing else ""
    return f"batches of {batch_size}, {precision}{again}"


def thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most POINTS of a curve: when there are more, every second of the older half goes."""
    if len(points) <= POINTS:
        return points
    half = len(points) // 2
    return points[:half:2] + points[half:]
