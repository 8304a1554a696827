"""Define messages between peers, events from the process around a core, and actions for it.

The process around a core checks signatures before a message comes in, bounds what it decodes, and executes actions in
their order. It may die between any two actions; `Persist` writes every promise and vote before another action sends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Goodbye
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, LedgerRecord, Share, Slice
from volunteer_kit.swarm.sync.entries import Entry, Head, Member, Opening, RollbackOrder, Verdict
from volunteer_kit.swarm.sync.log import LogItem

CHECKPOINT: Final = ""  # a source of snapshots that is no peer

# --- between peers ---


@dataclass(frozen=True, slots=True)
class Report:
    """A member tells the leader once a second what it could bring."""

    ballot: Ballot
    member: Member
    samples: int  # pending
    bandwidth: float  # Mbit/s up; 0: reduces nothing
    round_seconds: float | None  # learned: from a round's beginning to its last answer
    vote_seconds: float | None  # learned: from there to the certificate
    alone_for: float  # s without a quorum in touch


@dataclass(frozen=True, slots=True)
class Lead:
    """The leader's heartbeat."""

    ballot: Ballot
    quorum: bool  # whether the leader hears a quorum


@dataclass(frozen=True, slots=True)
class Ask:
    """The leader of a ballot above 0 asks for a promise."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Promise:
    """To accept nothing below `ballot` in this slot; it carries the accepted proposal."""

    ballot: Ballot
    accepted: Entry | None
    accepted_at: Ballot | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The answer to who uses a ballot that this peer does not follow: it hears another leader, or has promised more."""

    ballot: Ballot
    promised: bool


class Round(NamedTuple):
    """All that a leader says when a round begins; the fingerprint is the hash of it, and parts travel under it."""

    slot: bytes
    ballot: Ballot
    attempt: int
    group: tuple[Member, ...]
    samples: tuple[int, ...]  # that each member reported, as `group` is ordered
    slices: tuple[tuple[str, int], ...]  # reducer, cells
    exchange_seconds: float
    vote_seconds: float
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Begin:
    """Parts may travel."""

    round: Round


@dataclass(frozen=True, slots=True)
class Without:
    """These members fell silent during the exchange: nobody waits for their parts or answers."""

    fingerprint: bytes
    silent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """The answers that a member has when its exchange is over."""

    fingerprint: bytes
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """The leader proposes an entry. Above ballot 0 the promises of a quorum show that it had to be this one."""

    ballot: Ballot
    entry: Entry
    promises: tuple[tuple[str, Promise], ...]  # by peer; signed
    goodbyes: tuple[Goodbye, ...] = ()


@dataclass(frozen=True, slots=True)
class Vote:
    """For an entry at a ballot. The voter keeps the entry and its answers' bytes."""

    ballot: Ballot
    entry: bytes  # lineage
    sketch: float | None  # of the voter's parameters at the parent


@dataclass(frozen=True, slots=True)
class Sketches:
    """The votes for an entry with their sketches, from the leader: a voter outside the plurality takes a snapshot."""

    slot: bytes
    votes: tuple[tuple[str, Vote], ...]  # by peer; signed


@dataclass(frozen=True, slots=True)
class AskItems:
    """Send what comes behind the newest of these lineages that you have (newest first)."""

    lineages: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Items:
    """The answer to `AskItems`, or the certificate of a new entry. `items[0]` follows `after`.

    No items: the answerer has none of the lineages, or not any more.
    """

    after: bytes | None
    items: tuple[LogItem, ...]


@dataclass(frozen=True, slots=True)
class AskOpening:
    """Sign this opening of a branch, please."""

    opening: Opening


@dataclass(frozen=True, slots=True)
class SignOpening:
    """A signature under an opening; of another one than was asked for if this peer has signed that."""

    opening: bytes  # lineage
    attempt: int


@dataclass(frozen=True, slots=True)
class Order:
    """A rollback order; the monitor signed it."""

    order: RollbackOrder


@dataclass(frozen=True, slots=True)
class Accuse:
    """A proof against a peer, for everybody."""

    verdict: Verdict


