"""Pictures are drawn with a good checkpoint, and it is brought to the Hub. Before there is one, the host's notebook and
its kit are brought there, once for each version of them; then the Hub is asked now and then who can read them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from volunteer_kit.monitor.chore import Chore
from volunteer_kit.monitor.kept import Kept, KeptStates
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.runs import RunConfig
from volunteer_kit.ways_in import HUB, Offer, colab_link, is_pushed, is_reachable, read_offer

DRAW_EVERY, DRAW_SHARE = 60.0, 0.02  # s, and share of the time that goes into drawing
DRAW_PATIENCE, PUSH_PATIENCE = 1800.0, 6 * 3600.0  # s
PUSH_EVERY = 900.0  # s between two uploads
ASK_EVERY = 300.0  # s between two questions whether everybody can read the repository
RETRY_FIRST, RETRY_LAST = 60.0, 3600.0  # s until a failed upload is tried again; doubles
POINTS = 500  # of the curve


class Errands:
    """Looks after two processes; never waits for them.

    :param kept: of the monitor's folder, beside which the host's offer lies
    :param push_to: org/name on the Hub; None: nothing is brought there
    :param token: of the Hub
    :param say: gets a line of JSON, {"said": words}, for the host's screen
    """

    def __init__(
        self,
        run: RunConfig,
        kept: KeptStates,
        notes: Notes,
        push_to: str | None,
        token: str | None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._run, self._kept, self._notes, self._say = run, kept, notes, say
        self._host = kept.checkpoints.parent.parent
        self._push_to, self._token = push_to, token
        self._drawing = Chore("volunteer_kit.monitor.drawing", DRAW_PATIENCE)
        self._pushing = Chore("volunteer_kit.monitor.push", PUSH_PATIENCE)
        self._inviting = Chore("volunteer_kit.monitor.push_way_in", PUSH_PATIENCE)
        self._invite_at, self._invite_retry = time.monotonic(), RETRY_FIRST
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
        if (done := self._inviting.result()) is not None:
            self._has_invited(done, now)
        if self._push_to and now >= self._invite_at and not self._inviting.is_busy and not self._pushing.is_busy:
            self._invite()
        newest = next(iter(reversed(self._kept.confirmed)), None)
        if newest is None:
            return
        if self._run.captions and not self._drawing.is_busy and now >= self._draw_at and newest.epoch != self._drawn:
            self._drawn = newest.epoch
            self._begin(self._drawing, newest)
        is_free = not self._pushing.is_busy and not self._inviting.is_busy  # two commits at once: one is refused
        if self._push_to and is_free and now >= self._push_at and newest.epoch != self._pushed:
            self._under_way = newest.epoch
            self._begin(self._pushing, newest, **self._for_the_hub(newest))

    def close(self) -> None:
        for chore in (self._drawing, self._pushing, self._inviting):
            chore.stop()

    def _invite(self) -> None:
        """Bring notebook and kit to the Hub, if the host has some that are not there; else ask who can read them."""
        self._invite_at = float("inf")  # the host makes them before the monitor starts
        offer = read_offer(self._host)
        if offer is None or offer.push_to != self._push_to:
            return
        try:
            self._inviting.start(
                run=self._run.model_dump(mode="json"), host=str(self._host), token=self._token
            )
        except OSError as error:
            self._invite_at = time.monotonic() + RETRY_FIRST
            self._notes.warn(f"No process could be started for the Hub: {error}")

    def _has_invited(self, done: dict[str, Any], now: float) -> None:
        offer = read_offer(self._host)
        if "error" in done and (offer is None or not is_pushed(self._host, offer)):
            self._invite_at = now + self._invite_retry
            text = (
                f"The notebook and the kit were not brought to the Hub ({self._push_to}): {done['error']}. "
                f"It is tried again in {self._invite_retry / 60:.0f} min."
            )
            self._notes.warn(text)
            self._say(json.dumps({"warning": text}))
            self._invite_retry = min(2 * self._invite_retry, RETRY_LAST)
            return
        self._invite_at, self._invite_retry = now + ASK_EVERY, RETRY_FIRST
        if done.get("is_news"):  # where the Hub could not be asked, nothing changes
            self._say(json.dumps({"said": self._invited(done, offer)}))

    def _invited(self, done: dict[str, Any], offer: Offer | None) -> str:
        what = f"The notebook and the kit are on the Hub, at {done['repo']}"
        if done["is_private"]:
            return (
                f"{what}, which is private or gated: Colab opens it for nobody. "
                f"Make it public in its settings; within {ASK_EVERY / 60:.0f} min the link is here."
            )
        if offer is None or not offer.notebook_sha256 or not is_reachable(offer.url) or offer.hub != HUB:
            return f"{what}."
        return f"{what}. It opens in Colab by:\n  {colab_link(done['repo'])}"

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
            "repo": self._push_to, "token": self._token, "host": str(self._host), "history": history,
            "leaders": leaders,
            "pictures": [[row["caption"], str(folder / row["path"])] for row in newest],
        }  # fmt: skip
