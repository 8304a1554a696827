"""When the model is ruined: who says so, to which state everybody goes back, and not again and again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from hivemind.p2p import PeerID

from volunteer_kit.monitor.judge import Look, Restraint, began, choose, is_left_behind
from volunteer_kit.monitor.kept import Kept, KeptStates
from volunteer_kit.monitor.lookout import Lookout, Pace
from volunteer_kit.monitor.member import Member
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.signing import Signing
from volunteer_kit.runs import RunConfig

TRY_EVERY = 5.0  # s until an order that could not be given is tried again
DISBELIEVED_FOR = 90.0  # s that a refused state speaks against its owner


class Disbelief:
    """Whose states were refused lately because no steps lead to them. That two volunteers differ is daily bread, and
    speaks against nobody."""

    def __init__(self) -> None:
        self._refused: deque[tuple[float, PeerID, str]] = deque(maxlen=256)  # when, whose, why
        self._count = 0  # of the averager's refusals for distance, what we know of

    def note(self, peer_id: str, why: str, refused_for_distance: int) -> None:
        """A state was refused; for its distance, if the averager's count of those has grown."""
        if refused_for_distance < self._count:
            self._count = 0
        if refused_for_distance > self._count:
            self._refused.append((time.monotonic(), PeerID.from_base58(peer_id), why))
        self._count = refused_for_distance

    def lately(self, now: float) -> list[tuple[PeerID, str]]:
        while self._refused and now - self._refused[0][0] > DISBELIEVED_FOR:
            self._refused.popleft()
        return [(peer, why) for _, peer, why in self._refused]

    def clear(self) -> None:
        self._refused.clear()


class Rescue:
    """Of the loop. `signing` is None in a run without an authority: then it can only say what is wrong."""

    def __init__(
        self,
        run: RunConfig,
        member: Member,
        kept: KeptStates,
        signing: Signing | None,
        lookout: Lookout,
        disbelief: Disbelief,
        notes: Notes,
        pace: Pace,
    ):
        self._run, self._member, self._kept, self._signing = run, member, kept, signing
        self._lookout, self._disbelief, self._notes, self._pace = lookout, disbelief, notes, pace
        self.restraint = Restraint()
        self._pending: tuple[str, Look, Sequence[Look]] | None = None  # a ruin of which nobody was told yet
        self._pending_at = 0.0

    def calm(self) -> None:
        """A later model was looked at, and is none to go back from."""
        self._pending = None

    def look_after_the_others(self, history: Sequence[Look], now: float) -> None:
        """Have they gone where we cannot follow? And what could not be ordered is ordered now."""
        if self._pending is not None and now >= self._pending_at:
            self.help(*self._pending)
        refused = self._disbelief.lately(now)
        if not refused:
            return
        peer, why = refused[-1]
        name = self._lookout.name_of(peer) or "somebody"
        if self._notes.complain("refused state", f"The model of {name} ({peer}) is not believed: {why}"):
            text = "The model of {username} was not believed: {reason}"
            self._notes.event("outlier", text, username=name, reason=why)
        account_of = self._member.admission.account_of
        here = {account_of(one) for one in self._lookout.records}
        disbelieved = {account_of(one) for one, _ in refused} & here
        behind = self._member.optimizer.tracker.global_epoch - self._member.epoch
        if is_left_behind(behind, len(disbelieved), len(here)):
            reason = "most volunteers hold a model that no steps can have led to"
            self.help(reason, Look(self._member.epoch), history)

    def help(self, reason: str, look: Look, before: Sequence[Look]) -> None:
        """The model is ruined: order everybody back, if it is ours to do."""
        self._pending = None
        if self.restraint.is_cooling(look.epoch):
            return
        if self._signing is None:
            self._notes.warn(f"The model is ruined ({reason}); without an authority nobody can order volunteers back.")
            return
        if not self._lookout.is_our_turn:  # another monitor sees the same; if it is silent, the turn will be ours
            self._try_again(reason, look, before)
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
            self._try_again(reason, look, before)

    def _try_again(self, reason: str, look: Look, before: Sequence[Look]) -> None:
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
        order = self._signing.order(one, self._pace.epochs_per_second(time.monotonic()) or 0.0)
        if order is None:
            return None
        self._notes.event("rollback", to_epoch=one.epoch, resume_epoch=order.resume_epoch, reason=reason)
        self._notes.complain(f"order {order.sequence}", f"Back to step {one.epoch}: {reason}.")
        self.restraint.note(order.resume_epoch, order.root.hex())
        self._member.optimizer.obey(order)
        return (
            f"The run goes back to its checkpoint of step {one.epoch}, as step {order.resume_epoch}. "
            "Volunteers hear of it within seconds."
        )
