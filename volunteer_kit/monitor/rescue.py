"""Decide to which state everybody goes back when the model is ruined, and do not go back again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence

from volunteer_kit.monitor.judge import Look, Restraint, began, choose
from volunteer_kit.monitor.kept import Kept, KeptStates
from volunteer_kit.monitor.lookout import Lookout
from volunteer_kit.monitor.member import Member
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.signing import Signing
from volunteer_kit.runs import RunConfig

TRY_EVERY = 5.0  # s until an order that could not be given is tried again


class Rescue:
    """Of the loop. `signing` is None in a run without an authority: then it can only say what is wrong."""

    def __init__(
        self,
        run: RunConfig,
        member: Member,
        kept: KeptStates,
        signing: Signing | None,
        lookout: Lookout,
        notes: Notes,
    ):
        self._run, self._member, self._kept, self._signing = run, member, kept, signing
        self._lookout, self._notes = lookout, notes
        self.restraint = Restraint()
        self._pending: tuple[str, Look, Sequence[Look]] | None = None  # a ruin of which nobody was told yet
        self._pending_at = 0.0

    def calm(self) -> None:
        """A later model was looked at, and is none to go back from."""
        self._pending = None

    def try_again(self, now: float) -> None:
        """Give the order that could not be given before, if it is time to try again."""
        if self._pending is not None and now >= self._pending_at:
            self.help(*self._pending)

    def help(self, reason: str, look: Look, before: Sequence[Look]) -> None:
        """The model is ruined: order everybody back, if it is ours to do."""
        self._pending = None
        if self.restraint.is_cooling(look.epoch):
            return
        if self._signing is None:
            self._notes.warn(f"The model is ruined ({reason}); without an authority nobody can order volunteers back.")
            return
        if not self._lookout.is_our_turn:  # another monitor sees the same; if it is silent, the turn will be ours
            self._postpone(reason, look, before)
            return
        good = {one.epoch: one for one in self._kept.confirmed if one.root}
        epoch = choose(good, began(before, look))
        if epoch is None:
            self._notes.warn(f"The model is ruined ({reason}), and no state from before it is kept.")
        elif self.restraint.has_given_up(good[epoch].root):
            self._notes.warn(
                f"The model is ruined again ({reason}), after several returns to step {epoch}. No more are ordered: "
                f"find out who or what does it, then: volunteer-kit monitor rollback {self._run.run_id} --to {epoch}"
            )
        elif self._order_back(good[epoch], reason) is None:
            self._postpone(reason, look, before)

    def _postpone(self, reason: str, look: Look, before: Sequence[Look]) -> None:
        """A model that is no number makes no step, and there may be no other look."""
        self._pending, self._pending_at = (reason, look, list(before)), time.monotonic() + TRY_EVERY

    def go_back_by_hand(self, to_epoch: int, checkpoint_every: int) -> tuple[bool, str]:
        """:returns: whether it was ordered, and in words what was done or why it was not."""
        if self._signing is None:
            return False, f"The run {self._run.run_id!r} has no authority: nobody would obey an order to go back."
        one = self._kept.of_epoch(to_epoch)
        if one is None or not one.root:
            steps = ", ".join(str(one.epoch) for one in self._kept.all if one.root)
            none = f"None is kept yet; the first comes at step {checkpoint_every}."
            kept = f"Kept are those of step {steps}." if steps else none
            return False, f"There is no checkpoint of step {to_epoch}. {kept}"
        text = self._order_back(one, "the host ordered it")
        return text is not None, text or "The order could not be given: no peer took it. Try again in a minute."

    def _order_back(self, one: Kept, reason: str) -> str | None:
        """:returns: what was done in words, None if the order could not be given."""
        order = self._signing.order(one)
        if order is None:
            return None
        self._notes.event("rollback", to_epoch=one.epoch, resume_epoch=order.resume_epoch, reason=reason)
        self._notes.complain(f"order {order.sequence}", f"Back to step {one.epoch}: {reason}.")
        self.restraint.note(order.resume_epoch, order.root.hex())
        return (
            f"The run goes back to its checkpoint of step {one.epoch}, as step {order.resume_epoch}. "
            "Volunteers hear of it within seconds."
        )
