"""Define the messages between the training process and its node process.

Both run on one machine and come from one start, so the messages are pickled objects on a pipe. Tensors never travel on
it: gradients lie in slots of a mapped file (`slots.py`), averages and states in files of the node's folder.

The order of one epoch, as the training process sees it: `Granted` a slot, fill it with microbatches, `Delivered`; then
`Step` with the files of the averaged gradient, and `Stepped` when the optimizer has taken it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from volunteer_kit.auth.access_token import BanList, Trust
from volunteer_kit.robust.messages import Duty
from volunteer_kit.robust.messages import Event as Finding
from volunteer_kit.robust.standing import Settings, Strike
from volunteer_kit.swarm.sync.entries import RollbackOrder

ROLE: Final = "The process that takes part in the swarm's rounds"  # of the node, for people
CHECKED_FIRST: Final = "checked first"  # a topic of `Told`: the others check our work before it counts

# --- from the training process ---


@dataclass(frozen=True)
class Admit:
    """What the run's authority said last: the token that this peer shows, and who is banned. The training process has
    checked both. `condemned` are keys of those that most of the others have convicted; see Admission.condemn."""

    token: bytes = b""
    bans: BanList = field(default_factory=BanList)
    condemned: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class NodeSpec:
    """The first message: all that the node needs to know.

    :param daemon: address of the p2pd that the DHT's process owns
    :param folder: the node's files
    :param run_key: peers with another one never meet
    :param sync: fields of `SyncConfig` that differ from its defaults
    :param shapes: of the parameters that are averaged, in the optimizer's order
    :param codec: of gradients: (small, large, elements above which a tensor is large, density of `sparse`)
    :param origins, most_weight, rank, ends: as `rounds.layout.Layout` takes them
    :param rule: how the members' parts become one, a name of `robust.rules`
    :param account: who answers for this peer; "": nobody, each peer is an account of its own
    :param trust: the run's root keys; None: a run without an authority
    :param admit: what its authority has said by now
    :param speed: samples per second that this device is believed to do
    :param origin: epoch of the state that this peer brings along (a checkpoint's); it is used where nobody else is
    :param state_digest: SHA-256 of that state, the same for all who bring it; b"": the parameters that every peer of
        the run can make
    :param trust: the run's root keys, for the monitor's orders; None: orders are refused
    :param verification: contributions are computed again, and who cheats is banned; None: not
    :param observes: the training process wants to know whose samples each step holds: `StepOf.shares` and `History`
    :param averages_ways: members take local steps, and a contribution is how far these moved the model: `StepOf.scales`
    """

    daemon: str
    identity_path: str
    client_mode: bool
    initial_peers: tuple[str, ...]
    folder: Path
    run_key: str
    sync: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    codec: tuple[str, str, int, float]
    rule: str = "mean"
    account: str = ""
    max_mbps: float | None = None
    speed: float = 0.0
    origin: int = 0
    state_digest: bytes = b""
    founds: bool = True  # whether this peer may begin the run where nobody else is
    trust: Trust | None = None
    observes: bool = False
    origins: tuple[int, ...] | None = None
    most_weight: float = 0.0
    averages_ways: bool = False
    verification: Settings | None = None
    admit: Admit = field(default_factory=Admit)
    rank: int = 0
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Delivered:
    """A slot holds the gradient sum of these samples, computed on the parameters of `lineage`; or how far local steps
    by these samples moved the model."""

    slot: int
    samples: int
    lineage: bytes
    names: tuple[str, ...] = ()  # of the samples
    life: int = 0  # of the model that steps by itself: it grows when that begins anew, see `Step.done`
    microbatches: int = 1


@dataclass(frozen=True)
class Recomputed:
    """The answer to `Recompute`. Nothing is answered where samples cannot be read, or a model is not here any more."""

    duty: Duty
    totals: tuple[np.ndarray[Any, Any], ...]  # (cells, sums) of each range


@dataclass(frozen=True)
class Forgive:
    """A moderator has set aside what was found against this peer."""

    peer: str


@dataclass(frozen=True)
class Stepped:
    """The parameters of this lineage are there. `sketch` is a number that equal parameters share up to rounding."""

    lineage: bytes
    sketch: float


@dataclass(frozen=True)
class StateWritten:
    """The state at `lineage` is in its file, as `WriteState` asked; `error` says why not."""

    lineage: bytes
    path: Path
    digest: bytes  # SHA-256 of the file
    error: str = ""


@dataclass(frozen=True)
class Checked:
    """The answer to `Check`: why the state cannot be used; "": it can."""

    path: Path
    error: str
    lineage: bytes = b""  # of the state in it
    epoch: int = -1


@dataclass(frozen=True)
class PrepareOrder:
    """The monitor orders everybody back: `OrderToSign` is the answer.

    From now on the node gives the checkpoint's state to everybody who asks for it.
    """

    parent: bytes  # lineage of the checkpoint
    path: Path  # of its state, as `WriteState` has it
    digest: bytes  # SHA-256 of that file


@dataclass(frozen=True)
class GiveOrder:
    """An order that the monitor has signed: follow it, and tell the others."""

    order: RollbackOrder
    signature: bytes


@dataclass(frozen=True)
class SpeedMeasured:
    """What this device does, in samples per second."""

    speed: float


@dataclass(frozen=True)
class Seen:
    """Discovery found these peers of the run, which have its parameters: (peer id, account, whether it is public,
    samples per second that its device is believed to do).

    :param own_speed: what others believe of this peer
    """

    peers: tuple[tuple[str, str, bool, float], ...]
    own_speed: float = inf


@dataclass(frozen=True)
class Found:
    """Discovery found nobody else: begin the run with the parameters of the training process."""


@dataclass(frozen=True)
class Leave:
    """Say goodbye; `Left` is the answer."""


# --- from the node process ---


@dataclass(frozen=True)
class Up:
    """The node runs. The training process waits for `Load` or `Found` next."""

    peer: str


class Brought(NamedTuple):
    """What one member brought to a step, late samples in full."""

    peer: str
    account: str  # who answers for it, as `entries.Member` has it
    samples: float  # of all cells, by the number of cells: a round may lose some


@dataclass(frozen=True)
class StepOf:
    """One entry, opening or rollback order, as far as the training process needs it."""

    lineage: bytes
    parent: bytes
    generation: int
    epoch: int  # behind it
    answers: tuple[tuple[int, Path], ...] = ()  # (cells, file); none: parameters and statistics stay as they are
    missing: int = 0  # cells without an answer: zero in this step
    group_size: int = 1
    samples: int = 0  # of everybody
    received: float = 1.0  # the part of all cells that has an answer
    is_step: bool = True  # False: a beginning, an opening or an order, no optimizer step
    sequence: int = 0  # of the last rollback order, beside its generation
    shares: tuple[Brought, ...] = ()  # by peer; told to who observes
    scales: tuple[float, ...] = ()  # of each cell: what its mean is multiplied with, where ways are averaged


@dataclass(frozen=True)
class Founded:
    """This peer begins the run at `lineage`, with the parameters that the training process has."""

    lineage: bytes
    epoch: int


@dataclass(frozen=True)
class History:
    """The log's tail, oldest first, told to who observes: where this peer stands now it has not come step by step."""

    steps: tuple[StepOf, ...]


@dataclass(frozen=True)
class Load:
    """Take parameters and statistics from this file, then these steps. Comes at the start, for a peer that fell behind,
    after a rollback and for damaged parameters; what was computed meanwhile is the node's to settle."""

    lineage: bytes  # of the file's state
    epoch: int
    path: Path
    steps: tuple[StepOf, ...]
    reason: str  # "restart", "joined", "behind", "damaged", "rollback"
    generation: int = 0  # of the last rollback order that is in the file's state
    sequence: int = 0


@dataclass(frozen=True)
class Check:
    """Whether the state in this file, which came from another peer, can be used; `Checked` is the answer."""

    path: Path


@dataclass(frozen=True)
class OrderToSign:
    """The order that `PrepareOrder` asked for, and what the monitor's key has to sign as kind "order"; None: this peer
    is not in the run yet."""

    order: RollbackOrder | None
    digest: bytes = b""


@dataclass(frozen=True)
class Step:
    """Take this step. `own` is what it settled of this peer's samples, `names` those that are applied whole by now.

    Where ways are averaged, `done` are this peer's own, as (slot, cells), which are in this step or in none to come.
    The slots stay as they are until `Stepped`. A model of another `life` than theirs is not ahead by them.
    """

    step: StepOf
    own: float = 0.0
    names: tuple[str, ...] = ()
    seconds: float = 0.0  # from the round's beginning to its certificate
    sent_bytes: int = 0
    received_bytes: int = 0
    done: tuple[tuple[int, int], ...] = ()
    life: int = 0
    openings: tuple[bytes, ...] = ()  # of the branch, the last ones
    is_unconfirmed: bool = False  # the branch may lose


@dataclass(frozen=True)
class Expired:
    """Samples of this peer that can no longer count, by cause."""

    samples: float
    cause: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recompute:
    """Compute others' samples again, between two microbatches of our own.

    :param models: lineage of the parameters of each of the duty's loads; b"": it is not known any more
    """

    duty: Duty
    models: tuple[bytes, ...]


@dataclass(frozen=True)
class Verdicts:
    """The findings of verified rounds. Peers are named by their ids in base58.

    :param bans: who is to be banned, with the strikes
    :param credits: samples of probations that ended: they are in no step
    :param measured: mismatches, as shares of contributions' lengths
    """

    events: tuple[Finding, ...]
    bans: tuple[tuple[Any, list[Strike]], ...] = ()
    credits: tuple[Brought, ...] = ()
    measured: tuple[float, ...] = ()


@dataclass(frozen=True)
class Granted:
    """The training process may fill this slot; it is zero."""

    slot: int


@dataclass(frozen=True)
class Compute:
    """Whether the device may compute."""

    on: bool


@dataclass(frozen=True)
class WriteState:
    """Write parameters and statistics to `path` (safetensors, in one piece) when next between two steps."""

    path: Path


@dataclass(frozen=True)
class Progress:
    """How things stand; about once a second."""

    phase: str
    epoch: int  # -1: this peer has no parameters of the run yet
    pending: int  # samples of this peer that no entry has yet
    swarm_samples: int  # that everybody has reported for the epoch under way, as far as this peer knows
    num_peers: int  # in touch, this one included
    is_alone: bool  # no quorum is in touch
    alone_for: float  # s
    sent: int  # bytes since the start
    received: int
    totals: dict[str, float] = field(default_factory=dict)  # samples: computed, committed, pending, expired by cause
    epoch_seconds: float = 0.0  # that an epoch takes; 0: not known
    computing: int = 1  # in touch without observers, this one included
    place: int = 0  # of this peer among them, by name
    decides_alone: bool = False  # this peer is a quorum by itself


@dataclass(frozen=True)
class Downloading:
    """Bytes of a state that are here."""

    done: int
    total: int


@dataclass(frozen=True)
class Told:
    """News for people: a topic of `sync.messages.Topic`, or "warning", and words."""

    topic: str
    about: str


@dataclass(frozen=True)
class Left:
    """The goodbye is said."""


@dataclass(frozen=True)
class Broken:
    """The node cannot go on; it ends."""

    why: str  # a sentence, with or without its full stop
