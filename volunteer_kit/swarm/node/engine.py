"""Run the core in a real process: hand it events, and execute its actions in their order.

One engine runs on one asyncio loop. It owns the core, the store, the slots and the exchange, and talks to the training
process through `tell`. Each message and timer becomes an event for the core; `_execute` has one method for each action.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from volunteer_kit.swarm.node.access import Access, named_in
from volunteer_kit.swarm.node.clock import RunningClock
from volunteer_kit.swarm.node.going_back import CHECKPOINTS, GoingBack
from volunteer_kit.swarm.node.gradients import Gradients
from volunteer_kit.swarm.node.head_layout import Answers, HeadLayout
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.statements import BadSignature
from volunteer_kit.swarm.node.states import OPENS_WITHIN, States
from volunteer_kit.swarm.node.store import NodeStore, StoreError
from volunteer_kit.swarm.node.talk import (
    CHECKED_FIRST,
    Admit,
    Brought,
    Checked,
    Delivered,
    Forgive,
    Found,
    Founded,
    GiveOrder,
    History,
    Leave,
    Left,
    Load,
    NodeSpec,
    OrderToSign,
    PrepareOrder,
    Progress,
    Recomputed,
    Seen,
    SpeedMeasured,
    StateWritten,
    Step,
    StepOf,
    Stepped,
    Told,
)
from volunteer_kit.swarm.node.transfers import Transfers
from volunteer_kit.swarm.node.transport import Transport
from volunteer_kit.swarm.node.verification import Named, Verification
from volunteer_kit.swarm.node.verified_words import MARK
from volunteer_kit.swarm.rounds.exchange import Exchange
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.normalised import scales_of, unit_of
from volunteer_kit.swarm.rounds.reducer import decode_answer
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Cause, LedgerRecord, Slice
from volunteer_kit.swarm.sync.core import SyncCore
from volunteer_kit.swarm.sync.entries import Entry, Member, RollbackOrder
from volunteer_kit.swarm.sync.log import LogItem, items_behind
from volunteer_kit.swarm.sync.messages import (
    CHECKPOINT,
    Adopt,
    AnswerRefused,
    AnswersHeld,
    Apply,
    Ban,
    CommitmentsHeard,
    Computed,
    Disregarded,
    Durable,
    EndExchange,
    Event,
    ExchangeEnded,
    ExchangeWithout,
    FetchAnswers,
    FetchSnapshot,
    HeadRecord,
    LeaveRequested,
    Measured,
    Ordered,
    PeerSeen,
    Persist,
    Proven,
    Received,
    Repair,
    Send,
    SetTimer,
    Sketched,
    Snapshot,
    SnapshotFailed,
    SnapshotTaken,
    Started,
    StartExchange,
    Tell,
    Timer,
    TimerFired,
    Topic,
)
from volunteer_kit.swarm.sync.messages import Compute as ComputeAction
from volunteer_kit.swarm.sync.phases import Phase
from volunteer_kit.swarm.wire import WireError

logger = logging.getLogger(__name__)
Task = asyncio.Task[None]

PROGRESS_EVERY: Final = 1.0  # s
STUCK: Final = 5.0  # s in which none of several peers has brought an answer: others are asked
NUMBERS_LEFT: Final = 2**20  # more contributions than a power cut can take from the ledger
MAY_ENTER: Final = 600.0  # s that an answer is kept which no entry of the log has
ANSWERS_KEPT: Final = 2 * 2**30  # bytes


class Engine:
    """One peer's node.

    :param tell: hands a message to the training process
    :param access: what is known of the others' accounts; None: there is no authority
    """

    def __init__(
        self,
        spec: NodeSpec,
        transport: Transport,
        store: NodeStore,
        slots: Slots,
        layout: Layout,
        signatures: Signatures,
        exchange: Exchange,
        tell: Callable[[Any], None],
        access: Access | None = None,
    ):
        self._access = access or Access()
        self._spec, self._transport, self._store, self._slots = spec, transport, store, slots
        self._signatures, self._exchange = signatures, exchange
        self._layout = HeadLayout(layout)
        self._tell = tell
        self._clock = RunningClock()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[Task] = set()  # the loop itself holds them weakly
        self._storing: set[Task] = set()  # of answers that are not on the disk yet
        self.config = SyncConfig(**spec.sync)
        peer = transport.peer_id
        self.me = Member(peer, spec.account or peer, not spec.client_mode, spec.observes)
        self._events: deque[Event] = deque()
        self._executing = False
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        ledger = store.durable().ledger
        self._gradients = Gradients(
            slots,
            store.slot_table(),
            tell,
            self.config.cells,
            self.config.target_batch_size,
            dict(ledger.expired) if ledger is not None else {},
            spec.averages_ways,
            {number: store.names(number) for number in store.slot_table()},
        )
        self._is_checked_first = False  # was our last part taken for checking alone?
        self._verification = self._build_verification(layout) if spec.verification is not None else None
        # answers that no entry of the log has yet -> when they came, s
        self._came = dict.fromkeys(store.durable().held, time.monotonic())
        self._fetched_now: set[bytes] = set()  # hashes of the answers that are being fetched
        self._founding = False
        self._round_began = self._applied_at = time.monotonic()
        self._traffic = (0, 0)  # bytes sent and received when the last step was told
        self.left = asyncio.Event()
        self._transfers = Transfers(
            transport,
            answer=store.answer,
            keep_answer=self._keep_answer,
            largest_answer=layout.largest_answer,
            elements=layout.elements,
            checkpoint=lambda lineage, digest: self._back.file_of(lineage, digest),
        )
        self._states = States(
            store,
            self._transfers,
            signatures,
            self._access,
            self.config.kept_entries,
            self.config.sketch_tolerance,
            core=lambda: self.core,
            tell=tell,
            handle=self.handle,
            spawn=self._spawn,
            begin=self._begin_with,
            load_message=self._load_message,
            is_fresh=lambda: not self._has_model and not spec.state_digest,
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            Delivered: self._on_delivered,
            Stepped: self._on_stepped,
            StateWritten: self._states.on_written,
            Checked: self._states.on_checked,
            SpeedMeasured: lambda message: None,
            Recomputed: self._on_recomputed,
            Forgive: self._on_forgive,
            Admit: self._on_admit,
            Seen: self._on_seen,
            Found: self._on_found,
            PrepareOrder: self._on_prepare_order,
            GiveOrder: self._on_give_order,
            Leave: lambda message: self.handle(LeaveRequested()),
        }
        self._execute: dict[type, Callable[[Any], None]] = {
            Persist: self._persist,
            Send: self._send,
            SetTimer: self._set_timer,
            StartExchange: self._start_exchange,
            EndExchange: self._end_now,
            ExchangeWithout: self._go_on_without,
            FetchAnswers: self._fetch_answers,
            FetchSnapshot: self._fetch_snapshot,
            Apply: self._apply,
            Adopt: self._adopt,
            Repair: self._repair,
            ComputeAction: self._compute,
            Ban: self._ban,
            Tell: self._tell_people,
        }
        self._back = GoingBack(
            store.folder / CHECKPOINTS,
            self._transfers,
            self._who_may_have,
            self._states.look_at,
            tell,
            self._spawn,
            on_state=self._layout.arrived,
        )
        durable, load = self._recover()
        self.core = SyncCore(self.config, self.me, durable, None, self.now)
        self._gradients.note(self.core.ledger)
        self._has_model = load is not None
        if load is not None:
            assert durable.head is not None
            self._tell_history(durable.head.snapshot.items)
            tell(load)
        transport.on_message = self._on_message
        exchange.on_ended = self._on_exchange_ended
        exchange.on_answer = self._on_answer
        exchange.on_refused = lambda answer: self.handle(AnswerRefused(answer.slice))
        transport.on_measured = lambda mbps: self.handle(Measured(mbps))

    # --- life ---

    @property
    def now(self) -> float:
        """s, of the core's clock."""
        return self._clock()

    def start(self) -> None:
        """Begin; from here on the loop drives everything."""
        self.handle(Started())
        self._gradients.grant()
        self._spawn(self._report_progress())

    def stop(self) -> None:
        """End all that was begun."""
        for task in self._tasks:
            task.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._layout.close()
        if self._verification is not None:
            self._verification.close()

    def _spawn(self, work: Any) -> Task:
        async def watched() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception:
                logger.exception("A part of the node failed")

        task = self._loop.create_task(watched())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: work.close())  # it may have been cancelled before it began
        return task

    def _recover(self) -> tuple[Durable, Load | None]:
        """Return the core's first state. Parameters are those of the newest state with the steps behind it. If it is
        not whole, this peer joins anew, and what it had computed cannot be placed any more."""
        head, state = self._store.durable().head, self._store.newest_state(check=True)
        if head is not None and state is not None:
            snapshot, path = state
            log = head.snapshot.items
            behind = items_behind(log, snapshot.head.lineage)
            if behind is not None and all(self._is_whole(item) for item in behind):
                self._signatures.load(self._store.signatures)
                self._settle_residuals(log)
                self._states.heads[head.snapshot.head.lineage] = head.snapshot
                durable = self._store.durable()
                if self._store.rebooted:  # what was not flushed may be gone, of slots and of the ledger
                    durable = replace(durable, ledger=self._without_contributions(durable.ledger))
                return durable, self._load_message(snapshot, path, behind, "restart")
        durable = self._store.durable()
        ledger = self._without_contributions(durable.ledger)
        if ledger is not None:
            ledger = ledger._replace(counted=(), lately=())
        return replace(durable, head=None, ledger=ledger), None

    def _without_contributions(self, ledger: LedgerRecord | None) -> LedgerRecord | None:
        """Drop the contributions, which nobody can use. The peer may have sent none of the next numbers."""
        self._gradients.table.clear()
        if ledger is None:
            return None
        lost = sum(each.samples * (each.pending | each.in_flight).bit_count() for each in ledger.live)
        expired = dict(ledger.expired)
        if lost:
            expired[Cause.UNKNOWN] = expired.get(Cause.UNKNOWN, 0) + lost
        return ledger._replace(live=(), expired=tuple(expired.items()), next_number=ledger.next_number + NUMBERS_LEFT)

    def _is_whole(self, item: LogItem) -> bool:
        """Whether the bytes of all its answers are here; damaged ones are forgotten."""
        step = item.step
        try:
            for each in step.answers if isinstance(step, Entry) else ():
                self._store.answer(each.digest)
        except KeyError:
            return False
        return True

    def _settle_residuals(self, log: Iterable[LogItem]) -> None:
        """A process that died between the write of a head and its step left residuals of the round tentative."""
        for item in log:
            if isinstance(item.step, Entry):
                self._exchange.settle(item.step.fingerprint, item.step.answers)

    # --- events ---

    def handle(self, event: Event) -> None:
        """Hand the core an event, and execute what it says."""
        self._events.append(event)
        if self._executing:
            return
        self._executing = True
        try:
            while self._events:
                phase = self.core.phase
                for action in self.core.handle(self._events.popleft(), self.now):
                    self._execute[type(action)](action)
                self._gradients.note(self.core.ledger)
                if self.core.phase is not phase:
                    logger.debug("%s -> %s", phase.value, self.core.phase.value)
        finally:
            self._executing = False

    def on_trainer(self, message: Any) -> None:
        """The training process says something."""
        self._handlers[type(message)](message)

    def _on_message(self, peer: str, data: bytes) -> None:
        if data[:1] == MARK:
            if self._verification is not None:
                self._verification.on_message(peer, data[1:])
            return
        try:
            message = self._signatures.open(peer, data)
        except (WireError, BadSignature) as error:
            logger.debug("A message of %s was refused: %s", peer, error)
            self._tell_found()
            return
        why = self._access.why_misnamed(message)
        if why is not None:
            logger.info("A %s of %s was refused: %s", type(message.body).__name__, peer, why)
            return
        self.handle(Received(peer, message))
        self._tell_found()

    def _tell_found(self) -> None:
        while self._signatures.found:
            self.handle(Proven(self._signatures.found.pop()))

    def _on_seen(self, message: Seen) -> None:
        self.handle(PeerSeen(self.me, message.own_speed))
        for peer, account, public, speed in message.peers:
            self.handle(PeerSeen(Member(peer, account or peer, public), speed))

    def _on_admit(self, message: Admit) -> None:
        self._access.take(message)
        self._transport.check_again()

    def _on_found(self, message: Found) -> None:
        """Begin the run: this peer is its only founder, and has its parameters."""
        if self.core.head is None:
            item = LogItem.genesis([self.me], self._spec.origin, self._spec.state_digest)
            self._states.founds_with(self._access.token)
            self._begin_with(Snapshot((item,), Accounts()))

    def _begin_with(self, beginning: Snapshot) -> None:
        """Stand at the run's beginning, with the parameters that the training process has."""
        self._founding = True
        self.handle(SnapshotTaken(beginning))
        self._founding = False

    def _on_stepped(self, message: Stepped) -> None:
        self._gradients.reached(message.lineage)
        self.handle(Sketched(message.lineage, message.sketch))
        self._states.write_if_due(message.lineage)

    def _on_delivered(self, message: Delivered) -> None:
        self._spawn(self._gradients.take_delivery(message, self.core, self._count))

    def _count(self, delivery: Delivered) -> None:
        self.handle(Computed(delivery.samples, delivery.lineage, self._gradients.is_apart(delivery)))

    # --- actions: the disk, time, messages ---

    def _persist(self, action: Persist) -> None:
        self._gradients.place(self.core.ledger)
        heads = [record.snapshot for record in action.records if isinstance(record, HeadRecord)]
        live = {each.number for each in self.core.ledger.live}
        for record in action.records:
            if isinstance(record, LedgerRecord):  # of one event may come several, and the core is behind the last one
                live |= {each.number for each in record.live}
        table = {number: slot for number, slot in self._gradients.table.items() if number in live}
        signatures: bytes | None = None
        flush = any(not isinstance(record, LedgerRecord) for record in action.records)
        if flush and self.core.log is not None:
            self._states.note_heads(heads)
            self._signatures.prune(self.core.log.items, self.core.replay)
            signatures = self._signatures.export(self.core.log.items, self.core.ballot)
        names = self._gradients.names if self._verification is not None else None
        self._store.write(action.records, slots=table, names=names, signatures=signatures, flush=flush)

    def _send(self, action: Send) -> None:
        try:
            data = self._signatures.seal(action.message, action.to)
            named = () if self._access.is_open else named_in(action.message)
            self._transport.send(action.to, data, [member.peer for member in named])
        except (BadSignature, WireError) as error:
            logger.warning("A %s is not sent: %s", type(action.message.body).__name__, error)

    def _set_timer(self, action: SetTimer) -> None:
        timer = self._timers.pop(action.timer, None)
        if timer is not None:
            timer.cancel()
        if action.at is not None:
            wait = max(0.0, action.at - self.now)
            self._timers[action.timer] = self._loop.call_later(wait, self.handle, TimerFired(action.timer))

    # --- actions: rounds ---

    def _start_exchange(self, action: StartExchange) -> None:
        self._round_began = time.monotonic()
        assert self.core.head is not None
        borrowed = self._gradients.borrow(share.number for share in action.shares)
        self._spawn(self._run_exchange(action, self.core.head.epoch, borrowed, self._layout.here))

    async def _run_exchange(
        self, action: StartExchange, epoch: int, borrowed: dict[int, int], layout: Future[Layout] | None
    ) -> None:
        """:param layout: at the round's beginning; None: it is not known"""
        try:
            at_head = await _result_of(layout)
            if at_head is None:
                self._exchange.decline(action)
            elif self._verification is None:
                await self._exchange.run(action, epoch, lambda number: self._slots.view(borrowed[number]), at_head)
            else:
                await self._run_verified(self._verification, action, epoch, borrowed, at_head)
        finally:
            self._gradients.give_back(borrowed)

    # --- verified rounds ---

    def _build_verification(self, layout: Layout) -> Verification:
        assert self._spec.verification is not None
        return Verification(
            self.me.peer,
            self._spec.verification,
            clips=self._spec.rule == "centered_clip",
            transport=self._transport,
            signatures=self._signatures,
            layout=layout,
            max_staleness=self.config.max_staleness,
            named=lambda number: Named(*self._gradients.named(number)),
            answer=self._store.answer,
            parts=self._exchange.parts_of,
            lineage=self._lineage_of,
            tell=self._tell,
        )

    async def _run_verified(
        self,
        verification: Verification,
        action: StartExchange,
        epoch: int,
        borrowed: dict[int, int],
        layout: Layout,
    ) -> None:
        """The exchange, of what the members have committed to."""

        def gradient(number: int) -> torch.Tensor:
            return self._slots.view(borrowed[number])

        began = self._loop.time()
        commitments = await verification.commit(action, epoch, gradient)
        if commitments is not None:
            fingerprint = action.round.fingerprint
            heard = CommitmentsHeard(
                fingerprint, commitments.digest, commitments.may_enter, commitments.disregarded
            )
            self.handle(heard)
            await self._exchange.run(action, epoch, gradient, layout, commitments, self._loop.time() - began)

    def _take_verdict_of(self, verification: Verification, step: Entry) -> None:
        """Take the members' verdict on whose work enters, and disregard our contributions that are only checked."""
        numbers = verification.committed(step)
        if numbers:
            self.handle(Disregarded(numbers))
            if not self._is_checked_first:
                self._tell(Told(CHECKED_FIRST, "the others compute some of them again before they enter"))
            self._is_checked_first = True

    def _lineage_of(self, epoch: int) -> bytes:
        items = self.core.log.items if self.core.log is not None else ()
        return next((item.head.lineage for item in reversed(items) if item.head.epoch == epoch), b"")

    def _on_recomputed(self, message: Recomputed) -> None:
        if self._verification is not None:
            self._spawn(self._verification.report(message))

    def _on_forgive(self, message: Forgive) -> None:
        if self._verification is not None:
            self._verification.forgive(message.peer)

    def _end_now(self, action: EndExchange) -> None:
        if self._verification is not None:
            self._verification.end(action.fingerprint)
        self._exchange.end(action.fingerprint)

    def _go_on_without(self, action: ExchangeWithout) -> None:
        if self._verification is not None:
            self._verification.without(action.fingerprint, action.silent)
        self._exchange.without(action.fingerprint, action.silent)

    # --- answers ---

    def _on_exchange_ended(self, fingerprint: bytes, answers: tuple[Answer, ...]) -> None:
        """The exchange is over; these answers are here, and on the disk before anybody is told."""
        self._spawn(self._end_exchange(fingerprint, answers, list(self._storing)))

    async def _end_exchange(self, fingerprint: bytes, answers: tuple[Answer, ...], storing: list[Task]) -> None:
        if storing:
            await asyncio.wait(storing)
        stored = tuple(answer for answer in answers if self._store.has_answer(answer.digest))
        self.handle(ExchangeEnded(fingerprint, stored))

    def _on_answer(self, answer: Answer, data: bytes) -> None:
        """An answer came, in time or late; its hash and its reducer's signature hold."""
        storing = self._spawn(self._store_answer(answer.digest, data))
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)

    async def _store_answer(self, digest: bytes, data: bytes) -> None:
        try:
            await self._loop.run_in_executor(None, self._keep_answer, digest, data)
        except StoreError as error:
            self._tell(Told("warning", str(error)))
            return
        self.handle(AnswersHeld(frozenset({digest})))

    def _keep_answer(self, digest: bytes, data: bytes) -> None:
        """Raises StoreError."""
        self._came[digest] = time.monotonic()
        self._store.put_answer(digest, data)

    def _fetch_answers(self, action: FetchAnswers) -> None:
        head = self.core.head.lineage if self.core.head is not None else b""
        self._spawn(self._get_answers(action, head, self._layout.here))

    async def _get_answers(self, action: FetchAnswers, head: bytes, layout: Future[Layout] | None) -> None:
        """:param head: lineage; `layout` is that of its next step, None: it is not known, and nothing can be judged"""
        at_head = await _result_of(layout)
        if at_head is None and action.judged:
            return
        fitting: set[Slice] = set()
        unusable: set[Slice] = set()

        def is_usable(digest: bytes, data: bytes) -> bool:
            """Return whether at least one answer can use the bytes."""
            judged = [answer for answer in action.judged if answer.digest == digest]
            for answer in judged:
                why = _why_no_answer(at_head, answer, data)
                if why is not None:
                    logger.info("An answer that was fetched makes no sense: %s", why)
                (fitting if why is None else unusable).add(answer.slice)
            return not judged or any(answer.slice in fitting for answer in judged)

        def here_now(digests: frozenset[bytes]) -> AnswersHeld:
            return AnswersHeld(digests, frozenset(each for each in fitting if each.digest in digests), head)

        late = [answer for answer in action.answers if answer.digest in action.digests]
        late = [answer for answer in late if not self._store.has_answer(answer.digest)]
        if late:
            await self._exchange.await_late(action.round, [answer.reducer for answer in late])
            if self._storing:
                await asyncio.wait(list(self._storing))
        here = frozenset(digest for digest in action.digests if self._store.has_answer(digest))
        if here and action.judged:  # they may be of another step
            here = await self._loop.run_in_executor(None, self._usable, here, is_usable)
        if here:
            self._came.update(dict.fromkeys(here, time.monotonic()))
            self.handle(here_now(here))
        asked = action.digests - here - {each.digest for each in unusable} - self._fetched_now
        missing = set(asked)
        self._fetched_now |= asked

        async def get(source: str, digests: Iterable[bytes]) -> None:
            got = await self._transfers.fetch_answers(sorted(digests), source, OPENS_WITHIN, is_usable)
            missing.difference_update(got, (each.digest for each in unusable))
            if got:
                self.handle(here_now(got))

        try:
            await self._get_from_each(_shared_out(missing, action), get)
            for source in action.sources:
                if missing and source != self.me.peer:
                    await get(source, missing)
        finally:
            self._fetched_now -= asked
        if self.core.head is not None and self.core.head.lineage == head:
            for each in unusable:
                self.handle(AnswerRefused(each))

    async def _get_from_each(
        self, wanted: Mapping[str, Iterable[bytes]], get: Callable[[str, Iterable[bytes]], Awaitable[None]]
    ) -> None:
        """Get answers from several peers at once, until they are here or none has come for `STUCK`."""
        getting = {self._spawn(get(source, digests)) for source, digests in wanted.items() if source != self.me.peer}
        done = getting
        while getting and done:
            done, getting = await asyncio.wait(getting, timeout=STUCK, return_when=asyncio.FIRST_COMPLETED)
        for task in getting:
            task.cancel()
        if getting:
            await asyncio.wait(getting)

    def _usable(self, digests: frozenset[bytes], is_usable: Callable[[bytes, bytes], bool]) -> frozenset[bytes]:
        return frozenset(digest for digest in digests if is_usable(digest, self._bytes_of(digest)))

    # --- actions: steps ---

    def _apply(self, action: Apply) -> None:
        item = action.item
        step, membership = item.step, item.membership
        self._applied_at = time.monotonic()
        if isinstance(step, Entry):
            self._exchange.settle(step.fingerprint, step.answers)
            if self._verification is not None:
                self._take_verdict_of(self._verification, step)
        self._exchange.drop_rounds()
        if action.own:
            self._is_checked_first = False
        own, names = self._gradients.settled(action.own, self.core.ledger)
        done = self._gradients.done(action.own, item.head.lineage)
        sent, received = self._transport.traffic
        before, self._traffic = self._traffic, (sent, received)
        if isinstance(step, RollbackOrder):
            self._layout.await_state()
            self._back.follow(step, self._step_of(item))
        else:
            for answers in self._answers_of([item]):
                self._layout.step(answers)
            self._back.step(
                Step(
                    self._step_of(item),
                    own,
                    names,
                    time.monotonic() - self._round_began,
                    sent - before[0],
                    received - before[1],
                    done,
                    self._gradients.life,
                    membership.openings,
                    membership.unconfirmed is not None,
                )
            )
            self._states.write_if_on_grid(item.head.epoch)
        self._prune()

    def _answers_of(self, items: Iterable[LogItem]) -> Iterator[Answers]:
        """The answers of each step; of damaged ones no bytes."""
        for item in items:
            if isinstance(item.step, Entry) and self._layout.goes_by_steps:
                yield [(answer.cells, self._bytes_of(answer.digest)) for answer in item.step.answers]

    def _bytes_of(self, digest: bytes) -> bytes:
        try:
            return self._store.answer(digest)
        except KeyError:
            return b""  # nobody's answer: the layout fails, and the training process finds it, too

    def _step_of(self, item: LogItem) -> StepOf:
        step, head = item.step, item.head
        if not isinstance(step, Entry):
            parent = step.parent if step is not None else b""
            return StepOf(
                head.lineage, parent, head.generation, head.epoch, is_step=False, sequence=head.sequence
            )
        cells = self.config.cells
        return StepOf(
            head.lineage,
            step.parent,
            head.generation,
            head.epoch,
            tuple((answer.cells, self._store.answer_path(answer.digest)) for answer in step.answers),
            step.missing,
            len(step.group),
            round(step.sample_cells / cells),
            1 - step.missing.bit_count() / cells,
            sequence=head.sequence,
            shares=brought_to(step, cells) if self._spec.observes else (),
            scales=scales_of(step, cells, unit_of(self.config.target_batch_size)) if self._spec.averages_ways else (),
        )

    def _tell_history(self, items: Iterable[LogItem]) -> None:
        if self._spec.observes:
            self._tell(History(tuple(self._step_of(item) for item in items)))

    def _prune(self) -> None:
        """Keep the answers that a restart or a peer that is a little behind needs, and those that may yet enter."""
        assert self.core.log is not None and self.core.ballot is not None
        entries = [self.core.ballot.accepted, *(item.step for item in self.core.log.items)]
        keep = {answer.digest for entry in entries if isinstance(entry, Entry) for answer in entry.answers}
        old = time.monotonic() - MAY_ENTER
        for digest, at in list(self._came.items()):  # threads write to it as well
            if at < old or digest in keep:
                del self._came[digest]
        keep.update(self._came)
        self._store.prune_answers(keep, ANSWERS_KEPT)

    # --- actions: states ---

    def _adopt(self, action: Adopt) -> None:
        snapshot = action.snapshot
        self._settle_residuals(snapshot.items)
        self._exchange.drop_rounds()
        self._back.give_up()
        self._tell_history(snapshot.items)
        reason, self._has_model = "behind" if self._has_model else "joined", True
        if self._founding:
            self._layout.begin()
            self._states.keep_founder(snapshot)
            self._tell(Founded(snapshot.head.lineage, snapshot.head.epoch))
            self._states.write_if_on_grid(0)
        else:
            self._states.adopt(snapshot, reason)

    def _repair(self, action: Repair) -> None:
        self._back.give_up()
        self._states.repair(action.snapshot, action.items)

    def _load_message(self, snapshot: Snapshot, path: Path, items: Iterable[LogItem], reason: str) -> Load:
        head, items = snapshot.head, tuple(items)
        self._layout.load(path, self._answers_of(items))
        steps = tuple(self._step_of(item) for item in items)
        self._gradients.done((), steps[-1].lineage if steps else head.lineage)
        return Load(head.lineage, head.epoch, path, steps, reason, head.generation, head.sequence)

    def _fetch_snapshot(self, action: FetchSnapshot) -> None:
        if action.source == CHECKPOINT:
            if self._spec.founds and self.core.head is None:
                self._loop.call_soon(self._on_found, Found())
            else:
                self._loop.call_soon(self.handle, SnapshotFailed(CHECKPOINT))
            return
        self._states.fetch(action.source, action.fork)

    # --- the monitor's orders ---

    def _on_prepare_order(self, message: PrepareOrder) -> None:
        self._back.keep(message.parent, message.digest, message.path)
        if self.core.head is None:
            self._tell(OrderToSign(None))
            return
        order = self.core.order_back(message.parent, message.digest, 1 + secrets.randbelow(2**32 - 1))
        self._tell(OrderToSign(order, self._signatures.order_digest(order)))

    def _on_give_order(self, message: GiveOrder) -> None:
        if self._signatures.check_order(message.order, message.signature):
            self.handle(Ordered(message.order))
        else:
            self._tell(Told("warning", "The monitor's key is not certified for this run: nobody follows its order."))

    def _who_may_have(self, order: RollbackOrder) -> list[str]:
        """Peers that may have an order's state, in an order of this peer's own, so that not all ask the same one."""
        peers = {member.peer for member in order.members}
        if self.core.log is not None:
            peers |= self.core.log.last.membership.view.keys()
        return random.sample(sorted(peers - {self.me.peer}), len(peers - {self.me.peer}))

    # --- actions: people ---

    def _compute(self, action: Any) -> None:
        self._back.compute(action.on)

    def _ban(self, action: Ban) -> None:
        self._transport.ban(action.verdict.peer)
        self._tell(Told("banned", action.verdict.peer))

    def _tell_people(self, action: Tell) -> None:
        logger.info("%s: %s", action.topic.value, action.about)
        self._tell(Told(action.topic.value, action.about))
        if action.topic is Topic.LEFT:
            self._gradients.note(self.core.ledger)
            self._tell(self._progress())  # what became of all that it computed, exactly
            self._tell(Left())
            self.left.set()

    # --- what others see ---

    async def _report_progress(self) -> None:
        while True:
            self._tell(self._progress())
            await asyncio.sleep(PROGRESS_EVERY)

    def _progress(self) -> Progress:
        core, ledger, cells = self.core, self.core.ledger, self.config.cells
        pending = sum(each.samples * (each.pending | each.in_flight).bit_count() for each in ledger.live) / cells
        totals = {"computed": ledger.computed / cells, "committed": ledger.committed / cells, "pending": pending}
        totals |= {cause.value: amount / cells for cause, amount in ledger.expired.items()}
        view = core.log.last.membership.view if core.log is not None else {}
        here = {each.peer: each for each in (*core.known, *view.values(), self.me)}
        computing = sorted(peer for peer in view.keys() | core.in_touch | {self.me.peer} if not here[peer].observes)
        share = min(1.0, (time.monotonic() - self._applied_at) / max(core.epoch_seconds, 0.1))
        return Progress(
            core.phase.value,
            core.head.epoch if core.head is not None else -1,
            round(pending),
            max(round(pending), round(share * self.config.target_batch_size)),
            len(view.keys() | core.in_touch | {self.me.peer}),
            core.phase is Phase.ISOLATED,
            core.alone_for,
            *self._transport.traffic,
            totals,
            core.epoch_seconds,
            len(computing),
            computing.index(self.me.peer) if self.me.peer in computing else 0,
            core.decides_alone,
        )


