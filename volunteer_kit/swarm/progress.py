"""The swarm's progress: what decides when it steps. Each peer tells how far it is, and believes what can be true.

A speed that no device has, an epoch that time does not allow, more samples than its device and its earlier claims make
believable: what a peer says of itself is dropped, or counts for less.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from hivemind.dht import DHT
from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, ProgressTracker
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time

from volunteer_kit.swarm.attendance import Attendance
from volunteer_kit.swarm.believed_progress import MAX_PEERS, Claims, believed_samples
from volunteer_kit.swarm.children import BROKEN
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.forked import LeanDHT
from volunteer_kit.swarm.plausible import MOST_SAID, Limits, believed_epoch, epochs_ahead, is_plausible
from volunteer_kit.swarm.records import read_record
from volunteer_kit.swarm.turns import Other

DURATIONS = 9  # epochs that it is the median of
NEAR = 2  # epochs behind: who makes up for a round is here for the next
NEWCOMER = 10.0  # s that a member without samples is taken for one that is about to have some
# samples/s: of a device that computes at least, of one that has gone into the round, and of one that waits for others
SLOWEST, IN_ROUND, WAITS = 1e-9, 5e-10, 0.0
LAST_ROUNDS = 3  # that tell what a peer brings to a step
KEPT_WORD = 0.25  # of its claim, that a weight is at least: samples differ in what they weigh
LATE = 5.0  # s without a word; clocks may differ by 3
LOOK_PATIENCE = 3.0  # s, for a look while a round waits
LOCK_PATIENCE = 1.0  # s, for the lock of our thread, between two looks whether that has failed
# of an epoch, and s: between two records of ours, and between looks at the others'. What they say is extrapolated by
# speed in between; a look fetches a kilobyte of each peer from several
SAID_SHARE, LOOKED_SHARE, LONGEST_PERIOD = 1 / 20, 1 / 30, 2.0


class PacedEvent(threading.Event):
    """An event that is set once a `period` (s), or at any time while `urgent`. A call that comes too
    early is made up for later: the last microbatch of a step would never be told otherwise."""

    def __init__(self, period: float):
        super().__init__()
        self.period, self.urgent = period, True
        self._last, self._is_owed = float("-inf"), False

    def set(self) -> None:
        if self.urgent or self._is_due:
            self.urgent = False
            super().set()
        else:
            self._is_owed = True

    def clear(self) -> None:
        self._last, self._is_owed = time.monotonic(), False
        super().clear()

    def wait(self, timeout: float | None = None) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not super().wait(max(0.0, min(end - time.monotonic(), self.period))):
            if self._is_owed and self._is_due:
                super().set()
            elif time.monotonic() >= end:
                return False
        return True

    @property
    def _is_due(self) -> bool:
        return time.monotonic() - self._last >= self.period


class SwarmProgressTracker(ProgressTracker):
    """hivemind's tracker, believing only what can be true. `claims_dropped` counts the rest.

    Samples count as far as their claimant's device and its earlier claims make them believable; and an epoch that only
    a few accounts say has begun, when nearly as much time has passed as the last ones took.

    hivemind signs and stores a record after every microbatch, 20 a second on a small model; here one a
    `report_period`, and at once when the epoch changes. Between two the others extrapolate by speed. Where epochs are
    long there are fewer records, and fewer looks at them.

    :param limits: bounds of one peer's claims
    :param report_period: s, at least
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        target_batch_size: int,
        *,
        limits: Limits,
        report_period: float = 0.25,
        start: bool,
        **kwargs,
    ):
        self.limits, self.claims_dropped = limits, 0
        self.may_date: Callable[[], bool] = lambda: True  # no: a record would carry a wrong clock's date, and stand
        self.highest_claim = 0  # epoch that somebody claims, believed or not
        self.behind: frozenset[PeerID] = frozenset()  # others whose epoch is not ours yet
        self.num_ahead = 0  # others whose epoch is later than ours
        self.num_uncallable = 0  # others here, if nobody can be called: they and we are in client mode, all of them
        self.computing: frozenset[PeerID] = frozenset()  # others who have samples of our epoch
        self.num_late = 0  # of those behind, who will not be in the next round: gone, or with a state to take first
        self.attendance, self.awaited = Attendance(), frozenset[PeerID]()  # others who will be in the next round
        self.num_regulars = 0  # others whose record is not over, and who came to one of the last rounds
        self._waiting_in: int | None = None  # epoch of which others have to bring their share first
        self._in_round_of: int | None = None  # epoch whose samples of ours are all there
        self._at_work: tuple[LocalTrainingProgress, ...] = ()  # others who compute samples for steps
        self._speeds: OrderedDict[PeerID, float] = OrderedDict()  # samples/s that they said; who waits says WAITS
        self._brought: OrderedDict[PeerID, deque[float]] = OrderedDict()  # samples, to the last rounds
        # time.monotonic() when they were first seen without a sample
        self._first_idle: OrderedDict[PeerID, float] = OrderedDict()
        self.on_look: Callable[[], None] = lambda: None  # called, in our thread, when the others' progress is known
        self.on_others: Callable[[], None] = lambda: None  # likewise, when there are others
        self.seconds_of_computing = math.inf  # that the swarm's devices need for an epoch
        self._ended_by: BaseException | None = None  # what our thread failed with
        self._attends = False  # trains nothing
        self.ends_pass = False  # the samples at hand are the last of our pass over our data; the optimizer sets it
        self._trained = -math.inf  # the last epoch that samples of ours are of
        self._looked_at = -math.inf  # time.monotonic(), while paused
        self._own_epoch = (0, time.monotonic())  # and since when
        self._in_common = self._own_epoch  # the last that we know for certain to have been the swarm's, and when
        self._saw_it_begin = False  # that epoch
        self._durations: deque[float] = deque(maxlen=DURATIONS)  # s, of the last epochs that we saw begin and end
        self.claims, self._typical_speed = Claims(limits.inflation), math.inf
        self.speed_limit: Callable[[PeerID, float], float | None] = lambda peer, seconds: None
        super().__init__(dht, prefix, target_batch_size, start=False, **kwargs)
        self.should_report_progress = PacedEvent(report_period)
        self._least_periods = report_period, self.min_refresh_period
        if start:
            self.start()

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the samples are there. A peer that is alone also ends an epoch with its pass over the data, as
        a trainer without a swarm does. The DHT may know less than our last microbatch: ours alone may suffice."""
        own = self.local_progress.samples_accumulated
        ends_here = self.ends_pass and self.global_progress.num_peers <= 1 and own > 0
        return ends_here or own >= self.target_batch_size or super().ready_to_update_epoch

    def attend(self, epoch: int) -> None:
        """Be counted as a member, at this epoch, without samples."""
        if not self._attends or self.local_progress.epoch != epoch:
            self._attends = True
            self.report_local_progress(epoch, 0)

    def run(self) -> None:
        try:
            super().run()
        except BaseException as e:
            self._ended_by = e
            self.shutdown_complete.set()
            if not (isinstance(e, SwarmError) and e.kind == BROKEN):  # a dead DHT: the training thread raises it
                raise

    @contextlib.contextmanager
    def pause_updates(self) -> Iterator[None]:
        """hivemind's, for a tracker that runs. One that failed may have kept the lock: hivemind takes it in a thread,
        for a task that has ended by then. Raises what it failed with."""
        while not self.lock_global_progress.acquire(timeout=LOCK_PATIENCE):
            self._raise_if_failed()
        try:
            self._raise_if_failed()
            with self.performance_ema.pause():
                yield
        finally:
            self.lock_global_progress.release()

    def _raise_if_failed(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by

    async def _progress_reporter(self) -> None:
        """Stores our record when it has changed, and before it expires.

        hivemind's leaves out who has no samples: whoever only attends would be met in rounds by peers that do not know
        of it, who call them off again.
        """
        loop, last_report = asyncio.get_running_loop(), -math.inf
        while not self.shutdown_triggered.is_set():
            patience = max(0.0, last_report - get_dht_time() + self.metadata_expiration / 2)
            await loop.run_in_executor(None, self.should_report_progress.wait, patience)
            has_changed = self.should_report_progress.is_set()
            self.should_report_progress.clear()  # before it is read: what changes from here on sets the event again
            claim, last_report = self._said(), get_dht_time()
            if not has_changed:  # a microbatch of minutes: told with the old time it would be taken for a lie
                claim = claim.copy(update={"time": last_report})
            # not by the claim: where epochs are short it is always one of a beginning, with no samples yet
            if self.may_date() and (self._attends or self._waits or self._trained >= self.global_epoch - 1):
                key, expiration = self.training_progress_key, last_report + self.metadata_expiration
                self.dht.store(key, claim.dict(), expiration, subkey=self._local_public_key, return_future=True)

    def _said(self) -> LocalTrainingProgress:
        """Our progress as it is told. Who waited for others' round, or for a state, may have more than can be believed:
        its records would be dropped, by itself as well, and its epoch would never end."""
        ours = self.local_progress
        most = MOST_SAID * self.limits.target_batch_size
        said = {"samples_accumulated": min(ours.samples_accumulated, most)}
        if self._waits or ours.epoch == self._in_round_of:  # or others would count on what does not come
            speed = WAITS if self._waits else IN_ROUND
            said |= {"samples_per_second": speed, "time": get_dht_time()}
        return ours.copy(update=said)

    @property
    def _waits(self) -> bool:
        return self.local_progress.epoch == self._waiting_in

    def wait_in(self, epoch: int | None) -> None:
        """No samples of ours come in this epoch for now, and all know. None: they come again."""
        if epoch != self._waiting_in:
            self._waiting_in = epoch
            self.tell_now()

    def go_into_round(self, epoch: int) -> None:
        """All samples of ours of this epoch are there, and all know. A peer may find the step complete by how fast
        others said to be, and they would wait for a batch of its share that does not come."""
        self._in_round_of = epoch
        self.tell_now()

    def tell_now(self) -> None:
        self.should_report_progress.urgent = True
        self.should_report_progress.set()

    @property
    def seconds_in_epoch(self) -> float:
        return time.monotonic() - self._own_epoch[1]

    def others_at_work(self, epoch: int) -> tuple[int, list[Other]]:
        """Our place in this epoch's order, and the others who compute samples for it. Those that are believed less than
        they say are left out: the step needs more samples than they will say that they have."""
        at_work = {PeerID(claim.peer_id): claim for claim in self._at_work if self._is_believed(claim)}
        order = sorted([self.dht.peer_id, *at_work], key=PeerID.to_bytes)
        places = {peer: (number - epoch) % len(order) for number, peer in enumerate(order)}
        others = []
        for peer, claim in at_work.items():
            is_there, brought = claim.epoch == epoch, self._brought.get(peer)
            others.append(
                Other(
                    samples=claim.samples_accumulated if is_there else 0,
                    usual=max(brought) if brought else None,
                    waits=is_there and claim.samples_per_second == WAITS,
                    is_in_round=is_there and claim.samples_per_second == IN_ROUND,
                    place=places[peer],
                    speed=self._speeds.get(peer, 0.0),
                )
            )
        return places[self.dht.peer_id], others

    def _is_believed(self, claim: LocalTrainingProgress) -> bool:
        """Do its samples count for as many as it says?"""
        peer, limit = PeerID(claim.peer_id), self._limit(claim)
        return self.claims.share(peer) >= 1.0 and (limit is None or claim.samples_accumulated <= limit)

    def _limit(self, claim: LocalTrainingProgress) -> float | None:
        """Samples that its device can have by now; None: not known, for we did not see this epoch begin."""
        own_epoch, since = self._own_epoch
        if claim.epoch != own_epoch or not self._saw_it_begin:
            return None
        return self.speed_limit(PeerID(claim.peer_id), time.monotonic() - since)

    def report_local_progress(self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True):
        if local_epoch != self.local_progress.epoch or samples_accumulated == 0:
            self.should_report_progress.urgent = True
        if samples_accumulated > 0:
            self._attends, self._trained, self._in_round_of = False, local_epoch, None
        super().report_local_progress(local_epoch, samples_accumulated, update_global_samples)

    def count_again(self, epoch: int, samples: int) -> None:
        """We are at `epoch` with so many samples, of which some were computed earlier: they say nothing of our speed.
        While updates are paused."""
        if epoch == self.local_progress.epoch == self.global_progress.epoch:
            self.global_progress.samples_accumulated += samples - self.local_progress.samples_accumulated
        self.local_progress = self._get_local_progress(epoch, samples)
        self.tell_now()

    def shutdown(self, timeout: float | None = None) -> None:
        self.should_report_progress.urgent = True
        super().shutdown(timeout)

    def _account_of(self, peer_id: bytes) -> bytes:
        known = self.dht.admission.account_of(PeerID(peer_id)) if isinstance(self.dht, LeanDHT) else None
        return known or peer_id

    def look_again(self, timeout: float) -> None:
        """Fetch the others' progress now and wait for it, `timeout` s at most."""
        self.fetched_global_progress_this_epoch.clear()
        self.global_progress.next_fetch_time = 0.0
        self.global_state_updated.set()  # wakes the fetcher, which then finds that it is time
        self.fetched_global_progress_this_epoch.wait(timeout)

    def look_while_paused(self) -> None:
        """Fetch the others' progress in this thread, which has paused our own; no more often than that looks."""
        if time.monotonic() - self._looked_at < self.min_refresh_period:
            return
        found = None
        with contextlib.suppress(Exception):  # of a DHT that does not answer
            found = self.dht.get(self.training_progress_key, latest=True, return_future=True).result(LOOK_PATIENCE)
        if found is not None:  # else what we knew stays
            self.global_progress = self._parse_swarm_progress_data(found.value)
        self._looked_at = time.monotonic()

    def go_back(self, epoch: int) -> None:
        """We are at `epoch` again, having given up a state that was ahead of the others'. What was known of the swarm
        was that epoch's, which nobody else has begun: we would end ours at once. While updates are paused."""
        if epoch < self.global_progress.epoch:
            self.global_progress.epoch, self.global_progress.samples_accumulated = epoch, 0
            self.global_progress.eta_next_epoch, self.global_progress.next_fetch_time = math.inf, 0.0
            self.global_state_updated.set()

    def _note_own_epoch(self) -> None:
        epoch, since = self._own_epoch
        if self.local_progress.epoch == epoch:
            return
        follows = self.local_progress.epoch == epoch + 1
        if follows and self._saw_it_begin:
            self._durations.append(time.monotonic() - since)
            self._keep_pace(median(self._durations))
        self._own_epoch, self._saw_it_begin = (self.local_progress.epoch, time.monotonic()), follows
        is_a_lone_step = follows and self.global_progress.num_peers > 1  # unless a round tells more
        if not is_a_lone_step and self.local_progress.epoch > self._in_common[0]:
            self._in_common = self._own_epoch

    def _most_ahead(self, durations: Sequence[float]) -> int:
        """Epochs that the swarm can be ahead of us. Who steps on alone comes no nearer to what all had in common: were
        time counted from its last own step, it would believe nothing of those who are far, and stay alone for ever."""
        (own_epoch, began), (common, since) = self._own_epoch, self._in_common
        now, least = time.monotonic(), self.limits.min_epoch_seconds
        since_common = epochs_ahead(now - since, durations, least) - (own_epoch - common)
        return max(epochs_ahead(now - began, durations, least), since_common)

    def _keep_pace(self, epoch_seconds: float) -> None:
        say, look = self._least_periods
        self.should_report_progress.period = max(say, min(LONGEST_PERIOD, SAID_SHARE * epoch_seconds))
        self.min_refresh_period = max(look, min(LONGEST_PERIOD, LOOKED_SHARE * epoch_seconds))
        self.max_refresh_period = max(self.max_refresh_period, self.min_refresh_period)

    def _as_believed(self, claim: LocalTrainingProgress, epoch: int, now: float) -> LocalTrainingProgress:
        """Another's claim with as many samples, and as much speed, as is believed. One that is ahead of the swarm's
        `epoch` by itself is a peer that is here, and no more: hivemind takes it so from a client.

        But if it is ahead by one, what it had claimed of this epoch counts on: it takes the epoch for ended, and will
        be in its round. Were it left out, those who look a moment later would find samples missing, and compute them
        themselves, while the first wait for them in vain.
        """
        peer = PeerID(claim.peer_id)
        if peer == self.dht.peer_id:
            return claim
        if claim.samples_per_second == IN_ROUND:  # as before it went there: others come as soon as they would have come
            claim = claim.copy(update={"samples_per_second": self._speeds.get(peer, 0.0)})
        since_then = self._since_then(claim, now)
        self.claims.note(peer, claim.epoch, claim.samples_accumulated, claim.samples_accumulated + since_then)
        claim_of_epoch = self.claims.of(peer, epoch)
        if claim.epoch == epoch + 1 and claim_of_epoch is not None:
            both = claim_of_epoch.expected + claim.samples_accumulated
            claim = claim.copy(update={"epoch": epoch, "samples_accumulated": int(both)})
        share, limit = self.claims.share(peer), self._limit(claim)
        speed = claim.samples_per_second
        if share < 1 or self.claims.is_new(peer):  # hivemind counts on the speed of who is at another epoch, too
            speed = min(speed, self._typical_speed)
        speed *= share
        samples = believed_samples(claim.samples_accumulated, share, limit)
        if limit is not None:
            speed = min(speed, max(0.0, limit - samples) / max(1.0, now - claim.time))
        samples += min(since_then, speed * max(0.0, now - claim.time))  # or hivemind adds it, without a bound
        believed = {"samples_accumulated": int(samples), "samples_per_second": float(speed), "time": now}
        return claim.copy(update={**believed, "client_mode": claim.client_mode or claim.epoch > epoch})

    def _since_then(self, claim: LocalTrainingProgress, now: float) -> float:
        """Samples that it may have computed since it told its progress, by its speed; but no more than makes it as many
        as it brought to one of the last rounds. Where a step takes less time than a word needs, peers would be taken to
        have computed several, and be believed less for it."""
        samples = claim.samples_per_second * max(0.0, now - claim.time)
        brought = self._brought.get(PeerID(claim.peer_id))
        if not brought:
            return samples
        return min(samples, max(0.0, max(brought) - claim.samples_accumulated))

    def settle_round(self, epoch: int, group: Iterable[PeerID], weights: Mapping[PeerID, float]) -> None:
        """What the claims of `epoch` were worth in its round, and who came to it.

        :param weights: in samples, of those whose parts entered our slice
        """
        group = frozenset(group)
        if 2 * len(group) > self.global_progress.num_peers:  # else it is we who may be apart
            self._in_common = epoch + 1, time.monotonic()
        self.claims.settle(epoch, group, weights, self.target_batch_size)
        for peer, weight in weights.items():
            claim = self.claims.of(peer, epoch)
            has_kept_word = claim is not None and weight >= KEPT_WORD * claim.samples
            brought = max(weight, claim.samples) if has_kept_word and weight > 0 else weight
            self._brought.setdefault(peer, deque(maxlen=LAST_ROUNDS)).append(brought)
            self._brought.move_to_end(peer)
        while len(self._brought) > MAX_PEERS:
            self._brought.popitem(last=False)
        self.attendance.met(group, self.awaited)

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        if not isinstance(metadata, dict):
            metadata = {}
        now, kept, own_id = get_dht_time(), {}, self.dht.peer_id.to_bytes()
        for subkey, value in metadata.items():
            claim = read_record(self.dht, LocalTrainingProgress, subkey, value)
            if claim is not None and claim.peer_id == own_id and claim.epoch > self.local_progress.epoch:
                continue  # of an epoch that we have given up
            if claim is not None and is_plausible(claim, self.limits, now, self.metadata_expiration):
                kept[subkey] = (claim, value.expiration_time)
            elif isinstance(value, ValueWithExpiration) and value.value is not None:
                self.claims_dropped += 1
        self._note_uncallable([claim for claim, _ in kept.values() if claim.peer_id != own_id])
        self._note_own_epoch()
        own_epoch, _ = self._own_epoch
        self._put_in_our_own(kept)
        possible, max_advance = self._most_ahead(()), self._most_ahead(self._durations)
        others, clients = [], []
        for claim in (claim for claim, _ in kept.values() if claim.peer_id != own_id):
            (clients if claim.client_mode else others).append((claim.epoch, self._account_of(claim.peer_id)))
        self.highest_claim = max((epoch for epoch, _ in others), default=0)
        believed = believed_epoch(others, own_epoch, max_advance, clients)
        # a peer in client mode does not make the epoch, but may be the first to begin the next one
        here = own_epoch + possible if self._durations else believed
        trusted = {
            key: (claim, expiration)
            for key, (claim, expiration) in kept.items()
            if claim.epoch <= max(believed + claim.client_mode, here)
        }
        self.claims_dropped += len(kept) - len(trusted)
        told = [(claim.samples_per_second, PeerID(claim.peer_id)) for claim, _ in trusted.values()]
        speeds = sorted(speed if speed >= SLOWEST else self._speeds.get(peer, 0.0) for speed, peer in told)
        # the speeds are of devices that compute: hivemind does not count what a round keeps them waiting
        self.seconds_of_computing = self.target_batch_size / sum(speeds) if sum(speeds) > 0 else math.inf
        self._typical_speed = speeds[(len(speeds) - 1) // 2] if speeds else math.inf
        progress = super()._parse_swarm_progress_data(
            {
                subkey: ValueWithExpiration(self._as_believed(claim, believed, now).dict(), expiration)
                for subkey, (claim, expiration) in trusted.items()
            }
        )
        behind = [c for c, _ in trusted.values() if c.peer_id != own_id and c.epoch < own_epoch]
        self.behind = frozenset(PeerID(c.peer_id) for c in behind)
        self.num_ahead = sum(c.peer_id != own_id and c.epoch > own_epoch for c, _ in trusted.values())
        level = [c for c, _ in trusted.values() if c.peer_id != own_id and c.epoch == own_epoch]
        self.computing = frozenset(PeerID(c.peer_id) for c in level if c.samples_accumulated > 0)
        self.num_late = sum(c.epoch < own_epoch - 1 and c.time < now - LATE for c in behind)
        self._note_attendance([claim for claim, _ in trusted.values() if claim.peer_id != own_id], own_epoch)
        # hivemind counts records, and takes itself for alone while its own is not stored yet
        progress.num_peers = 1 + sum(claim.peer_id != own_id for claim, _ in trusted.values())
        self.on_look()
        if progress.num_peers > 1:
            self.on_others()
        return progress

    def _put_in_our_own(self, kept: dict[Any, tuple[LocalTrainingProgress, float]]) -> None:
        """What the DHT has of ours is older than what we know; a microbatch would be missing, or a whole share."""
        for subkey, (claim, expiration) in kept.items():
            if claim.peer_id == self.dht.peer_id.to_bytes():
                kept[subkey] = self._said(), expiration

    def seen(self) -> str:
        """What we know of the swarm, for a log."""
        known, own = self.global_progress, self.local_progress
        return (
            f"at epoch {known.epoch} {known.samples_accumulated} samples of {self.target_batch_size} are believed, "
            f"{own.samples_accumulated} are ours; {known.num_peers} peers, {1 + len(self.awaited)} will come"
        )

    def _note_uncallable(self, others: Sequence[LocalTrainingProgress]) -> None:
        """Count all others that say something plausible: peers that never meet are soon so far apart that epochs are
        no longer believed."""
        is_nobody_callable = self.client_mode and all(claim.client_mode for claim in others)
        self.num_uncallable = len(others) if is_nobody_callable else 0

    def _computes(self, claim: LocalTrainingProgress) -> bool:
        """Whether it has samples, or will have. A monitor is a member that never has one; a newcomer has none yet."""
        peer = PeerID(claim.peer_id)
        if claim.samples_per_second >= SLOWEST:
            self._speeds[peer] = claim.samples_per_second
            self._speeds.move_to_end(peer)
        now = time.monotonic()
        waits = claim.samples_per_second in (IN_ROUND, WAITS)
        known = peer in self._speeds or claim.samples_accumulated > 0 or waits
        first = now if known else self._first_idle.setdefault(peer, now)
        for kept in (self._speeds, self._first_idle):
            while len(kept) > MAX_PEERS:
                kept.popitem(last=False)
        return now - first < NEWCOMER

    def _note_attendance(self, others: Sequence[LocalTrainingProgress], own_epoch: int) -> None:
        near = {PeerID(claim.peer_id): claim.time for claim in others if claim.epoch >= own_epoch - NEAR}
        for peer, told in near.items():
            self.attendance.heard(peer, told)
        self.awaited = frozenset(filter(self.attendance.is_awaited, near))
        self._at_work = tuple(c for c in others if PeerID(c.peer_id) in self.awaited and self._computes(c))
        self.num_regulars = sum(self.attendance.is_regular(PeerID(claim.peer_id)) for claim in others)