Body = (
    Report
    | Lead
    | Ask
    | Promise
    | Refuse
    | Begin
    | Without
    | Held
    | Propose
    | Vote
    | Sketches
    | AskItems
    | Items
    | Goodbye
    | AskOpening
    | SignOpening
    | Order
    | Accuse
)


@dataclass(frozen=True, slots=True)
class Message:
    """Everything between peers says where its sender is. A body that speaks of a slot means the head's lineage."""

    head: Head | None  # None: the sender has no parameters yet
    body: Body


# --- events ---


@dataclass(frozen=True, slots=True)
class Started:
    """The process runs; also after a restart."""


class Timer(Enum):
    """Setting a timer replaces an earlier one of its name."""

    TICK = "tick"  # the heartbeat
    PHASE = "phase"  # the bound of the phase


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer is due."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class Received:
    """A message came. Its signatures hold: the sender's and those that it carries; also each verdict's proof and the
    goodbye of each peer that an entry calls gone."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """Discovery knows this peer. `speed` is what its device is believed to do, in samples per second."""

    member: Member
    speed: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What this peer's uplink does: its share of the reducing follows from it."""

    bandwidth: float  # Mbit/s


@dataclass(frozen=True, slots=True)
class Computed:
    """The device finished a microbatch on the parameters that had this lineage when it began."""

    samples: int
    lineage: bytes
    apart: bool = False  # it is a contribution of its own, and so is what came before


@dataclass(frozen=True, slots=True)
class ExchangeEnded:
    """All answers are here, or the exchange was ended before: these are here."""

    fingerprint: bytes
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class CommitmentsHeard:
    """In a run that verifies: what a round's leader told as the members' commitments, before any part travels."""

    fingerprint: bytes
    digest: bytes  # of all of them
    shares: tuple[Share, ...]  # that may enter
    disregarded: int = 0  # sample-cells of those that may not: somebody did compute them for this epoch


@dataclass(frozen=True, slots=True)
class AnswerRefused:
    """This answer is longer than any average of what the members had committed to; or it was fetched to be judged, and
    its bytes are no average of these cells in the head's next step."""

    slice: Slice


@dataclass(frozen=True, slots=True)
class Disregarded:
    """A committed entry's members took these contributions of this peer for checking alone."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnswersHeld:
    """Answers are here, by their hashes.

    :param fitting: those whose bytes were decoded as the average of these cells, in the step behind `head`
    :param head: lineage
    """

    digests: frozenset[bytes]
    fitting: frozenset[Slice] = frozenset()
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """A snapshot arrived. Its manifest, bounds and witnesses were checked."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """The source did not give a snapshot."""

    source: str


@dataclass(frozen=True, slots=True)
class Sketched:
    """A sketch of the parameters at this lineage."""

    lineage: bytes
    sketch: float


@dataclass(frozen=True, slots=True)
class Proven:
    """This process found a proof against a peer, or checked one that was sent."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Ordered:
    """The monitor, whose process this is, has signed a rollback order."""

    order: RollbackOrder


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The volunteer wants to leave."""


Event = (
    Started
    | TimerFired
    | Received
    | PeerSeen
    | Measured
    | Computed
    | ExchangeEnded
    | CommitmentsHeard
    | AnswerRefused
    | Disregarded
    | AnswersHeld
    | SnapshotTaken
    | SnapshotFailed
    | Sketched
    | Proven
    | Ordered
    | LeaveRequested
)

# --- what is durable ---


@dataclass(frozen=True)
class Snapshot:
    """The log's tail and the accounts at its end; the parameters travel beside it."""

    items: tuple[LogItem, ...]
    accounts: Accounts

    @property
    def head(self) -> Head:
        """Where it leads."""
        return self.items[-1].head


@dataclass(frozen=True, slots=True)
class BallotRecord:
    """What this peer may never forget about its slot: invariant I6."""

    slot: bytes
    promised: Ballot
    accepted: Entry | None = None
    accepted_at: Ballot | None = None
    proposed_at: Ballot | None = None  # the highest ballot at which it proposed itself


