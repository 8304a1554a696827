"""The loop of a monitor: attend, look, judge, keep, sign, and go back when the model is ruined."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from volunteer_kit.auth.access_token import BanList
from volunteer_kit.home import Home
from volunteer_kit.monitor import asked
from volunteer_kit.monitor.convictions import Convictions
from volunteer_kit.monitor.credits import Credits
from volunteer_kit.monitor.errands import Errands
from volunteer_kit.monitor.evidence import Looker, Seen
from volunteer_kit.monitor.judge import PROBATION, Look, is_good, should_roll_back
from volunteer_kit.monitor.kept import Kept, KeptStates, Writer
from volunteer_kit.monitor.lookout import Lookout, Pace
from volunteer_kit.monitor.member import Member
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.own_peer import Addresses
from volunteer_kit.monitor.people import Bans
from volunteer_kit.monitor.recording import Recorder, Tracker
from volunteer_kit.monitor.rescue import Rescue
from volunteer_kit.runs import RunConfig
from volunteer_kit.swarm.credit.accounting import EntryCollector
from volunteer_kit.swarm.credit.ledger import CreditLedger
from volunteer_kit.swarm.net.identity import give_up_key
from volunteer_kit.swarm.net.same_key import CLONED, HOW_COME, KeyWatch, Sharing, TwinWatch

CHECKPOINT_EVERY = 10  # epochs
REMEMBERED = 300  # looks
IDLE = 60.0  # s without a step after which the last state is kept whatever its number,
IDLE_EPOCHS = 5  # and so many times what an epoch takes
CHORES_EVERY = 0.5  # s
SIGNED_EVERY = 15.0  # s between looks for what other monitors have signed


class Monitor:
    """One monitor in its folder. `close()` in any case.

    The later one of two monitors under one key gives it up and ends: its next start makes one of its own, by which
    nobody outside knows it. The one that was here before goes on, and warns its host.

    :param home: the folder: identity.key, journal.sqlite, credit.sqlite, checkpoints/, states/, pictures/,
        metrics.jsonl
    :param checkpoint_every: epochs; the same on all monitors of a run, ten or more where states are signed
    :param on_broken: as of Member
    :param say: gets a line of JSON, {"warning": words} or {"said": words}, for the host's screen
    :ivar why_over: the reason why it has to end, in words; None: it may go on
    """

    def __init__(
        self,
        run: RunConfig,
        home: Home,
        keys: Path | None,
        addresses: Addresses,
        *,
        push_to: str | None = None,
        token: str | None = None,
        tracker: Tracker | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
        on_broken: Callable[[str], None],
        say: Callable[[str], None] = lambda line: None,
    ):
        self.run, self._home, self._every, self._say = run, home, checkpoint_every, say
        self._new_bans: deque[BanList] = deque(maxlen=1)
        self.why_over: str | None = None
        self._twins: TwinWatch | None = None
        self.member = Member(run, home, keys, addresses, self._new_bans.append, on_broken)
        try:
            self._begin(push_to, token, tracker)
        except BaseException:
            self.member.close()
            raise

    def _begin(self, push_to: str | None, token: str | None, tracker: Tracker | None) -> None:
        """What writes files is opened now, after the member's processes were forked."""
        run, member, path = self.run, self.member, self._home.path
        self.notes = Notes(path / "journal.sqlite")
        self._bans = Bans(path / "bans.json", run.run_id, self.notes)
        self.kept = KeptStates(path, self._warn_host)
        self._resume()
        member.join()
        self.signing = member.make_signing(self.kept, self.notes) if member.own.signs else None
        meta = {"run_id": run.run_id, "fingerprint": run.fingerprint, "run": run.model_dump(mode="json")}
        self._writer = Writer(self.kept, member.tensor_names, meta, chunks=member.own.signs)
        self._looker = Looker(member.step_bound, member.public_loss)
        self._history: deque[tuple[Look, bool]] = deque(maxlen=REMEMBERED)  # and whether it was good
        self._order = member.order
        self._seen_epoch, self._moved_at = -1, time.monotonic()
        self._pace = Pace()
        name = f"monitor-{str(member.peer.peer_id)[-6:]}"
        settings = {"project": run.run_id, "name": name, "resume": "allow"}  # a restart goes on with its curves
        if getattr(tracker, "__name__", "") == "wandb":
            settings["id"] = name
        self._recorder = Recorder(
            path / "metrics.jsonl", tracker, settings, lambda text: self.notes.complain("metrics", text) and None
        )
        self._lookout = Lookout(member, self.notes, self._recorder, self._pace, self._numbers)
        self._rescue = Rescue(run, member, self.kept, self.signing, self._lookout, self.notes)
        self._credits = Credits(path / "credit.sqlite", self.notes, self._collector, lambda: member.epoch)
        self._convictions = Convictions(member, self.notes, self._lookout.name_of, self._bans.explain)
        self._errands = Errands(run, self.kept, self.notes, push_to, token, self._say)
        key = KeyWatch(member.peer.dht, run.run_id, member.peer.peer_id)
        self._twins = TwinWatch(key, self._take_twin, lambda: not member.optimizer.reach.waits_for_itself)
        self._chores_at = self._signed_at = 0.0
        if member.public_loss is None and run.draws:  # in a fine-tune each member has data of its own
            self.notes.warn("The run's samples cannot be read here: the model is judged by what volunteers report.")
        if member.peer.client_mode:
            self.notes.warn(
                "Others cannot call this monitor, so volunteers alone give the states that it signs. "
                "Open a port, and name it with --host-maddrs and --announce-maddrs."
            )

    def _resume(self) -> None:
        """Go on from the newest checkpoint that can be used."""
        for one in reversed(self.kept.all):
            if self.member.resume(self.kept.checkpoints / one.checkpoint):
                return
            self._warn_host(f"The checkpoint of step {one.epoch} in {self.kept.checkpoints} cannot be used.")

    def _warn_host(self, text: str) -> None:
        """Into the journal, the log, and onto the host's screen."""
        self.notes.warn(text)
        self._say(json.dumps({"warning": text}))

    def _take_twin(self, sharing: Sharing) -> None:
        """In a thread of its own."""
        if sharing is Sharing.FIRST:
            self._warn_host(
                f"Another monitor of this run works under the key of this one: {HOW_COME}. It came later, and takes a "
                "key of its own; nothing has to be done here."
            )
            return
        if sharing is Sharing.CLONED:
            self._warn_host(f"{CLONED}\n1. End one of the two monitors.")
            return
        found = f"Another monitor of this run works under the key of this one, and was here before: {HOW_COME}."
        path = self._home.identity
        if (aside := give_up_key(path)) is None:
            text = f"{found} The key's file cannot be moved.\n1. Move it away, and start this monitor again: {path}"
        else:
            text = f"{found} The key is kept as {aside}.\n1. Start this monitor again: it makes a key of its own."
        self._warn_host(text)
        self.why_over = text

    def _collector(self, ledger: CreditLedger) -> EntryCollector:
        return self.member.make_collector(ledger, self._lookout.name_of, self.notes.warn)

    def _numbers(self) -> dict[str, Any]:
        """For a row of metrics, beside what the lookout knows."""
        last = self._history[-1][0] if self._history else None
        sent, received = self.member.optimizer.traffic()
        moved = last.moved if last is not None and last.moved is not None and last.moved < 1e9 else None
        return {
            "samples_total": self._credits.samples if hasattr(self, "_credits") else 0,
            "public_loss": _finite(last.public_loss) if last is not None else None,
            "share_of_step_bound": moved,
            "bytes_sent": sent,
            "bytes_received": received,
            "entries_lost": self.notes.failed + self._recorder.dropped,
        }

    def go_back_by_hand(self, to_epoch: int) -> tuple[bool, str]:
        """:returns: whether it was ordered, and in words what was done or why it was not."""
        done = self._rescue.go_back_by_hand(to_epoch, self._every)
        self._follow_orders()
        self._rescue.restraint.forget()
        return done

    @property
    def _looks(self) -> list[Look]:
        return [one for one, _ in self._history]

    # --- one turn of the loop ---

    def turn(self) -> None:
        """To be called several times a second; may take as long as a round."""
        self.member.attend()
        self._follow_orders()
        self._take_a_look()
        for seen in self._looker.results():
            self._judge(seen)
        for written in self._writer.results():
            self._has_written(written)
        now = time.monotonic()
        if now - self._chores_at >= CHORES_EVERY:
            self._chores_at = now
            self._do_chores(now)

    def _do_chores(self, now: float) -> None:
        self._follow_orders()  # what was just given up must not be signed
        self._keep_what_is_due(now)
        if self.signing is not None:
            if now - self._signed_at >= SIGNED_EVERY:
                self._signed_at = now
                self.signing.look()
            if self._lookout.is_our_turn:
                self.signing.sign_what_is_due()
        asked.answer_all(self._home.path, self.go_back_by_hand)
        self._errands.look()
        while self.member.news:
            self.notes.warn(self.member.news.popleft())
        while self._new_bans:
            self._bans.take(self._new_bans.popleft())
        self._rescue.try_again(now)

    def _follow_orders(self) -> None:
        """Somebody's order was obeyed, ours or another monitor's: what came after its state is no longer the run's."""
        if self.member.order == self._order:
            return
        self._order = self.member.order
        self._rescue.calm()
        order = self.signing.last_order() if self.signing is not None else None
        self._pace.begin_anew()
        if order is not None and order.sequence == self._order:
            self._cut(order.to_epoch)

    def _cut(self, to_epoch: int) -> None:
        self._history = deque((one for one in self._history if one[0].epoch <= to_epoch), maxlen=REMEMBERED)
        self._try(lambda: self.kept.give_up_after(to_epoch))

    def _take_a_look(self) -> None:
        member = self.member
        if not member.is_steady or member.epoch == self._seen_epoch:
            return
        self._moved_at = time.monotonic()
        self._pace.saw(member.epoch, self._moved_at)
        if not self._looker.is_busy:
            self._seen_epoch = member.epoch
            self._looker.submit(member.look(self._lookout.summary.loss))

    # --- judging ---

    def _judge(self, seen: Seen) -> None:
        if seen.order != self.member.order:
            return
        look, before = seen.look, self._looks
        reason = should_roll_back(before, look)
        self._history.append((look, reason is None and is_good(before, look)))
        if reason is not None:
            self._rescue.help(reason, look, before)
        else:
            self._rescue.calm()
            self._confirm(look.epoch)

    def _confirm(self, epoch: int, probation: int = PROBATION) -> None:
        """States that were good, and were followed by good ones, are everybody's ground from now on."""
        for one in self.kept.waiting:
            if epoch < one.epoch + probation or one.order != self._order:
                continue
            since = [(look.epoch, good) for look, good in self._history if look.epoch >= one.epoch]
            if since and all(good for _, good in since):
                self._try(lambda one=one: self.kept.update(one, replace(one, confirmed=True)))
                self.notes.event("checkpoint", epoch=one.epoch)
            elif since and since[0][0] <= one.epoch + PROBATION:  # later looks alone do not speak against it
                self._try(lambda one=one: self.kept.remove(one))

    # --- keeping ---

    def _keep_what_is_due(self, now: float) -> None:
        member = self.member
        if self._writer.is_busy or not member.is_steady or self._is_in_doubt:
            return
        last = self.kept.all[-1].epoch if self.kept.all else 0
        pace = self._pace.epochs_per_second(now)
        new, idle = member.epoch - last, now - self._moved_at > max(IDLE, IDLE_EPOCHS / pace if pace else 0.0)
        is_due = new >= self._every and (member.epoch % self._every == 0 or new >= 1.5 * self._every)
        if new > 0 and (is_due or idle):
            self._writer.submit(*member.copy())
        elif idle and self.kept.waiting:
            self._confirm(member.epoch, probation=0)

    @property
    def _is_in_doubt(self) -> bool:
        return bool(self._history) and not self._history[-1][1]

    def _has_written(self, written: Kept | OSError) -> None:
        if isinstance(written, OSError):
            self.notes.warn(str(written))
        elif written.order == self.member.order:
            self._try(lambda: self.kept.add(written))

    def _try(self, change: Callable[[], None]) -> None:
        """Change what is kept, on a disk that may be sick."""
        try:
            change()
        except OSError as error:
            self.notes.warn(f"{self._home.path} cannot be written to: {error.strerror or error}.")

    def close(self) -> None:
        """Say goodbye; some seconds."""
        if self._twins is not None:
            self._twins.close()
        beside = (self._convictions, self._errands, self._credits, self._lookout)
        for part in (*beside, self._looker, self._writer, self._recorder):
            part.close()
        self.member.close()
        self.notes.close()


def _finite(value: float | None) -> float | None:
    return value if value is not None and value == value and abs(value) < 1e9 else None
