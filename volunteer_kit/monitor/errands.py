"""What is done with a good checkpoint: pictures are drawn with it, and it is brought to the Hub."""

from __future__ import annotations

import time
from typing import Any

from volunteer_kit.monitor.chore import Chore
from volunteer_kit.monitor.kept import Kept, KeptStates
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.runs import RunConfig

DRAW_EVERY, DRAW_SHARE = 60.0, 0.02  # s, and share of the time that goes into drawing
DRAW_PATIENCE, PUSH_PATIENCE = 1800.0, 6 * 3600.0  # s
PUSH_EVERY = 900.0  # s between two uploads
RETRY_FIRST, RETRY_LAST = 60.0, 3600.0  # s until a failed upload is tried again; doubles
POINTS = 500  # of the curve


class Errands:
    """Looks after two processes; never waits for them.

    :param folder: the monitor's
    :param push_to: org/name on the Hub; None: nothing is brought there
    :param token: of the Hub
    """

    def __init__(self, run: RunConfig, kept: KeptStates, notes: Notes, push_to: str | None, token: str | None):
        self._run, self._kept, self._notes = run, kept, notes
        self._push_to, self._token = push_to, token
        self._drawing = Chore("volunteer_kit.monitor.drawing", DRAW_PATIENCE)
        self._pushing = Chore("volunteer_kit.monitor.push", PUSH_PATIENCE)
        self._draw_at = self._push_at = time.monotonic()
        self._retry = RETRY_FIRST
        self._drawn = self._pushed = -1  # epochs
        self._under_way = -1

    def look(self) -> None:
        """To be called now and then."""
        now = time.monotonic()
        if (done := self._drawing.result()) is not None:
            self._drew(done, now)
        if (done := self._pushing.result()) is not None:
            self._has_pushed(done, now)
        newest = next(iter(reversed(self._kept.confirmed)), None)
        if newest is None:
            return
        if self._run.captions and not self._drawing.is_busy and now >= self._draw_at and newest.epoch != self._drawn:
            self._drawn = newest.epoch
            self._begin(self._drawing, newest)
        if self._push_to and not self._pushing.is_busy and now >= self._push_at and newest.epoch != self._pushed:
            self._under_way = newest.epoch
            self._begin(self._pushing, newest, **self._for_the_hub(newest))

    def close(self) -> None:
        self._drawing.stop()
        self._pushing.stop()

    def _begin(self, chore: Chore, one: Kept, **task: Any) -> None:
        try:
            chore.start(
                run=self._run.model_dump(mode="json"),
                checkpoint=str(self._kept.checkpoints / one.checkpoint),
                folder=str(self._kept.checkpoints.parent),
                epoch=one.epoch,
                **task,
            )
        except OSError as error:
            self._draw_at = self._push_at = time.monotonic() + RETRY_FIRST
            self._notes.warn(f"No process could be started for pictures or the Hub: {error}")

    def _drew(self, done: dict[str, Any], now: float) -> None:
        self._draw_at = now + max(DRAW_EVERY, done.get("seconds", 0.0) / DRAW_SHARE)
        if "error" in done:
            self._notes.warn(f"No pictures were drawn: {done['error']}")
            return
        for picture in done["pictures"]:
            self._notes.do("add_picture", time.time(), done["epoch"], picture["caption"], picture["path"])

    def _has_pushed(self, done: dict[str, Any], now: float) -> None:
        if "error" in done:
            self._push_at = now + self._retry
            self._notes.warn(
                f"The checkpoint of step {self._under_way} was not brought to the Hub ({self._push_to}): "
                f"{done['error']}. It is tried again in {self._retry / 60:.0f} min."
            )
            self._retry = min(2 * self._retry, RETRY_LAST)
            return
        self._pushed, self._push_at, self._retry = self._under_way, now + PUSH_EVERY, RETRY_FIRST
        text = "The checkpoint of step {epoch} is on the Hub: {repo}"
        self._notes.event("checkpoint", text, epoch=self._pushed, repo=self._push_to)

    def _for_the_hub(self, one: Kept) -> dict[str, Any]:
        notes, hidden = self._notes, self._notes.do("hidden", default=frozenset())
        leaders = [
            {
                "username": "" if row["account"] in hidden else row["username"], "hidden": row["account"] in hidden,
                "samples": row["samples"], "seconds": row["seconds"],
            }
            for row in notes.do("leaderboard", default=[])
        ]  # fmt: skip
        history = [
            {"epoch": row["epoch"], "loss": row["loss"]}
            for row in notes.do("metrics", POINTS, default=[])
            if row["epoch"] <= one.epoch
        ]
        pictures = notes.do("pictures", 8, default=[])
        newest = [row for row in pictures if row["epoch"] == pictures[0]["epoch"]]
        folder = self._kept.checkpoints.parent
        return {
            "repo": self._push_to, "token": self._token, "history": history, "leaders": leaders,
            "pictures": [[row["caption"], str(folder / row["path"])] for row in newest],
        }  # fmt: skip
