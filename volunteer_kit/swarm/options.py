"""Define a run's options for averaging, and the report of each global step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from hivemind.compression import CompressionBase, NoCompression


@dataclass(frozen=True)
class SwarmOptions:
    """The options of a run's averaging; one object, equal on all peers but for their own choices.

    :param run_key: prefix of all DHT keys: run id and fingerprint, so that peers of different runs never meet
    :param target_batch_size: samples of one epoch, swarm-wide
    :param allreduce_timeout: s after which an exchange is given up, at most; once some rounds were seen, a few
        deviations after what they take
    :param delay_optimizer_step, delay_grad_averaging: the device computes while a round runs
    :param grad_codec: what gradients travel in
    :param grad_rank: of the factors that gradients travel as, in `grad_codec`; None: they travel as they are
    :param max_mbps: Mbit/s that this peer may send, and as much that it may receive; None: as much as the line has. Its
        own choice: set it when the line is needed for something else
    :param verbose: say in the log when epochs and rounds begin
    :param alone_after: s of silence after which a peer that joined others takes them for gone, and goes on alone; None:
        never, for its own line may be dead, and what it does meanwhile is lost
    """

    run_key: str
    target_batch_size: int
    allreduce_timeout: float = 60.0
    delay_optimizer_step: bool = True
    delay_grad_averaging: bool = False
    grad_codec: CompressionBase = field(default_factory=NoCompression)
    grad_rank: int | None = None
    max_mbps: float | None = None
    verbose: bool = False
    alone_after: float | None = None


@dataclass(frozen=True)
class StepReport:
    """One applied global step, as this peer saw it.

    `samples`: this peer's own that were in it; `names`: what they are called; `expected`: members that its round should
    have had, ourselves among them; `received`: share of the values for which an answer came; `cause`: one of
    failures.CAUSES if its round lacked something, though the step was taken; `all_samples`: of all members together;
    `waiting`: names of our samples that a later step may still take; `openings`: of the branch that the step is on, the
    last ones; `is_unconfirmed`: the branch may lose against that of the peers that are missing, so the samples wait for
    a report of a confirmed branch that still has the opening behind which they came, the last one here.
    """

    epoch: int
    samples: int
    group_size: int
    received: float
    seconds: float
    bytes_sent: int
    bytes_received: int
    names: tuple[Hashable, ...] = ()
    expected: int = 1
    cause: str | None = None
    all_samples: int = 0
    waiting: frozenset[Hashable] = frozenset()
    openings: tuple[str, ...] = ()
    is_unconfirmed: bool = False

    @property
    def is_round(self) -> bool:
        """Was there anybody to average with?"""
        return max(self.expected, self.group_size) > 1

    @property
    def is_complete(self) -> bool:
        """Did all meet who were expected?"""
        return self.is_round and self.group_size >= self.expected


class SwarmProgress(NamedTuple):
    """How far the epoch under way is, as this peer knows it.

    `num_peers`: in sight, this one included; `swarm_samples`: of all of them; `own_samples`: of this peer, in no step
    yet; `uncallable`: others in sight while nobody can be called, neither they nor this peer; `computing`: in sight,
    without observers; `place`: of this peer among these; `epoch_seconds`: that an epoch takes, 0: not known.
    """

    num_peers: int
    swarm_samples: int
    own_samples: int
    uncallable: int = 0
    computing: int = 1
    place: int = 0
    epoch_seconds: float = 0.0