def _shared_out(digests: Collection[bytes], action: FetchAnswers) -> dict[str, list[bytes]]:
    """Share answers out among the peers to be asked first: each to its reducer, whose share fits its line, or else to
    the sources in turn. One peer with all of them would send for as long as a round takes."""
    reducers = {answer.digest: answer.reducer for answer in action.answers}
    wanted: dict[str, list[bytes]] = {}
    for place, digest in enumerate(sorted(digests)):
        source = reducers.get(digest, "")
        if source not in action.sources and action.sources:
            source = action.sources[place % len(action.sources)]
        wanted.setdefault(source, []).append(digest)
    return wanted if action.sources else {}


async def _result_of(layout: Future[Layout] | None) -> Layout | None:
    """None: it is not known, or cannot be told."""
    if layout is None:
        return None
    try:
        return await asyncio.shield(asyncio.wrap_future(layout))
    except ValueError as error:
        logger.warning("The layout of this round cannot be told: %s", error)
        return None


def _why_no_answer(layout: Layout | None, answer: Answer, data: bytes) -> str | None:
    """Why these bytes are no average of the answer's cells; None: they are.

    :param layout: of their step
    """
    assert layout is not None
    try:
        decode_answer(layout, answer.cells, data)
    except ValueError as error:
        return str(error)
    return None

def brought_to(entry: Entry, cells: int) -> tuple[Brought, ...]:
    """Whose samples an entry holds, and how many: a quorum has certified it, so every peer says the same.

    :param cells: of the parameter vector
    """
    accounts = {member.peer: member.account for member in entry.group}
    sample_cells: dict[str, int] = {}
    for answer in entry.answers:
        for share in answer.shares:
            sample_cells[share.peer] = sample_cells.get(share.peer, 0) + share.samples * share.cells.bit_count()
    return tuple(Brought(peer, accounts[peer], amount / cells) for peer, amount in sorted(sample_cells.items()))
