"""The synchronization core of one peer: a state machine that commits, then applies.

Read it from `handle`: events come in, actions go out. The parts, in the order of one epoch: the heartbeat, ballots, a
round, its proposal and votes, the commit; then catching up, branches, rollbacks, and leaving. `docs/protocol.md` says
why each rule is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from statistics import median
from typing import Any, Final, NamedTuple

from volunteer_kit.swarm.sync import leading
from volunteer_kit.swarm.sync.ballots import Ballot, is_quorum, leader_order, may_lead
from volunteer_kit.swarm.sync.beliefs import REDUCER_SLACK, SENDER_SLACK, Beliefs
from volunteer_kit.swarm.sync.branches import (
    ALONE_SLACK,
    Fork,
    OpeningAttempt,
    Suffix,
    checked_suffix,
    entries_behind,
    last_order,
    opener,
    opening_members,
)
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye, Membership
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contacts import Contacts
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Cause, Ledger, Slice
from volunteer_kit.swarm.sync.drift import outliers
from volunteer_kit.swarm.sync.entries import Entry, Head, Member, Opening, RollbackOrder, Verdict
from volunteer_kit.swarm.sync.judging import Judge, why_malformed
from volunteer_kit.swarm.sync.leading import Leadership
from volunteer_kit.swarm.sync.log import Log, LogItem, is_chain
from volunteer_kit.swarm.sync.messages import (
    CHECKPOINT,
    Accuse,
    Action,
    Adopt,
    AnswerRefused,
    AnswersHeld,
    Apply,
    Ask,
    AskItems,
    AskOpening,
    BallotRecord,
    Ban,
    Begin,
    Body,
    CommitmentsHeard,
    Compute,
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
    Held,
    Items,
    Lead,
    LeaveRequested,
    Measured,
    Message,
    OpeningRecord,
    Order,
    Ordered,
    PeerSeen,
    Persist,
    Promise,
    Propose,
    Proven,
    Received,
    Record,
    Refuse,
    Repair,
    Report,
    Round,
    Send,
    SetTimer,
    SignOpening,
    Sketched,
    Sketches,
    Snapshot,
    SnapshotFailed,
    SnapshotTaken,
    Started,
    StartExchange,
    Tell,
    Timer,
    TimerFired,
    Topic,
    Vote,
    Without,
)
from volunteer_kit.swarm.sync.phases import COMPUTING, Phase, PhaseClock
from volunteer_kit.swarm.sync.slot import Slot
from volunteer_kit.swarm.sync.timing import Deadline, agreed

USUAL_BANDWIDTH: Final = 10.0  # Mbit/s, until the process has measured it
LONGEST_LEFT_OUT: Final = 5  # doublings
ATTEMPTS_AHEAD: Final = 8  # of what a peer has signed: nobody can use up the numbers
STUCK: Final = 3  # times a patience: a client then follows a branch of strangers, and a branch opens without who should
STRAYS: Final = 3  # reports of a higher turn, called back each time; then the leader does not count on that peer
SECOND_OPINION: Final = 2.0  # s that a leader waits for more promises if only one speaks of an accepted entry
OFTEN: Final = 2  # slots led in vain, one after another; then a leader's turns are skipped
LEAST_PATIENCE: Final = 2  # halvings, with a leader that led in vain before
LONG_EPOCH: Final = 3.0  # epochs without a commit; then the leader does not do its part
ROUNDS_IN_VAIN: Final = 2  # at one ballot; then the next leader has its turn
LEARNED_FROM: Final = 2  # rounds; until then a dead member costs as long as the run allows
WAITED: Final = 4  # heartbeats, and parts of an epoch, that a round waits for a member that has the last answers soon
ABSENT_SHARE: Final = 1 / 4  # of the members in touch: for more of them a round waits longer
REPORTS_OF_EPOCH: Final = 8  # that a member sends, where a heartbeat is longer
HISTORY: Final = 16  # epochs by whose median an epoch's duration is judged
LINEAGES_ASKED: Final = 64  # newest first, that a peer names when it asks for items


class _Fetching(NamedTuple):
    """A snapshot on its way."""

    source: str
    since: float  # s
    snapshot: Snapshot | None = None  # it is here, and waits for the source's items behind it
    mends: bool = False  # it is here and on our branch, and waits for answers of steps behind it


class SyncCore:
    """One peer's part in the protocol.

    :param me: this peer
    :param durable: what its process found on the disk
    :param genesis: of a founder; a peer with neither joins by a snapshot
    :param now: s, of the clock that every call of `handle` uses
    """

    def __init__(
        self, config: SyncConfig, me: Member, durable: Durable | None, genesis: LogItem | None, now: float
    ):
        self.config = config
        self.me = me
        self._now = now
        self._actions: list[Action] = []
        durable = durable or Durable()
        self.ledger = Ledger(config.cells, durable.ledger, config.target_batch_size)
        self.accounts = Accounts()
        self._held: dict[bytes, int] = dict.fromkeys(durable.held, 0)  # hash of an answer -> epoch
        self._last_opening = durable.opening.opening if durable.opening is not None else None
        self._fresh_genesis = durable.head is None and genesis is not None
        if durable.head is not None:
            self.accounts = durable.head.snapshot.accounts
            self.log: Log | None = Log(durable.head.snapshot.items, config.kept_entries)
        else:
            self.log = Log((genesis,), config.kept_entries) if genesis is not None else None
        self._clock = PhaseClock(Phase.COLLECTING if self.log is not None else Phase.JOINING, now)
        self._contacts = Contacts(config.suspect_after)
        self._beliefs = Beliefs(config.most_epochs, config.cells)
        self._goodbyes: dict[str, Goodbye] = {}
        self._goodbyes_ahead: dict[str, Goodbye] = {}  # of peers that were ahead of us
        self._round_time = Deadline(config.exchange_ceiling, config.exchange_floor, LEARNED_FROM)
        self._vote_time = Deadline(config.vote_ceiling, config.vote_floor, LEARNED_FROM)
        self._epochs: deque[float] = deque(maxlen=HISTORY)  # s
        self._sketch: tuple[bytes, float] | None = None
        self._damaged = False
        self._leaving = False
        self._bandwidth = USUAL_BANDWIDTH
        self._computes: bool | None = None
        self._quorum_at = self._touched_at = now  # when a leader had a quorum, and when one was in touch
        self._replay: tuple[LogItem, ...] = ()
        self._source: str | None = None  # of the items that are replayed
        self._fetching: _Fetching | None = None  # a snapshot
        self._reported_at = now  # when this peer reported to a leader last
        self._greeted, self._greetings = now, 0  # when somebody that had fallen silent was greeted, and how often
        self._entered: dict[bytes, float] = {}  # when this peer came to each head of its log
        self._counted: tuple[Entry, dict[str, Vote]] | None = None  # the last entry that this leader certified
        self._last_ballot = durable.ballot  # of any life: it binds in its slot, however this peer comes there again
        if self.log is not None:
            self._enter_slot()

    # --- what others may read ---

    def on_our_branch(self, peers: Iterable[str]) -> set[str]:
        """Those of these peers whose last known head is in our log."""
        heads = {peer: contact.head for peer, contact in self._contacts if contact.head is not None}
        return {peer for peer in peers if peer in heads and self.log is not None and heads[peer].lineage in self.log}

    @property
    def weighed(self) -> bytes | None:
        """The lineage of a snapshot that is here and may be used yet: its source says what it has behind it, or answers
        of steps behind it are on their way."""
        fetching = self._fetching
        return fetching.snapshot.head.lineage if fetching is not None and fetching.snapshot is not None else None

    @property
    def phase(self) -> Phase:
        """What the peer is doing."""
        return self._clock.phase

    @property
    def phase_entered(self) -> float:
        """s, when it entered the phase; it may come from one round into the next within one event."""
        return self._clock.entered

    @property
    def head(self) -> Head | None:
        """Where it is; None: it has no parameters yet."""
        return None if self.log is None else self.log.last.head

    @property
    def computes(self) -> bool:
        """Whether the device may compute."""
        return bool(self._computes)

    @property
    def ballot(self) -> BallotRecord | None:
        """What it promised, accepted and proposed in its slot."""
        return None if self.log is None else self._slot.acceptor.record

    @property
    def turn(self) -> int:
        """The turn that it follows in its slot."""
        return 0 if self.log is None else self._slot.turn

    @property
    def replay(self) -> tuple[LogItem, ...]:
        """Proven items ahead of the head, while their answers are being fetched."""
        return self._replay

    @property
    def in_touch(self) -> frozenset[str]:
        """Others with the run's parameters that were heard just now."""
        return frozenset(peer for peer in self._in_touch() if self._contacts[peer].head is not None)

    @property
    def known(self) -> tuple[Member, ...]:
        """Others that can be called, or were heard just now."""
        here = set(self._in_touch())
        return tuple(each.member for peer, each in self._contacts if each.member.public or peer in here)

    @property
    def is_damaged(self) -> bool:
        """True while this peer mends its parameters, which are not the swarm's."""
        return self._damaged

    @property
    def alone_for(self) -> float:
        """s since a leader had a quorum."""
        return self._now - self._quorum_at

    @property
    def decides_alone(self) -> bool:
        """Whether this peer is a quorum by itself, so that it lacks nobody's vote."""
        return self.log is not None and is_quorum(self._electorate(), {self.me.peer}, self._left())

    @property
    def epoch_seconds(self) -> float:
        """How long an epoch takes, as this peer saw it."""
        return median(self._epochs) if self._epochs else self.config.epoch_deadline

    @property
    def _believed_seconds(self) -> float:
        """How long an epoch takes, at least as long as this one has lasted."""
        return max(self.epoch_seconds, self._now - self._slot.began)

    def order_back(self, parent: bytes, state: bytes, sequence: int) -> RollbackOrder:
        """The order that takes everybody to a checkpoint, for the monitor to sign; this peer has parameters.

        Its view are this peer and those of the view that are in touch; others come back with what they bring.

        :param parent: lineage of the checkpoint
        :param state: SHA-256 of its file
        :param sequence: drawn at random, so that two monitors never give two orders of one rank
        """
        head, membership = self._head(), self._membership()
        here = [membership.view[peer] for peer in self._in_touch() if peer in membership.view]
        members = tuple(sorted({self.me, *here}))
        banned = tuple(sorted(membership.banned))
        return RollbackOrder(head.generation + 1, sequence, head.epoch + 1, parent, members, banned, state)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event; return what to do, in this order.

        :param now: s, never less than before
        """
        self._now = max(now, self._now)
        self._actions = []
        if self.phase is not Phase.LEAVING:
            self._handlers[type(event)](self, event)
            if self._leaving and self.phase not in (Phase.EXCHANGING, Phase.VOTING):
                self._say_goodbye()
            self._allow_computing()
        elif isinstance(event, Computed):
            self.ledger.add(event.samples, 0, Cause.LEFT)
        return self._actions

    # --- the process's events ---

    def _on_started(self, event: Started) -> None:
        if self._fresh_genesis:
            self._persist(self._head_record(), self.ledger.record())
        self._set_timer(Timer.TICK, self._now + self.config.heartbeat)
        if self.log is None:
            self._look_for_snapshot()
        else:
            self._stand_if_first()

    def _on_timer(self, event: TimerFired) -> None:
        if event.timer is Timer.TICK:
            self._set_timer(Timer.TICK, self._now + self.config.heartbeat)
            self._tick()
        else:
            self._phase_timer_fired()

    def _phase_timer_fired(self) -> None:
        until = self._clock.until
        if until is None:
            return
        if self._now >= until:
            self._phase_is_over()
            return
        self._set_timer(Timer.PHASE, until)  # early: another one follows
        if self.phase is Phase.VOTING and self._slot.lead is not None:
            self._propose_if_ready(self._slot.lead)

    def _on_peer_seen(self, event: PeerSeen) -> None:
        if event.member.peer != self.me.peer:
            self._contacts[event.member.peer].member = event.member
        self._beliefs.saw(event.member, event.speed)

    def _on_measured(self, event: Measured) -> None:
        self._bandwidth = event.bandwidth

    def _on_computed(self, event: Computed) -> None:
        birth, cause = self._birth(event.lineage)
        if event.apart:
            self.ledger.seal()
        self.ledger.add(event.samples, birth, cause)
        self._expire_stale()
        self._persist(self.ledger.record())
        if self._slot.lead is not None:
            self._begin_if_ready()
        elif self.phase is Phase.COLLECTING and self._reports_early():
            self._report_to_leader()

    def _reports_early(self) -> bool:
        """Whether the leader speaks, and waits longer for the next heartbeat's report than short epochs allow."""
        if not self._has_short_epochs or self._slot.followed is None or not self._hears_leader():
            return False
        return self._now - self._reported_at >= self._median_epoch / REPORTS_OF_EPOCH

    @property
    def _median_epoch(self) -> float:
        """s; 0: none was seen yet."""
        return median(self._epochs) if self._epochs else 0.0

    @property
    def _has_short_epochs(self) -> bool:
        """Whether a heartbeat is too long a time in them, as far as this peer knows."""
        return self._median_epoch / REPORTS_OF_EPOCH < self.config.heartbeat

    def _birth(self, lineage: bytes) -> tuple[int, Cause | None]:
        """Epoch of the parameters of a microbatch, or why they are not on our branch any more."""
        assert self.log is not None
        for item in reversed(self.log.items):
            if item.head.lineage == lineage:
                return item.head.epoch, None
            if isinstance(item.step, RollbackOrder):
                return 0, Cause.ROLLBACK
        return 0, Cause.LOST_BRANCH if self.log.items[0].head.epoch == 0 else Cause.UNKNOWN

    def _on_sketched(self, event: Sketched) -> None:
        self._sketch = (event.lineage, event.sketch)

    def _on_proven(self, event: Proven) -> None:
        verdict = event.verdict
        if verdict.peer in self._contacts.banned or verdict.peer == self.me.peer:
            return
        self._contacts.banned[verdict.peer] = verdict
        self._do(Ban(verdict))
        for peer in self._in_touch():
            self._send(peer, Accuse(verdict))
        self._skip_turn_of(verdict.peer)

    # --- the heartbeat ---

    def _tick(self) -> None:
        if self.log is None:
            self._look_for_snapshot()
            return
        if self._fetching is not None:
            self._tick_snapshot(self._fetching)
        if self.phase is Phase.CATCHING_UP:
            self._report_ahead()
            return
        self._expire_stale()
        if self._damaged:
            self._seek_undamaged()
        lead = self._slot.lead
        if lead is not None:
            self._tick_as_leader(lead)
        else:
            self._report_to_leader()
        if self._slot.lead is None:
            if self._now - self._slot.heard > self._leader_patience() + self._jitter():
                self._give_up_round()
                self._next_turn()
            elif self._ballot_is_old():
                self._refuse(self._ballot_followed(), "nothing is committed")
        self._greet_somebody()
        self._note_quorum()
        alone = self._now - self._quorum_at
        if self.phase is Phase.COLLECTING and alone > self.config.isolated_after:
            self._move(Phase.ISOLATED)
        if self.phase is Phase.ISOLATED or (self.phase is Phase.COLLECTING and self._is_alone(0.0)):
            self._tick_alone()

    def _ballot_is_old(self) -> bool:
        """Whether a ballot has lasted so long that its leader does not do its part."""
        speed = self._beliefs.speed([*self._in_touch(), self.me.peer])
        epoch = max(self.epoch_seconds, self.config.target_batch_size / speed if speed > 0 else 0.0)
        collecting = min(self.config.epoch_deadline, LONG_EPOCH * epoch)
        patience = collecting + ROUNDS_IN_VAIN * (self._round_time.seconds + self._vote_time.seconds)
        halvings = min(self._contacts[self._ballot_followed().leader].vain, LEAST_PATIENCE)
        return self._now - self._slot.turn_began > patience / (1 << halvings)

    def _leader_patience(self) -> float:
        """s without a word of the leader; a round that runs is given up later than one that has not begun."""
        in_round = self.phase in (Phase.EXCHANGING, Phase.VOTING)
        return self.config.suspect_after if in_round else self.config.leader_timeout

    def _tick_as_leader(self, lead: Leadership) -> None:
        if lead.active:
            quorum = self._hears_quorum()
            if quorum:
                self._quorum_at = self._slot.heard = self._now
                if self.phase is Phase.ISOLATED:
                    self._move(Phase.COLLECTING)
            for peer in self._audience():
                self._send(peer, Lead(lead.ballot, quorum))
            if self.phase is Phase.EXCHANGING and self._slot.round is not None:
                self._go_on_without_silent(self._slot.round)
            if lead.proposal is not None and self.phase is not Phase.VOTING:
                self._send_proposal(lead)
            self._begin_if_ready()
            silent = not quorum and self._now - max(self._slot.heard, lead.since) > 2 * self.config.leader_timeout
            if self._slot.lead is lead and (silent or self._ballot_is_old()):
                self._give_up_round()
                self._next_turn()  # this peer may be cut off in one direction
            elif self._slot.lead is lead and lead.outbid is not None and self.phase is Phase.COLLECTING:
                if not quorum or self._slot.failures > 0:
                    self._outbid(lead)  # it is needed
        else:
            for peer in sorted(self._electorate() - {self.me.peer}):
                self._send(peer, Ask(lead.ballot))
            if lead.fetching_since is not None and self._now - lead.fetching_since > self.config.leader_timeout:
                for peer in self._bound_entry(lead)[1]:  # they did not serve the bytes: their answers do not count
                    lead.promises.pop(peer, None)
                    self._goodbyes.pop(peer, None)
                lead.fetching_since = None
            self._try_to_lead()
            if self._slot.lead is lead and not lead.active and self._now - lead.since > 2 * self.config.leader_timeout:
                self._next_turn()

    def _report_to_leader(self) -> None:
        self._reported_at = self._now
        leader = self._leader(self._slot.turn)
        if self._slot.turn >= len(self._slot.order):
            for peer in self._contacts.public():
                self._send(peer, self._report())
        elif leader is not None and leader != self.me.peer:
            self._send(leader, self._report())

    def _greet_somebody(self) -> None:
        """Say where we are to one that was not heard for a while: branches that lost sight of each other meet again."""
        if self._now - self._greeted < self.config.suspect_after:
            return
        self._greeted = self._now
        silent = sorted(
            peer
            for peer, contact in self._contacts
            if self._now - contact.heard >= self.config.suspect_after and (contact.member.public or self.me.public)
        )
        if silent:
            self._greetings += 1
            self._send(silent[self._greetings % len(silent)], self._report())

    def _report(self) -> Report:
        samples = min(self.ledger.pending_samples, int(self._most_to_send()))
        self._slot.reported = max(self._slot.reported, samples)
        return Report(
            self._ballot_followed(),
            self.me,
            samples,
            self._bandwidth,
            self._round_time.learnt,
            self._vote_time.learnt,
            self._alone_for(),
        )

    # --- ballots ---

    def _enter_slot(self) -> None:
        """A new head: what belonged to the slot before is gone."""
        assert self.log is not None
        item = self.log.last
        last = self._last_ballot
        record = last if last is not None and last.slot == item.head.lineage else None
        self._slot = Slot.behind(item, self._now, record)
        kept = {lineage: at for lineage, at in self._entered.items() if lineage in self.log}
        self._entered = kept | {item.head.lineage: self._now}
        if record is None:
            self._slot.turn = self._first_turn()
        known = {peer: each for peer, each in self._goodbyes.items() if peer in item.membership.view}
        known |= {peer: each for peer, each in self._goodbyes_ahead.items() if peer in item.membership.view}
        self._goodbyes = {peer: each for peer, each in known.items() if not self._is_ahead(each)}
        self._goodbyes_ahead = {peer: each for peer, each in known.items() if peer not in self._goodbyes}
        for peer in item.membership.banned:
            self._contacts.banned.setdefault(peer, Verdict(peer, b""))

    def _first_turn(self) -> int:
        """The first turn of a leader that did not lead in vain lately."""
        order = self._slot.order
        return next((turn for turn, peer in enumerate(order) if not self._is_vain(peer)), 0)

    def _stand_if_first(self) -> None:
        """In a new slot."""
        if self._leader(self._slot.turn) == self.me.peer:
            self._stand()

    def _leader(self, turn: int) -> str | None:
        """Whose turn it is. Behind the last member's turn it is the turn of any public peer at the head, one by one."""
        if turn < len(self._slot.order):
            return self._slot.order[turn]
        public = set(self._at_head()) & set(self._contacts.public())
        public |= set(self._slot.order) - self._contacts.banned.keys()
        if self.me.public:
            public.add(self.me.peer)
        order = leader_order(self._lineage(), public)
        return order[turn % len(order)] if order else None

    def _ballot_followed(self) -> Ballot:
        if self._slot.lead is not None:
            return self._slot.lead.ballot
        if self._slot.followed is not None and self._slot.followed.turn == self._slot.turn:
            return self._slot.followed
        return Ballot(self._slot.turn, self._leader(self._slot.turn) or "")

    def _stand(self) -> None:
        """Lead this turn: at once if nobody can have promised anything above, else after a quorum's promises."""
        ballot = Ballot(self._slot.turn, self.me.peer)
        if self._damaged or self._leaving or not self._slot.acceptor.may_propose(ballot):
            return
        self._slot.lead = Leadership(ballot, active=self._slot.turn == 0, since=self._now)
        if self._slot.turn == 0 and self._has_short_epochs:
            for peer in self._audience():
                self._send(peer, Lead(ballot, self._hears_quorum()))
        if self._slot.turn > 0:
            for peer in sorted(self._electorate() - {self.me.peer}):
                self._send(peer, Ask(ballot))
            self._try_to_lead()

    def _next_turn(self) -> None:
        """Nobody leads: count one further. This binds nobody, only a promise does."""
        out = self._goodbyes.keys() | self._contacts.banned.keys()
        self._slot.follow_turn(self._slot.turn_after(out), self._now)
        if self._leader(self._slot.turn) == self.me.peer:
            self._stand()
        else:
            self._report_to_leader()

    def _skip_turn_of(self, peer: str) -> None:
        """The leader has left or is banned."""
        if self.log is not None and self.phase is not Phase.CATCHING_UP and self._leader(self._slot.turn) == peer:
            self._next_turn()

    def _hears_leader(self) -> bool:
        """Whether a leader that has a quorum was heard just now."""
        if self._slot.lead is not None:
            begins = self._now - self._slot.began < self.config.leader_timeout
            return self._slot.lead.active and (begins or self._hears_quorum())
        followed = self._slot.followed
        if followed is None:
            return self._slot.turn == 0 and self._now - self._slot.began < self.config.leader_timeout  # it begins
        return followed.turn == self._slot.turn and self._now - self._slot.heard < self.config.leader_timeout

    def _on_report(self, sender: str, report: Report) -> None:
        self._note_report(sender, report)
        lead = self._slot.lead
        if lead is not None and lead.active:
            if sender not in self._electorate():
                pass  # nobody counts on it
            elif report.ballot > lead.ballot:
                lead.strays[sender] = lead.strays.get(sender, 0) + 1
                if lead.strays[sender] > STRAYS:
                    lead.refusals.setdefault(sender, False)  # it does not come back: it is not counted on
                elif self._hears_quorum():
                    self._send(sender, Refuse(lead.ballot, False))  # it counted alone
            elif report.ballot == lead.ballot:
                lead.strays.pop(sender, None)
                if not lead.refusals.get(sender, True):
                    del lead.refusals[sender]  # it has come
            self._begin_if_ready()
        elif report.ballot.turn > self._slot.turn and sender in self._membership().view:
            if self._hears_leader():
                self._send(sender, Refuse(self._ballot_followed(), False))
            elif self._leader(report.ballot.turn) == self.me.peer:
                self._slot.follow_turn(report.ballot.turn, self._now)
                self._stand()

    def _note_report(self, sender: str, report: Report) -> None:
        contact = self._contacts[sender]
        contact.member, contact.report, contact.reported = report.member, report, self._now
        contact.reported_from = contact.head.lineage if contact.head is not None else b""

    def _on_lead(self, sender: str, body: Lead) -> None:
        if not body.quorum and body.ballot < self._ballot_followed():
            return  # it calls nobody back
        if not self._may_follow(sender, body.ballot):
            return
        self._slot.follow(body.ballot, self._now)
        if body.quorum:
            self._slot.heard = self._quorum_at = self._now
            if self.phase is Phase.ISOLATED:
                self._move(Phase.COLLECTING)

    def _may_follow(self, sender: str, ballot: Ballot, proven: bool = False) -> bool:
        """Whether to listen to this leader; one with another ballot than the one that we hear is told.

        :param proven: whether the message shows that a quorum has promised this ballot
        """
        if not self._may_lead(ballot):
            return False
        followed, promised = self._ballot_followed(), self._slot.acceptor.promised
        if ballot < promised:
            self._send(sender, Refuse(promised, True))
            return False
        above = ballot > promised and not proven and self._is_called_away(ballot)
        if above or (ballot < followed and self._hears_leader()):
            self._send(sender, Refuse(followed, False))
            return False
        self._slot.note_ballot(ballot, self._now, self.config.leader_timeout)
        return True

    def _is_called_away(self, ballot: Ballot) -> bool:
        """Whether this ballot is above that of another leader that we hear. A leader that counts higher itself has left
        its lower ballot."""
        followed = self._ballot_followed()
        return ballot > followed and ballot.leader != followed.leader and self._hears_leader()

    def _may_lead(self, ballot: Ballot) -> bool:
        """Whether this peer may have this turn at all. Strangers to the view have one only when no public member is in
        touch."""
        slot = self._slot
        if not may_lead(ballot, slot.order) or ballot in slot.refused or slot.is_hasty(ballot, self._now):
            return False
        if self._is_vain(ballot.leader) and self._now - slot.began < 2 * self.config.leader_timeout:
            return False
        if ballot.leader in self._slot.order:
            return True
        return self.me.peer not in self._slot.order and not set(self._slot.order) & set(self._in_touch())

    def _is_vain(self, leader: str) -> bool:
        """Whether this leader's turn is skipped: in slots before, others had to bring the commit."""
        contact = self._contacts[leader]
        return leader != self.me.peer and contact.vain >= OFTEN and contact.turn_again > self._head().epoch

    def _on_ask(self, sender: str, body: Ask) -> None:
        ballot = body.ballot
        if not self._may_lead(ballot):
            return
        if ballot < self._slot.acceptor.promised:
            self._send(sender, Refuse(self._slot.acceptor.promised, True))
        elif ballot > self._slot.acceptor.promised and self._is_called_away(ballot):
            self._send(sender, Refuse(self._ballot_followed(), False))
        else:
            if ballot > self._slot.acceptor.promised:
                self._persist(self._slot.acceptor.promise(ballot))
            heard, began = self._slot.heard, self._slot.turn_began
            first = self._slot.note_ballot(ballot, self._now, self.config.leader_timeout)
            self._slot.follow(ballot, self._now)
            if first:
                self._slot.heard = self._now
            else:
                self._slot.heard, self._slot.turn_began = heard, began  # it only counts higher
            self._send(sender, self._slot.acceptor.answer(ballot))

    def _on_refuse(self, sender: str, body: Refuse) -> None:
        lead = self._slot.lead
        plan = self._slot.round
        if lead is None or body.ballot == lead.ballot or (body.promised and body.ballot < lead.ballot):
            return  # it refused an earlier ballot of ours
        if plan is not None and any(member.peer == sender for member in plan.group):
            self._slot.apart.add(sender)
        if sender not in self._electorate() or lead.refusals.get(sender):
            return  # a promise binds it
        lead.refusals[sender] = body.promised  # it is not counted on, unless it may come and does
        if body.promised and body.ballot > lead.ballot and self._contacts[sender].may_outbid(self._head().epoch):
            lead.outbid = max(body.ballot, lead.outbid or body.ballot)

    def _outbid(self, lead: Leadership) -> None:
        """A member that this leader hears has promised a higher ballot: it can only follow a still higher one."""
        assert lead.outbid is not None
        self._slot.follow_turn(max(lead.outbid.turn + 1, len(self._slot.order)), self._now)
        self._stand()

    def _on_promise(self, sender: str, body: Promise) -> None:
        lead = self._slot.lead
        if lead is not None and not lead.active and body.ballot == lead.ballot and sender in self._electorate():
            lead.promises[sender] = body
            self._try_to_lead()

    def _bound_entry(self, lead: Leadership) -> tuple[Entry | None, frozenset[str]]:
        """What this leader has to propose again, and the peers that reported it."""
        own = (self.me.peer, self._slot.acceptor.answer(lead.ballot))
        return self._judge().bound_entry([*lead.promises.items(), own], (), lead.ballot)

    def _try_to_lead(self) -> None:
        """Become the leader once a quorum has promised, and propose again what may have been certified."""
        lead = self._slot.lead
        if lead is None or lead.active or not self._slot.acceptor.may_propose(lead.ballot):
            return
        entry, reporters = self._bound_entry(lead)
        own = self._slot.acceptor.answer(lead.ballot)
        promises = [*lead.promises.items(), (self.me.peer, own)]
        if not self._judge().has_promises(promises, (), lead.ballot, entry):
            return
        silent = self._electorate() - {*lead.promises, self.me.peer} - self._goodbyes.keys()
        if len(reporters - {self.me.peer}) == 1 and silent and self._now - lead.since < SECOND_OPINION:
            return  # more promises may show that nobody else accepted it
        if entry is not None and (missing := self._not_fitting(entry.answers)):
            if lead.fetching_since is None:
                lead.fetching_since = self._now
                sources = tuple(sorted(reporters))
                self._do(FetchAnswers(missing, sources, entry.answers, entry.fingerprint, entry.answers))
            return
        lead.promises[self.me.peer] = own
        self._persist(self._slot.acceptor.promise(lead.ballot))  # to itself last
        lead.active = True
        self._give_up_round()  # of a lower ballot
        self._slot.heard = self._now
        for peer in self._audience():
            self._send(peer, Lead(lead.ballot, True))
        if entry is not None:
            self._propose(lead, entry)
        else:
            self._begin_if_ready()

    # --- a round ---

    def _begin_if_ready(self) -> None:
        lead = self._slot.lead
        if lead is None or not lead.active or lead.proposal is not None:
            return
        if self.phase not in (Phase.COLLECTING, Phase.ISOLATED) or self._leaving or self._damaged:
            return
        if self._now < self._slot.pause_until:
            return
        reports = [(member, report) for member, report in self._reporting() if member.peer not in lead.refusals]
        group = [(self.me, self._report().samples, self._bandwidth)]
        group += [(member, report.samples, self._slice_bandwidth(member, report)) for member, report in reports]
        if not is_quorum(self._electorate(), {member.peer for member, _, _ in group}, self._left()):
            return
        samples = sum(samples for _, samples, _ in group)
        late = self._now - self._slot.began >= self.config.epoch_deadline
        if samples == 0 or (samples < self.config.target_batch_size and not late):
            return
        if self._waits_for_absent({member.peer for member, report in reports if report.ballot == lead.ballot}):
            return
        exchange, vote = self._deadlines([report for _, report in reports])
        lead.attempts = max(lead.attempts, len(self.ledger.rounds(self._lineage()))) + 1
        lead.held = {}
        plan = leading.make_round(
            self._lineage(), lead.ballot, lead.attempts, group, self.config.cells, exchange, vote
        )
        self._enter_round(plan)
        for member in plan.group:
            self._contacts[member.peer].missed = 0
            if member.peer != self.me.peer:
                self._send(member.peer, Begin(plan))

    def _slice_bandwidth(self, member: Member, report: Report) -> float:
        """Mbit/s; 0: it is new, or has lost slices, and reduces none for a while."""
        trusted = member.peer in self._membership().view and self._now >= self._contacts[member.peer].no_slices_until
        return report.bandwidth if trusted else 0.0

    def _deadlines(self, reports: Sequence[Report]) -> tuple[float, float]:
        """s for a round's exchange and for its votes: what most members have learned."""
        config = self.config
        exchange = [self._round_time.learnt, *(report.round_seconds for report in reports)]
        vote = [self._vote_time.learnt, *(report.vote_seconds for report in reports)]
        return (
            agreed(exchange, config.exchange_floor, config.exchange_ceiling),
            agreed(vote, config.vote_floor, config.vote_ceiling),
        )

    def _go_on_without_silent(self, plan: Round) -> None:
        """The leader hears everybody: it tells the others whom nobody has to wait for. A member that follows another
        leader takes no part either."""
        here = {*self._in_touch(), self.me.peer} - self._slot.apart
        silent = tuple(member.peer for member in plan.group if member.peer not in here)
        if silent:
            for member in plan.group:
                if member.peer in here and member.peer != self.me.peer:
                    self._send(member.peer, Without(plan.fingerprint, silent))
            self._do(ExchangeWithout(plan.fingerprint, silent))

    def _on_without(self, sender: str, body: Without) -> None:
        plan = self._slot.round
        if plan is not None and plan.fingerprint == body.fingerprint and plan.ballot.leader == sender:
            self._do(ExchangeWithout(body.fingerprint, body.silent))

    def _reporting(self) -> list[tuple[Member, Report]]:
        """Members of a round that could begin now, beside this peer."""
        fresh = self._contacts.reporting(self._lineage(), self._now)
        return [(contact.member, report) for contact, report in fresh if contact.member.peer not in self._goodbyes]

    def _waits_for_absent(self, reporting: Set[str]) -> bool:
        """Return whether a round that could begin waits for members in touch that do not report to this leader from
        this head.

        It waits for any of them as long as a report travels, and longer for one that does not come late time after
        time: a member that misses a round has to fetch its answers during the next one. It waits half an epoch for more
        than a quarter of them, and `catching_up_patience` for most of them.
        """
        view = self._membership().view
        in_touch = {peer for peer in self._in_touch() if peer in view and peer not in self._goodbyes}
        absent = in_touch - reporting
        if not absent:
            return False
        if 2 * len(in_touch - set(self._at_head())) > len(in_touch) + 1:
            if self._slot.may_wait_until is None:
                self._slot.may_wait_until = self._now + self.config.catching_up_patience
            return self._now < self._slot.may_wait_until
        epoch = self._head().epoch
        patience = min(self.config.heartbeat, self._median_epoch / REPORTS_OF_EPOCH)
        if any(self._contacts[peer].waited_again <= epoch for peer in absent):
            patience = min(WAITED * self.config.heartbeat, self._median_epoch / WAITED)
        if len(absent) > ABSENT_SHARE * len(in_touch):
            some = self._median_epoch / 2 or self.config.catching_up_patience / 4
            patience = min(max(patience, some), self.config.catching_up_patience)
        if self._now - self._slot.began < patience:
            return True
        for peer in absent:
            if self._contacts[peer].waited_again <= epoch:
                self._contacts[peer].missed_round(epoch)
        return False

    def _on_begin(self, sender: str, body: Begin) -> None:
        plan = body.round
        if self._damaged or self._leaving or not self._may_follow(sender, plan.ballot):
            return
        if plan.fingerprint in self.ledger.rounds(plan.slot):
            return  # it came twice, or before a crash: what was sent under a fingerprint stays as it is
        why = self._judge().why_not_begin(plan)
        if why is not None:
            self._refuse(plan.ballot, why)
            return
        self._slot.follow(plan.ballot, self._now)
        self._slot.heard = self._now
        if self.phase in (Phase.EXCHANGING, Phase.VOTING):
            self._give_up_round()
            self._slot.rounds_failed += 1
            if self._slot.rounds_failed > ROUNDS_IN_VAIN:
                self._refuse(plan.ballot, "it begins round after round")
                return
        self._enter_round(plan)

    def _enter_round(self, plan: Round) -> None:
        self._slot.round, self._slot.exchange_ended = plan, False
        self._slot.apart.clear()
        self._slot.commitments = None
        shares = self.ledger.send(self.me.peer, plan.slot, plan.fingerprint, self._most_to_send())
        self._persist(self.ledger.record())
        self._move(Phase.EXCHANGING, plan.exchange_seconds)
        limits = tuple((member.peer, self._limit(member, REDUCER_SLACK)) for member in plan.group)
        self._do(StartExchange(plan, shares, limits, self.accounts))

    def _most_to_send(self) -> float:
        """Samples of ours that others believe, about."""
        most = self.config.most_epochs * self.config.target_batch_size
        return min(self._limit(self.me, SENDER_SLACK), most)

    def _limit(self, member: Member, slack: float) -> float:
        return self._beliefs.limit(member.account, self._now, self._believed_seconds, slack)

    def _on_commitments_heard(self, event: CommitmentsHeard) -> None:
        plan = self._slot.round if self.log is not None else None
        if plan is not None and plan.fingerprint == event.fingerprint:
            self._slot.commitments = event

    def _on_answer_refused(self, event: AnswerRefused) -> None:
        """Nobody votes for it, and an own proposal goes without it."""
        if self.log is None:
            return
        self._slot.refused_answers.add(event.slice)
        considered, lead = self._slot.considered, self._slot.lead
        if considered is not None and any(answer.slice == event.slice for answer in considered.entry.answers):
            self._refuse(considered.ballot, "it holds an answer that was refused")
        elif lead is not None:
            self._propose_if_ready(lead)

    def _on_disregarded(self, event: Disregarded) -> None:
        self.ledger.expire(event.numbers, Cause.PROBATION)
        self._persist(self.ledger.record())

    def _on_exchange_ended(self, event: ExchangeEnded) -> None:
        plan = self._slot.round
        if plan is None or event.fingerprint != plan.fingerprint:
            return
        self._hold((answer.digest for answer in event.answers), (answer.slice for answer in event.answers))
        if self.phase is not Phase.EXCHANGING:
            return
        whole = len(event.answers) == len(plan.slices)
        if whole:
            self._round_time.succeeded(self._now - self._clock.entered)
        else:
            self._round_time.failed(1 - len(event.answers) / len(plan.slices))
        lead = self._slot.lead
        self._move(Phase.VOTING, self.config.gather + plan.vote_seconds)
        if lead is not None and lead.ballot == plan.ballot:
            lead.held[self.me.peer] = event.answers
            self._propose_if_ready(lead)
        elif plan.ballot.leader != self.me.peer:
            self._send(plan.ballot.leader, Held(plan.fingerprint, event.answers))

    def _on_held(self, sender: str, body: Held) -> None:
        lead, plan = self._slot.lead, self._slot.round
        if lead is None or plan is None or plan.fingerprint != body.fingerprint or lead.ballot != plan.ballot:
            return
        if any(member.peer == sender for member in plan.group):
            lead.held[sender] = body.answers
            self._propose_if_ready(lead)

    def _propose_if_ready(self, lead: Leadership) -> None:
        plan = self._slot.round
        if plan is None or lead.proposal is not None or self.phase is not Phase.VOTING:
            return
        own = lead.held.get(self.me.peer, ())
        answers = tuple(
            answer
            for answer in leading.merged_answers(plan, [own, *lead.held.values()])
            if self._why_wrong_answer(plan, answer) is None
        )
        gathered = self._clock.entered + self.config.gather
        waited = self._now >= gathered
        whole = len(answers) == len(plan.slices)
        if not whole and not waited and len(lead.held) < len(plan.group):
            self._set_timer(Timer.PHASE, gathered)
            return
        missing = self._not_fitting(answers)
        if missing:
            holders = tuple(
                peer for peer, held in sorted(lead.held.items()) if any(answer.digest in missing for answer in held)
            )
            self._do(FetchAnswers(missing, holders, answers, plan.fingerprint, answers))
            self._set_timer(Timer.PHASE, self._clock.until)
            return
        self._judge_reducers(plan, answers)
        entry = self._entry(plan, answers)
        judge = self._judge()
        why = judge.why_early(entry, 1.0) or judge.why_wrong(entry) or self._why_disbelieved(entry)
        if why is not None:
            self._fail_round(why)
        else:
            self._propose(lead, entry)

    def _why_wrong_answer(self, plan: Round, answer: Answer) -> str | None:
        """Why a slice is left out; None: it can be part of an entry."""
        entry = self._entry(plan, (answer,))
        judge = self._judge()
        return judge.why_wrong(entry) or judge.why_not_committed(entry) or self._why_disbelieved(entry)

    def _judge_reducers(self, plan: Round, answers: tuple[Answer, ...]) -> None:
        """One whose slice is wrong or not here reduces nothing for a while."""
        here = {answer.reducer for answer in answers}
        for reducer, _ in plan.slices:
            if reducer in here:
                self._contacts[reducer].lost_slices = 0
            elif reducer != self.me.peer:
                self._contacts[reducer].lost_slice(self._now, self.epoch_seconds)

    def _entry(self, plan: Round, answers: tuple[Answer, ...]) -> Entry:
        head, view = self._head(), self._membership().view
        covered = 0
        bringing = {*view, *self._membership().may_observe(plan.group)}
        for answer in answers:
            covered |= answer.cells
            bringing |= {share.peer for share in answer.shares}
        return Entry(
            head.generation,
            head.sequence,
            head.epoch,
            head.lineage,
            plan.ballot,
            plan.fingerprint,
            tuple(member for member in plan.group if member.peer in bringing),
            answers,
            ((1 << self.config.cells) - 1) & ~covered,
            tuple(sorted(peer for peer in self._goodbyes if peer in view)),
            tuple(sorted(verdict for peer, verdict in self._contacts.banned.items() if peer in view)),
            self._slot.commitments.digest if self._slot.commitments is not None else b"",
        )

    # --- proposal and votes ---

    def _propose(self, lead: Leadership, entry: Entry) -> None:
        lead.proposal = entry
        self._persist(self._slot.acceptor.propose(lead.ballot, entry))
        if self.phase in (Phase.COLLECTING, Phase.ISOLATED):
            self._move(Phase.VOTING, self._vote_time.seconds)
        else:
            self._set_timer(Timer.PHASE, self._clock.until)
        if self.me.peer in self._electorate():
            lead.votes[self.me.peer] = self._vote(lead.ballot, entry)
        self._send_proposal(lead)
        self._count_votes()

    def _send_proposal(self, lead: Leadership) -> None:
        assert lead.proposal is not None
        promises = tuple(sorted(lead.promises.items(), key=lambda each: each[0])) if lead.ballot.turn else ()
        body = Propose(lead.ballot, lead.proposal, promises, self._known_goodbyes())
        group = {member.peer for member in lead.proposal.group}
        for peer in sorted((group | self._membership().view.keys()) - {self.me.peer} - self._goodbyes.keys()):
            if peer not in lead.votes:
                self._send(peer, body)

    def _vote(self, ballot: Ballot, entry: Entry) -> Vote:
        sketch = self._sketch[1] if self._sketch is not None and self._sketch[0] == entry.parent else None
        return Vote(ballot, entry.lineage, sketch)

    def _on_propose(self, sender: str, body: Propose) -> None:
        if not self._may_follow(sender, body.ballot, proven=True):
            return
        if not self._slot.acceptor.accepts(body.ballot, body.entry):
            return
        why = self._judge().why_not_accept(body) or self._why_disbelieved(body.entry)
        if why is not None:
            self._refuse(body.ballot, why)
            return
        self._slot.follow(body.ballot, self._now)
        self._slot.heard = self._now
        if self._damaged:
            return
        self._end_exchange()
        if self.phase is not Phase.VOTING:
            self._move(Phase.VOTING, self._vote_time.seconds)
        self._slot.considered = body
        missing = self._not_fitting(body.entry.answers)
        if missing:
            sources = self._spread({sender, *(member.peer for member in body.entry.group)})
            entry = body.entry
            self._do(FetchAnswers(missing, sources, entry.answers, entry.fingerprint, entry.answers))
        else:
            self._accept(body)

    def _accept_if_fitting(self, body: Propose, came: frozenset[bytes]) -> None:
        """Vote if this peer can take a step with all of its answers.

        :param came: hashes of bytes that are here and that nobody has decoded
        """
        missing = self._not_fitting(body.entry.answers)
        if not missing:
            self._accept(body)
        elif missing & came:
            self._do(FetchAnswers(missing & came, (), body.entry.answers))

    def _accept(self, body: Propose) -> None:
        self._slot.considered = None
        if self._damaged or not self._slot.acceptor.accepts(body.ballot, body.entry):
            return
        self._persist(self._slot.acceptor.accept(body.ballot, body.entry))
        self._send(body.ballot.leader, self._vote(body.ballot, body.entry))

    def _judge(self) -> Judge:
        return Judge(
            self.config,
            self._last(),
            self.me,
            self.accounts,
            self.ledger.live,
            max(self._slot.reported, self.ledger.pending_samples),
            tuple(self._goodbyes.values()),
            self._now - self._slot.began,
            self._slot.commitments,
            frozenset(self._slot.refused_answers),
        )

    def _why_disbelieved(self, entry: Entry) -> str | None:
        return self._beliefs.why_refused(entry, self._now, self._believed_seconds)

    def _refuse(self, ballot: Ballot, why: str) -> None:
        """This leader does not keep the rules: the next one has its turn."""
        self._slot.refused.add(ballot)
        self._do(Tell(Topic.REFUSED, f"{ballot.leader}: {why}"))
        if ballot == self._ballot_followed():
            self._slot.pause(self._now, self.config.heartbeat)
            self._give_up_round()
            self._next_turn()

    def _on_vote(self, sender: str, body: Vote) -> None:
        lead = self._slot.lead
        if lead is None or lead.proposal is None or body.ballot != lead.ballot:
            return
        if body.entry == lead.proposal.lineage and sender in self._electorate():
            lead.votes[sender] = body
            self._count_votes()

    def _count_votes(self) -> None:
        lead = self._slot.lead
        if lead is None or lead.proposal is None:
            return
        entry = lead.proposal
        certificate = Certificate(
            entry.lineage, lead.ballot, frozenset(lead.votes).difference(self._goodbyes), self._known_goodbyes()
        )
        if not self._membership().certifies(certificate, entry):
            return
        item = self._last().after_entry(entry, certificate)
        for peer in self._audience():
            self._send(peer, Items(entry.parent, (item,)))
        if self.phase is Phase.VOTING:
            self._vote_time.succeeded(self._now - self._clock.entered)
        self._counted = (entry, lead.votes)
        self._commit(item)
        self._compare_sketches(entry, lead.votes)

    def _on_late_vote(self, sender: str, body: Vote) -> None:
        """Its entry is committed; its sketch may still show whose parameters are damaged."""
        assert self.log is not None
        if self._counted is None or self._counted[0].lineage != body.entry:
            return
        entry, votes = self._counted
        if entry.parent in self.log and sender in self.log.item(entry.parent).membership.electorate:
            votes[sender] = body
            self._compare_sketches(entry, votes)

    def _compare_sketches(self, entry: Entry, votes: dict[str, Vote]) -> None:
        told = tuple(sorted(votes.items(), key=lambda each: each[0]))
        divergent = outliers(told, self.config.sketch_tolerance)
        for peer in sorted(divergent - {self.me.peer}):
            self._send(peer, Sketches(entry.parent, told))
        if self.me.peer in divergent:
            self._damage_found()

    # --- the commit ---

    def _commit(self, item: LogItem) -> None:
        """The entry is certified: take its step. Head, accounts and contributions change in one write."""
        entry = item.step
        assert isinstance(entry, Entry) and entry.parent == self._lineage()
        in_time = self.phase is not Phase.CATCHING_UP and not self._replay
        self._end_exchange()
        plan = self._slot.round
        if self._slot.lead is None and plan is not None and plan.fingerprint == entry.fingerprint:
            self._judge_reducers(plan, entry.answers)
        settled = self.ledger.commit(entry.lineage, self.me.peer, entry.answers)
        self.ledger.return_all()
        self.accounts = self.accounts.after(entry.answers, item.head.epoch, self.config.max_staleness)
        for answer in entry.answers:
            self._held[answer.digest] = item.head.epoch
        if in_time and item.certificate is not None:
            self._judge_leaders(item.certificate.ballot)
        if in_time:
            self._beliefs.committed(entry, self._now, self._believed_seconds)
            if self._slot.in_time:
                self._epochs.append(self._now - self._slot.began)
        self._take(item)
        self._slot.in_time = in_time
        self._do(Apply(item, tuple((each.number, each.cells) for each in settled)))
        if self.phase is not Phase.CATCHING_UP:
            self._settle_in()

    def _judge_leaders(self, ballot: Ballot) -> None:
        """The entry was certified at this ballot: leaders of lower ones that are still heard led in vain."""
        here = set(self._in_touch())
        for peer, before in self._slot.ballots.items():
            if before < ballot and peer != ballot.leader and peer in here:
                self._contacts[peer].led_in_vain(self._head().epoch)
        if ballot.leader != self.me.peer:
            self._contacts[ballot.leader].vain = 0

    def _take(self, item: LogItem) -> None:
        """Write the new head with all that belongs to it, and enter its slot."""
        assert self.log is not None
        self.log = self.log.extended(item)
        self._expire_stale()
        self.ledger.forget_entries({each.head.lineage for each in self.log.items})
        oldest = item.head.epoch - self.config.kept_entries
        if len(self._held) > 4 * self.config.kept_entries:
            self._held = {digest: epoch for digest, epoch in self._held.items() if epoch > oldest}
        self._persist(self._head_record(), self.ledger.record())
        self._quorum_at = self._touched_at = self._now
        self._enter_slot()

    def _settle_in(self) -> None:
        """At the head: collect."""
        if self.phase is Phase.LEAVING:
            return
        if self.phase is not Phase.COLLECTING:
            self._move(Phase.COLLECTING)
        if self._slot.lead is None:
            self._stand_if_first()
        if self._slot.lead is None:
            self._report_to_leader()

    def _head_record(self) -> HeadRecord:
        assert self.log is not None
        return HeadRecord(Snapshot(self.log.items, self.accounts))

    def _expire_stale(self) -> None:
        if self.log is not None:
            self.ledger.expire_born(self._head().epoch - self.config.max_staleness, None, Cause.STALE)

    # --- the end of a phase ---

    def _phase_is_over(self) -> None:
        if self.phase is Phase.EXCHANGING and self._slot.round is not None:
            if self._slot.exchange_ended:
                self._fail_round("the exchange did not end")
                return
            self._slot.exchange_ended = True
            self._clock.extend(self._now, self.config.suspect_after)
            self._set_timer(Timer.PHASE, self._clock.until)
            self._do(EndExchange(self._slot.round.fingerprint))  # the process answers with what is there
        elif self.phase is Phase.VOTING:
            self._vote_time.failed()
            self._fail_round("no certificate came in time")
        elif self.phase is Phase.CATCHING_UP:
            self._fetch_failed()

    def _fail_round(self, why: str) -> None:
        """The round is over for this peer; what was in flight is pending again. Its entry may still be committed."""
        self._do(Tell(Topic.ROUND_FAILED, why))
        self._give_up_round()
        self._slot.pause(self._now, self.config.heartbeat)
        self._slot.rounds_failed += 1
        if self._slot.rounds_failed >= ROUNDS_IN_VAIN and (self._slot.lead is None or self._slot.lead.proposal is None):
            self._next_turn()

    def _give_up_round(self) -> None:
        """If one runs: what was in flight is pending again."""
        if self.phase in (Phase.EXCHANGING, Phase.VOTING):
            self._stop_round()
            self._move(Phase.COLLECTING)

    def _stop_round(self) -> None:
        self._end_exchange()
        self.ledger.return_all()
        self._slot.round = self._slot.considered = None

    def _end_exchange(self) -> None:
        """The answers that come after this are not waited for."""
        if self.phase is Phase.EXCHANGING and self._slot.round is not None:
            self._do(EndExchange(self._slot.round.fingerprint))

    # --- catching up ---

    def _on_ask_items(self, sender: str, body: AskItems) -> None:
        assert self.log is not None
        contact = self._contacts[sender]
        if self._now - contact.sent_items < self.config.heartbeat / 2:
            return
        contact.sent_items = self._now
        common = self.log.last_common(body.lineages[:LINEAGES_ASKED])
        self._send(sender, Items(common, self.log.behind(common) if common is not None else ()))

    def _compare(self, sender: str, head: Head | None) -> bool:
        """Whether the sender is where this peer is; else see to it that the one that is behind learns what is ahead."""
        assert self.log is not None
        contact = self._contacts[sender]
        if head is None:
            return False
        if head.lineage == self._lineage():
            return True
        if head.lineage in self.log:
            if self._now - contact.sent_items >= self.config.heartbeat:
                contact.sent_items = self._now
                self._send(sender, Items(head.lineage, self.log.behind(head.lineage)))
        elif self._now - contact.asked_items >= self.config.heartbeat and self._now >= contact.avoided_until:
            contact.asked_items = self._now
            lineages = tuple(item.head.lineage for item in reversed(self.log.items))
            self._send(sender, AskItems(lineages[:LINEAGES_ASKED]))
        return False

    def _on_items(self, sender: str, body: Items) -> None:
        assert self.log is not None
        if self._now < self._contacts[sender].avoided_until:
            return
        fetching = self._fetching
        if fetching is not None and fetching.snapshot is not None and not fetching.mends and fetching.source == sender:
            if body.items and body.after == fetching.snapshot.head.lineage:
                self._weigh(fetching, fetching.snapshot, body.items)
            return
        if body.after is None or not body.items:
            head = self._contacts[sender].head
            if body.after is None and head is not None and self._could_follow(head):
                self._fetch_snapshot(sender)
            return
        if self._replay and body.after in {item.head.lineage for item in self._replay}:
            place = [item.head.lineage for item in self._replay].index(body.after)
            longer = len(body.items) > len(self._replay) - place - 1
            if longer and is_chain((self._replay[place], *body.items)):
                ahead = (*self._replay[: place + 1], *body.items)
                self._compare_suffix(sender, Suffix(self._last(), ahead))
            return
        suffix = checked_suffix(self.log, body.after, body.items)
        if suffix is None:
            if body.after in self.log:
                self._contacts[sender].disappointed(self._now, self.config.fetch_patience)
            return
        self._compare_suffix(sender, suffix)

    def _compare_suffix(self, sender: str, suffix: Suffix) -> None:
        place = suffix.order_place
        if place is not None:
            step = suffix.items[place].step
            assert isinstance(step, RollbackOrder)
            if (step.generation, step.sequence) > self._head().order:
                self._roll_back(step)
                self._catch_up(sender, suffix.items[place + 1 :])
            return
        if suffix.base.head.lineage == self._lineage():
            if suffix.items != self._replay[: len(suffix.items)]:  # else their answers are being fetched
                self._catch_up(sender, suffix.items)
        elif self._fork(suffix).they_win:
            self._fetch_snapshot(sender, suffix.base.head.lineage)  # the switch is made in one step

    def _may_join_branch(self, suffix: Suffix) -> bool:
        """From the fork point: as a member; or alone, if no leader has a quorum or the branch has an epoch's worth."""
        opening = suffix.items[0].step
        assert isinstance(opening, Opening)
        if self.me in opening.members:
            return True
        view = self._membership().view
        if not any(member.peer in view for member in opening.members) and not self._may_join_strangers():
            return False
        fork = self._fork(suffix)
        if not self._is_alone(ALONE_SLACK) or not fork.is_plausible:
            return False
        return self.phase is Phase.ISOLATED or fork.theirs >= self.config.target_batch_size * self.config.cells

    def _may_join_strangers(self) -> bool:
        """Strangers open a branch when everybody has left. A member of the view that is still here can open one by
        itself; a client cannot, so it follows them in the end."""
        view = self._membership().view
        if view.keys() & set(self._in_touch()):
            return False
        if self.me.peer not in view:
            return True
        return not self.me.public and self._alone_for() >= STUCK * self.config.alone_after

    def _fork(self, suffix: Suffix) -> Fork:
        assert self.log is not None
        return Fork(self.log, suffix, self._beliefs, self._entered, self.epoch_seconds, self._now)

    def _could_follow(self, head: Head) -> bool:
        """Whether a head that has nothing in common with our log could be the one to follow."""
        return head.order >= self._head().order and head.beats(self._head())

    def _catch_up(self, source: str, items: tuple[LogItem, ...]) -> None:
        """Replay proven items behind the head."""
        self._replay, self._source = items, source
        self._replay_on()

    def _replay_on(self) -> None:
        while self._replay and self.phase is not Phase.LEAVING:
            item = self._replay[0]
            step = item.step
            if isinstance(step, Entry):
                missing = self._missing(step)
                if missing:
                    self._fetch_for_replay(missing, step)
                    return
                self._replay = self._replay[1:]
                self._commit(item)
            else:
                assert isinstance(step, Opening)
                if not self._may_join_branch(Suffix(self._last(), self._replay)):
                    self._replay = ()
                    break
                self._replay = self._replay[1:]
                self._open(item)
        self._source = None
        if self.phase is Phase.CATCHING_UP:
            self._do(Tell(Topic.CAUGHT_UP, f"epoch {self._head().epoch}"))
            self._settle_in()

    def _fetch_for_replay(self, missing: frozenset[bytes], entry: Entry) -> None:
        if self.phase is not Phase.CATCHING_UP:
            self._stop_round()
            self._move(Phase.CATCHING_UP, self._fetch_patience())
            self._report_ahead()
        for item in self._replay[1:]:
            if isinstance(item.step, Entry):
                missing |= self._missing(item.step)
        sources = {member.peer for member in entry.group} | ({self._source} if self._source is not None else set())
        self._do(FetchAnswers(missing, self._spread(sources), (), entry.fingerprint, entry.answers))

    def _report_ahead(self) -> None:
        """While catching up: keep in touch with the source, and with the leader whose round may wait for us."""
        order: tuple[str, ...] = ()
        if self._replay:
            ahead = self._replay[-1]
            order = leader_order(ahead.head.seed, ahead.membership.public)
        for peer in sorted({*order[:1], *([] if self._source is None else [self._source])} - {self.me.peer}):
            self._send(peer, self._report())

    def _spread(self, sources: set[str]) -> tuple[str, ...]:
        """The sources in an order of this peer's own, so that not all ask the same one."""
        return leader_order(self.me.peer.encode(), sources - {self.me.peer})

    def _fetch_patience(self) -> float:
        """s for answers: about as long as a round's exchange takes, with as much to carry for others."""
        return max(self.config.fetch_patience, 2 * self._round_time.seconds)

    def _fetch_failed(self) -> None:
        """Nobody served the answers in time: a snapshot is needed, and meanwhile the round goes on without us."""
        source = self._source
        self._replay, self._source = (), None
        if source is not None:
            self._fetch_snapshot(source)
        self._settle_in()

    def _on_answers_held(self, event: AnswersHeld) -> None:
        self._hold(event.digests, event.fitting if self.log is not None and event.head == self._lineage() else ())
        if self._replay:
            if self.phase is Phase.CATCHING_UP:
                self._clock.extend(self._now, self._fetch_patience())
                self._set_timer(Timer.PHASE, self._clock.until)
            self._replay_on()
            return
        fetching = self._fetching
        if fetching is not None and fetching.snapshot is not None and fetching.mends:
            self._mend(fetching.source, fetching.snapshot)
        considered = self._slot.considered
        if considered is not None:
            self._accept_if_fitting(considered, event.digests if not event.fitting else frozenset())
        lead = self._slot.lead
        if lead is not None:
            lead.fetching_since = None
            self._try_to_lead()
            self._propose_if_ready(lead)

    # --- snapshots ---

    def _look_for_snapshot(self) -> None:
        """Ask the public peers for a snapshot, one after another."""
        if self._fetching is not None and self._now - self._fetching.since <= self.config.snapshot_patience:
            return
        known = [
            peer
            for peer, contact in self._contacts
            if (contact.member.public or contact.head is not None) and self._now >= contact.avoided_until
        ]
        self._fetching = None
        if known:
            self._fetch_snapshot(leader_order(self.me.peer.encode(), known)[0])
        elif self._now - self._clock.entered >= self.config.alone_after:
            self._fetch_snapshot(CHECKPOINT)  # everybody has left

    def _fetch_snapshot(self, source: str, fork: bytes = b"") -> None:
        if self._fetching is None and self._now >= self._contacts[source].avoided_until:
            self._fetching = _Fetching(source, self._now)
            self._do(FetchSnapshot(source, fork))

    def _on_snapshot_failed(self, event: SnapshotFailed) -> None:
        self._snapshot_failed(event.source)

    def _snapshot_failed(self, source: str) -> None:
        self._fetching = None
        self._contacts[source].disappointed(self._now, self.config.fetch_patience)
        if self.log is None:
            self._look_for_snapshot()

    def _tick_snapshot(self, fetching: _Fetching) -> None:
        patience = self.config.snapshot_patience if fetching.snapshot is None else self.config.fetch_patience
        if fetching.mends:
            patience = self._fetch_patience()
        if self._now - fetching.since > patience:
            self._snapshot_failed(fetching.source)
        elif fetching.snapshot is not None and not fetching.mends:
            self._ask_behind(fetching.source, fetching.snapshot)

    def _ask_behind(self, source: str, snapshot: Snapshot) -> None:
        self._send(source, AskItems((snapshot.head.lineage,)))

    def _on_snapshot_taken(self, event: SnapshotTaken) -> None:
        fetching, self._fetching = self._fetching, None
        source, snapshot = (fetching.source if fetching is not None else CHECKPOINT), event.snapshot
        if self._use_snapshot(source, snapshot):
            self._contacts[source].useless = 0
        elif source != CHECKPOINT and self._may_lead_ahead(snapshot):
            self._fetching = _Fetching(source, self._now, snapshot)
            self._ask_behind(source, snapshot)
        else:
            self._snapshot_failed(source)

    def _use_snapshot(self, source: str, snapshot: Snapshot) -> bool:
        """Adopt it if it is ahead of us, on our branch or on one that wins; return whether it is of use."""
        if not snapshot.items or not is_chain(snapshot.items):
            return False
        if self.log is None:
            self._adopt(snapshot, None)
            return True
        if self._damaged and snapshot.head.lineage in self.log:
            return self._mend(source, snapshot)
        if self._lineage() in Log(snapshot.items, len(snapshot.items)):
            if snapshot.head.lineage != self._lineage():
                self._adopt(snapshot, self._head())
            return True
        common = self._common(snapshot)
        if not self._beats_us(snapshot, common):
            return False
        self._adopt(snapshot, None if common is None else self.log.item(common).head)
        return True

    def _common(self, snapshot: Snapshot) -> bytes | None:
        """The last lineage that a snapshot's items and our log both have."""
        assert self.log is not None
        inside = Log(snapshot.items, len(snapshot.items))
        return inside.last_common(item.head.lineage for item in reversed(self.log.items))

    def _may_lead_ahead(self, snapshot: Snapshot) -> bool:
        """Return whether the branch of a snapshot may win, though the snapshot does not: members serve states that are
        some entries old, and two branches that are equally fast would never meet by these."""
        if self.log is None or not snapshot.items or not is_chain(snapshot.items):
            return False
        return snapshot.head.lineage not in self.log and snapshot.head.order == self._head().order

    def _weigh(self, fetching: _Fetching, snapshot: Snapshot, items: tuple[LogItem, ...]) -> None:
        """Adopt a snapshot with its branch behind it, if the branch wins now. Else its source is asked again, for a
        while. Both sides compare with their heads of now, so two peers never change places."""
        assert self.log is not None
        if not is_chain((snapshot.items[-1], *items)):
            self._snapshot_failed(fetching.source)
            return
        common = self._common(snapshot)
        if self._beats_us(Snapshot((*snapshot.items, *items), snapshot.accounts), common):
            self._fetching = None
            self._contacts[fetching.source].useless = 0
            self._adopt(snapshot, None if common is None else self.log.item(common).head)
            self._compare_suffix(fetching.source, Suffix(self._last(), items))

    def _beats_us(self, snapshot: Snapshot, common: bytes | None) -> bool:
        assert self.log is not None
        if common is None or snapshot.head.order != self._head().order:
            return snapshot.head.beats(self._head())
        place = [item.head.lineage for item in snapshot.items].index(common)
        if place == len(snapshot.items) - 1:
            return False  # it is behind us
        return self._fork(Suffix(self.log.item(common), snapshot.items[place + 1 :])).they_win

    def _adopt(self, snapshot: Snapshot, common: Head | None) -> None:
        """Stand where the snapshot stands, in one write.

        :param common: where our log and the snapshot's parted; None: unknown
        """
        if self.log is not None:
            self._stop_round()
            self._leave_branch(self.log, snapshot, common)
        self.accounts = snapshot.accounts
        self.log = Log(snapshot.items, self.config.kept_entries)
        self._expire_stale()
        self.ledger.forget_entries({each.head.lineage for each in self.log.items})
        self._persist(self._head_record(), self.ledger.record())
        self._do(Adopt(snapshot))
        self._damaged = False
        self._replay, self._source = (), None
        self._quorum_at = self._touched_at = self._now
        self._enter_slot()
        self._settle_in()

    def _leave_branch(self, log: Log, snapshot: Snapshot, common: Head | None) -> None:
        """What our branch has and the snapshot's has not is lost, with its cause."""
        gained = entries_behind(snapshot.items, common)
        order = last_order(snapshot.items, common)
        if order is not None and order.parent in log:
            base, cause = order.parent, Cause.ROLLBACK
        elif common is not None and order is None:
            base, cause = common.lineage, Cause.LOST_BRANCH
        else:
            base, cause = None, Cause.UNKNOWN
        ours = log.behind(base) if base is not None else log.items
        kept = {lineage for lineage, _ in gained}
        lost = [item.head.lineage for item in ours if item.head.lineage not in kept]
        self.ledger.switch(lost, gained, self.me.peer, cause)
        if cause is not Cause.LOST_BRANCH:
            self.ledger.expire_born(None, -1, cause)  # nobody can use it, or tell what became of it
        elif lost and common is not None:
            self.ledger.expire_born(None, common.epoch, cause)
            self._do(Tell(Topic.BRANCH_LOST, f"{len(lost)} entries"))

    def _on_sketches(self, sender: str, body: Sketches) -> None:
        assert self.log is not None
        if body.slot not in self.log or body.slot == self._lineage():
            return
        base, after = self.log.item(body.slot), self.log.behind(body.slot)[0]
        votes = [
            (peer, vote)
            for peer, vote in dict(body.votes).items()
            if peer in base.membership.electorate and vote.entry == after.head.lineage
        ]
        if self.me.peer in outliers(votes, self.config.sketch_tolerance):
            self._damage_found()

    def _damage_found(self) -> None:
        """This peer's parameters are not the swarm's: it mends them, and neither leads, votes nor computes before."""
        if not self._damaged:
            self._damaged = True
            self._slot.lead = None
            self._do(Tell(Topic.DRIFTED, f"epoch {self._head().epoch}"))
            self._seek_undamaged()

    def _seek_undamaged(self) -> None:
        here = [peer for peer in self._at_head() if self._now >= self._contacts[peer].avoided_until]
        if here:
            self._fetch_snapshot(min(here, key=lambda peer: (not self._contacts[peer].member.public, peer)))

    def _mend(self, source: str, snapshot: Snapshot) -> bool:
        """Take the parameters of a snapshot that is where we are, or some steps behind, and take those steps again;
        return whether that can be. Answers that are not here are fetched first."""
        assert self.log is not None
        self._fetching = None
        if not self._damaged or snapshot.head.lineage not in self.log:
            return False
        items = self.log.behind(snapshot.head.lineage)
        if any(isinstance(item.step, RollbackOrder) for item in items):
            return False
        missing = frozenset().union(*(self._missing(item.step) for item in items if isinstance(item.step, Entry)))
        if missing:
            self._fetching = _Fetching(source, self._now, snapshot, mends=True)
            self._do(FetchAnswers(missing, self._spread({source, *self._at_head()})))
            return True
        self._do(Repair(snapshot, items))
        self._damaged = False
        return True

    # --- branches and rollbacks ---

    def _alone_for(self) -> float:
        """s that this peer has been alone: no quorum was in touch. A quorum in touch elects a leader; only if nothing
        comes of that long after the epoch's deadline, because an accepted proposal is lost, does it count as well."""
        return max(self._now - self._touched_at, self._now - self._slot.began - self.config.epoch_deadline)

    def _is_alone(self, slack: float) -> bool:
        """Whether this peer may open a branch, or follow one of which it is no member."""
        return self._alone_for() >= self.config.alone_after - slack

    def _note_quorum(self) -> None:
        in_touch = {*self._in_touch(), self.me.peer}
        somebody_public = self.me.public or bool(in_touch & set(self._contacts.public()))
        if somebody_public and is_quorum(self._electorate(), in_touch, self._left()):
            self._touched_at = self._now

    def _tick_alone(self) -> None:
        for peer, contact in self._contacts:
            if contact.member.public or self.me.public:
                self._send(peer, self._report())
        if not self._is_alone(0.0) or self.decides_alone:
            return  # it waits for samples
        attempt = self._slot.opening
        if attempt is not None and self._now - attempt.asked < self.config.isolated_after:
            return
        if attempt is not None:
            self._leave_out(attempt)
        lonely = self.config.alone_after - ALONE_SLACK
        company = [self.me] + [
            member
            for member, report in self._reporting()
            if report.alone_for >= lonely and self._now >= self._slot.left_out_until.get(member.peer, self._now)
        ]
        members = opening_members(self._last(), company)
        if self.me not in members or not self._opens(opener(self._lineage(), members)):
            return
        last = self._last_opening
        number = last.attempt + 1 if last is not None and last.parent == self._lineage() else 0
        number = max(number, 0 if attempt is None else attempt.above + 1)
        head = self._head()
        opening = Opening(head.generation, head.sequence, head.epoch, head.lineage, number, members)
        self._slot.opening = OpeningAttempt(opening, self._now, signers={self.me.peer})
        self._sign(opening)
        for each in members:
            if each.peer != self.me.peer:
                self._send(each.peer, AskOpening(opening))
        self._open_if_signed()

    def _opens(self, first: str | None) -> bool:
        """Return whether this peer opens the branch itself. Leave out another one that has not opened it long after
        its time, as those that do not sign."""
        slot = self._slot
        if first is None or first == self.me.peer:
            slot.opener = None
            return first is not None
        if slot.opener is None or slot.opener[0] != first:
            slot.opener = (first, self._now)
        elif self._now - slot.opener[1] > STUCK * self.config.isolated_after:
            slot.opener = None
            self._leave_out_for_a_while(first)
        return False

    def _leave_out(self, attempt: OpeningAttempt) -> None:
        """Members that did not sign are left out."""
        for member in attempt.opening.members:
            if member.peer not in attempt.signers:
                self._leave_out_for_a_while(member.peer)

    def _leave_out_for_a_while(self, peer: str) -> None:
        """Longer each time."""
        slot = self._slot
        slot.unsigned[peer] = slot.unsigned.get(peer, 0) + 1
        patience = self.config.isolated_after * 2 ** min(slot.unsigned[peer], LONGEST_LEFT_OUT)
        slot.left_out_until[peer] = self._now + patience

    def _sign(self, opening: Opening) -> None:
        self._last_opening = opening
        self._persist(OpeningRecord(opening))

    def _on_ask_opening(self, sender: str, body: AskOpening) -> None:
        opening, last = body.opening, self._last_opening
        if opening.parent != self._lineage() or self.me not in opening.members or not self._is_alone(ALONE_SLACK):
            return
        if opener(self._lineage(), opening.members) != sender:
            return
        if not self._last().may_open(opening, frozenset(member.peer for member in opening.members)):
            return
        signed = last.attempt if last is not None and last.parent == opening.parent else -1
        if last is None or opening.attempt > signed:
            if opening.attempt > signed + ATTEMPTS_AHEAD:
                return
            self._sign(opening)
            last = opening
        self._send(sender, SignOpening(last.lineage, last.attempt))  # one signature for each attempt

    def _on_sign_opening(self, sender: str, body: SignOpening) -> None:
        attempt = self._slot.opening
        if attempt is None or all(member.peer != sender for member in attempt.opening.members):
            return
        if body.opening == attempt.opening.lineage:
            attempt.signers.add(sender)
            self._open_if_signed()
        elif body.attempt >= attempt.opening.attempt:
            attempt.above = max(attempt.above, body.attempt)

    def _open_if_signed(self) -> None:
        attempt = self._slot.opening
        if attempt is None or not attempt.is_whole:
            return
        item = self._last().after_opening(attempt.opening, frozenset(attempt.signers))
        if not self._last().may_open(attempt.opening, frozenset(attempt.signers)):
            return
        for member in attempt.opening.members:
            if member.peer != self.me.peer:
                self._send(member.peer, Items(attempt.opening.parent, (item,)))
        self._open(item)
        self._settle_in()

    def _open(self, item: LogItem) -> None:
        """Go on behind an opening: same parameters, another lineage."""
        self._stop_round()
        self._take(item)
        self._do(Apply(item, ()))
        self._do(Tell(Topic.BRANCH_OPENED, f"epoch {item.head.epoch}"))
        if self.phase is not Phase.CATCHING_UP:
            self._settle_in()

    def _on_ordered(self, event: Ordered) -> None:
        self._follow_order(event.order)

    def _follow_order(self, order: RollbackOrder) -> None:
        if self.log is not None and (order.generation, order.sequence) > self._head().order:
            self._roll_back(order)
            self._settle_in()

    def _roll_back(self, order: RollbackOrder) -> None:
        """The monitor's order opens a generation: what was computed on the undone epochs expires."""
        assert self.log is not None
        self._stop_round()
        self._replay, self._source = (), None
        kept = order.parent in self.log
        undone = self.log.behind(order.parent) if kept else self.log.items
        cause = Cause.ROLLBACK if kept else Cause.UNKNOWN
        self.ledger.switch([item.head.lineage for item in undone], (), self.me.peer, cause)
        self.ledger.expire_born(None, -1, Cause.ROLLBACK)
        self.accounts = Accounts()
        item = self.log.last.after_order(order)
        self._take(item)
        self._do(Apply(item, ()))
        self._do(Tell(Topic.ROLLED_BACK, f"generation {order.generation}"))
        for peer in self._in_touch():
            self._send(peer, Order(order))
        if self.phase is not Phase.CATCHING_UP:
            self._settle_in()

    # --- leaving ---

    def _on_leave(self, event: LeaveRequested) -> None:
        self._leaving = True  # it says goodbye when no round runs

    def _say_goodbye(self) -> None:
        """Promise never to vote again: the accepted proposal goes with it, so nobody waits for this peer."""
        self.ledger.return_all()
        self.ledger.expire_born(None, -1, Cause.LEFT)
        if self.log is not None:
            record = self._slot.acceptor.record
            goodbye = Goodbye(self.me.peer, self._lineage(), record.promised, record.accepted, record.accepted_at)
            self._persist(goodbye, self.ledger.record())
            for peer in sorted({*self._in_touch(), *self._membership().view} - {self.me.peer}):
                self._send(peer, goodbye)
        self._move(Phase.LEAVING)
        self._set_timer(Timer.TICK, None)
        self._do(Tell(Topic.LEFT, ""))

    def _on_goodbye(self, sender: str, goodbye: Goodbye) -> None:
        if self.log is None or goodbye.peer in self._goodbyes or goodbye.peer not in self._membership().view:
            return
        if self._is_ahead(goodbye):
            self._goodbyes_ahead[goodbye.peer] = goodbye
            return
        self._goodbyes[goodbye.peer] = goodbye
        self._skip_turn_of(goodbye.peer)
        self._try_to_lead()
        self._count_votes()
        self._begin_if_ready()

    def _is_ahead(self, goodbye: Goodbye) -> bool:
        """Whether the leaver stood somewhere else than here or shortly before: it may have voted in our slot."""
        return goodbye.slot != self._lineage() and goodbye.slot not in self._membership().slots

    def _left(self) -> frozenset[str]:
        """Members out of the denominator at the ballot that is followed."""
        return self._membership().left(self._goodbyes.values(), self._lineage(), self._ballot_followed())

    def _known_goodbyes(self) -> tuple[Goodbye, ...]:
        return tuple(goodbye for _, goodbye in sorted(self._goodbyes.items()))

    # --- small things ---

    def _on_received(self, event: Received) -> None:
        sender, message = event.sender, event.message
        if sender in self._contacts.banned or sender == self.me.peer:
            return
        body = message.body
        if why_malformed(sender, body) is not None:
            return
        contact = self._contacts[sender]
        contact.heard, contact.head = self._now, message.head
        if isinstance(body, Accuse):
            self._on_proven(Proven(body.verdict))
        elif isinstance(body, Order):
            self._follow_order(body.order)
        elif self.log is None:
            return
        elif isinstance(body, AskItems):
            self._on_ask_items(sender, body)
            self._compare(sender, message.head)
        elif isinstance(body, Items):
            self._on_items(sender, body)
        elif isinstance(body, Goodbye):
            self._on_goodbye(sender, body)
        elif isinstance(body, Sketches):
            self._on_sketches(sender, body)
        elif isinstance(body, Vote) and message.head is not None and message.head.lineage != self._lineage():
            self._on_late_vote(sender, body)
            self._compare(sender, message.head)
        else:
            if isinstance(body, Propose):
                for goodbye in body.goodbyes:
                    self._on_goodbye(goodbye.peer, goodbye)
            if self._compare(sender, message.head) and self.phase is not Phase.CATCHING_UP:
                self._slot_handlers[type(body)](self, sender, body)
            elif isinstance(body, Report):
                self._note_report(sender, body)

    def _last(self) -> LogItem:
        assert self.log is not None
        return self.log.last

    def _head(self) -> Head:
        return self._last().head

    def _lineage(self) -> bytes:
        return self._last().head.lineage

    def _membership(self) -> Membership:
        return self._last().membership

    def _electorate(self) -> frozenset[str]:
        return self._last().membership.electorate

    def _in_touch(self) -> list[str]:
        """Peers that were heard just now."""
        return [peer for peer in self._contacts.in_touch(self._now) if peer not in self._goodbyes]

    def _at_head(self) -> list[str]:
        """Peers in touch that are where this peer is."""
        return [peer for peer in self._contacts.at(self._lineage(), self._now) if peer not in self._goodbyes]

    def _hears_quorum(self) -> bool:
        hears = set(self._at_head())
        if self._slot.lead is not None:
            hears -= self._slot.lead.refusals.keys()
        return is_quorum(self._electorate(), hears | {self.me.peer}, self._left())

    def _audience(self) -> list[str]:
        """Those that a leader speaks to: the view, and newcomers that report."""
        peers = {*self._in_touch(), *self._membership().view} - {self.me.peer}
        return sorted(peers - self._contacts.banned.keys() - self._goodbyes.keys())

    def _missing(self, entry: Entry) -> frozenset[bytes]:
        return frozenset(answer.digest for answer in entry.answers) - self._held.keys()

    def _not_fitting(self, answers: Iterable[Answer]) -> frozenset[bytes]:
        """Those that this peer may not vote for yet: whoever takes a step with them has to read them as these cells."""
        return frozenset(answer.digest for answer in answers if answer.slice not in self._slot.fitting)

    def _hold(self, digests: Iterable[bytes], fitting: Iterable[Slice]) -> None:
        epoch = self._head().epoch if self.log is not None else 0
        for digest in digests:
            self._held.setdefault(digest, epoch)
        if self.log is not None:
            self._slot.fitting.update(fitting)

    def _jitter(self) -> float:
        """s; peers do not count further at the same moment."""
        return (self._slot.acceptor.record.slot[0] ^ sum(self.me.peer.encode()) & 0xFF) / 512

    def _allow_computing(self) -> None:
        on = self.phase in COMPUTING and not self._damaged and not self._leaving
        if not self.config.overlap and self.phase in (Phase.EXCHANGING, Phase.VOTING):
            on = False
        alone_for = self._now - self._quorum_at
        if alone_for > max(self.config.max_staleness * self.epoch_seconds, self.config.suspect_after):
            on = False  # what it computed would expire
        if self.ledger.pending_samples >= self.config.most_epochs * self.config.target_batch_size:
            on = False  # nobody would believe more
        if on != self._computes:
            self._computes = on
            self._do(Compute(on))

    def _move(self, phase: Phase, bound: float | None = None) -> None:
        self._clock.move(phase, self._now, bound)
        self._set_timer(Timer.PHASE, self._clock.until)

    def _set_timer(self, timer: Timer, at: float | None) -> None:
        self._do(SetTimer(timer, at))

    def _persist(self, *records: Record) -> None:
        for record in records:
            if isinstance(record, BallotRecord):
                self._last_ballot = record
        self._do(Persist(records))

    def _send(self, to: str, body: Body) -> None:
        self._do(Send(to, Message(self.head, body)))

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    _handlers: Final[dict[type, Callable[[Any, Any], None]]] = {
        Started: _on_started,
        TimerFired: _on_timer,
        Received: _on_received,
        PeerSeen: _on_peer_seen,
        Measured: _on_measured,
        Computed: _on_computed,
        ExchangeEnded: _on_exchange_ended,
        CommitmentsHeard: _on_commitments_heard,
        AnswerRefused: _on_answer_refused,
        Disregarded: _on_disregarded,
        AnswersHeld: _on_answers_held,
        SnapshotTaken: _on_snapshot_taken,
        SnapshotFailed: _on_snapshot_failed,
        Sketched: _on_sketched,
        Proven: _on_proven,
        Ordered: _on_ordered,
        LeaveRequested: _on_leave,
    }
    _slot_handlers: Final[dict[type, Callable[[Any, str, Any], None]]] = {
        Report: _on_report,
        Lead: _on_lead,
        Ask: _on_ask,
        Refuse: _on_refuse,
        Promise: _on_promise,
        Begin: _on_begin,
        Without: _on_without,
        Held: _on_held,
        Propose: _on_propose,
        Vote: _on_vote,
        AskOpening: _on_ask_opening,
        SignOpening: _on_sign_opening,
    }