@dataclass(frozen=True, slots=True)
class OpeningRecord:
    """The last opening that this peer signed."""

    opening: Opening


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """The log and the accounts. The process makes the parameters of its head recoverable with it."""

    snapshot: Snapshot


Record = BallotRecord | OpeningRecord | HeadRecord | LedgerRecord | Goodbye


@dataclass(frozen=True, slots=True)
class Durable:
    """What a process finds when it starts again: the last record of each kind. A process with a `Goodbye` starts as a
    new peer, with a key of its own."""

    head: HeadRecord | None = None
    ballot: BallotRecord | None = None
    opening: OpeningRecord | None = None
    ledger: LedgerRecord | None = None
    held: frozenset[bytes] = frozenset()  # hashes of the answers whose bytes are on the disk


# --- actions ---


@dataclass(frozen=True, slots=True)
class Persist:
    """Write these records in one piece and flush them before the next action. A `BallotRecord` with an accepted entry
    keeps the bytes of its answers; a `HeadRecord` keeps those of its log's entries."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; it may be lost, late, or come twice."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Fire `timer` at this time of the core's clock; None: not at all."""

    timer: Timer
    at: float | None


@dataclass(frozen=True, slots=True)
class StartExchange:
    """Send these shares to the reducers of the round, and reduce if a slice is ours.

    A member's part of a slice is one tensor, so a reducer takes all of its shares or none: none if their samples are
    above the member's limit, or if `spent` has some of their cells.

    The sender's error-feedback residuals stay tentative, by fingerprint and cell, until `Apply` or `DropRound`.
    """

    round: Round
    shares: tuple[Share, ...]  # with the cells that are pending
    limits: tuple[tuple[str, float], ...]  # samples that are believed of each member
    spent: Accounts  # what is committed already


@dataclass(frozen=True, slots=True)
class EndExchange:
    """Stop it; answer with `ExchangeEnded` and what is here."""

    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class ExchangeWithout:
    """Do not wait for these members: the exchange ends when everything else is here."""

    fingerprint: bytes
    silent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FetchAnswers:
    """Get the bytes of these answers from any of the sources.

    :param judged: the answers of the entry that this peer is to propose or accept with them: bytes that are none of the
        head's next step are not to be held. None of them: a quorum has certified the entries
    :param round: whose answers may still be on their way to this peer; `answers` are those of its entry
    """

    digests: frozenset[bytes]
    sources: tuple[str, ...]
    judged: tuple[Answer, ...] = ()
    round: bytes = b""  # its fingerprint
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Get a snapshot from this peer; from `CHECKPOINT` it is the newest signed checkpoint that the run has published.
    """

    source: str
    fork: bytes = b""  # the snapshot has to be behind this lineage, where the branches part; empty: any


@dataclass(frozen=True, slots=True)
class Apply:
    """Take the step. Rounds of the slot are over: residuals of cells that entered count, all others are undone."""

    item: LogItem
    own: tuple[tuple[int, int], ...]  # (number, cells) of this peer's contributions that it settled


@dataclass(frozen=True, slots=True)
class Adopt:
    """Replace parameters and statistics by the snapshot's."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Repair:
    """These parameters are damaged: take the snapshot's, and the steps of these items behind it again. The head stays.
    """

    snapshot: Snapshot
    items: tuple[LogItem, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Whether the device may compute."""

    on: bool


@dataclass(frozen=True, slots=True)
class Ban:
    """Refuse this peer from now on."""

    verdict: Verdict


class Topic(Enum):
    """What people are told."""

    ROUND_FAILED = "round failed"
    REFUSED = "proposal refused"
    CAUGHT_UP = "caught up"
    BRANCH_OPENED = "branch opened"
    BRANCH_LOST = "branch lost"
    ROLLED_BACK = "rolled back"
    DRIFTED = "drifted"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Tell:
    """News for the volunteer or the host."""

    topic: Topic
    about: str


Action = (
    Persist
    | Send
    | SetTimer
    | StartExchange
    | EndExchange
    | ExchangeWithout
    | FetchAnswers
    | FetchSnapshot
    | Apply
    | Adopt
    | Repair
    | Compute
    | Ban
    | Tell
)
