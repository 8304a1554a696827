"""Looks at the swarm's records every few seconds, beside the loop: a look into the DHT can take as long as the DHT."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hivemind.p2p import PeerID

from volunteer_kit.monitor.hiding import follow_wishes
from volunteer_kit.monitor.member import Member
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.people import People
from volunteer_kit.monitor.recording import Recorder
from volunteer_kit.monitor.rounds import Rounds
from volunteer_kit.monitor.summary import Summary, summarize
from volunteer_kit.monitor.turn import MonitorBoard
from volunteer_kit.swarm.records.device_speeds import MAX_SAMPLES_PER_SECOND
from volunteer_kit.swarm.records.peer_record import PeerRecord

LOOK_EVERY = 4.0  # s
STILL = 3  # times what a step took, after which the swarm stands still
PACE_OVER = 300.0  # s in which the swarm's pace is measured


class Pace:
    """How fast the swarm makes steps, by what we saw ourselves."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, epoch: int, now: float) -> None:
        if self._seen and epoch <= self._seen[-1][1]:
            return
        self._seen.append((now, epoch))
        while now - self._seen[0][0] > PACE_OVER and len(self._seen) > 2:
            self._seen.popleft()

    def begin_anew(self) -> None:
        """The number of the epoch was changed by an order."""
        self._seen.clear()

    def epochs_per_second(self, now: float) -> float | None:
        """None until two steps were seen."""
        all_seen = list(self._seen)
        seen = [one for one in all_seen if now - one[0] <= PACE_OVER]
        if len(seen) < 2 and len(all_seen) > 1:  # steps that take longer than that
            (before, _), (last, _) = all_seen[-2:]
            seen = all_seen[-2:] if now - last <= STILL * (last - before) else []
        if len(seen) < 2:
            return None
        return (seen[-1][1] - seen[0][1]) / max(seen[-1][0] - seen[0][0], 0.1)


class Lookout:
    """A thread. `summary`, `records` and `others` (monitors) are of the last look.

    :param more: numbers of the loop's own for each row of metrics
    """

    def __init__(
        self, member: Member, notes: Notes, recorder: Recorder, pace: Pace, more: Callable[[], dict[str, Any]]
    ):
        self.summary = Summary(0, None, 0.0, None)
        self.records: dict[PeerID, PeerRecord] = {}
        self.others: list[PeerID] = []
        self._member, self._notes, self._recorder, self._pace, self._more = member, notes, recorder, pace, more
        self._people, self._rounds = People(notes, member.admission), Rounds(notes)
        run = member.run
        self._monitors = MonitorBoard(member.peer.dht, run.run_id, run.fingerprint, member.own.is_monitor)
        self._refused = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        self._thread.start()

    @property
    def is_our_turn(self) -> bool:
        return self._monitors.is_our_turn(self.others)

    def name_of(self, peer: PeerID) -> str | None:
        """For the leaderboard."""
        if not self._member.admission.is_open:
            return self._member.admission.username_of(peer)
        record = self.records.get(peer)
        return record.name if record is not None else None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)
        self._monitors.leave()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except Exception as error:  # of the DHT; the next look comes
                self._notes.complain("lookout", f"The others' records could not be read: {error!r}")
            self._stop.wait(LOOK_EVERY)

    def _look(self) -> None:
        member = self._member
        self._monitors.say(member.epoch)
        self.others = self._monitors.others()
        fingerprint, own = member.run.fingerprint, member.peer.peer_id
        found = member.board.fetch()
        self.records = {p: r for p, r in found.items() if r.fingerprint == fingerprint and p != own}
        follow_wishes(self.records, member.admission, self._notes)  # before anything is told of them
        claims = self._people.claims(self.records)
        pace = self._pace.epochs_per_second(time.monotonic())
        measured = None if pace is None else pace * member.run.target_batch_size
        self.summary = summarize(claims, measured, MAX_SAMPLES_PER_SECOND)
        self._people.look(self.records, claims)
        self._rounds.look(self.records, (claim.peer_id for claim in claims), member.epoch)
        member.reports.clear()
        self._tell_refusals()
        self._write()

    def _tell_refusals(self) -> None:
        """How often somebody was turned away who has no right to be here; not who, for he showed no name."""
        refused = sum(n for (call, _), n in self._member.admission.refused.items() if call != "record")
        if refused >= 2 * self._refused + 10:  # the tenth, then each time that it has doubled
            self._refused = refused
            self._notes.event(
                "refused", "{number} calls by peers without a right to take part were refused", number=refused
            )

    def _write(self) -> None:
        member, summary = self._member, self.summary
        more = self._more()
        progress = member.samples_of_epoch / member.run.target_batch_size
        row = {
            "time": time.time(),
            "epoch": member.epoch,
            "loss": summary.loss,
            "samples_per_second": summary.samples_per_second,
            "volunteers": summary.volunteers,
            "progress": min(max(progress, 0.0), 1.0),
            "samples_total": more.pop("samples_total"),
        }
        self._notes.do("add_metrics", **row)
        self._recorder.record({**row, **more})
