"""Looking around while the loop trains: who is here, what the network took, how far the memory has grown."""

from __future__ import annotations

import math
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from volunteer_kit.swarm.net.connectivity import why_anew
from volunteer_kit.swarm.net.same_key import CLONED, KeyWatch, Sharing

if TYPE_CHECKING:
    from volunteer_kit.session import Session

LOOK_EVERY = 2.0  # s
VAIN = 4  # times in a row without a state; a donor may be busy, or in the middle of its step
SWARM_EVERY = 15.0  # s between looks at the others' records, as often as they write them
MEMORY_EVERY = 30.0  # s; adding it up takes a tenth of a second
SETTLED_AFTER = 300.0  # s from which on memory should no longer grow
RENEW_AFTER = 1800.0  # s that a process lives at least, or its memory is not what grows
LAST_STEP = 60.0  # s for the step under way, before a machine whose key another one has begins afresh
MAX_TROUBLES = 20  # different ones that are logged
GROWTH, SLACK_GB = 1.5, 0.5  # times what it was when it had settled, and this more


class Lookout:
    """A thread of its own: the others' records can take seconds to come. Begins with the download of the state.

    `must_dial_anew`: the line is dead, and has been for so long that the peer may not find back by itself; or its
    records were dated by a wrong clock, which is right again. `why_anew`: which of these, in words.
    `must_change_key`: another machine was here before under our key, and it was told to go.
    `why_renew`: the reason why the process should begin afresh between two global steps, "" while there is none.
    """

    def __init__(self, session: Session):
        self.why_renew, self.why_anew = "", ""
        self.must_dial_anew = self.must_change_key = False
        self._key = KeyWatch(session.peer.dht, session.run.run_id, session.peer.peer_id)
        self._told_of_key = False
        self._shared_since = math.inf  # time.monotonic(): since then another machine has our key
        self._session = session
        self._trains_since: float | None = None  # before, its memory says nothing about training
        self._swarm_at = self._memory_at = float("-inf")
        self._settled_gb: float | None = None
        self._cut_off: str | None = None
        self._behind = False
        self._traffic, self._counts = (-1, -1), False
        self._turned_away: dict[str, int] = {}
        self._troubles: set[str] = set()  # told
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._look(self._look_at_traffic)  # the last bytes count too

    def _run(self) -> None:
        while not self._stop.is_set():
            now = time.monotonic()
            self._look(self._look_at_traffic)
            self._look(self._look_at_the_line)
            self._look(self._look_at_the_model)
            if self._session.trainer is not None and now - self._memory_at >= MEMORY_EVERY:
                self._memory_at = now
                self._trains_since = self._trains_since or now
                self._look(self._look_at_memory, now - self._trains_since)
            began_to_count = self._session.tally.totals.samples > 0 and not self._counts
            if began_to_count or now - self._swarm_at >= SWARM_EVERY:
                self._counts = self._session.tally.totals.samples > 0
                self._swarm_at = now
                self._look(self._look_at_the_others)
                self._look(self._look_at_the_key)
            self._stop.wait(LOOK_EVERY)

    def _look(self, look: Callable[..., None], *args: float) -> None:
        """What goes wrong with one look is logged once, and ends neither the others nor the next."""
        try:
            look(*args)
        except Exception as error:
            if repr(error) not in self._troubles and len(self._troubles) < MAX_TROUBLES:
                self._troubles.add(repr(error))
                traceback.print_exc()

    def _look_at_traffic(self) -> None:
        sent, received = self._session.optimizer.traffic()
        if (sent, received) != self._traffic:
            self._traffic = sent, received
            self._session.emit("traffic", sent=sent, received=received)

    def _look_at_the_line(self) -> None:
        emit, optimizer = self._session.emit, self._session.optimizer
        reason, before, reach = optimizer.cut_off, self._cut_off, optimizer.reach
        if self._session.trainer is not None and not self.must_dial_anew:
            self.why_anew = why_anew(reason, optimizer.cut_off_for, reach.waits_for_itself, reach.why_afresh)
            self.must_dial_anew = bool(self.why_anew)
        self._cut_off = reason
        if reason and (not before or _kind(reason) != _kind(before)):
            emit("cut_off", reason=reason)
        elif before and not reason:
            emit("back")

    def _look_at_the_model(self) -> None:
        """A donor may be known to all and still be out of our reach; training alone would be for nobody."""
        in_vain = self._session.optimizer.states_asked_in_vain
        if in_vain >= VAIN and not self._behind:
            message = (
                "The others are ahead, and none of them has given this machine their model: they cannot be reached "
                "from here, or are too busy. It goes on asking; until then its samples do not count. If this stays for "
                "minutes, leave and join again, and tell the host."
            )
            self._session.emit("warning", kind="no_model", message=message)
        self._behind = in_vain >= VAIN

    def _look_at_the_others(self) -> None:
        session = self._session
        records = session.board.fetch()
        records.pop(session.peer.peer_id, None)
        others = [record for record in records.values() if record.fingerprint == session.run.fingerprint]
        samples, speed = session.tally.totals.samples, session.speed
        total = samples + sum(record.total_samples for record in others)
        session.emit(
            "swarm",
            num_peers=1 + len(others),
            rank=1 + sum(record.total_samples > samples for record in others),
            share=samples / total if samples and (total > samples or not others) else None,  # they have not told yet
            samples_per_second=round(speed + sum(record.samples_per_second for record in others), 3),
        )
        refused = {f"{call}: {why}": number for (call, why), number in session.peer.admission.refused.items()}
        if refused != self._turned_away:
            self._turned_away = refused
            session.emit("turned_away", counts=refused)
        if session.home:
            with suppress(OSError):  # only a convenience for after a restart
                session.home.save_stay(session.run.fingerprint)
                if known := session.optimizer.reach.known_peers():
                    session.home.save_known_peers(known)

    @property
    def waits_in_vain_with_key(self) -> bool:
        """A step should have ended by now, after which we could have begun afresh under another key."""
        return time.monotonic() - self._shared_since > LAST_STEP

    def _look_at_the_key(self) -> None:
        if self._session.optimizer.reach.waits_for_itself:
            return  # a record that a wrong clock dates would stand as long as it is ahead
        sharing = self._key.look()
        if sharing is Sharing.ALONE:
            return
        if sharing.must_yield and not self.must_change_key:
            self.must_change_key, self._shared_since = True, time.monotonic()
            found = "Another machine takes part under the key of this one, and was here before: a folder was copied, or"
            found = CLONED if sharing is Sharing.CLONED else f"{found} a machine cloned."
            after = "This machine takes a key of its own after this step. Its samples so far stay counted."
            self.why_renew = self.why_renew or f"{found} {after}"
            self._session.emit("warning", kind="identity", message=self.why_renew)
        elif sharing is Sharing.FIRST and not self._told_of_key:
            self._told_of_key = True
            message = (
                "Another machine takes part under the key of this one: a folder was copied, or a machine cloned. It "
                "came later, and takes a key of its own; nothing has to be done here."
            )
            self._session.emit("warning", kind="identity", message=message)

    def _look_at_memory(self, age: float) -> None:
        held = memory_gb()
        limit = self._session.spec.renew_above_gb
        if limit is not None:
            grown = held > limit
        else:
            if self._settled_gb is None and age >= SETTLED_AFTER:
                self._settled_gb = held
            grown = should_renew(held, self._settled_gb, psutil.virtual_memory(), age)
        if grown and not self.why_renew:
            self.why_renew = (
                f"The worker holds {held:.1f} GB of memory by now; it begins afresh after this step. Nothing is lost."
            )


def _kind(reason: str) -> str:
    """A cause without its numbers: a time that goes on is no news."""
    return re.sub(r"\d+", "", reason)


def should_renew(held: float, settled: float | None, machine, age: float) -> bool:
    """Has a process that held `settled` GB grown so far that it should begin afresh?

    :param machine: psutil's virtual_memory()
    :param age: s
    """
    if settled is None or age < RENEW_AFTER:
        return False
    is_tight = machine.available < 0.08 * machine.total and held > 1.2 * settled
    return is_tight or held > GROWTH * settled + SLACK_GB


def memory_gb() -> float:
    """Memory of this process and its children, pages that several share counted once (Linux: PSS)."""
    own = psutil.Process(os.getpid())
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss)
        except psutil.Error:
            continue
    return total / 1e9
